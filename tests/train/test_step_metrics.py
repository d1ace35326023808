"""A step's row: what the batch was, and what others say of it."""

import pytest

from tasks.train.manifests import BatchManifest, ManifestEntry
from tasks.train.step_metrics import step_row


def entry(name, oldest, reward, domain="game", turns=2):
    return ManifestEntry(
        name=name,
        version=oldest,
        oldest_version=oldest,
        domain=domain,
        group=int(name[1]),
        reward=reward,
        turns=turns,
        tokens=30,
        sampled_tokens=10,
    )


def row_of(entries, **changes):
    manifest = BatchManifest(
        step=7, epoch=1, trajectories=entries, counts={"tokens/sampled": 80, "waste/game/stale": 20}
    )
    given = {
        "time": 60.0,
        "stage_seconds": {"train_step": 3.0},
        "step_seconds": 4.0,
        "trainer": {"train/loss": 0.5, "staleness/tokens": [10, 20]},
        "alpha": 2,
    }
    return step_row(manifest, **{**given, **changes})


def test_a_row_says_what_the_batch_was_and_what_became_of_the_rest():
    row = row_of([entry("g0", 7, 1.0), entry("g1", 6, 0.0), entry("g2", 6, 0.5, "web", 4)])
    assert row["staleness/histogram"] == [1, 2, 0]
    assert row["staleness/mean"] == pytest.approx(2 / 3)
    assert (row["reward/game/mean"], row["reward/game/count"], row["reward/web/mean"]) == (0.5, 2, 0.5)
    assert (row["tokens/trained"], row["tokens/sampled"], row["waste/game/stale"]) == (30, 80, 20)
    assert row["rollout/tokens_per_second"] == 20
    assert (row["seconds/train_step"], row["seconds/step"]) == (3.0, 4.0)
    assert row["staleness/tokens"] == [10, 20]


def test_what_no_other_argument_has_is_taken_as_it_is():
    row = row_of([entry("g0", 7, 1.0)], more={"tokens/recomputed": 9, "reward/utilisation": 0.06})
    assert (row["tokens/recomputed"], row["reward/utilisation"]) == (9, 0.06)


def test_a_stamp_from_the_future_is_an_error_and_no_negative_staleness():
    with pytest.raises(ValueError, match="version stamp 8 is impossible"):
        row_of([entry("g0", 8, 1.0)])
