from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tasks.train.batching import DomainQuota, ReadyGroup, choose
from tasks.trajectory import MemberSpec, TrajectoryKey
from tests.builders import header_for


def ready(group: int, domain: str, version: int = 0) -> ReadyGroup:
    member = MemberSpec(TrajectoryKey(group, 0), domain, 0, 0, version, 1.0)
    return ReadyGroup(group, domain, (header_for(member),))


def test_batches_follow_the_weights_exactly_where_they_divide() -> None:
    quota = DomainQuota({"a": 2.0, "b": 1.0, "c": 1.0}, groups_per_batch=8)
    assert quota.of_batch(0) == {"a": 4, "b": 2, "c": 2}
    assert quota.of_batch(7) == {"a": 4, "b": 2, "c": 2}


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.integers(1, 12), st.integers(0, 30))
def test_no_domain_ever_strays_by_more_than_a_group_per_other_domain(weights, groups, steps) -> None:
    named = {f"d{index}": weight for index, weight in enumerate(weights)}
    quota = DomainQuota(named, groups)
    slots = groups * (steps + 1)
    counts = quota.through(slots)
    assert sum(counts.values()) == slots
    for domain, weight in named.items():
        assert abs(counts[domain] - slots * weight / sum(weights)) <= max(1, len(weights) - 1)
    summed: Counter[str] = Counter()
    for step in range(steps + 1):
        summed += quota.of_batch(step)
    assert summed == +counts


def test_who_is_told_a_quota_may_change_what_it_got() -> None:
    quota = DomainQuota({"a": 1.0, "b": 1.0}, groups_per_batch=2)
    for ask in (lambda: quota.of_batch(3), lambda: quota.through(8)):
        before = dict(ask())
        ask()["a"] += 1
        assert ask() == before
    assert quota.of_batch(0) == {"a": 1, "b": 1}, "another batch than the last one asked for"


def test_a_batch_waits_for_the_domain_that_lacks_a_group() -> None:
    assert choose([ready(0, "a"), ready(2, "a")], {"a": 1, "b": 1}) is None


def test_older_groups_go_first_and_the_batch_is_in_order_of_group() -> None:
    groups = [ready(9, "a", version=1), ready(4, "a", version=2), ready(6, "a", version=1), ready(1, "b")]
    chosen = choose(groups, {"a": 2, "b": 1})
    assert chosen is not None
    assert [group.group for group in chosen] == [1, 6, 9]
