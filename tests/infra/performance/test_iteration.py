from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.hardware import CATALOGUE, hardware
from infra.models import model_of
from infra.performance.iteration import BatchWork, IterationModel, Precision
from infra.performance.parallel import ModelDoesNotFit, Parallel
from tests.infra.performance.small import DENSE, DEVICE, IDEAL, MIXTURE

US = 1e-6


def ideal(size=DENSE, parallel=None, **changes):
    return IterationModel(size, DEVICE, parallel, replace(IDEAL, **changes))


def test_one_decoding_sequence_reads_the_weights_and_its_kv():
    # 2 bytes of 2 x (208 + 384) + 80 parameters; KV of 5 tokens, 2 layers x 2 x 2 x 2 x 2 bytes = 32 each,
    # against 4 x 2 layers x 8 wide = 64 operations: compute is the longer
    assert ideal().seconds(BatchWork(1, 5)) == pytest.approx((2 * 1264 + 5 * 64) * US)
    slow_reads = ideal(kv_bandwidth=0.25)
    assert slow_reads.seconds(BatchWork(1, 5)) == pytest.approx((2 * 1264 + 5 * 32 * 4) * US)


def test_a_prompt_is_bound_by_operations_and_its_last_token_alone_is_sampled():
    # 10 tokens x 2 x 1184 parameters of the layers, one through the 80 of the output; attention over 10 x 5
    work = BatchWork(0, 0, prefill_tokens=10, prefill_attended=50, prefills=1)
    assert ideal().seconds(work) == pytest.approx((10 * 2 * 1184 + 160 + 50 * 64) * US)


def test_a_tile_computes_for_all_its_rows():
    tiles = IterationModel(DENSE, DEVICE, None, IDEAL, Precision(tile_tokens=64))
    # 64 rows of 2 x 1184 operations are more than the 2 x 1184 bytes; the output layer has no tile
    assert tiles.seconds(BatchWork(1, 0)) == pytest.approx((64 * 2 * 1184 + 160) * US)
    assert tiles.seconds(BatchWork(64, 0)) == pytest.approx(64 * 2 * 1264 * US)


def test_fixed_costs_are_of_layers_the_iteration_and_its_sequences():
    bare, fixed = ideal(), ideal(layer_s=1e-3, iteration_s=1e-2, sequence_s=1e-4)
    work = BatchWork(3, 30, 7, 24, 1)
    assert fixed.seconds(work) - bare.seconds(work) == pytest.approx(2e-3 + 1e-2 + 4e-4)


def test_an_empty_batch_takes_no_time():
    assert ideal(iteration_s=1).seconds(BatchWork(0, 0)) == 0
    assert ideal(iteration_s=1).decode_seconds(0, 0, 5) == 0


def test_tensor_parallel_halves_the_work_and_pays_two_all_reduces_a_layer():
    alone, two = ideal().seconds(BatchWork(1, 4)), ideal(parallel=Parallel(2)).seconds(BatchWork(1, 4))
    # of each of 4 all-reduces 16 bytes: 2 steps of 8 bytes at 10**5 bytes a second
    assert two - alone / 2 == pytest.approx(4 * 2 * 8 / 1e5)
    # beyond one KV head a device the KV is replicated: 4 ways it is read as with 2
    reads = replace(IDEAL, kv_bandwidth=0.01, link_share=1e9)
    of_context = [
        IterationModel(DENSE, DEVICE, Parallel(tensor), reads).seconds(BatchWork(1, 1000))
        - IterationModel(DENSE, DEVICE, Parallel(tensor), reads).seconds(BatchWork(1, 0))
        for tensor in (1, 2, 4)
    ]
    assert of_context[0] == pytest.approx(2 * of_context[1])
    assert of_context[2] == pytest.approx(of_context[1])


def test_a_ring_of_more_devices_than_a_node_goes_over_the_network():
    engine = ideal(parallel=Parallel(4), collective_s=2e-3, hop_s=1e-3)
    assert engine.all_reduce_seconds(8, 800) == pytest.approx(2e-3 + 14 * (1e-3 + 100 / 1e5))
    assert engine.all_reduce_seconds(16, 1600) == pytest.approx(2e-3 + 30 * (1e-3 + 100 / 1e4))
    assert engine.all_reduce_seconds(1, 800) == 0
    of_four = ideal(parallel=Parallel(4, node=4), direct_s=1e-6)
    assert of_four.all_reduce_seconds(8, 800) == pytest.approx(14 * 100 / 1e4)


