"""Response of the predicted speed to the hardware and to the layout."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.costs import cut, speed
from tests.pure.shapes import with_attention
from tests.refusals import refuses
from weft.checkpoint.architectures.place import whole
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.names.catalogue import find
from weft.checkpoint.quantised.precision import weight_bytes
from weft.errors import ConfigError
from weft.machine.hardware import cpus, kernel_shares, links
from weft.machine.hardware.cluster import Cluster, Node, parse_gpus, parse_nodes
from weft.machine.hardware.gpus import find_gpu, known_gpus
from weft.planner.deployment import Workload
from weft.planner.memory.footprint import footprint
from weft.planner.profiles import Constant, engine_names, load_profile
from weft.planner.speed.cost import predict
from weft.planner.work.replica import Stage
from weft.planner.work.work import rank_work

LLAMA, QWEN_72B = find("Llama-3.1-8B").shape, find("Qwen2.5-72B-Instruct").shape
QWEN_MOE, DEEPSEEK = find("Qwen3-30B-A3B").shape, find("DeepSeek-R1").shape
MODELS = [LLAMA, QWEN_MOE, DEEPSEEK, find("gpt-oss-120b").shape]


cuts = st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 4), (2, 1, 2), (4, 1, 1)])


@settings(deadline=None, max_examples=60)
@given(
    shape=st.sampled_from(MODELS),
    engine=st.sampled_from(engine_names()),
    sizes=cuts,
    concurrency=st.integers(1, 512) | st.none(),
    factor=st.floats(1.0, 10.0),
    experts=st.booleans(),
)
def test_cost_falls_with_bandwidth(
    shape: ModelShape,
    engine: str,
    sizes: tuple[int, int, int],
    concurrency: int | None,
    factor: float,
    experts: bool,
) -> None:
    tensor, stages, copies = sizes
    count = tensor * stages * copies
    layout = cut(shape, range(count), tensor=tensor, stages=stages, experts=experts and count > 1 and stages == 1)
    b200 = find_gpu("B200")
    faster = msgspec.structs.replace(b200, bandwidth_Bps=b200.bandwidth_Bps * factor)
    slow, fast = (
        speed(shape, layout, Cluster((Node((gpu,) * count, "nvlink"),), 1e9), engine, concurrency=concurrency)
        for gpu in (b200, faster)
    )
    near = 1 + 1e-9
    assert fast.single_tok_s * near >= slow.single_tok_s
    assert fast.tpot_s <= slow.tpot_s * near
    assert fast.ttft_s <= slow.ttft_s * near
    assert fast.saturated_tok_s * near >= slow.saturated_tok_s


@settings(deadline=None)
@given(order=st.permutations(range(8)), sizes=st.sampled_from([(8, 1), (4, 2), (1, 8), (2, 4), (2, 2), (1, 1)]))
def test_permuting_identical_gpus_changes_nothing(order: list[int], sizes: tuple[int, int]) -> None:
    tensor, stages = sizes
    same, shuffled = (
        speed(LLAMA, cut(LLAMA, places, tensor=tensor, stages=stages), "8xL40S") for places in (range(8), order)
    )
    assert same == shuffled


@pytest.mark.parametrize("engine", engine_names())
@pytest.mark.parametrize("shape", MODELS)
def test_one_request_stays_below_what_the_bandwidth_allows(shape: ModelShape, engine: str) -> None:
    chosen = shape.experts.top_k / shape.experts.count if shape.experts else 1.0
    least = chosen * (weight_bytes(shape, "bf16") - 2 * 2 * shape.vocab * shape.hidden)
    found = speed(shape, cut(shape, range(16), tensor=16), "16xB200", engine, input_len=1)
    assert 0 < found.single_tok_s < 16 * 7.7e12 / least


def test_replicas_multiply_what_is_saturated_and_nothing_else() -> None:
    one, four = speed(LLAMA, cut(LLAMA, [0]), "1xL40S"), speed(LLAMA, cut(LLAMA, range(4)), "4xL40S")
    assert four.saturated_tok_s == pytest.approx(4 * one.saturated_tok_s)
    assert four.single_tok_s == pytest.approx(one.single_tok_s)
    assert four.tpot_s == pytest.approx(one.tpot_s)


def test_a_request_goes_through_all_stages_but_many_fill_them() -> None:
    one, four = (speed(QWEN_72B, cut(QWEN_72B, range(n), stages=n), f"{n}xH200") for n in (1, 4))
    assert four.single_tok_s < one.single_tok_s
    assert four.saturated_tok_s > 2 * one.saturated_tok_s


def test_engines_without_a_pipeline_use_one_gpu_at_a_time() -> None:
    asked = {"concurrency": 8}
    piped, layered = (
        speed(QWEN_72B, cut(QWEN_72B, range(4), stages=4), "4xH200", engine, **asked)
        for engine in ("vllm", "transformers")
    )
    alone = speed(QWEN_72B, cut(QWEN_72B, range(4), stages=4), "4xH200", "transformers", concurrency=1)
    assert layered.tpot_s > alone.tpot_s
    assert piped.tpot_s < layered.tpot_s


def test_more_requests_at_once_are_slower_each_and_faster_together() -> None:
    found = [speed(LLAMA, cut(LLAMA, [0]), "1xH100", concurrency=n) for n in (1, 4, 16, 64)]
    tpots = [it.tpot_s for it in found]
    assert tpots == sorted(tpots)
    rates = [it.concurrency / it.tpot_s for it in found]
    assert rates == sorted(rates)
    assert rates[-1] < found[-1].saturated_tok_s
    assert tpots[0] == pytest.approx(1 / found[0].single_tok_s)


def test_unlike_replicas_have_as_many_requests_each() -> None:
    """Least connections gives them equal numbers: the faster one answers more, and a mean is over answers."""
    both = speed(LLAMA, cut(LLAMA, [0, 1]), "1xH100+1xRTX3090", concurrency=16)
    each = [speed(LLAMA, cut(LLAMA, [0]), f"1x{gpu}", concurrency=8) for gpu in ("H100", "RTX3090")]
    assert both.concurrency / both.tpot_s == pytest.approx(sum(it.concurrency / it.tpot_s for it in each))
    assert each[0].tpot_s < both.tpot_s < (each[0].tpot_s + each[1].tpot_s) / 2


def test_concurrency_ends_where_the_cache_does() -> None:
    full, asked = (speed(LLAMA, cut(LLAMA, [0]), "1xRTX4090", concurrency=n) for n in (None, 100_000))
    assert full.limit == asked.limit == "kv_cache"
    assert asked.concurrency == full.concurrency < 100
    assert asked.tpot_s == full.tpot_s


def test_more_requests_at_once_get_more_up_to_what_is_saturated() -> None:
    """With long prompts and short answers too, of which reading takes the most."""
    work = {"input_len": 6000, "output_len": 200}
    found = [speed(LLAMA, cut(LLAMA, [0]), "1xRTX4090", "weft", concurrency=n, **work) for n in (1, 2, 4, 6, 7, 100)]
    rates = [it.output_tok_s for it in found]
    assert rates == sorted(rates) and rates[-1] == rates[-2] == found[0].saturated_tok_s
    # One on two replicas leaves one of them idle.
    two = speed(LLAMA, cut(LLAMA, [0, 1]), "2xRTX4090", "weft", concurrency=1, **work)
    assert two.output_tok_s == pytest.approx(rates[0])


def test_the_engines_own_limit_is_named() -> None:
    assert speed(LLAMA, cut(LLAMA, [0]), "1xB200", "weft", output_len=64, input_len=64).limit == "max_num_seqs"
    assert speed(LLAMA, cut(LLAMA, [0]), "1xB200", "weft", concurrency=3).limit == "concurrency"


def test_shorter_steps_take_longer_to_the_first_token_and_answer_less() -> None:
    found = []
    for most in (1, 16, 64, 256, 1024):
        said = msgspec.structs.replace(
            load_profile("weft"), max_num_batched_tokens=Constant(most, ""), hold_up_ms=Constant(0, "")
        )
        found.append(predict(LLAMA, cut(LLAMA, [0]), parse_gpus("1xH100"), Workload(), said))
    assert [it.ttft_s for it in found] == sorted((it.ttft_s for it in found), reverse=True)
    assert [it.saturated_tok_s for it in found] == sorted(it.saturated_tok_s for it in found)
    assert found[0].ttft_s > 1000 / found[0].single_tok_s  # a step for each token of the prompt
    assert found[0].saturated_concurrency == 1.0


def test_more_prompts_come_to_a_step_than_a_float_can_count() -> None:
    """Poisson's terms: of hundreds of requests with one token each."""
    gpt2 = find("gpt2").shape
    found = speed(gpt2, cut(gpt2, [0, 1], stages=2), "2xH100", "weft", input_len=1, output_len=1)
    assert found.saturated_concurrency >= 256 and 0 < found.saturated_tok_s < 1e6


