from pathlib import Path

import pytest

from tests.bench import small_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with a character tokenizer, built once."""
    directory = tmp_path_factory.mktemp("model")
    small_llama.build(directory)
    return directory
