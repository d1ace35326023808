from pathlib import Path

import pytest

from tasks.report.run_files import Span
from tests.bench import small_llama
from tests.bench.exposed_update import exposed_and_whole, parameters
from tests.bench.loops import LoopRecord


def span(stage: str, step: int, start: float, end: float) -> Span:
    return Span("weights", stage, step, start, end)


def test_a_version_is_published_in_its_step_and_stops_generation_in_the_next() -> None:
    spans = [
        span("publish", 3, 10.0, 12.0),
        span("pull", 3, 12.0, 15.0),
        span("suspend", 4, 20.0, 20.1),
        span("update", 4, 20.1, 20.4),
        span("resume", 4, 20.4, 20.45),
        span("update", 3, 1.0, 9.0),  # of the version before
        span("publish", 4, 30.0, 39.0),  # of the version after
    ]
    exposed, whole = exposed_and_whole(spans, 3)
    assert exposed == pytest.approx(0.45)
    assert whole == pytest.approx(2.0 + 3.0 + 0.3)


def test_steps_are_timed_from_end_to_end_after_the_warm_up() -> None:
    record = LoopRecord(
        [{"time": time} for time in (5.0, 7.0, 8.0, 8.5)],
        [span("get_batch", step, 10 * step, 10 * step + step) for step in range(4)],
    )
    assert record.step_seconds(1) == [2.0, 1.0, 0.5]
    assert record.step_seconds(2) == [1.0, 0.5]
    assert record.stage_seconds("get_batch", 2) == [2, 3]


def test_every_element_of_a_model_is_counted(tmp_path: Path) -> None:
    built = small_llama.build(tmp_path, shape=small_llama.TINY)
    # 100 x 32 tied embeddings; 4 x 32 x 32 of attention, 3 x 32 x 64 of the MLP, two norms; the last norm.
    assert parameters(tmp_path) == built == 3200 + 4096 + 6144 + 64 + 32
