"""Admission first, discard second: how many groups may be begun under the present policy version.

A group begun at version v can be trained at step v + alpha at the latest. So everything begun so far, whether
trained, waiting or running, must fit the batches of steps 0 to v + alpha (AReaL's capacity rule, in groups).
A mode with one batch at a time begins nothing past the next batch to form.
"""

from collections.abc import Mapping

from tasks.train.batching import DomainQuota


def horizon_slots(
    *,
    version: int,
    alpha: int,
    groups_per_batch: int,
    steps: int,
    redundant_groups: int,
    last_batch: int | None = None,
) -> int:
    """Groups that may have been begun at all, with `redundant_groups` more to outrun stragglers.

    Nothing is begun for batches past the last step, nor past `last_batch` where one is given.
    """
    batches = min(version + alpha + 1, steps)
    if last_batch is not None:
        batches = min(batches, last_batch + 1)
    return batches * groups_per_batch + (redundant_groups if batches else 0)


def capacity(quota: DomainQuota, slots: int, counted: Mapping[str, int]) -> dict[str, int]:
    """Groups of each domain that may be begun now.

    `counted` holds each domain's groups that are trained, ready or running; groups dropped for good are not
    among them, so that their places are filled again.
    """
    wanted = quota.through(slots)
    return {domain: max(0, count - counted.get(domain, 0)) for domain, count in wanted.items()}
