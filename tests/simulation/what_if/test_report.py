import json
import re
from pathlib import Path

import pytest

from tasks.report.run_files import Span
from tasks.simulation.what_if.answer import Answer
from tasks.simulation.what_if.artifacts import WIDTH, pareto_markdown, timeline_markdown
from tasks.simulation.what_if.candidates import Axis, Space
from tasks.simulation.what_if.figures import pareto
from tasks.simulation.what_if.prediction import Objective
from tasks.simulation.what_if.report import render_what_if, write_what_if
from tasks.simulation.what_if.search import Limits, Search
from tests.report.test_html import own_markup
from tests.simulation.what_if.predictions import split

SPANS = [
    Span("engine", "generate", 0, 0.0, 50.0),
    Span("trainer", "get_batch", 0, 0.0, 50.0),
    Span("trainer", "train_step", 0, 50.0, 100.0),
]


def answer(objective: Objective = Objective.STEP_TIME) -> Answer:
    """Rent of 2 USD a device and hour: 8 + 8 devices take 150 s a step, 16 + 8 75 s, 64 + 8 75 s."""
    space = Space.of([Axis(("cluster.rollout.0.devices",), (8, 16, 64)), Axis(("train.mode",), ("a", "<b>"))])
    search = Search(
        space,
        lambda point: "there is no <b>" if point[1] else None,
        limits=Limits(usd_per_hour=200, step_seconds=100),
        objective=objective,
    )
    for point in search.ask():
        search.tell(point, split(space.changes(point)["cluster.rollout.0.devices"], 8))
    return Answer.of(search, "cam", "clu")


def test_the_page_holds_all_it_shows_and_loads_nothing(tmp_path: Path):
    path = write_what_if(tmp_path / "deep/page.html", answer(), SPANS, {"cluster": "name: <clu>"})
    page = path.read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)""", own_markup(page))
    (embedded,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    places = re.findall(r'class="plot" id="([^"]+)"', page)
    assert sorted(places) == sorted(json.loads(embedded))
    assert set(places) == {"pareto", "stages", "utilisation", "staleness", "timeline"}
    assert "name: &lt;clu&gt;" in page


def test_the_page_says_what_is_best_and_why_others_are_not():
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", own_markup(render_what_if(answer()))))
    assert "Best: rollout.0.devices=16, mode=a" in text
    assert "3 of 6 candidates simulated · rent at most 200 USD an hour · a step at most 100 s" in text
    assert "a step takes 150 s, over the limit of 100" in text
    assert "3 there is no &lt;b&gt;" in text
    assert "beaten" in text


def test_one_candidate_alone_has_no_pareto_plot():
    search = Search(Space.of([]), lambda _: None)
    for point in search.ask():
        search.tell(point, split(8, 8))
    alone = Answer.of(search, "cam", "clu")
    assert alone.best is not None
    assert alone.best.label == "as configured"
    assert 'id="pareto"' not in render_what_if(alone)


def test_without_a_candidate_within_the_limits_the_page_says_so():
    search = Search(Space.of([]), lambda _: None, limits=Limits(usd_per_step=1e-9))
    for point in search.ask():
        search.tell(point, split(8, 8))
    assert "No candidate can run within the limits" in render_what_if(Answer.of(search, "cam", "clu"))


@pytest.mark.parametrize(
    ("objective", "x", "y"),
    [
        (Objective.STEP_TIME, 48 * 75 / 3600, 75),
        # 1000 tokens in 75 s at 48 USD an hour.
        (Objective.THROUGHPUT, 48 / 3600 * 75 * 1000, 1000 / 75),
    ],
)
def test_the_pareto_plot_has_cost_against_speed(objective: Objective, x: float, y: float):
    found = answer(objective)
    figure = pareto(found)
    by_name = {trace["name"]: trace for trace in figure["data"]}
    assert set(by_name) == {"beaten", "over a limit", "Pareto front", "best"}
    assert by_name["best"]["x"] == [pytest.approx(x)]
    assert by_name["best"]["y"] == [pytest.approx(y)]
    assert by_name["over a limit"]["text"] == ["rollout.0.devices=8, mode=a"]


def test_the_front_as_an_artifact_has_bars():
    markdown = pareto_markdown(answer())
    assert "| **rollout.0.devices=16, mode=a** | 1 | ████████████████████ | 75 |" in markdown
    assert "rollout.0.devices=8" not in markdown


def test_the_timeline_as_an_artifact_shows_who_works_when():
    markdown = timeline_markdown(SPANS)
    lanes = dict(re.findall(r"^(engine|trainer) +([A-Z·]+)$", markdown, re.MULTILINE))
    half = WIDTH // 2
    assert lanes["engine"][: half - 1] == "G" * (half - 1)
    assert lanes["engine"][half + 1 :] == "·" * (half - 1)
    assert lanes["trainer"][: half - 1] == "·" * (half - 1)
    assert lanes["trainer"][half + 1 :] == "T" * (half - 1)
    assert "G generate, T train_step" in markdown
