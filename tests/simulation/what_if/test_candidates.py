import pytest

from tasks.simulation.what_if.candidates import Axis, Space, VaryError, changed, devices_by_pool

CAMPAIGN = {"name": "a", "train": {"mode": "tutti", "alpha": 2, "groups": 8}}
CLUSTER = {
    "pools": {"h20": {"hardware": "h20", "devices": 8}, "h800": {"hardware": "h800", "devices": 16}},
    "rollout": [{"pool": "h20", "devices": 8}, {"pool": "h800", "devices": 8}],
    "train": {"pool": "h800", "devices": 8},
}


def space(*axes: str) -> Space:
    return Space.of([Axis.parse(axis) for axis in axes])


def test_values_are_yaml_and_options_can_be_tied():
    assert Axis.parse("train.alpha=1,2") == Axis(("train.alpha",), (1, 2))
    assert Axis.parse("train.mode=sync, tutti").values == ("sync", "tutti")
    assert Axis.parse("a.b + c.d=[1, 2],null") == Axis(("a.b", "c.d"), ([1, 2], None))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train.alpha", "option=value"),
        ("=1,2", "option=value"),
        ("a+=1", "option=value"),
        ("train.alpha=", "no value"),
        ("train.alpha=1,1", "twice"),
        ("train.alpha=[1", "not YAML"),
    ],
)
def test_an_axis_that_cannot_be_says_what_is_wrong(text: str, says: str):
    with pytest.raises(VaryError, match=says):
        Axis.parse(text)


def test_an_option_varies_on_one_axis_only():
    with pytest.raises(VaryError, match=r"train\.alpha varies twice"):
        space("train.alpha=1,2", "train.groups+train.alpha=4,8")


def test_every_point_has_its_place():
    whole = space("x=3,1,2", "mode=a,b")
    assert whole.size == 6
    assert list(whole.points()) == [whole.at(place) for place in range(6)]
    assert whole.changes(whole.at(0)) == {"x": 1, "mode": "a"}, "numbers are in order"
    assert whole.label((2, 1)) == "x=3, mode=b"
    assert space("train.alpha=1,2", "train.groups=8").label((1, 0)) == "alpha=2"
    assert space("cluster.rollout.0.devices=4,8").label((0,)) == "rollout.0.devices=4"
    assert list(Space.of([]).points()) == [()]


def test_numbers_have_two_neighbours_and_names_all_others():
    whole = space("x=1,2,3", "mode=a,b,c")
    assert set(whole.neighbours((0, 1))) == {(1, 1), (0, 0), (0, 2)}
    assert set(whole.neighbours((1, 0))) == {(0, 0), (2, 0), (1, 1), (1, 2)}


def test_changes_reach_both_files_and_leave_the_originals_alone():
    campaign, cluster = changed(
        CAMPAIGN, CLUSTER, {"train.groups": 4, "cluster.rollout.1.tensor_parallel": 2, "cluster.weights.x": 1}
    )
    assert campaign["train"]["groups"] == 4
    assert cluster["rollout"][1] == {"pool": "h800", "devices": 8, "tensor_parallel": 2}
    assert cluster["weights"] == {"x": 1}
    assert CAMPAIGN["train"]["groups"] == 8
    assert "tensor_parallel" not in CLUSTER["rollout"][1]


def test_a_pool_grows_and_shrinks_with_its_parts():
    _, cluster = changed(CAMPAIGN, CLUSTER, {"cluster.rollout.1.devices": 24})
    assert cluster["pools"] == {
        "h20": {"hardware": "h20", "devices": 8},
        "h800": {"hardware": "h800", "devices": 32},
    }
    _, cluster = changed(CAMPAIGN, CLUSTER, {"cluster.train.pool": "h20"})
    assert {name: pool["devices"] for name, pool in cluster["pools"].items()} == {"h20": 16, "h800": 8}


def test_a_pool_whose_size_is_set_keeps_it():
    _, cluster = changed(
        CAMPAIGN, CLUSTER, {"cluster.rollout.1.devices": 24, "cluster.pools.h800.devices": 64}
    )
    assert cluster["pools"]["h800"]["devices"] == 64


def test_a_trainer_that_shares_devices_takes_none_of_its_own():
    assert devices_by_pool(CLUSTER) == {"h20": 8, "h800": 16}
    assert devices_by_pool({**CLUSTER, "train": {**CLUSTER["train"], "colocated": True}}) == {
        "h20": 8,
        "h800": 8,
    }


@pytest.mark.parametrize(("mode", "alpha"), [("sync", 0), ("one_off", 1), ("areal", 2)])
def test_a_mode_takes_the_nearest_alpha_that_it_allows(mode: str, alpha: int):
    campaign, _ = changed(CAMPAIGN, CLUSTER, {"train.mode": mode})
    assert campaign["train"]["alpha"] == alpha
    campaign, _ = changed(CAMPAIGN, CLUSTER, {"train.mode": mode, "train.alpha": 5})
    assert campaign["train"]["alpha"] == 5, "one that is set is not touched"


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("cluster.rollout.2.devices", "list of 2"),
        ("cluster.rollout.first.devices", "no place"),
        ("train.mode.name", "no such option"),
    ],
)
def test_an_option_that_cannot_be_there_is_named(option: str, says: str):
    with pytest.raises(VaryError, match=says) as raised:
        changed(CAMPAIGN, CLUSTER, {option: 1})
    assert option in str(raised.value)
