"""The search: what fits, what is best, and the rules of thumb as consequences of the arithmetic."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.commands import weft_json
from tests.pure.shapes import with_attention
from tests.refusals import has_values
from weft.checkpoint.names import catalogue
from weft.machine.hardware.cluster import Cluster, Node, parse_gpus, parse_nodes
from weft.machine.hardware.gpus import GpuSpec, find_gpu, known_gpus
from weft.plan.max_memory import Caps, cap_cluster
from weft.plan.parallelism import Parallelism
from weft.planner.deployment import DeploymentLayout, Workload
from weft.planner.question import Question
from weft.planner.report.advice import advice
from weft.planner.report.binding import binding_constraint
from weft.planner.report.summary import choice_reason, choice_reasons
from weft.planner.search.cuts import Cut, candidate_layouts
from weft.planner.search.domains import interconnect_domains, place_replicas, tensor_groups, tensor_sizes
from weft.planner.search.ranking import RANKING_ERROR, Candidate, objective_value, request_s, single_request_s
from weft.planner.search.search import SearchResult, search

LONG_PROMPTS = Workload(input_len=5000, output_len=500)
THOUSANDS = Workload(input_len=1000, output_len=1000)


def question(model: str, cluster: Cluster, precision: str = "bf16", engine: str = "vllm", **more: object) -> Question:
    shape = catalogue.find(model).shape
    return Question(model=model, shape=shape, cluster=cluster, precisions=(precision,), engine=engine, **more)  # type: ignore[arg-type]


def plan(model: str, hardware: str, precision: str = "bf16", engine: str = "vllm", **more: object) -> SearchResult:
    parse = parse_nodes if hardware.count("x") > 1 and hardware.split("x")[1].isdigit() else parse_gpus
    return search(question(model, parse(hardware), precision, engine, **more))


def best(answer: SearchResult) -> Candidate:
    assert answer.best, [it.reason for it in answer.rejected]
    return answer.best


def sizes(candidate: Candidate) -> tuple[int, int, int]:
    """(tensor, pipeline, data) parallel."""
    return (
        candidate.cut.parallelism.tensor_parallel,
        candidate.cut.parallelism.pipeline_parallel,
        candidate.cut.parallelism.data_parallel,
    )


def forced(model: str, hardware: str, tensor: int, stages: int, precision: str, **more: object) -> float:
    constraints = Parallelism(tensor_parallel=tensor, pipeline_parallel=stages, data_parallel=1)
    answer = plan(model, hardware, precision, "trtllm", constraints=constraints, **more)
    return best(answer).predicted.saturated_tok_s


# --- the rules of the guides ---


@pytest.mark.parametrize("engine", ["weft", "vllm", "sglang"])
@pytest.mark.parametrize(
    ("model", "hardware"), [("SmolLM2-135M-Instruct", "8xA100"), ("Llama-3.2-1B", "4xA100"), ("gpt2", "8xH100")]
)
def test_a_model_that_is_small_for_one_gpu_is_replicated_not_split(model: str, hardware: str, engine: str) -> None:
    answer = plan(model, hardware, engine=engine)
    assert sizes(best(answer)) == (1, 1, len(answer.question.cluster.gpus))


@pytest.mark.parametrize("engine", ["weft", "vllm", "sglang"])
@pytest.mark.parametrize(
    ("model", "hardware", "precision"),
    [
        ("Llama-3.1-8B-Instruct", "4xA100", "bf16"),
        ("Llama-3.1-8B-Instruct", "8xH100", "bf16"),
        ("Qwen2.5-14B-Instruct", "8xH100", "bf16"),
        ("gpt2", "8xT4", "fp16"),
    ],
)
def test_a_model_that_fits_one_gpu_is_split_only_within_the_error_of_its_replicas(
    model: str, hardware: str, precision: str, engine: str
) -> None:
    """Replicas have the highest throughput. A split was once preferred only from 1.5 times that on, an assumption that
    no measurement bore out; now the rule for near ties holds for it as for any other layout."""
    answer = plan(model, hardware, precision, engine)
    highest = max(answer.candidates, key=lambda it: objective_value(answer.question, it))
    assert sizes(highest) == (1, 1, len(answer.question.cluster.gpus))
    if highest is not best(answer):
        assert objective_value(answer.question, highest) < (1 + RANKING_ERROR) * objective_value(
            answer.question, best(answer)
        )
        assert single_request_s(answer.question, best(answer).predicted) < single_request_s(
            answer.question, highest.predicted
        )


@pytest.mark.parametrize("engine", ["weft", "vllm", "trtllm", "sglang"])
@pytest.mark.parametrize(
    ("model", "hardware", "ranks"),
    [
        ("Llama-3.1-70B-Instruct", "4xH100", 4),
        ("Llama-3.1-70B-Instruct", "2xH100", 2),
        ("Qwen2.5-72B-Instruct", "4xA100", 4),
        ("opt-13b", "4xRTX 3090", 4),
    ],
)
def test_a_model_that_fits_one_node_is_cut_by_tensors(model: str, hardware: str, ranks: int, engine: str) -> None:
    assert sizes(best(plan(model, hardware, engine=engine))) == (ranks, 1, 1)


@pytest.mark.parametrize("engine", ["weft", "vllm", "sglang"])
@pytest.mark.parametrize(
    ("model", "hardware", "cut"),
    [
        ("Llama-3.1-405B-Instruct", "2x8xH100", (8, 2, 1)),
        ("Llama-3.1-405B-Instruct", "2x8xA100", (8, 2, 1)),
        ("Llama-3.1-405B-Instruct", "4x8xA100-40GB", (8, 4, 1)),
    ],
)
def test_a_model_over_several_nodes_is_cut_by_tensors_inside_and_layers_between(
    model: str, hardware: str, cut: tuple[int, int, int], engine: str
) -> None:
    found = best(plan(model, hardware, engine=engine))
    assert sizes(found) == cut
    # No tensor parallel group reaches across nodes.
    per_node = len(parse_nodes(hardware).nodes[0].gpus)
    for start in range(0, len(found.layout.gpus), found.layout.parallelism.tensor_parallel):
        group = found.layout.gpus[start : start + found.layout.parallelism.tensor_parallel]
        assert len({gpu // per_node for gpu in group}) == 1


def test_tensor_parallelism_across_nodes_is_slower_than_a_pipeline_between_them() -> None:
    across = best(plan("Qwen2.5-72B-Instruct", "2x4xA100-40GB", constraints=Parallelism(tensor_parallel=8)))
    between = best(plan("Qwen2.5-72B-Instruct", "2x4xA100-40GB"))
    assert sizes(across) == (8, 1, 1) and sizes(between) == (4, 2, 1)
    assert across.predicted.saturated_tok_s < between.predicted.saturated_tok_s / 2


def test_a_split_of_what_fits_one_gpu_is_taken_if_it_is_faster() -> None:
    """A 24 GB card holds an 8B model, and little KV beside it: a split has room for more requests, and reads the
    weights twice as fast for one."""
    answer = plan("Llama-3.1-8B-Instruct", "2xRTX4090", engine="weft")
    split = best(answer)
    assert sizes(split) == (2, 1, 1)
    copied = next(it for it in answer.candidates if sizes(it) == (1, 1, 2))
    assert split.predicted.output_tok_s > copied.predicted.output_tok_s
    assert split.predicted.single_tok_s > 1.5 * copied.predicted.single_tok_s


@pytest.mark.parametrize(("model", "hardware"), [("Llama-3.1-70B-Instruct", "3xH100"), ("gpt2", "5xRTX 3090")])
def test_a_model_that_does_not_divide_evenly_is_cut_by_layers(model: str, hardware: str) -> None:
    """vLLM cuts heads evenly or not at all."""
    answer = plan(model, hardware, constraints=Parallelism(data_parallel=1))
    count = len(answer.question.cluster.gpus)
    assert any(sizes(it) == (1, count, 1) for it in answer.candidates)
    told = [it.reason for it in answer.rejected if it.cut.parallelism.tensor_parallel == count]
    assert told and all((note.code, note.values["ranks"]) == ("heads_not_even", count) for note in told)
    assert sizes(best(plan("Llama-3.1-70B-Instruct", "3xH100"))) == (1, 3, 1)


def test_weft_cuts_what_does_not_divide_evenly() -> None:
    answer = plan("Llama-3.1-70B-Instruct", "3xH100", engine="weft", constraints=Parallelism(tensor_parallel=3))
    assert [len(place.kv_heads) for place in best(answer).layout.places] == [3, 3, 2]


@pytest.mark.parametrize("engine", ["weft", "vllm", "trtllm"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_without_nvlink_layers_are_cut_too(engine: str, precision: str) -> None:
    found = best(plan("Llama-3.1-70B-Instruct", "8xL40S", precision, engine))
    assert found.cut.parallelism.pipeline_parallel > 1
    linked = best(plan("Llama-3.1-70B-Instruct", "8xA100-40GB", precision if precision == "bf16" else "int8", engine))
    assert linked.cut.parallelism.pipeline_parallel == 1


# --- facts that the ranking has to reproduce ---


def test_l40s_gains_little_from_four_more_ranks_and_much_from_stages() -> None:
    four = forced("Llama-3.1-70B-Instruct", "4xL40S", 4, 1, "fp8", workload=THOUSANDS)
    eight = forced("Llama-3.1-70B-Instruct", "8xL40S", 8, 1, "fp8", workload=THOUSANDS)
    assert 1.0 < eight / four < 1.25  # measured: 1.10
    gain = forced("Llama-3.1-70B-Instruct", "8xL40S", 1, 8, "fp8", workload=THOUSANDS) / eight
    on_prompts = forced("Llama-3.1-70B-Instruct", "8xL40S", 1, 8, "fp8", workload=LONG_PROMPTS) / forced(
        "Llama-3.1-70B-Instruct", "8xL40S", 8, 1, "fp8", workload=LONG_PROMPTS
    )
    assert 1.5 < gain < on_prompts


def test_h200_scales_less_than_linearly() -> None:
    """Measured: 2,823, 5,165 and 8,911 tokens per second."""
    one, two, four = (forced("Llama-3.1-70B-Instruct", f"{n}xH200", n, 1, "fp8", workload=THOUSANDS) for n in (1, 2, 4))
    assert 1.5 < two / one < 2.0
    assert 1.5 < four / two < 2.0


# --- different GPUs ---


def test_a_larger_gpu_holds_more() -> None:
    answer = plan("Qwen2.5-32B-Instruct", "1xRTX A6000+1xRTX 4090", engine="weft")
    layout = best(answer).layout
    first, second = layout.places
    if layout.parallelism.pipeline_parallel == 2:
        assert len(first.layers) > len(second.layers)
    else:
        assert len(first.ffn) > len(second.ffn)
    both = {it.cut.parallelism.tensor_parallel for it in answer.candidates}
    assert both == {1, 2}


def test_a_gpu_that_only_slows_the_others_stays_idle() -> None:
    answer = plan("Qwen2.5-32B-Instruct", "1xH100+1xT4", "fp16", "weft", objective="latency")
    assert best(answer).layout.gpus == (0,)
    (idle,) = [change for change in advice(answer) if change.code == "idle_gpus"]
    assert (idle.values["idle"], idle.values["usable"]) == (1, 2)


def test_a_split_of_the_user_s_is_taken() -> None:
    constraints = Parallelism(tensor_parallel=2, tensor_split=(3.0, 1.0), pipeline_parallel=2, pipeline_split=(50, 30))
    layout = best(plan("Llama-3.1-70B-Instruct", "4xH200", engine="weft", constraints=constraints)).layout
    assert layout.parallelism.tensor_split == (3.0, 1.0) and layout.parallelism.pipeline_split == (50, 30)
    assert [len(place.kv_heads) for place in layout.places] == [6, 2, 6, 2]
    refused = plan("Llama-3.1-70B-Instruct", "4xH200", constraints=constraints)
    assert refused.best is None and refused.rejected[0].reason.code == "uneven_tensor_split"


# --- experts ---


def test_experts_of_replicas_that_share_them_lie_on_one_node() -> None:
    constraints = Parallelism(tensor_parallel=1, pipeline_parallel=2, data_parallel=8, deals_experts=True)
    layout = best(plan("DeepSeek-R1", "2x8xH200", "fp8", constraints=constraints)).layout
    assert layout.parallelism.expert_parallel == 8
    for stage in range(2):
        held = [layout.places[rank] for rank in range(stage, 16, 2)]
        assert sorted(layout.gpus[stage::2]) == list(range(8 * stage, 8 * stage + 8))
        assert sum(len(place.experts) for place in held) == 256


def test_expert_parallelism_is_weighed_with_the_rest() -> None:
    answer = plan("Qwen3-30B-A3B", "4xH100")
    assert {it.cut.parallelism.expert_parallel > 1 for it in answer.candidates} == {True, False}
    without = plan("Qwen3-30B-A3B", "4xH100", constraints=Parallelism(deals_experts=False))
    assert {it.cut.parallelism.expert_parallel for it in without.candidates} == {1}


# --- properties ---

MODELS = st.sampled_from(["Llama-3.1-8B-Instruct", "Qwen2.5-14B-Instruct", "SmolLM2-135M-Instruct", "Mixtral-8x7B"])
PLAIN = st.sampled_from([gpu for gpu in known_gpus() if gpu.capability >= (8, 0)])
ENGINES = st.sampled_from(["weft", "vllm", "sglang", "llama.cpp", "transformers"])
FEW = settings(max_examples=25)


def node(found: list[GpuSpec]) -> Cluster:
    return Cluster((Node(tuple(found), "pcie"),), 12.5e9)


@FEW
@given(MODELS, st.lists(PLAIN, min_size=1, max_size=4), ENGINES)
def test_layouts_are_whole(model: str, found: list[GpuSpec], engine: str) -> None:
    """Every layer, head, column and row is held exactly once, on GPUs that are there, within their memory."""
    answer = search(question(model, node(found), engine=engine))
    shape = answer.question.shape
    for candidate in answer.candidates:
        layout = candidate.layout
        assert len(set(layout.gpus)) == len(layout.gpus) == len(layout.places) <= len(found)
        for number in range(layout.parallelism.data_parallel):
            places = [place for place, _ in layout.replica(number)]
            by_stage = places[:: layout.parallelism.tensor_parallel]
            assert [i for place in by_stage for i in range(place.layers.start, place.layers.stop)] == list(
                range(len(shape.layers))
            )
            group = places[: layout.parallelism.tensor_parallel]
            for axis, total in (("q_heads", shape.q_heads), ("ffn", shape.ffn), ("vocab", shape.vocab)):
                assert sum(len(getattr(place, axis)) for place in group) == total
        assert candidate.memory.fits
        for rank in candidate.memory.ranks:
            assert rank.weights.total + rank.other_bytes + max(0, rank.kv_room_bytes) <= rank.memory_bytes
    tried = [it.cut for it in (*answer.candidates, *answer.rejected)]
    assert tried and len(tried) == len(set(tried))
    assert all(any(letter.isdigit() for letter in str(it.reason)) for it in answer.rejected)


@FEW
@given(MODELS, st.lists(PLAIN, min_size=1, max_size=4), ENGINES, st.floats(1, 3))
def test_more_memory_never_makes_a_plan_unfit(model: str, found: list[GpuSpec], engine: str, factor: float) -> None:
    larger = [msgspec.structs.replace(gpu, memory_bytes=int(gpu.memory_bytes * factor)) for gpu in found]
    before = {it.cut for it in search(question(model, node(found), engine=engine)).candidates}
    after = {it.cut for it in search(question(model, node(larger), engine=engine)).candidates}
    assert before <= after


@FEW
@given(MODELS, PLAIN, st.integers(1, 4), ENGINES, st.floats(1.05, 3))
def test_more_bandwidth_is_never_slower(model: str, gpu: GpuSpec, count: int, engine: str, factor: float) -> None:
    faster = msgspec.structs.replace(gpu, bandwidth_Bps=gpu.bandwidth_Bps * factor)
    slow, fast = (search(question(model, node([it] * count), engine=engine)) for it in (gpu, faster))
    # Cut by cut: which one is best may change, and replicas are then preferred to a split that is a little faster.
    then, now = ({it.cut: it.predicted.saturated_tok_s for it in answer.candidates} for answer in (slow, fast))
    assert then.keys() == now.keys()
    assert all(now[cut] > speed for cut, speed in then.items())


@pytest.mark.parametrize(("one", "other"), [("RTX4080", "RTX4090"), ("RTX4090", "A6000")])
def test_no_answer_depends_on_the_rank_that_samples(one: str, other: str) -> None:
    """The first rank of a stage holds the logits too: on the smaller of two unlike GPUs they would cost KV cache."""
    there, back = (
        best(plan("Qwen3-14B", f"1x{a}+1x{b}", engine="weft", constraints=Parallelism(tensor_parallel=2)))
        for a, b in ((one, other), (other, one))
    )
    assert there.layout.parallelism.tensor_parallel == back.layout.parallelism.tensor_parallel == 2
    assert there.predicted.saturated_tok_s == pytest.approx(back.predicted.saturated_tok_s, rel=0.01)
    # Who says the shares says whose they are.
    said = Parallelism(tensor_parallel=2, tensor_split=(1.0, 2.0))
    assert best(plan("Qwen3-14B", f"1x{one}+1x{other}", engine="weft", constraints=said)).layout.gpus == (0, 1)


@FEW
@given(MODELS, st.permutations([find_gpu("RTX 4090"), find_gpu("RTX 4090"), find_gpu("RTX 3090")]))
def test_the_order_of_gpus_changes_little(model: str, found: list[GpuSpec]) -> None:
    """Equal ones may change places; between different ones only the order of the stages does."""
    sorted_ones = sorted(found, key=lambda gpu: gpu.name)
    first, second = (search(question(model, node(it), engine="weft")) for it in (found, sorted_ones))
    assert {it.cut for it in first.candidates} == {it.cut for it in second.candidates}


def test_permuting_equal_nodes_changes_nothing() -> None:
    two = parse_nodes("2x4xA100")
    turned = Cluster(two.nodes[::-1], two.network_Bps)
    first, second = (search(question("Llama-3.1-70B-Instruct", it)) for it in (two, turned))
    assert [(it.cut, it.layout, it.predicted) for it in first.candidates] == [
        (it.cut, it.layout, it.predicted) for it in second.candidates
    ]


# --- the enumeration ---


def test_islands_and_groups() -> None:
    cluster = parse_gpus("2xRTX4090+3xRTX3090")
    assert [[device.number for device in island] for island in interconnect_domains(cluster)] == [[0, 1], [2, 3, 4]]
    pairs = tensor_groups(interconnect_domains(cluster), 2)
    assert [[device.number for device in pair] for pair in pairs] == [[0, 1], [2, 3]]
    assert tensor_sizes(interconnect_domains(parse_gpus("6xH100")), 64) == [6, 4, 3, 2, 1]
    assert tensor_sizes(interconnect_domains(parse_gpus("6xH100")), 3) == [3, 2, 1]


def test_replicas_stay_on_a_node_while_they_can() -> None:
    singles = tensor_groups(interconnect_domains(parse_nodes("3x4xH100")), 1)
    found = place_replicas(singles, 3, 4)
    numbers = [[device.number for stage in replica for device in stage] for replica in found]
    assert numbers == [[0, 1, 2], [4, 5, 6], [8, 9, 10], [3, 7, 11]]


def test_every_draft_is_drawn_once() -> None:
    asked = question("Qwen3-30B-A3B", parse_gpus("2xH100+2xA100"))
    found = [draft.cut for draft in candidate_layouts(asked)]
    assert Cut(Parallelism(4, 1, 1, 1, deals_experts=False), "bf16") in found
    assert Cut(Parallelism(2, 2, 1, 1, deals_experts=False), "bf16") in found
    assert Cut(Parallelism(1, 1, 4, 4, deals_experts=True), "bf16") in found
    assert len({repr(draft) for draft in candidate_layouts(asked)}) == len(found)


@pytest.mark.parametrize(
    ("constraints", "cuts"),
    [
        (Parallelism(tensor_parallel=4, pipeline_parallel=2, data_parallel=1), [(4, 2, 1)]),
        (Parallelism(tensor_parallel=2, pipeline_parallel=2), [(2, 2, 2)]),
        (Parallelism(tensor_parallel=8), [(8, 1, 1)]),
        (Parallelism(pipeline_parallel=8), [(1, 8, 1)]),
        (Parallelism(data_parallel=8), [(1, 1, 8)]),
    ],
)
def test_settings_of_the_user_stay(constraints: Parallelism, cuts: list[tuple[int, int, int]]) -> None:
    asked = question("Llama-3.1-8B-Instruct", parse_gpus("8xH100"), constraints=constraints)
    found = [
        (d.cut.parallelism.tensor_parallel, d.cut.parallelism.pipeline_parallel, d.cut.parallelism.data_parallel)
        for d in candidate_layouts(asked)
    ]
    assert found == cuts


def test_objectives_differ() -> None:
    fast = best(plan("Llama-3.1-70B-Instruct", "8xH100", objective="latency"))
    much = best(plan("Llama-3.1-70B-Instruct", "8xH100"))
    assert fast.predicted.single_tok_s > much.predicted.single_tok_s
    assert fast.predicted.saturated_tok_s < much.predicted.saturated_tok_s
    cheap = best(plan("Llama-3.1-8B-Instruct", "3xH200", objective="cost"))
    assert cheap.cut.parallelism.data_parallel == 3


def test_precisions_are_compared() -> None:
    shape = catalogue.find("Qwen2.5-72B-Instruct").shape
    asked = Question(
        model="m", shape=shape, cluster=parse_gpus("2xA100-40GB"), engine="vllm", precisions=("bf16", "int8", "int4")
    )
    answer = search(asked)
    assert {it.cut.precision for it in answer.candidates} == {"int8", "int4"} - {
        it.cut.precision for it in answer.rejected
    } or best(answer).cut.precision != "bf16"
    assert any(it.cut.precision == "bf16" for it in answer.rejected)


# --- objections and advice ---


@pytest.mark.parametrize(
    ("hardware", "precision", "engine", "code"),
    [
        ("1xT4", "bf16", "vllm", "gpu_without_bf16"),
        ("1xV100", "fp8", "vllm", "gpu_without_bf16"),
        ("1xH100", "q4_k_m", "trtllm", "gguf_not_in_engine"),
        ("1xH100", "int4", "llama.cpp", "only_gguf"),
    ],
)
def test_features_that_a_gpu_or_an_engine_lacks(hardware: str, precision: str, engine: str, code: str) -> None:
    answer = plan("Llama-3.1-8B-Instruct", hardware, precision, engine)
    assert answer.best is None
    reason = answer.rejected[0].reason
    assert reason.code == code and reason.values["precision"] == precision
    if code == "gpu_without_bf16":
        assert reason.values["capability"] < reason.values["needed"] == (8, 0)
    assert binding_constraint(answer).resource is None


def test_twice_of_a_resource_never_makes_a_plan_slower() -> None:
    """With room for more requests at once this mixture would be slower in all, if they ran."""
    gains = binding_constraint(plan("gpt-oss-20b", "2xRTX4090", "mxfp4", "weft")).gains
    assert gains["compute"] > 1.5 and gains["memory"] == min(gains.values()) == 1.0


@pytest.mark.parametrize("precision", ["int8", "int4", "q4_k_m"])
def test_cuts_that_our_kernels_do_not_take(precision: str) -> None:
    """Heads of 80 columns, three for a rank: 240 are no multiple of 32, which the engine would refuse too."""
    asked = question(
        "Qwen2.5-0.5B", parse_gpus("2xRTX4090"), precision, "weft", constraints=Parallelism(data_parallel=1)
    )
    odd = with_attention(asked.shape, heads=6, kv_heads=2, head_dim=80)
    asked = msgspec.structs.replace(asked, shape=odd)
    answer = search(asked)
    assert {sizes(it) for it in answer.candidates} == {(1, 1, 1), (1, 2, 1)}
    (reason,) = [it.reason for it in answer.rejected if it.cut.parallelism.tensor_parallel == 2]
    assert reason.code == "not_possible" and reason.values["fault"] == "quantised-columns-off-grid"
    columns = ("rank 0", "columns 0 to 240", "model.layers.0.self_attn.o_proj.weight")
    has_values(str(reason), *columns, f"({precision})", "32", "pipeline parallel", "--precision bf16")
    for other in ({"precisions": ("bf16",)}, {"engine": "vllm", "precisions": ("int8",)}):
        assert (2, 1, 1) in map(sizes, search(msgspec.structs.replace(asked, **other)).candidates)


def test_nothing_fits_says_by_how_much_and_what_would() -> None:
    answer = plan("Qwen2.5-72B-Instruct", "1xH100")
    assert answer.best is None
    reason = answer.rejected[0].reason
    assert (reason.code, reason.values["weight_bytes"]) == ("weights_too_large", 145_412_407_296)
    assert binding_constraint(answer).resource == "memory"
    changes = advice(answer)
    (int4,) = [it for it in changes if it.code == "smaller_checkpoint" and "int4" in it.values["checkpoint"]]
    assert int4.values["spare"].values["spare_bytes"] > 0
    (more,) = [it for it in changes if it.code == "more_gpus"]
    assert (more.values["count"], more.values["gpu"]) == (1, "H100-SXM")
    # The changes are true.
    assert plan("Qwen2.5-72B-Instruct", "1xH100", "int4").best
    assert plan("Qwen2.5-72B-Instruct", "2xH100").best


def test_too_long_a_request_is_told_the_longest() -> None:
    answer = plan("Qwen-72B-Chat", "2xA100", workload=Workload(max_model_len=32768))
    reason = answer.rejected[0].reason
    assert answer.best is None and (reason.code, reason.values["length"]) == ("context_too_small", 32768)
    (shorter,) = [change for change in advice(answer) if change.code == "shorter_max_model_len"]
    length = shorter.values["tokens"]
    assert 4000 < length < 8000
    fits = Workload(input_len=100, output_len=100, max_model_len=length)
    assert plan("Qwen-72B-Chat", "2xA100", workload=fits).best


def test_too_long_a_prompt_is_told_what_fits_and_no_flag_against_it() -> None:
    work = Workload(input_len=30000, output_len=2000)
    changes = advice(plan("Qwen-72B-Chat", "2xA100", workload=work))
    (shorter,) = [change for change in changes if change.code == "shorter_request"]
    length = shorter.values["tokens"]
    assert 4000 < length < 8000 and "--" not in str(shorter)
    fits = Workload(input_len=length - 2000, output_len=2000)
    assert plan("Qwen-72B-Chat", "2xA100", workload=fits).best


def test_the_binding_constraint_is_the_one_that_helps_most() -> None:
    single = plan("Llama-3.1-70B-Instruct", "4xH100", objective="latency", workload=Workload(input_len=1))
    assert binding_constraint(single).resource == "bandwidth"
    tight = plan("Llama-3.1-70B-Instruct", "2xH100")
    assert binding_constraint(tight).resource == "memory"
    prompts = Workload(input_len=8000, output_len=1, max_model_len=8192)
    assert binding_constraint(plan("Llama-3.1-8B-Instruct", "1xA100", workload=prompts)).resource == "compute"
    linked = plan("Llama-3.1-70B-Instruct", "8xL40S", workload=LONG_PROMPTS, constraints=Parallelism(tensor_parallel=8))
    assert binding_constraint(linked).resource == "links"


def test_one_more_gpu_is_weighed() -> None:
    answer = plan("Llama-3.2-3B-Instruct", "1xA100")
    (more,) = [change for change in advice(answer) if change.code == "added_gpus"]
    gains = more.values["gains"].values
    assert (more.values["count"], more.values["gpu"]) == (1, "A100-80GB-SXM")
    assert (round(gains["context"], 1), round(gains["speed"], 1)) == (2.0, 2.0)


def test_a_layout_is_plain_data() -> None:
    layout = best(plan("Mixtral-8x7B", "4xA100")).layout
    assert msgspec.json.decode(msgspec.json.encode(layout), type=DeploymentLayout) == layout


# --- what a cold reader found ---


def test_replicas_that_share_their_experts_get_no_bonus_for_fitting_one_gpu() -> None:
    """None of them holds the model, and one that fails takes the others along."""
    for model, cluster, precision in (
        ("DeepSeek-V3", parse_nodes("2x8xH100", "400Gb"), "fp8"),
        ("Qwen3-30B-A3B", parse_gpus("2xRTX4090+1xRTX3090"), "bf16"),
    ):
        answer = search(question(model, cluster, precision, "weft"))
        most = max(it.predicted.saturated_tok_s for it in answer.candidates)
        assert best(answer).predicted.saturated_tok_s == pytest.approx(most, rel=0.01)


def test_requests_without_room_wait() -> None:
    """With eight requests, a layout with room for two is not faster because it is less busy."""
    work = Workload(input_len=1024, output_len=1024, concurrency=8)
    three, four = (
        best(plan("Qwen3-30B-A3B", f"{count}xRTX4090", engine="weft", workload=work, objective="latency"))
        for count in (3, 4)
    )
    assert three.predicted.concurrency < 8 == four.predicted.concurrency
    asked = question("Qwen3-30B-A3B", parse_gpus("3xRTX4090"), engine="weft", workload=work, objective="latency")
    assert request_s(asked, four.predicted) < request_s(asked, three.predicted)
    assert min(binding_constraint(search(asked)).gains.values()) >= 0.99  # twice of anything is no loss


def test_more_replicas_than_requests_answer_no_more_requests() -> None:
    work = Workload(concurrency=1)
    copied = best(plan("Llama-3.1-8B", "4xH100", workload=work, constraints=Parallelism(data_parallel=4)))
    assert copied.predicted.concurrency == 1
    # For one request at a time three of four GPUs would idle.
    assert best(plan("Llama-3.1-8B", "4xH100", engine="weft", workload=work)).layout.parallelism.replica_size > 1


def test_the_gain_of_a_free_layout_is_not_credited_to_more_hardware() -> None:
    forced = Parallelism(tensor_parallel=1, pipeline_parallel=1, data_parallel=1)
    told = advice(plan("Llama-3.1-8B", "4xH100", engine="weft", constraints=forced))
    (free,) = [change for change in told if change.code == "free_layout"]
    assert (free.values["cut"], round(free.values["gain"], 1)) == ("DP 4, bf16", 4.0)
    assert "idle_gpus" not in [change.code for change in told]
    (more,) = [change for change in told if change.code == "added_gpus"]
    assert more.values["gpu"] == "H100-SXM" and round(more.values["gains"].values["speed"], 1) == 1.2


def test_a_limit_is_named_before_more_of_the_gpus_that_it_leaves_out() -> None:
    cluster = cap_cluster(parse_gpus("4xH100"), Caps(gpus={0: 10 * 10**9, 1: 20 * 10**9}, cpu=None))
    codes = [change.code for change in advice(search(question("Llama-3.1-8B", cluster, engine="weft")))]
    assert "unlimited_memory" in codes and "added_gpus" not in codes


def test_more_requests_than_fit_are_as_fast_as_saturated() -> None:
    constraints = Parallelism(tensor_parallel=2)
    asked, most = (
        plan("Llama-3.1-8B", "2xRTX4090", engine="weft", constraints=constraints, workload=Workload(concurrency=number))
        for number in (10_000, None)
    )
    assert best(asked).predicted.output_tok_s == best(most).predicted.saturated_tok_s


def test_an_idle_gpu_is_not_called_useless_beside_a_use_of_it() -> None:
    answer = plan("Qwen2.5-3B", "1xH100+1xRTX3060", engine="weft")
    idle = advice(answer)[0]
    assert idle.code == "idle_gpus" and not idle.values["no_better"]
    (why,) = choice_reasons(answer)
    assert why.code == "simpler"
    assert [why.values[name] for name in ("best", "other")] == ["one GPU, bf16", "DP 2, bf16"]
    assert why.values["figures"] == "14,830 vs 15,577 tok/s"


def test_an_even_tensor_split_is_one_that_any_engine_makes() -> None:
    even, uneven = (
        plan("Llama-3.1-8B", "2xRTX4090", constraints=Parallelism(tensor_split=it)) for it in ((1.0, 1.0), (2.0, 1.0))
    )
    assert sizes(best(even)) == (2, 1, 1)
    assert uneven.best is None and uneven.rejected[0].reason.code == "uneven_tensor_split"


def test_a_near_tie_goes_to_the_faster_single_request() -> None:
    answer = plan("gpt-oss-120b", "4xL40S", "mxfp4", "vllm")
    highest = max(answer.candidates, key=lambda it: it.predicted.output_tok_s)
    assert sizes(best(answer)) == (2, 1, 2) and highest.cut.parallelism.expert_parallel == 4
    assert 1 < highest.predicted.output_tok_s / best(answer).predicted.output_tok_s < 1 + RANKING_ERROR
    why, _ = choice_reasons(answer)
    assert why.code == "faster_single_request"
    assert [why.values[name] for name in ("best", "other")] == ["TP 2 x DP 2, mxfp4", "DP 4 x EP 4, mxfp4"]
    assert why.values["figures"] == "4,368 vs 4,784 tok/s" and why.values["speeds"] == "152.3 vs 86.3 tok/s"


def test_the_headline_says_why_a_row_with_a_higher_figure_is_not_taken() -> None:
    answer = plan("Qwen3-8B", "1xRTX4090+1xRTX3090", engine="weft")
    assert sizes(best(answer)) == (1, 2, 1)
    (why,) = choice_reasons(answer)
    assert (why.code, why.values["other"]) == ("other_faster_alone", "TP 2, bf16")
    assert why.values["speeds"] == "81.6 vs 48.4 tok/s"
    answer = plan("Llama-3.1-8B-Instruct", "2xRTX4090", engine="weft")
    (why,) = choice_reasons(answer)
    assert why.code == "faster_single_request"
    assert [why.values[name] for name in ("best", "other")] == ["TP 2, bf16", "PP 2, bf16"]
    assert why.values["figures"] == "1,990 vs 2,092 tok/s" and why.values["speeds"] == "90.5 vs 51.5 tok/s"
    # Nothing to say of one that has the highest figure itself.
    assert choice_reasons(plan("Llama-3.1-70B-Instruct", "4xH100", engine="weft")) == []


@pytest.mark.parametrize("objective", ["throughput", "latency", "cost"])
@pytest.mark.parametrize(
    ("model", "hardware"),
    [("Qwen3-8B", "1xRTX4090+1xRTX3090"), ("Llama-3.1-8B", "2xRTX4090"), ("Llama-3.1-70B", "8xL40S")],
)
def test_the_best_is_explained_or_has_the_highest_figure(model: str, hardware: str, objective: str) -> None:
    answer = plan(model, hardware, engine="weft", objective=objective)
    highest = max(answer.candidates, key=lambda it: objective_value(answer.question, it))
    gain = objective_value(answer.question, highest) / objective_value(answer.question, best(answer))
    assert gain < 1 + RANKING_ERROR
    assert (gain > 1.001) == (str(highest.cut) in choice_reason(answer))


@pytest.mark.parametrize(
    ("concurrency", "grouped"), [(512, True), (None, True), (64, False), (2, False)], ids=["512", "all", "64", "2"]
)
def test_latent_attention_is_in_groups_where_they_pay_and_the_way_back_is_told(
    concurrency: int | None, grouped: bool
) -> None:
    """Each tensor-parallel rank holds and reads all latents: that limits the requests at once, and costs time with many
    rows. With few, a layer's other weights are read by one rank each."""
    load = Workload(input_len=1024, output_len=1024, concurrency=concurrency)
    answer = plan("DeepSeek-R1", "8xH200", "fp8", "weft", workload=load)
    chosen = best(answer)
    assert chosen.cut.parallelism.shares_experts == grouped
    (note,) = (note for note in choice_reasons(answer) if "attention_groups" in note.code)
    assert note.code == ("attention_groups" if grouped else "no_attention_groups")
    others = [candidate for candidate in answer.candidates if candidate.cut.parallelism.shares_experts != grouped]
    other = max(others, key=lambda candidate: candidate.predicted.output_tok_s)
    assert other.predicted.output_tok_s < chosen.predicted.output_tok_s
    assert (note.values["other"], note.values["flags"]) == (str(other.cut), other.cut.flags)
    back = weft_json("plan", "DeepSeek-R1", "--gpus", "8xH200", *other.cut.flags.split())[1]["best"]
    assert back["name"] == str(other.cut)


