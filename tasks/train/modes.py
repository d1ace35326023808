"""The modes of the one training loop: how far rollout may run ahead of the trainer, as a policy each.

The names are those of RollArt's baselines (§7.1). A mode only answers questions; the loop that asks them is
the same for all.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mode:
    name: str
    overlaps_training: bool
    """Rollout goes on under the present weights while the trainer trains; the engines take the weights of
    the step before when the next batch is there. Off: the engines take each new version before the next batch
    is begun."""
    bounds_every_turn: bool
    """A trajectory that has become too old is aborted at once, not only kept out when the batch forms."""


MODES = {
    "sync": Mode("sync", overlaps_training=False, bounds_every_turn=True),
    "tutti": Mode("tutti", overlaps_training=True, bounds_every_turn=True),
}
