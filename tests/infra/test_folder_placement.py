from pathlib import Path

from infra.folder_placement import spread_subfolders


def test_folders_work_as_before_whatever_the_file_system(tmp_path: Path) -> None:
    spread_subfolders(tmp_path)
    spread_subfolders(tmp_path)
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "run/logs/a").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "logs", "a"]
    spread_subfolders(tmp_path / "absent")