@pytest.mark.parametrize("model", ["DeepSeek-R1", "DeepSeek-V2-Lite"])
@pytest.mark.parametrize("hardware", ["8xB200", "8xH200", "8xH100", "4xRTX4090"])
@pytest.mark.parametrize("concurrency", [None, 256, 16])
def test_a_word_on_attention_groups_is_true(model: str, hardware: str, concurrency: int | None) -> None:
    """The figures favour what was chosen, and groups are compared with tensor parallelism. A layout that another reason
    has chosen, though the figures favour the other kind, gets no such word."""
    load = Workload(input_len=1024, output_len=1024, concurrency=concurrency)
    answer = plan(model, hardware, "fp8" if model == "DeepSeek-R1" else "bf16", "weft", workload=load)
    if answer.best is None:
        return
    cuts = {str(candidate.cut): candidate for candidate in answer.candidates}
    for note in choice_reasons(answer):
        if "attention_groups" not in note.code:
            continue
        other = cuts[note.values["other"]]
        assert other.predicted.output_tok_s < best(answer).predicted.output_tok_s
        assert note.code == "no_attention_groups" or other.cut.parallelism.tensor_parallel > 1


def test_other_attention_has_no_word_on_attention_groups() -> None:
    answer = plan("Qwen3-30B-A3B", "4xH100", "bf16", "weft")
    assert not [note for note in choice_reasons(answer) if "attention_groups" in note.code]
