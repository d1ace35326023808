"""The modes of the one training loop: how far rollout may run ahead of the trainer, as a policy each.

| mode | alpha | weights are taken | rollout | too old is |
|---|---|---|---|---|
| `sync` | 0 | before the next batch is begun | in lockstep, rewards after all episodes | never begun |
| `sync_plus` | 0 | before the next batch is begun | each trajectory by itself | never begun |
| `one_off` | 1 | when the next batch is there | each by itself, a whole batch a version | never begun |
| `areal` | >= 1 | when the next batch is there | each by itself, over updates | trained all the same |
| `tutti` | >= 1 | when the next batch is there | each by itself, over updates | aborted, or dropped |

The names are those of RollArt's baselines (§7.1). A mode only answers questions; the loop that asks them is
the same for all.
"""

from dataclasses import dataclass
from typing import Literal

ModeName = Literal["sync", "sync_plus", "one_off", "areal", "tutti"]


@dataclass(frozen=True, slots=True)
class Mode:
    name: ModeName
    overlaps_training: bool
    """Rollout goes on under the present weights while the trainer trains; the engines take the weights of
    the step before when the next batch is there. Off: the engines take each new version before the next batch
    is begun."""
    bounds_staleness: bool
    """A trajectory that has become too old is aborted at its next turn, and none too old enters a batch. Off:
    age is checked only when a trajectory is begun, so a slow one may be trained older than alpha."""
    lowest_alpha: int
    highest_alpha: int | None
    """None is without bound."""
    lockstep: bool = False
    """All trajectories of the batch generate together and their environments step together; rewards are
    scored once every episode is over (batch-level interaction)."""
    one_batch_at_a_time: bool = False
    """Nothing of a batch is begun before the one ahead of it is complete, so none runs over an update."""


MODES: dict[ModeName, Mode] = {
    mode.name: mode
    for mode in (
        Mode("sync", False, True, lowest_alpha=0, highest_alpha=0, lockstep=True),
        Mode("sync_plus", False, True, lowest_alpha=0, highest_alpha=0),
        Mode("one_off", True, True, lowest_alpha=1, highest_alpha=1, one_batch_at_a_time=True),
        Mode("areal", True, False, lowest_alpha=1, highest_alpha=None),
        Mode("tutti", True, True, lowest_alpha=1, highest_alpha=None),
    )
}
