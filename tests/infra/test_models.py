import json

import pytest

from infra.model_size import UnknownModel
from infra.models import MODELS, model_of

PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "yi-34b": 34_388_917_248,
}
"""As the published checkpoints count them."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_published_models(name):
    assert model_of(name).parameters == PARAMETERS[name]


def test_a_name_may_have_its_maker_capitals_and_instruct():
    assert model_of("Qwen/Qwen2.5-7B-Instruct") == model_of("qwen2.5-7b")
    assert model_of("Qwen3-8B") == model_of("qwen3-8b")


def test_a_directory_is_read_before_the_catalogue(tmp_path):
    folder = tmp_path / "qwen3-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**MODELS["qwen3-4b"], "num_hidden_layers": 2}))
    assert model_of(folder).layers == 2


def test_what_is_neither_is_refused_with_the_catalogue():
    with pytest.raises(UnknownModel, match=r"'gpt-9' is neither .*qwen3-8b"):
        model_of("gpt-9")
