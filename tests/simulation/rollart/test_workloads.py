from pathlib import Path

import pytest

from tasks.simulation.cluster import ClusterConfig
from tasks.simulation.rollart.clusters import MODELS, affine, baseline
from tasks.simulation.rollart.workloads import (
    CONTEXT,
    DOMAINS,
    MAIN,
    PROFILES,
    RESET_FAILURE,
    campaign_of,
    givens_of,
)
from tasks.train.modes import MODES

TABLE_1 = {
    "swe": (30, 50),
    "webshop": (5, 30),
    "frozen_lake": (20, 100),
    "gem_math": (1, 4),
    "gem_game": (1, 1),
}


@pytest.mark.parametrize("name", DOMAINS)
def test_turns_are_those_of_table_1(name: str) -> None:
    low, high = TABLE_1[name]
    assert DOMAINS[name].turns.quantile(1e-9) == pytest.approx(low, abs=0.01)
    assert DOMAINS[name].turns.quantile(1 - 1e-9) == pytest.approx(high, abs=0.01)


@pytest.mark.parametrize("name", ["swe", "webshop", "frozen_lake"])
def test_an_episode_of_the_most_turns_fills_the_context(name: str) -> None:
    domain = DOMAINS[name]
    turn = domain.response_tokens.mean + domain.observation_tokens.mean
    longest = domain.prompt_tokens.mean + TABLE_1[name][1] * turn
    assert longest == pytest.approx(CONTEXT, rel=0.02)


def test_the_worked_cluster_file_has_the_same_workload() -> None:
    cluster = ClusterConfig.load(Path(__file__).parents[3] / "flows/clusters/rollart.yaml")
    assert cluster.workload == {name: DOMAINS[name] for name in cluster.workload}


def test_an_iteration_of_128_resets_fails_one_time_in_ten() -> None:
    none_fails = (1 - RESET_FAILURE) ** 128
    assert none_fails == pytest.approx(0.9)
    tail = DOMAINS["swe"].reset_s.tail
    assert tail is not None
    assert tail.probability == RESET_FAILURE


def test_every_domain_says_where_its_numbers_are_from() -> None:
    for name, profile in PROFILES.items():
        assert profile.givens, name
    bases = {given.basis for given in givens_of(MAIN["32B"])}
    assert bases == {"published", "inferred", "fitted"}
    assert not [given for given in givens_of(["webshop", "frozen_lake"]) if given.basis == "fitted"]


@pytest.mark.parametrize("mode", MODES)
def test_a_campaign_of_every_mode_is_valid(mode: str) -> None:
    campaign = campaign_of(MAIN["8B"], groups=64, group_size=8, steps=3, mode=mode)  # type: ignore[arg-type]
    assert campaign.train.groups * campaign.train.group_size == 512
    assert list(campaign.domains) == list(MAIN["8B"])
    assert all(domain.max_tokens == CONTEXT for domain in campaign.domains.values())


@pytest.mark.parametrize("model", MODELS)
def test_clusters_have_the_papers_gpus(model: str) -> None:
    plain, ours = baseline(model), affine(model)
    assert {name: pool.devices for name, pool in plain.pools.items() if name != "cpu"} == {"h800": 128}
    assert {name: pool.devices for name, pool in ours.pools.items() if name != "cpu"} == {
        "h800": 96,
        "h20": 32,
    }
    assert plain.train.devices == ours.train.devices == 32


def test_rollarts_cluster_costs_as_much_less_as_the_paper_says() -> None:
    """96 x 2.85 + 32 against 128 x 2.85: 0.838 of the cost."""

    def gpu_cost(cluster: ClusterConfig) -> float:
        gpus = [pool for pool in cluster.pools.values() if pool.entry.kind == "gpu"]
        return sum(pool.devices * pool.entry.cost for pool in gpus)

    assert gpu_cost(affine("8B")) / gpu_cost(baseline("8B")) == pytest.approx(0.838, abs=1e-3)


def test_affinity_sends_decode_heavy_domains_to_bandwidth() -> None:
    assert affine("8B").affinity == {
        "swe": "h800",
        "webshop": "h800",
        "frozen_lake": "h800",
        "gem_math": "h20",
        "gem_game": "h20",
    }
