import json
import re

import pytest

from tasks.report.facts import duration
from tasks.report.html import write_report
from tasks.report.intervals import mean_interval
from tasks.report.run_files import RunFiles, RunFilesDamaged
from tests.report.sample_run import write_sample_run


def figures(page):
    (embedded,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    return json.loads(embedded)


def own_markup(page):
    """The page without plotly.js, which mentions addresses it never asks."""
    return re.sub(r"<script>.*?</script>", "", page, count=1, flags=re.DOTALL)


def test_holds_everything_it_shows_and_loads_nothing(tmp_path):
    files = write_sample_run(tmp_path, 12)
    path = write_report(tmp_path)
    page = path.read_text()
    assert path == files.report_file
    assert "frozen-lake-and-chains" in page
    assert "12 of 80" in page
    assert not re.search(r"""(src|href)=["'](?!data:)""", own_markup(page))
    assert "Plotly" in page
    drawn = figures(page)
    assert set(drawn) >= {"reward-step", "reward-time", "staleness", "wasted", "stages", "timeline"}
    places = re.findall(r'class="plot" id="([^"]+)"', page)
    assert sorted(places) == sorted(drawn)


def test_shows_totals_and_evaluation(tmp_path):
    files = RunFiles(tmp_path)
    files.append_metrics(
        {
            "step": 0,
            "time": 200.0,
            "trajectories": 64,
            "tokens/trained": 900,
            "tokens/wasted/stale": 100,
            "staleness/histogram": [16, 48],
        }
    )
    files.write_evaluation(
        {"game": mean_interval([0] * 50, (0, 1)), "web": mean_interval([], (0, 1))},
        {"game": mean_interval([1] * 50, (0, 1))},
        temperature=0.7,
    )
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", own_markup(write_report(tmp_path).read_text())))
    assert "wall time 3 min 20 s" in text
    assert "wasted tokens 10.0%" in text
    assert "mean staleness 0.75" in text
    assert "temperature 0.7" in text
    assert "game 0.000 [0.000, 0.071] 50 episodes 1.000 [0.929, 1.000] 50 episodes" in text
    assert "apart: better" in text
    assert "web no episode 0 episodes not yet" in text


def test_says_whether_accepted_trajectories_are_a_fair_sample(tmp_path):
    write_sample_run(tmp_path, 20)
    page = write_report(tmp_path).read_text()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", own_markup(page)))
    assert "Accepted trajectories of game are shorter than generated ones" in text
    assert "Accepted trajectories of math" not in text
    assert "trained" in text
    drawn = figures(page)
    assert {"lengths-sampled_tokens", "lengths-turns", "lengths-seconds"} <= set(drawn)
    names = [trace["name"] for trace in drawn["lengths-turns"]["data"]]
    assert names == ["game, generated", "game, accepted"]  # sums have one turn each
    assert {"token-ages", "turn-ages", "mixed", "wasted-domains", "prefilled", "reward-use"} <= set(drawn)
    assert "1 dedicated worker computed" in text
    assert "busy 6.4% of the time" in text


def test_says_what_a_function_service_took(tmp_path):
    RunFiles(tmp_path).append_metrics(
        {
            "step": 0,
            "reward/function_calls": 640,
            "reward/function_seconds": 20.0,
            "reward/function_busy_seconds": 5.0,
            "reward/function_utilisation": 0.25,
            "reward/activations": 3,
            "reward/cold_starts": 1,
            "reward/concurrency_peak": 2,
        }
    )
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", own_markup(write_report(tmp_path).read_text())))
    assert "in 20 s of 3 activations, 25.0% of them with work; 1 cold start, at most 2" in text
    assert "dedicated" not in text


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("evaluated", [False, True])
def test_works_with_what_a_young_run_has(tmp_path, steps, evaluated):
    write_sample_run(tmp_path, steps, evaluated=evaluated)
    page = write_report(tmp_path).read_text()
    assert ("No train step has finished yet" in page) == (steps == 0)
    assert ("Held-out evaluation" in page) == evaluated


def test_works_with_an_empty_folder(tmp_path):
    page = write_report(tmp_path).read_text()
    assert tmp_path.name in page
    assert figures(page) == {}
    assert "campaign.yaml" not in page


def test_works_with_metrics_that_hold_only_a_step(tmp_path):
    RunFiles(tmp_path).append_metrics({"step": 0})
    assert figures(write_report(tmp_path).read_text()) == {}


def test_text_of_the_run_is_never_markup(tmp_path):
    files = RunFiles(tmp_path)
    files.write_campaign("name: '<script>alert(1)</script>'\n")
    files.append_metrics({"step": 0, "reward/</script><b>/mean": 0.5})
    page = write_report(tmp_path).read_text()
    assert "<script>alert" not in page
    assert "</script><b>" not in page
    assert figures(page)["reward-step"]["data"][0]["name"] == "</script><b>"


def test_refuses_damaged_files_and_keeps_the_last_report(tmp_path):
    files = write_sample_run(tmp_path, 1)
    before = write_report(tmp_path).read_text()
    files.metrics_file.write_text("{\n")
    with pytest.raises(RunFilesDamaged, match="line 1"):
        write_report(tmp_path)
    assert files.report_file.read_text() == before


def test_durations_as_a_person_says_them():
    assert [duration(seconds) for seconds in (42.4, 200, 7500)] == ["42 s", "3 min 20 s", "2 h 05 min"]
    assert duration(59.7) == "1 min 00 s"
    assert duration(3599.8) == "1 h 00 min"
