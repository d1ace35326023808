"""A folder's copy in a store: complete, bounded by its prefix, and taken over by one folder at a time."""

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.folder_mirror import MARKER, FolderMirror, MirrorDamaged, MirrorTakenOver
from infra.object_store import ObjectStore

FAR = "../../" * 4


@pytest.fixture
def remote() -> ObjectStore:
    return ObjectStore(f"memory://{uuid.uuid4().hex}")


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_push_makes_the_store_read_like_the_folder(remote: ObjectStore, tmp_path: Path) -> None:
    write(tmp_path, metrics="1\n", logs__trainer="a", samples__x="not a file of the run")
    (tmp_path / ".draft").write_text("hidden")
    mirror = FolderMirror(tmp_path, remote, skip=frozenset({"samples"}))
    assert mirror.push() == ["logs/trainer", "metrics"]
    assert remote.list() == ["logs/trainer", "metrics", MARKER]
    write(tmp_path, metrics="1\n2\n")
    assert mirror.push() == ["metrics"]
    assert remote.get("metrics") == b"1\n2\n"
    assert mirror.push() == []
    write(tmp_path, metrics="1\n2\n3\n", other="x")
    assert mirror.push(only=["metrics"]) == ["metrics"]
    assert FolderMirror(tmp_path, remote, skip=frozenset({"samples"})).push() == ["other"], "no second upload"


def test_an_empty_folder_is_filled_and_goes_on(remote: ObjectStore, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write(here, metrics="1\n", model__config="{}")
    FolderMirror(here, remote).push()
    second = FolderMirror(there, remote)
    assert second.restore() == ["metrics", "model/config"]
    assert (there / "model/config").read_text() == "{}"
    write(there, metrics="1\n2\n")
    second.push()
    # The first folder, older now, takes over in turn.
    first = FolderMirror(here, remote)
    assert first.restore() == ["metrics", "model/config"]
    assert (here / "metrics").read_text() == "1\n2\n"


def test_the_folder_that_wrote_last_is_not_set_back(remote: ObjectStore, tmp_path: Path) -> None:
    write(tmp_path, metrics="1\n")
    FolderMirror(tmp_path, remote).push()
    write(tmp_path, metrics="1\n2\n")  # and killed before the next push
    assert FolderMirror(tmp_path, remote).restore() == []
    assert (tmp_path / "metrics").read_text() == "1\n2\n"


def test_a_folder_that_was_taken_over_writes_no_more(remote: ObjectStore, tmp_path: Path) -> None:
    write(tmp_path / "a", metrics="1\n")
    first = FolderMirror(tmp_path / "a", remote)
    first.push()
    second = FolderMirror(tmp_path / "b", remote)
    second.restore()
    write(tmp_path / "b", metrics="2\n")
    second.push()
    write(tmp_path / "a", metrics="zombie")
    with pytest.raises(MirrorTakenOver):
        first.push()
    assert remote.get("metrics") == b"2\n"


async def test_the_store_follows_and_is_complete_at_the_end(remote: ObjectStore, tmp_path: Path) -> None:
    mirror = FolderMirror(tmp_path, remote)
    write(tmp_path, metrics="1\n")
    async with mirror.following(0.01):
        for _ in range(1000):
            if remote.exists("metrics"):
                break
            await asyncio.sleep(0.01)
        assert remote.get("metrics") == b"1\n"
        write(tmp_path, metrics="1\n2\n", report="done")
    assert remote.get("metrics") == b"1\n2\n"
    assert remote.get("report") == b"done"


async def test_a_failed_run_is_uploaded_too_and_fails_as_it_did(remote: ObjectStore, tmp_path: Path) -> None:
    async def fail() -> None:
        async with FolderMirror(tmp_path, remote).following(3600):
            await asyncio.sleep(0)
            write(tmp_path, log="why")
            raise LookupError("as it did")

    with pytest.raises(LookupError, match="as it did"):
        await fail()
    assert remote.get("log") == b"why"


async def test_a_store_that_is_away_for_a_while_is_tried_again(tmp_path: Path) -> None:
    away = tmp_path / "store"
    away.write_text("a file where the folder should be")
    mirror = FolderMirror(tmp_path / "run", ObjectStore(str(away)))
    write(tmp_path / "run", metrics="1\n")
    async with mirror.following(0.01):
        await asyncio.sleep(0.05)
        away.unlink()
    assert (away / "metrics").read_text() == "1\n"


def test_a_damaged_marker_is_a_typed_error(remote: ObjectStore, tmp_path: Path) -> None:
    remote.put(MARKER, b"[]")
    with pytest.raises(MirrorDamaged, match=MARKER):
        FolderMirror(tmp_path, remote).restore()


NAMES = st.one_of(
    st.text(max_size=20),
    st.lists(st.sampled_from(["..", ".", "a", "b", "", "~", "/", "link", "C:", "%2e%2e"]), max_size=6).map(
        "/".join
    ),
    st.sampled_from([f"{FAR}evil", "/tmp/evil", "link/evil", "a/../../evil", "a\\..\\evil", "a\x00b"]),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(NAMES, min_size=1, max_size=4))
def test_no_marker_makes_a_folder_write_outside_of_itself(names: list[str]) -> None:
    base = Path(tempfile.mkdtemp())
    try:
        folder, outside = base / "in/run", base / "outside"
        folder.mkdir(parents=True)
        outside.mkdir()
        os.symlink(outside, folder / "link")
        remote = ObjectStore(f"memory://{uuid.uuid4().hex}")
        for name in names:
            with contextlib.suppress(ValueError, OSError):
                remote.put(name, b"evil")
        files = {name: [4, 0] for name in names}
        remote.put(MARKER, json.dumps({"writer": "another", "files": files}).encode())
        with contextlib.suppress(ValueError, KeyError, OSError):
            FolderMirror(folder, remote).restore()
        inside = {path for path in base.rglob("*") if path.is_relative_to(folder)}
        assert set(base.rglob("*")) - inside == {base / "in", folder.parent, outside} - inside
        assert list(outside.iterdir()) == []
    finally:
        shutil.rmtree(base)
