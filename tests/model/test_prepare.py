import asyncio
import json
import os
import shutil
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.processes import ServiceFailed, ServiceProcess
from tasks.campaign import Campaign
from tasks.environment.rendering import ChatRenderer, TemplateError
from tasks.model.demonstrations import DemonstrationError
from tasks.model.prepare import MARKER, ModelError, prepare

SMALL: dict[str, Any] = {
    "build": {"hidden_size": 24, "intermediate_size": 40, "layers": 1, "heads": 3},
    "warm_up": {"steps": 3, "batch_size": 6},
}


def clock() -> float:
    return 0.0


@pytest.fixture
def small(campaign: Campaign) -> Campaign:
    return with_model(campaign, SMALL)


def with_model(campaign: Campaign, model: dict[str, Any], **domains: dict[str, Any]) -> Campaign:
    data = campaign.model_dump(mode="json")
    for name, changes in domains.items():
        data["domains"][name] |= changes
    return Campaign.parse({**data, "model": model})


def test_a_built_model_is_complete_and_reported(small: Campaign, tmp_path: Path) -> None:
    ticks = count(5.0, 2.5)
    report = prepare(small, tmp_path / "run" / "model", lambda: next(ticks))
    directory = Path(report["path"])
    assert directory == tmp_path / "run" / "model"
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.num_parameters() == report["parameters"]
    assert len(AutoTokenizer.from_pretrained(directory)) == report["vocabulary"] == model.config.vocab_size
    assert ChatRenderer(directory).end_tokens == {model.config.eos_token_id}
    assert report["seconds"] == 2.5
    assert report["warm_up_loss"][0] > report["warm_up_loss"][1]
    assert set(report["domains"]) == {"lake", "guess", "sums"}
    assert os.listdir(directory.parent) == ["model"]


def test_the_same_campaign_builds_the_same_tensors(small: Campaign, tmp_path: Path) -> None:
    for name in "ab":
        prepare(small, tmp_path / name, clock)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(a[key], b[key]) for key in a | b)
    tokenizers = [(tmp_path / name / "tokenizer.json").read_bytes() for name in "ab"]
    assert tokenizers[0] == tokenizers[1]


def test_a_finished_model_is_used_again(small: Campaign, tmp_path: Path) -> None:
    first = prepare(small, tmp_path / "model", clock)
    weights = tmp_path / "model" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert prepare(small, tmp_path / "model", clock) == first
    assert weights.stat().st_mtime_ns == written


def test_a_model_of_other_options_is_not_used(small: Campaign, tmp_path: Path) -> None:
    prepare(small, tmp_path / "model", clock)
    with pytest.raises(ModelError, match=r"another seed, model\.build"):
        prepare(small.model_copy(update={"seed": small.seed + 1}), tmp_path / "model", clock)


def test_files_that_are_no_finished_model_are_neither_used_nor_removed(
    small: Campaign, tmp_path: Path
) -> None:
    prepare(small, tmp_path / "model", clock)
    (tmp_path / "model" / MARKER).unlink()
    with pytest.raises(ModelError, match="in the way"):
        prepare(small, tmp_path / "model", clock)
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_domain_without_sampled_actions_gets_a_model_without_warm_up(tmp_path: Path) -> None:
    campaign = Campaign.parse(
        {"name": "sums", "model": SMALL, "domains": {"sums": {"source": "tests.bench.domains:Sums"}}}
    )
    report = prepare(campaign, tmp_path / "model", clock)
    assert report["domains"] == {}
    assert report["warm_up_loss"] is None
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() == report["parameters"]


def test_a_budget_below_every_valid_answer_is_named(campaign: Campaign, tmp_path: Path) -> None:
    tight = with_model(campaign, SMALL, guess={"max_turn_tokens": 3})  # \boxed{7} and its end are four
    with pytest.raises(DemonstrationError, match=r"domains\.guess.*max_turn_tokens \(3\)"):
        prepare(tight, tmp_path / "model", clock)
    assert not (tmp_path / "model").exists()