def test_longer_prompts_take_longer_to_the_first_token_and_to_every_one() -> None:
    found = [speed(LLAMA, cut(LLAMA, [0]), "1xL40S", input_len=n) for n in (100, 1000, 10_000)]
    assert found[0].ttft_s < found[1].ttft_s < found[2].ttft_s
    assert found[0].single_tok_s > found[1].single_tok_s > found[2].single_tok_s


def test_a_window_bounds_what_attention_reads() -> None:
    gemma = find("gemma-3-27b-it").shape
    whole = with_attention(gemma, window=None)
    windowed, full = (
        speed(shape, cut(shape, [0]), "1xH200", input_len=60_000, concurrency=1) for shape in (gemma, whole)
    )
    assert windowed.step.attention < full.step.attention
    assert windowed.ttft_s < full.ttft_s


def test_a_token_streams_only_the_experts_it_meets() -> None:
    """E (1 - (1 - k/E)^B) of them: 8 of 128 for one token, nearly all for 64."""
    found = [speed(QWEN_MOE, cut(QWEN_MOE, [0]), "1xH200", concurrency=n).step.experts for n in (1, 64)]
    (layer,) = rank_work(QWEN_MOE, "bf16", "bf16", cut(QWEN_MOE, [0]).places[0]).layers
    assert layer.experts is not None
    assert layer.experts.nbytes == 2 * 3 * QWEN_MOE.hidden * 768
    least = layer.count * 8 * layer.experts.nbytes / 4.8e12
    assert least < found[0] < 4 * least
    assert 8 * found[0] < 2 * found[1] < 2 * 16 * found[0]


