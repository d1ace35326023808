import pytest

from infra.hardware import hardware
from infra.model_size import PUBLIC, ModelSize
from tasks.rollout.roofline import DomainWork, RolloutPool, trajectory_time

QWEN3_8B = ModelSize.of(PUBLIC["Qwen3-8B"])
"""8 190 735 360 parameters, 36 layers of 32 heads of 128, and 147 456 bytes of KV a token."""
H800 = RolloutPool("h800", hardware("h800"), engines=2)
H20 = RolloutPool("h20", hardware("h20"), engines=6)
# How many tokens these have is not published. RollArt's Table 1: FrozenLake has 20 to 100 turns and is
# prefill-heavy, GEM-math fewer than 5 and is decode-heavy; contexts go to 32 k.
FROZEN_LAKE = DomainWork("frozen_lake", trajectories=64, tokens=8000, decoded=600, turns=20)
GEM_MATH = DomainWork("gem_math", trajectories=64, tokens=4000, decoded=3600, turns=2)


LAYERS, TABLE = 36 * (41_951_488 + 150_994_944), 151_936 * 4096


def test_prefill_takes_its_share_of_a_chunk_and_decode_of_an_iteration() -> None:
    time = trajectory_time(FROZEN_LAKE, QWEN3_8B, H800, running=64)
    assert time is not None
    # 7400 of 8192 tokens: 0.704 of the peak for products, 0.62 for attention over 4000 tokens of context,
    # the output layer of one token read at 0.851 of the bandwidth
    chunk = 8192 * (2 * LAYERS / 0.704 + 4 * 36 * 4096 * 4000 / 0.62) / 989.5e12
    chunk += 2 * TABLE / (0.851 * 3.35e12)
    assert time.prefill_s == pytest.approx(7400 * chunk / 8192, rel=1e-6)
    # 0.9 x 81 559 MiB, less 4.143 GB of runtime and 16.381 GB of weights, hold 382 787 tokens of KV: 47
    # trajectories of 8000. A step reads the weights, and 47 contexts of 4000 at 0.97 of the bandwidth
    step = 2 * (LAYERS + TABLE) / (0.851 * 3.35e12) + 47 * 4000 * 147_456 / (0.97 * 3.35e12)
    assert time.decode_s == pytest.approx(600 * step / 47, rel=1e-6)


def test_decode_of_many_short_contexts_is_bound_by_an_h20s_compute() -> None:
    time = trajectory_time(DomainWork("d", 1, 1000, 900, 1), QWEN3_8B, H20, running=64)
    assert time is not None
    # products of 64 tokens at 0.885 of 148 TFLOPS take longer than reading the weights at 0.779 of 4 TB/s
    step = 64 * 2 * (LAYERS + TABLE) / (0.885 * 148e12) + 64 * 500 * 147_456 / (0.779 * 4e12)
    assert step > 2 * (LAYERS + TABLE) / (0.779 * 4e12)
    assert time.decode_s == pytest.approx(900 * step / 64, rel=1e-6)


def test_a_model_over_more_devices_is_quicker_by_less_and_one_that_does_not_fit_has_no_time() -> None:
    big = ModelSize.of(PUBLIC["Qwen3-32B"])  # 65.5 GB; of 8000 tokens, 2.1 GB of KV
    work = DomainWork("d", 1, 8000, 600, 10)
    assert trajectory_time(work, big, RolloutPool("one", hardware("h800"), 1), 1) is not None
    assert trajectory_time(work, big, RolloutPool("one", hardware("l40s"), 1), 1) is None
    two = trajectory_time(work, big, RolloutPool("two", hardware("h800"), 1, devices=2), 1)
    four = trajectory_time(work, big, RolloutPool("four", hardware("h800"), 1, devices=4), 1)
    assert two is not None
    assert four is not None
    assert two.total_s / 2 < four.total_s < two.total_s


def cluster_ratio(work: DomainWork, batch: int) -> float:
    """Time of 6 H20 over that of 2 H800 for the same trajectories, each cluster by itself."""
    on_h800 = trajectory_time(work, QWEN3_8B, H800, batch // H800.engines)
    on_h20 = trajectory_time(work, QWEN3_8B, H20, batch // H20.engines)
    assert on_h800 is not None
    assert on_h20 is not None
    return (on_h20.total_s / H20.engines) / (on_h800.total_s / H800.engines)


def test_the_papers_two_domains_prefer_the_clusters_that_the_paper_measured() -> None:
    """RollArt §7: 2 H800 against 6 H20, 8B. FrozenLake takes at best 0.53 of the H20s' time on the H800s,
    GEM-math 0.49 to 0.79 of the H800s' on the H20s, at batches of 64 to 192."""
    batches = (64, 96, 128, 160, 192)
    frozen = [1 / cluster_ratio(FROZEN_LAKE, batch) for batch in batches]
    math = [cluster_ratio(GEM_MATH, batch) for batch in batches]
    print("\nbatch              " + "".join(f"{batch:8d}" for batch in batches) + "   paper")
    print("FrozenLake H800/H20" + "".join(f"{ratio:8.2f}" for ratio in frozen) + "   >= 0.53")
    print("GEM-math   H20/H800" + "".join(f"{ratio:8.2f}" for ratio in math) + "   0.49-0.79")
    assert all(0.5 <= ratio < 1 for ratio in frozen)
    assert all(0.4 <= ratio < 0.85 for ratio in math)