class TestGivenModel:
    def test_is_checked_and_named(self, campaign: Campaign, directory: Path, tmp_path: Path) -> None:
        report = prepare(with_model(campaign, {"path": str(directory)}), tmp_path / "model", clock)
        loaded = AutoModelForCausalLM.from_pretrained(directory)
        assert report == {
            "path": str(directory),
            "parameters": loaded.num_parameters(),
            "vocabulary": loaded.config.vocab_size,
        }
        assert not (tmp_path / "model").exists()

    def test_must_have_a_configuration(self, campaign: Campaign, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"model\.path .* has no config\.json"):
            prepare(with_model(campaign, {"path": str(tmp_path)}), tmp_path / "model", clock)

    def test_must_have_a_loadable_configuration(
        self, campaign: Campaign, directory: Path, tmp_path: Path
    ) -> None:
        copy = shutil.copytree(directory, tmp_path / "copy")
        (copy / "config.json").write_text('{"model_type": "no such model"}')
        with pytest.raises(ModelError, match=r"model\.path .* does not load"):
            prepare(with_model(campaign, {"path": str(copy)}), tmp_path / "model", clock)

    def test_must_have_a_chat_template(self, campaign: Campaign, directory: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(directory, tmp_path / "copy")
        (copy / "chat_template.jinja").unlink()
        with pytest.raises(ModelError, match=r"model\.path .* no chat template"):
            prepare(with_model(campaign, {"path": str(copy)}), tmp_path / "model", clock)

    def test_may_have_a_template_that_breaks_its_prefix_but_not_one_that_fails(
        self, campaign: Campaign, directory: Path, tmp_path: Path
    ) -> None:
        copy = shutil.copytree(directory, tmp_path / "copy")
        template = copy / "chat_template.jinja"
        whole = template.read_text()
        template.write_text("{{ messages | length }}" + whole)
        prepare(with_model(campaign, {"path": str(copy)}), tmp_path / "model", clock)
        template.write_text("{{ raise_exception('no such role') }}" + whole)
        with pytest.raises(TemplateError, match=r"model\.path"):
            prepare(with_model(campaign, {"path": str(copy)}), tmp_path / "model", clock)

    def test_must_hold_the_longest_trajectory(
        self, campaign: Campaign, directory: Path, tmp_path: Path
    ) -> None:
        long = with_model(campaign, {"path": str(directory)}, lake={"max_tokens": 513})
        with pytest.raises(ModelError, match=r"domains\.lake\.max_tokens \(513\) .* \(512\)"):
            prepare(long, tmp_path / "model", clock)


async def start(campaign: Campaign, model: Path, log: Path) -> ServiceProcess:
    settings = {"campaign": campaign.model_dump(mode="json"), "model": str(model)}
    return await ServiceProcess.start(
        "prepare", "tasks.model.prepare", settings, log, environment={"OMP_NUM_THREADS": "1"}
    )


class Talkative:
    """Prints while it is played."""

    def reset(self, seed: int) -> str:
        print("hello from the environment")
        return "row 1"

    def close(self) -> None:
        return None


@pytest.mark.slow
class TestProcess:
    async def test_prints_its_report_and_ends(self, small: Campaign, tmp_path: Path) -> None:
        process = await start(small, tmp_path / "model", tmp_path / "log")
        assert await process.wait() == 0
        marked = json.loads((tmp_path / "model" / MARKER).read_text())
        del marked["identity"]
        assert process.ready == {"path": str(tmp_path / "model"), **marked}

    async def test_an_environment_that_prints_does_not_garble_the_report(self, tmp_path: Path) -> None:
        talkative = {"source": "tests.model.test_prepare:Talkative"}
        campaign = Campaign.parse({"name": "talk", "model": SMALL, "domains": {"talk": talkative}})
        process = await start(campaign, tmp_path / "model", tmp_path / "log")
        await process.stop()
        assert process.ready["path"] == str(tmp_path / "model")
        assert "hello from the environment" in (tmp_path / "log").read_text()

    async def test_an_error_names_the_option(self, small: Campaign, tmp_path: Path) -> None:
        given = with_model(small, {"path": str(tmp_path)})
        with pytest.raises(ServiceFailed, match=r"model\.path .* has no config\.json"):
            await start(given, tmp_path / "model", tmp_path / "log")

    @pytest.mark.parametrize("how", ["killed", "orphaned"])
    async def test_a_half_made_model_is_never_used(
        self, campaign: Campaign, small: Campaign, tmp_path: Path, how: str
    ) -> None:
        endless = with_model(campaign, {**SMALL, "warm_up": {"steps": 1_000_000, "batch_size": 6}})
        partial, model = tmp_path / ".model.partial", tmp_path / "model"
        settings = {"campaign": endless.model_dump(mode="json"), "model": str(model)}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tasks.model.prepare"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        while not (partial / "model.safetensors").exists():  # the warm-up comes next
            assert process.returncode is None
            await asyncio.sleep(0.05)
        if how == "killed":
            process.send_signal(signal.SIGKILL)
        else:
            process.stdin.close()
        async with asyncio.timeout(20):
            output, _ = await process.communicate()
        assert output == b""
        assert not model.exists()
        assert partial.exists()
        prepare(small, model, clock)
        prepare(small, tmp_path / "untouched", clock)
        assert not partial.exists()
        mine, other = (load_file(path / "model.safetensors") for path in (model, tmp_path / "untouched"))
        assert all(torch.equal(mine[key], other[key]) for key in mine | other)