def test_sharing_experts_among_replicas_leaves_more_room_and_costs_exchanges() -> None:
    shared = cut(QWEN_MOE, range(4), experts=True)
    alone = cut(QWEN_MOE, range(4))
    memories = [footprint(QWEN_MOE, it, parse_gpus("4xH100"), load_profile("vllm")) for it in (shared, alone)]
    assert memories[0].kv_tokens > 2 * memories[1].kv_tokens
    found = [speed(QWEN_MOE, it, "4xH100", concurrency=64).step.links for it in (shared, alone)]
    assert found[0] > 0 == found[1]


def test_the_slowest_of_mixed_gpus_sets_the_pace() -> None:
    mixed = speed(LLAMA, cut(LLAMA, range(2), tensor=2), "1xRTX4090+1xRTX3090")
    slow, fast = (speed(LLAMA, cut(LLAMA, range(2), tensor=2), f"2x{gpu}") for gpu in ("RTX3090", "RTX4090"))
    assert mixed.step.matrices == pytest.approx(max(slow.step.matrices, fast.step.matrices))


def test_across_nodes_tensor_parallel_pays_for_the_network() -> None:
    layout, stages = cut(QWEN_72B, range(8), tensor=8), cut(QWEN_72B, range(8), tensor=4, stages=2)
    near, far = parse_nodes("1x8xH100"), parse_nodes("2x4xH100", "100Gb")
    asked = {"concurrency": 64}
    assert speed(QWEN_72B, layout, far, **asked).tpot_s > 1.3 * speed(QWEN_72B, layout, near, **asked).tpot_s
    assert speed(QWEN_72B, stages, far).saturated_tok_s > speed(QWEN_72B, layout, far).saturated_tok_s
    within = speed(QWEN_72B, stages, near).saturated_tok_s
    assert speed(QWEN_72B, stages, far).saturated_tok_s == pytest.approx(within, rel=0.1)


@pytest.mark.parametrize(
    ("gpu", "ranks", "megabyte_us"),
    [("H100", 2, 8.3), ("H100", 4, 12.8), ("H100", 8, 15.0), ("A100", 2, 10.7), ("A100", 8, 21.7), ("B200", 8, 17.2)],
)
def test_sums_take_what_was_measured(gpu: str, ranks: int, megabyte_us: float) -> None:
    """allreduce.csv, 1 MiB in a CUDA graph."""
    found = links.all_reduce_cost(find_gpu(gpu), "nvlink", ranks, 1e9, True).seconds(1 << 20)
    assert found * 1e6 == pytest.approx(megabyte_us, rel=1e-6)


def test_sums_slow_down_with_the_link() -> None:
    h100, l40s, geforce = find_gpu("H100"), find_gpu("L40S"), find_gpu("RTX 4090")
    size = 8 << 20
    found = [
        links.all_reduce_cost(gpu, kind, 4, 12.5e9, True).seconds(size)
        for gpu, kind in ((h100, "nvlink"), (h100, "pcie"), (l40s, "pcie"), (geforce, "pcie"))
    ]
    assert found == sorted(found)
    assert links.all_reduce_cost(h100, "nvlink", 1, 12.5e9, True).seconds(size) == 0
    eager, graphs = (links.all_reduce_cost(h100, "nvlink", 8, 12.5e9, graphs).latency_s for graphs in (False, True))
    assert eager - graphs == pytest.approx(11e-6)