def test_a_small_all_reduce_within_a_node_reads_all_others_at_once():
    engine = ideal(parallel=Parallel(4), hop_s=1e-3, direct_s=3e-3)
    # 3 others' bytes at 10**5 a second, or 6 steps of a quarter of them
    assert engine.all_reduce_seconds(4, 100) == pytest.approx(3e-3 + 3 * 100 / 1e5)
    assert engine.all_reduce_seconds(4, 4000) == engine.ring_seconds(4, 4000)
    assert engine.ring_seconds(4, 4000) == pytest.approx(6 * (1e-3 + 1000 / 1e5))
    assert engine.all_reduce_seconds(16, 100) == engine.ring_seconds(16, 100)


def test_pipeline_stages_read_the_weights_once_for_each_micro_batch():
    one, two = ideal(), ideal(parallel=Parallel(pipeline=2), link_share=1e9)
    # bound by bytes: both stages read their half for each of two micro-batches, hence all in sequence
    assert two.seconds(BatchWork(2, 0)) == pytest.approx(one.seconds(BatchWork(1, 0)))
    # bound by operations: half of the tokens at a time on half of the layers, twice as quick
    assert two.seconds(BatchWork(200, 4000)) == pytest.approx(one.seconds(BatchWork(200, 4000)) / 2)


def test_a_mixture_reads_the_experts_that_are_touched():
    # 212 of attention, 32 of the router, 80 of the output; of 4 experts with 2 a token, after 1 token 2 are
    # touched, after 3 4 x (1 - 1/8) = 3.5, 2 bytes of 96 each
    assert ideal(MIXTURE).seconds(BatchWork(1, 0)) == pytest.approx((2 * 324 + 2 * 2 * 96) * US)
    few = ideal(MIXTURE, gemm_compute=1e9, expert_compute=1e9).seconds(BatchWork(3, 0))
    assert few == pytest.approx((2 * 324 + 2 * 3.5 * 96) * US)
    # bound by operations: 3 tokens through 2 experts
    many = ideal(MIXTURE, gemm_compute=1e9, expert_bandwidth=1e9).seconds(BatchWork(3, 0))
    assert many == pytest.approx((2 * 324 + 2 * 3 * 2 * 96) * US)


def test_expert_parallel_ranks_exchange_tokens_and_share_the_experts():
    spread = ideal(MIXTURE, Parallel(expert=2, data=2))
    # each rank: one of two tokens for attention, and half of the 2 x 2 passes through experts; each token
    # goes to 1 of the other ranks at most: twice 16 bytes at 10**5 bytes a second
    assert spread.seconds(BatchWork(2, 0)) == pytest.approx((2 * 324 + 2 * 2 * 96) * US + 2 * 16 / 1e5)
    # bound by bytes: both tokens together touch 4 x (1 - 1/4) = 3 experts, half of them here
    reads = ideal(MIXTURE, Parallel(expert=2, data=2), expert_compute=1e9)
    assert reads.seconds(BatchWork(2, 0)) == pytest.approx((2 * 324 + 2 * 1.5 * 96) * US + 2 * 16 / 1e5)


def test_without_expert_parallelism_every_token_goes_to_every_rank():
    # 4 ranks of one token each, to the 3 others; with an expert on each rank, to the 2 x 3/4 of its experts
    wide = {"gemm_compute": 1e9, "gemm_bandwidth": 1e9, "expert_compute": 1e9, "expert_bandwidth": 1e9}
    sliced = ideal(MIXTURE, Parallel(data=4), **wide).seconds(BatchWork(4, 0))
    spread = ideal(MIXTURE, Parallel(expert=4, data=4), **wide).seconds(BatchWork(4, 0))
    assert sliced == pytest.approx(2 * 3 * 16 / 1e5, rel=1e-3)
    assert spread == pytest.approx(2 * 1.5 * 16 / 1e5, rel=1e-3)


def test_the_busiest_expert_rank_is_waited_for():
    reads = {"gemm_compute": 1e9, "gemm_bandwidth": 1e9, "expert_bandwidth": 1e9, "link_share": 1e9}
    even = ideal(MIXTURE, Parallel(expert=2, data=2), **reads)
    uneven = ideal(MIXTURE, Parallel(expert=2, data=2), **reads, expert_imbalance=1.5)
    work = BatchWork(100, 0)
    assert uneven.seconds(work) == pytest.approx(1.5 * even.seconds(work), rel=1e-3)


def test_fp8_weights_are_half_and_compute_twice():
    quick = IterationModel(DENSE, DEVICE, None, IDEAL, Precision(1.0, 2.0))
    # the output layer stays bfloat16
    assert quick.seconds(BatchWork(1, 0)) == pytest.approx((1184 + 160) * US)
    assert quick.seconds(BatchWork(100, 0)) == pytest.approx((100 * 1184 + 100 * 160) * US)


