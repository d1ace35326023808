from pathlib import Path

import pytest

from tests.train.trainers.megatron.families import write_families


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model directory a family."""
    directory = tmp_path_factory.mktemp("families")
    write_families(directory)
    return directory