def test_nccl_sends_up_and_down_a_tree_of_nodes() -> None:
    """Twice a message per level, whatever is measured of one; the GPUs of a node cost little beside that."""

    def latency(ranks: int, nodes: int, message_s: float) -> float:
        return links.all_reduce_cost(find_gpu("H100"), "network", ranks, 1e9, True, message_s, nodes).latency_s

    assert latency(2, 2, 1e-3) == pytest.approx(2e-3)
    assert latency(8, 8, 1e-3) == pytest.approx(6e-3)
    assert 2e-3 < latency(16, 2, 1e-3) < 2.1e-3
    assert links.all_reduce_cost(find_gpu("H100"), "network", 2, 1e9, True).latency_s == pytest.approx(30e-6)


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 2), (3, 3), (4, 4), (4, 2), (8, 2)])
def test_sums_of_cpu_ranks_take_one_latency_or_two(ranks: int, nodes: int) -> None:
    """The planner counts what `ranks.comm.gloo` waits for, by the rule that it goes by; and the bytes that a node
    sends."""
    cpu, message_s = cpus.typical_cpu(), 1e-3
    found = links.all_reduce_cost(cpu, "network", ranks, 1e8, False, message_s, nodes)
    shot_s = links.send_cost(cpu, "network", 1e8, message_s).latency_s
    assert message_s < shot_s < 2 * message_s
    byte_s = 1e-8
    own = ranks // nodes
    for size in (0, 1 << 10, 20_000, 100_000, links.SHOT_BYTES):
        shots = 1 if links.sums_in_one_shot(size, ranks) else 2
        sent = own * (ranks - own) * size * (1 if shots == 1 else 2 / ranks)
        assert found.seconds(size) == pytest.approx(shots * shot_s + sent * byte_s, rel=1e-6), size
    # Beyond, the bytes of a ring.
    more = found.seconds(4 << 20) - found.seconds(2 << 20)
    assert more == pytest.approx(2 * (ranks - 1) / ranks * (2 << 20) * byte_s)
    assert links.sums_in_one_shot(1 << 30, 2) and links.sums_in_one_shot(1 << 10, ranks)
    assert not links.sums_in_one_shot(1 << 20, 3)


def test_ranks_between_the_tabled_ones_lie_between() -> None:
    found = [
        links.all_reduce_cost(find_gpu("L40S"), "pcie", ranks, 1e9, True).latency_s for ranks in (2, 3, 4, 6, 8, 16)
    ]
    assert found == sorted(found)
    assert len(set(found)) == len(found)


def test_every_gpu_of_the_catalogue_has_kernels_and_links() -> None:
    for gpu in known_gpus():
        found = kernel_shares.find_kernel_shares(gpu)
        shares = found.weights, found.matmul, found.decode_attention, found.prefill_attention
        assert all(0 < share < 1 for share in shares)
        assert links.all_reduce_cost(gpu, "pcie", 2, 1e9, True).s_per_byte > 0


def test_h20_is_not_taken_for_an_h200() -> None:
    assert (
        kernel_shares.find_kernel_shares(find_gpu("H20")).weights
        < kernel_shares.find_kernel_shares(find_gpu("H200")).weights
    )
    assert "H200" in kernel_shares.find_kernel_shares(find_gpu("H200 NVL")).gpu


@pytest.mark.parametrize("engine", engine_names())
def test_every_constant_says_where_it_is_from(engine: str) -> None:
    for name, text in load_profile(engine).provenance().items():
        value, _, source = text.partition(": ")
        assert value, name
        assert len(source) > 3, name


def test_an_unknown_engine_names_the_nearest() -> None:
    with refuses(ConfigError, "unknown-engine", "'vlm'", "vllm"):
        load_profile("vlm")


def test_fp8_engines_keep_kv_in_fp8_where_they_do_so_by_themselves() -> None:
    assert load_profile("trtllm").kv_dtype("fp8") == "fp8"
    assert load_profile("trtllm").kv_dtype("bf16") == load_profile("vllm").kv_dtype("fp8") == "bf16"


def test_links_carry_the_sums_of_every_layer() -> None:
    shape = msgspec.structs.replace(LLAMA, layers=LLAMA.layers[:4])
    work = rank_work(shape, "bf16", "bf16", whole(shape))
    assert [(layer.count, layer.sums) for layer in work.layers] == [(4, 2)]
    one_sum = msgspec.structs.replace(work, layers=(msgspec.structs.replace(work.layers[0], sums=1),))
    none, sums = links.LinkCost(0.0, 0.0), links.LinkCost(1.0, 0.0)
    stage = Stage([], sums, None, none, shape.vocab)
    # Beside them the gather of the logits, once.
    assert [stage.links_s(each, 8, 0, 8) for each in (work, one_sum)] == [2 * 4 + 1, 4 + 1]
