from collections.abc import Callable

import pytest

from tests.e2e.chaos.run import Outcome


@pytest.fixture
def record(capsys: pytest.CaptureFixture[str]) -> Callable[[Outcome], None]:
    """Print a row of the chaos table, whatever pytest captures."""

    def say(outcome: Outcome) -> None:
        with capsys.disabled():
            print(f"\n{outcome}", flush=True)

    return say
