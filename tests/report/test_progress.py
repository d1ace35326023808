import io
import logging

import pytest
from rich.console import Console

from tasks.report.progress import ProgressLine, describe_step

ROW = {
    "step": 2,
    "version": 3,
    "trajectories": 64,
    "reward/game/mean": 0.5,
    "reward/math/mean": -0.25,
    "staleness/histogram": [32, 32],
    "tokens/trained": 900,
    "tokens/wasted/stale": 100,
    "seconds/step": 4.0,
}


def test_a_step_in_one_line():
    assert describe_step(ROW, 10) == (
        "step 3/10 · v3 · game 0.500 · math -0.250 · 4.0 s · 16.0 traj/s · staleness 0.50 · wasted 10%"
    )


def test_what_a_step_lacks_is_left_out():
    assert describe_step({"step": 0}, 10) == "step 1/10"


def test_prints_a_plain_line_a_step_where_there_is_no_terminal():
    stream = io.StringIO()
    row = {**ROW, **{f"reward/domain-number-{index}/mean": 0.1 for index in range(9)}}
    with ProgressLine(10, Console(file=stream, width=40)) as progress:
        progress.update(row)
        progress.update({"step": 3, "reward/[red]/mean": 1.0})
    assert stream.getvalue().splitlines() == [describe_step(row, 10), "step 4/10 · [red] 1.000"]


def test_keeps_one_live_line_on_a_terminal():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, force_interactive=True, width=70)
    with ProgressLine(10, console) as progress:
        progress.update(ROW)
        console.print("a log line")
    text = stream.getvalue()
    assert "step 3/10 · v3 · game 0.500" in text
    assert "a log line\n" in text
    # A live line is erased and written again; a longer one than the terminal would leave lines behind.
    assert "\x1b[2K" in text
    assert "\x1b[1A" not in text


@pytest.fixture
def prefect_console():
    from prefect.logging.handlers import PrefectConsoleHandler

    handler = PrefectConsoleHandler(io.StringIO(), styles={"log.info_level": "cyan"})
    handler.console._force_terminal = handler.console.is_interactive = True
    logger = logging.getLogger()
    others, logger.handlers = logger.handlers, [handler]
    yield handler.console
    logger.handlers = others


def test_shares_the_console_that_prefect_logs_to(prefect_console):
    with ProgressLine(10) as progress:
        progress.update(ROW)
        logging.getLogger("prefect").warning("publication took long")
    text = prefect_console.file.getvalue()
    assert "step 3/10" in text
    before_log = text[: text.index("publication took long")]
    assert "\r\x1b[2K" in before_log[before_log.rindex("step 3/10") :]
