import pytest

from infra.performance.transfer import TRANSPORTS, Transport, transport


def test_a_push_and_a_pull_take_their_latency_and_the_bytes_at_their_bandwidth():
    way = Transport("x", push_latency_s=0.5, push_gb_s=2, pull_latency_s=0.25, pull_gb_s=4)
    assert way.push_seconds(6e9) == pytest.approx(3.5)
    assert way.pull_seconds(6e9, pullers=9) == pytest.approx(1.75)


def test_pullers_share_a_store_once_they_draw_more_than_it_gives():
    store = Transport("x", 0, 1, 0, pull_gb_s=4, shared_gb_s=10)
    assert store.pull_seconds(8e9, pullers=2) == pytest.approx(2)
    assert store.pull_seconds(8e9, pullers=5) == pytest.approx(4)


def test_engines_that_receive_directly_wait_for_no_push():
    assert transport("nccl").push_seconds(1e12) == 0
    assert transport("nccl").pull_seconds(37.75e9) == pytest.approx(1.1)


# RollArt's tables 3 and 4; seconds of 15.26, 27.51 and 61.02 GB
PUBLISHED = [
    ("tcp", "pull", (6.911, 14.437, 29.649), (0,), 0.15),
    ("rdma", "pull", (5.466, 5.817, 9.442), (0, 2), 0.15),
    ("mooncake", "push", (32.4, 67.8, 127.3), (0,), 0.15),
    ("mooncake", "pull", (6.2, 16.3, 29.7), (0,), 0.35),
]


@pytest.mark.parametrize(("name", "way", "seconds", "fitted", "within"), PUBLISHED)
def test_what_was_fitted_to_some_sizes_predicts_the_others(name, way, seconds, fitted, within):
    of = getattr(transport(name), f"{way}_seconds")
    errors = [of(gb * 1e9) / told - 1 for gb, told in zip((15.26, 27.51, 61.02), seconds, strict=True)]
    print(f"{name} {way}: {', '.join(f'{error:+.1%}' for error in errors)}")
    for index, error in enumerate(errors):
        assert abs(error) < (0.005 if index in fitted else within)


def test_figures_are_replaced_where_they_are_given():
    assert transport("tcp", pull_gb_s=5.0, push_gb_s=None).pull_gb_s == 5.0
    assert transport("tcp") is not transport("tcp", pull_gb_s=5.0)
    with pytest.raises(KeyError, match=r"carrier pigeon.*nccl, tcp"):
        transport("carrier pigeon")


def test_every_transport_says_where_it_is_from():
    assert all(entry.source.startswith(("fitted to", "inferred")) for entry in TRANSPORTS.values())
