"""Saved blocks: by name from Prefect, credentials never in the open."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fsspec.config import conf
from prefect.client.orchestration import get_client
from prefect.testing.utilities import prefect_test_harness

from blocks.saved import ObjectStoreBlock, SampleBufferBlock, WeightStoreBlock
from infra.object_store import ObjectStore


def test_a_block_opens_the_plain_store_with_its_options_and_credentials(tmp_path: Path) -> None:
    store = ObjectStoreBlock(
        url="dir://x",
        options={"path": str(tmp_path)},
        credentials={"target_protocol": "file"},
    )
    (tmp_path / "x").mkdir()
    store.open().put("key", b"value")
    assert (tmp_path / "x/key").read_bytes() == b"value"
    buffer = SampleBufferBlock(store=ObjectStoreBlock(url=str(tmp_path / "samples"))).open()
    assert buffer.put("g00000001-m000-a00", 1, b"x")
    weights = WeightStoreBlock(store=ObjectStoreBlock(url=str(tmp_path / "weights"))).open()
    assert weights.versions() == []


def test_credentials_do_not_show() -> None:
    store = ObjectStoreBlock(url="s3://bucket", credentials={"key": "name", "secret": "hunter2"})
    assert "hunter2" not in repr(store)
    assert "hunter2" not in store.model_dump_json()


@pytest.mark.slow
async def test_blocks_are_saved_and_loaded_by_name(tmp_path: Path) -> None:
    with prefect_test_harness():
        store = ObjectStoreBlock(
            url="s3://bucket/prefix",
            options={"endpoint_url": "http://127.0.0.1:1"},
            credentials={"key": "name", "secret": "hunter2"},
        )
        await store.save("objects")
        await WeightStoreBlock(store=store).save("weights")
        await SampleBufferBlock(store=ObjectStoreBlock(url=str(tmp_path))).save("samples")

        loaded = await ObjectStoreBlock.load("objects")
        assert loaded.url == "s3://bucket/prefix"
        assert loaded.credentials.get_secret_value() == {"key": "name", "secret": "hunter2"}
        through = await WeightStoreBlock.load("weights")
        assert through.store.credentials.get_secret_value() == {"key": "name", "secret": "hunter2"}
        buffer = (await SampleBufferBlock.load("samples")).open()
        assert buffer.put("g00000001-m000-a00", 1, b"x")

        async with get_client() as client:
            documents = await client.read_block_documents(include_secrets=False)
            types = await client.read_block_types()
        assert {document.name for document in documents} >= {"objects", "weights", "samples"}
        shown = json.dumps([document.model_dump(mode="json") for document in documents])
        assert "hunter2" not in shown
        described = {block.name: block.description for block in types}
        assert "conditional creation" in described["Tutti sample buffer"]


def test_small_worker_processes_get_the_buffer_without_prefect_or_torch() -> None:
    program = (
        "import sys, blocks.sample_buffer, blocks.weight_store, tasks.trajectory_arrow\n"
        "print(sorted({'prefect', 'torch', 'distributed'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_lent_block_opens_every_url_of_its_protocol_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSSPEC_DIR", "{}")
    monkeypatch.setitem(conf, "dir", {})
    (tmp_path / "elsewhere").mkdir()
    ObjectStoreBlock(
        url="dir://x", options={"path": str(tmp_path)}, credentials={"target_protocol": "file"}
    ).lend()
    ObjectStore("dir://elsewhere").put("key", b"value")
    assert (tmp_path / "elsewhere/key").read_bytes() == b"value"
    with pytest.raises(ValueError, match="local directory"):
        ObjectStoreBlock(url=str(tmp_path)).lend()