@given(
    st.sampled_from([DENSE, MIXTURE]),
    st.integers(1, 300),
    st.integers(0, 10**6),
    st.integers(0, 400),
)
def test_the_closed_form_is_the_sum_of_its_iterations(size, decodes, context, count):
    model = ideal(size, layer_s=1e-4, sequence_s=1e-5)
    summed = sum(model.seconds(BatchWork(decodes, context + step * decodes)) for step in range(count))
    assert model.decode_seconds(decodes, context, count) == pytest.approx(summed, rel=1e-9)


@given(st.integers(1, 512), st.integers(0, 10**7), st.floats(0, 1e4))
def test_the_most_iterations_within_a_time_end_within_it_and_one_more_does_not(decodes, context, seconds):
    model = IterationModel(model_of("qwen3-8b"), hardware("h800"))
    count = model.decode_iterations(decodes, context, seconds)
    assert model.decode_seconds(decodes, context, count) <= seconds
    assert model.decode_seconds(decodes, context, count + 1) > seconds


@given(st.sampled_from(sorted(CATALOGUE)), st.integers(0, 256), st.integers(0, 10**6), st.integers(0, 8192))
def test_more_work_of_any_kind_never_takes_less_time(name, decodes, context, prompt):
    model = IterationModel(model_of("qwen3-30b-a3b"), CATALOGUE[name], Parallel(2))
    work = BatchWork(decodes, context, prompt, prompt * prompt / 2, 1 if prompt else 0)
    base = model.seconds(work)
    assert model.seconds(replace(work, decodes=decodes + 1)) >= base
    assert model.seconds(replace(work, decode_context=context + 100)) >= base
    assert model.seconds(replace(work, prefill_tokens=prompt + 1)) >= base
    assert model.seconds(replace(work, prefill_attended=work.prefill_attended + 100)) >= base


def test_kv_has_the_memory_that_weights_and_the_runtime_leave():
    # 9000 bytes, less 2 x 1184 + 2 x 2 x 80 of weights, less 312: 6000 over 32 a token
    assert ideal(reserved_bytes=312).kv_tokens(0.9) == 187
    # two devices: each holds half the weights and one of the two KV heads
    assert ideal(parallel=Parallel(2)).kv_tokens(0.9) == int((9000 - 1344) / 16)
    # two stages: a layer and one of the two tables each
    assert ideal(parallel=Parallel(pipeline=2)).kv_tokens(0.9) == int((9000 - 1184 - 160) / 16)


def test_data_parallel_ranks_each_hold_attention_and_their_own_sequences():
    one, two = ideal(MIXTURE), ideal(MIXTURE, Parallel(expert=2, data=2))
    # attention 212 and router 32 on both, 4 experts of 96 halved, two tables
    assert one.device_weight_bytes() == 2 * (212 + 32 + 4 * 96 + 2 * 80)
    assert two.device_weight_bytes() == 2 * (212 + 32 + 2 * 96 + 2 * 80)
    assert two.kv_tokens(0.9) == 2 * int((9000 - two.device_weight_bytes()) / 16)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(ModelDoesNotFit, match=r"1 l40s .* 43\.5 GB .* weights take 65\.5 .*tensor_parallel"):
        IterationModel(model_of("qwen3-32b"), hardware("l40s")).kv_tokens()


def test_splits_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="28 heads do not divide by tensor_parallel_size 8"):
        IterationModel(model_of("qwen2.5-7b"), hardware("h20"), Parallel(8))
    with pytest.raises(ValueError, match="expert_parallel_size 3 does not divide"):
        Parallel(tensor=2, expert=3)
    with pytest.raises(ValueError, match="pipeline_parallel_size is 0"):
        Parallel(pipeline=0)
    with pytest.raises(ValueError, match="devices_per_node is 0"):
        Parallel(node=0)


def test_one_h800_decodes_as_the_roofline_of_its_fitted_shares_says():
    """Qwen3-8B, 64 sequences of 4000 tokens, by hand in float64 from the committed shares."""
    model = IterationModel(model_of("qwen3-8b"), hardware("h800"))
    share = model.coefficients
    layers, table = 36 * (41_951_488 + 150_994_944), 151_936 * 4096
    weights = 2 * (layers + table) / (share.gemm_bandwidth * 3.35e12)
    kv = 64 * 4000 * 147_456 / (share.kv_bandwidth * 3.35e12)
    fixed = 36 * share.layer_s + share.iteration_s + 64 * share.sequence_s
    assert model.seconds(BatchWork(64, 64 * 4000)) == pytest.approx(weights + kv + fixed, rel=1e-9)
