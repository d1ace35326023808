"""A store out of reach is one error that names the option, before anything starts."""

import uuid
from pathlib import Path
from typing import Any

import pytest
from fsspec.config import conf

from flows.preparation import open_run
from flows.stores import reach_stores
from infra.object_store import ObjectStore
from tasks.campaign import Campaign, CampaignError
from tests.s3_server import S3Server


def campaign(**stores: Any) -> Campaign:
    return Campaign.parse({"name": "x", "domains": {"a": {"source": "gem"}}, "stores": stores})


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(conf, "s3", {})
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_wrong_credentials_are_one_error_that_does_not_repeat_them(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {**s3.environment, "AWS_SECRET_ACCESS_KEY": "hunter2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CampaignError, match=r"stores\.root.*does not answer") as caught:
        open_run(campaign(root=f"s3://tutti/{uuid.uuid4().hex}", runs=str(tmp_path / "runs")), "run")
    assert "hunter2" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_an_unknown_protocol_names_the_option() -> None:
    with pytest.raises(CampaignError, match=r"stores\.weights"):
        reach_stores(campaign(weights="nosuch://bucket/x"))


def test_a_block_without_a_remote_store_is_refused() -> None:
    with pytest.raises(CampaignError, match=r"stores\.block.*stores\.root"):
        campaign(block="lab")
    with pytest.raises(CampaignError, match=r"stores\.block"):
        campaign(block="../lab", root="s3://b/p")


def test_one_option_puts_a_whole_run_elsewhere_and_each_store_may_differ(tmp_path: Path) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    folder = open_run(campaign(root=root, runs=str(tmp_path), weights="memory://fast/"), "r1")
    assert folder.root == tmp_path / "r1"
    assert folder.samples_url == f"{root}/r1/samples"
    assert folder.checkpoints_url == f"{root}/r1/checkpoints"
    assert folder.weights_url == "memory://fast/r1/weights"
    assert folder.files_url == f"{root}/r1"
    assert ObjectStore(root).get("r1/campaign.yaml") == (tmp_path / "r1/campaign.yaml").read_bytes()


def test_a_run_in_the_store_is_known_on_an_empty_machine(tmp_path: Path) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    here = campaign(root=root, runs=str(tmp_path / "here"))
    folder = open_run(here, "r1")
    (folder.root / "metrics.jsonl").write_text('{"step": 0}\n')
    folder.upload()
    elsewhere = campaign(root=root, runs=str(tmp_path / "elsewhere"))
    other = open_run(elsewhere, "r1")
    assert (other.root / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert other.campaign_file.read_text() == folder.campaign_file.read_text()
    with pytest.raises(CampaignError, match="exists"):
        other.begin(elsewhere, resume=False)
    with pytest.raises(CampaignError, match="no run"):
        type(other).of(elsewhere, "r2").begin(elsewhere, resume=True)
