import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.hardware import hardware
from infra.models import model_of
from infra.performance.calibrated import Calibration, Fitted
from infra.performance.parallel import ModelDoesNotFit, Parallel
from infra.performance.training import (
    TrainingCoefficients,
    TrainingModel,
    training_coefficients_of,
    training_memory,
    training_parallel,
)
from tests.infra.performance.small import DENSE, DEVICE, IDEAL, MIXTURE

BARE = TrainingCoefficients(
    kernel_share=1,
    expert_kernel_share=1,
    exposed_collectives=1,
    exposed_gradients=1,
    step_s=0,
    micro_batch_s=0,
    memory_utilization=1e6,
)
US = 1e-6


def bare(size=DENSE, parallel=None, **changes):
    coefficients = TrainingCoefficients(
        **{**{name: getattr(BARE, name) for name in BARE.__slots__}, **changes}
    )
    return TrainingModel(size, DEVICE, parallel or Parallel(), coefficients, IDEAL)


# One forward pass over sequences of 3 and 5 tokens: 2 x 8 tokens x (2 x 592 + 80) parameters, and attention
# 2 x 2 layers x 8 wide x (9 + 25)
FORWARD = 2 * 8 * 1264 + 32 * 34
# The optimiser's step reads and writes 12 + 4 bytes of each of 2 x 592 + 160 + 8 parameters
UPDATE = 2 * 16 * 1352


def test_a_step_is_four_passes_with_recomputation_and_the_optimiser():
    assert bare().forward_seconds([3, 5]) == pytest.approx(FORWARD * US)
    assert bare().step_seconds([3, 5]) == pytest.approx((4 * FORWARD + UPDATE) * US)
    assert bare(recompute=False).step_seconds([3, 5]) == pytest.approx((3 * FORWARD + UPDATE) * US)
    assert bare(step_s=2.0).step_seconds([3, 5]) == pytest.approx((4 * FORWARD + UPDATE) * US + 2)
    assert bare().step_seconds([]) == 0


def test_data_parallel_ranks_share_the_sequences_and_reduce_gradients():
    # the longer sequence's rank: 5 tokens; 1344 parameters a rank, 6 bytes each, half of them sent
    slowest = 4 * (2 * 5 * 1264 + 32 * 25)
    wanted = (slowest + UPDATE / 2) * US + 1344 * 6 / 2 / 1e5
    assert bare(parallel=Parallel(data=2)).step_seconds([3, 5]) == pytest.approx(wanted)


def test_a_pipeline_has_a_bubble_that_more_micro_batches_fill():
    # 8 sequences of 4 tokens: 8 micro-batches of one each, or 2 of four, through 2 stages
    forward = 8 * (2 * 4 * 1264 + 32 * 16) / 2
    for tokens, micro_batches in ((4, 8), (16, 2)):
        model = bare(parallel=Parallel(pipeline=2), micro_batch_tokens=tokens)
        wanted = forward * (1 + 1 / micro_batches) * US
        assert model.forward_seconds([4] * 8) == pytest.approx(wanted)


def test_tensor_parallel_ranks_exchange_activations_twice_a_layer():
    # 2 layers x 2 x 8 tokens x 8 wide x 2 bytes, an all-reduce of 2 sends it once over: 2 x 1/2
    sent = 2 * 2 * 8 * 8 * 2 * 1
    model = bare(parallel=Parallel(tensor=2))
    assert model.forward_seconds([3, 5]) == pytest.approx(FORWARD / 2 * US + sent / 1e5)


def test_ranks_beyond_a_node_exchange_over_the_network():
    # as above, over the network: a tenth of the bandwidth
    model = bare(parallel=Parallel(tensor=2, node=1))
    assert model.forward_seconds([3, 5]) == pytest.approx(FORWARD / 2 * US + 2 * 2 * 8 * 8 * 2 / 1e4)
    chosen = training_parallel(model_of("qwen3-8b"), hardware("h800"), 16, 4096, node=4)
    assert chosen.node == 4


