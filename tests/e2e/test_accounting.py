"""What a run says of itself adds up, also where it was killed and resumed."""

from collections import Counter
from pathlib import Path

import pytest

from tasks.report.html import write_report
from tasks.report.run_files import RunFiles
from tests.e2e.campaigns import manifests_of, saved, slow_turns, small_campaign
from tests.e2e.test_resume import kill_after, run_to_the_end, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6
JUDGED = {
    "source": "tests.bench.gold_sums:GoldSums",
    "reward": "numeric",
    "max_turns": 1,
    "max_turn_tokens": 4,
    "max_tokens": 32,
}


def test_each_trajectory_has_one_fate_and_every_token_is_accounted_for(model: Path, tmp_path: Path) -> None:
    campaign = small_campaign(
        model,
        tmp_path,
        domains={"judged": JUDGED, "turns": slow_turns(latency_ms=20)},
        train={"steps": STEPS, "redundancy": {"groups": 1, "members": 1}, "checkpoint": {"every": 2}},
    )
    file = saved(campaign, tmp_path)
    kill_after(start(file, "run"), 4, 0.0)  # step 2 is done, and no checkpoint holds it
    run_to_the_end(file, "run")

    files = RunFiles(tmp_path / "run")
    rows, ends, manifests = files.read_metrics(), files.read_ends(), manifests_of(campaign, "run")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert max(Counter(end["key"] for end in ends).values()) == 1
    trained = {(end["step"], end["key"]) for end in ends if end["fate"] == "trained"}
    assert trained == {(manifest.step, name) for manifest in manifests for name in manifest.names}
    assert {end["domain"] for end in ends} == {"judged", "turns"}

    for row in rows:
        mine = [end for end in ends if end["step"] == row["step"]]
        by_fate: Counter[str] = Counter()
        for end in mine:
            by_fate[end["fate"]] += end["sampled_tokens"]
        assert row["tokens/trained"] == by_fate.pop("trained")
        wasted = sum(value for key, value in row.items() if key.startswith("tokens/wasted/"))
        assert wasted == sum(value for key, value in row.items() if key.startswith("waste/"))
        if row["step"] < STEPS - 1:  # what ended after the last batch is in its lines, and in no row
            assert {name: row[f"tokens/wasted/{name}"] for name in by_fate} == by_fate
            assert wasted == by_fate.total()
        assert sum(row["staleness/tokens"]) == row["tokens/trained"]
        assert sum(row["staleness/turns"]) == sum(e["turns"] for e in mine if e["fate"] == "trained")
        assert len(row["staleness/tokens"]) <= campaign.train.alpha + 1
        assert "tokens/recomputed" in row

    used = [row for row in rows if "reward/utilisation" in row]
    assert used, "no step says how much its reward workers were used"
    assert all(0 <= row["reward/utilisation"] <= 1.05 for row in used)  # 5 % for clocks of two processes
    assert sum(row["reward/calls"] for row in used) > 0
    page = write_report(files.folder).read_text()
    assert "Accepted against generated" in page
    assert "dedicated worker computed" in page