def test_a_mixture_computes_its_active_experts_and_sends_tokens_to_them():
    # 212 + 80, router 32, 2 experts of 96
    forward = 2 * 8 * (292 + 32 + 192) + 2 * 8 * 34
    assert bare(MIXTURE).forward_seconds([3, 5]) == pytest.approx(forward * US)
    # two ranks of 5 and 3 tokens: 16 bytes of each of 5 tokens to the one other rank, and back
    slowest = 2 * 5 * (292 + 32 + 192) + 2 * 8 * 25
    model = bare(MIXTURE, Parallel(expert=2, data=2))
    assert model.forward_seconds([3, 5]) == pytest.approx(slowest * US + 2 * 5 * 16 / 1e5)


def test_memory_of_the_state_by_hand():
    # weights and gradients 6 bytes, optimiser 12 bytes of all 1352 over both ranks
    assert training_memory(DENSE, Parallel(data=2), 0) == 6 * 1344 + 12 * 1352 / 2
    # two stages: a layer of 592 and one table of 80
    assert training_memory(DENSE, Parallel(pipeline=2), 0) == 6 * 672 + 12 * 1352 / 2
    # experts halved over two ranks: 212 + 32 + 192 + 160
    of_mixture = training_memory(MIXTURE, Parallel(expert=2, data=2), 0)
    assert of_mixture == 6 * 596 + 12 * MIXTURE.parameters / 2
    longer = training_memory(DENSE, Parallel(), 64) - training_memory(DENSE, Parallel(), 0)
    assert longer == DENSE.activation_bytes(64)


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(ModelDoesNotFit, match=r"8 h800 has 77\.0 GB and needs .*tensor_parallel_size"):
        training_parallel(model_of("qwen3-235b-a22b"), hardware("h800"), 8, 32768)
    model = TrainingModel(model_of("qwen3-8b"), hardware("h800"), Parallel(data=16))
    with pytest.raises(ModelDoesNotFit, match="sequences of 1000000 tokens"):
        model.step_seconds([1_000_000])
    with pytest.raises(ModelDoesNotFit, match="no split of 6 devices has tensor 4"):
        training_parallel(model_of("qwen3-8b"), hardware("h800"), 6, 1024, tensor=4)


@pytest.mark.parametrize(("name", "devices"), [("qwen3-8b", 16), ("qwen3-32b", 32), ("qwen3-235b-a22b", 256)])
def test_the_chosen_split_uses_all_devices_and_fits(name, devices):
    size, device = model_of(name), hardware("h800")
    chosen = training_parallel(size, device, devices, 32_768)
    assert chosen.devices == devices
    TrainingModel(size, device, chosen).check_memory(32_768)
    kept = training_parallel(size, device, devices, 4096, tensor=8)
    assert (kept.tensor, kept.devices) == (8, devices)


@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=60), st.sampled_from([1, 2, 8]))
def test_no_spread_over_ranks_is_quicker_than_all_devices_at_their_peak(lengths, tensor):
    size = model_of("qwen3-8b")
    model = TrainingModel(size, hardware("h20"), Parallel(tensor=tensor, data=16 // tensor))
    operations = 2 * sum(lengths) * (size.parameters - size.embedding_parameters)
    assert model.forward_seconds(lengths) > operations / (148e12 * 16)
    assert model.step_seconds(lengths) > 4 * model.forward_seconds(lengths) * 0.99


def test_an_h800_trains_a_dense_model_at_what_megatron_publishes():
    """Megatron-core on H100: 41 to 48 % of peak by 6 N a token, activations kept. Here short sequences."""
    size = model_of("qwen3-8b")
    coefficients = TrainingCoefficients(recompute=False)
    model = TrainingModel(size, hardware("h100"), Parallel(data=64), coefficients)
    lengths = [4096] * 2048
    reached = 6 * size.parameters * sum(lengths) / model.step_seconds(lengths) / (64 * 989.5e12)
    assert 0.38 < reached < 0.52


def test_a_calibration_changes_the_coefficients_that_it_names():
    fitted = Calibration(
        name="here", fitted_on="a run", hardware={"h20": Fitted(training={"kernel_share": 0.5})}
    )
    assert training_coefficients_of(hardware("h20"), fitted).kernel_share == 0.5
    assert training_coefficients_of(hardware("h800"), fitted) == training_coefficients_of(hardware("h800"))
    wrong = Calibration(name="here", fitted_on="a run", hardware={"h20": Fitted(training={"speed": 1})})
    with pytest.raises(ValueError, match="speed; there are kernel_share"):
        training_coefficients_of(hardware("h20"), wrong)
