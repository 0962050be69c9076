"""Placement that the user dictates, in weft plan and in an engine: checked, costed and shown as one of our own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.commands import weft
from tests.pure.machines import FOUR, H100, NOTHING, SIX, rig
from tests.pure.planner.test_execution import run
from tests.refusals import has_values, refusals, refuses
from weft.checkpoint.names import catalogue
from weft.errors import WeftError
from weft.machine.hardware.cluster import parse_gpus, parse_nodes
from weft.plan.parallelism import Parallelism
from weft.plan.plan import named_devices
from weft.planner.deployment import Workload
from weft.planner.profiles import engine_profile
from weft.planner.question import Question
from weft.planner.report.advice import advice
from weft.planner.report.notes import notes
from weft.planner.search.ranking import Candidate
from weft.planner.search.search import SearchResult, search
from weft.planner.speed.steps import StepPredictor
from weft.planner.work.replica import build_replicas

LLAMA = catalogue.find("Llama-3.1-8B").shape
BATCH = Workload(concurrency=64)


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.probes.stored_speeds.load_speeds", lambda _: NOTHING)


def plan(hardware: str, constraints: Parallelism, model: str = "Llama-3.1-8B", **more: object) -> SearchResult:
    parse = parse_nodes if hardware.count("x") > 1 and hardware.split("x")[1].isdigit() else parse_gpus
    asked = {"engine": "weft", "precisions": ("bf16",), "workload": BATCH, **more}
    shape = catalogue.find(model).shape
    return search(Question(model=model, shape=shape, cluster=parse(hardware), constraints=constraints, **asked))  # type: ignore[arg-type]


def best(answer: SearchResult) -> Candidate:
    assert answer.best, [it.reason for it in answer.rejected]
    return answer.best


def stages(*runs: tuple[int, int]) -> Parallelism:
    """GPU and layers of each stage."""
    return Parallelism(devices=tuple(gpu for gpu, _ in runs), pipeline_split=tuple(count for _, count in runs))


# --- weft plan ---


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=6),
    st.sampled_from(["weft", "transformers"]),
)
def test_stages_lie_where_they_are_told(runs: list[tuple[int, int]], engine: str) -> None:
    runs.append((3, len(LLAMA.layers) - sum(count for _, count in runs))) if sum(c for _, c in runs) < len(
        LLAMA.layers
    ) else None
    if sum(count for _, count in runs) != len(LLAMA.layers):
        return
    answer = plan("2xA100+2xRTX4090", stages(*runs), engine=engine)
    (cut,) = {it.cut for it in (*answer.candidates, *answer.rejected)}
    assert (cut.parallelism.tensor_parallel, cut.parallelism.pipeline_parallel, cut.parallelism.data_parallel) == (
        1,
        len(runs),
        1,
    )
    if answer.best:
        layout, memory = answer.best.layout, answer.best.memory
        assert [(gpu, len(place.layers)) for gpu, place in zip(layout.gpus, layout.places, strict=True)] == runs
        for gpu in set(layout.gpus):
            ranks = [rank for rank, number in zip(memory.ranks, layout.gpus, strict=True) if number == gpu]
            taken = sum(rank.weights.total + rank.other_bytes + rank.kv_room_bytes for rank in ranks)
            assert taken <= ranks[0].usable_bytes <= ranks[0].memory_bytes


def test_a_gpu_that_holds_two_stages_works_for_both() -> None:
    """The same memory and half the pipeline; one request alone is as fast."""
    apart = best(plan("3xA100", stages((0, 10), (1, 12), (2, 10))))
    shared = best(plan("3xA100", stages((0, 10), (1, 12), (0, 10))))
    assert shared.memory.kv_tokens < 0.6 * apart.memory.kv_tokens
    assert shared.predicted.single_tok_s == pytest.approx(apart.predicted.single_tok_s, rel=0.02)
    assert shared.predicted.tpot_s > 1.5 * apart.predicted.tpot_s
    (told,) = notes(plan("2xA100", stages((0, 10), (1, 12), (0, 10))).question, shared)
    assert (told.code, told.values["gpus"]) == ("stages_take_turns", (0, 1, 0))


def test_steps_of_such_a_gpu_are_as_predicted() -> None:
    answer = plan("2xA100", stages((0, 10), (1, 12), (0, 10)))
    question, layout = answer.question, best(answer).layout
    (run_,) = build_replicas(question.shape, layout, question.cluster, engine_profile(question))
    found = StepPredictor(run_).step_s([1536] * 16, groups=3)
    work = Workload(input_len=1024, output_len=1024)
    assert max(found.latency_s, 3 * found.interval_s) == pytest.approx(run_.round_s(48, work).total)


def test_engines_that_give_each_rank_a_gpu_refuse_two_stages_on_one() -> None:
    constraints = stages((0, 10), (1, 12), (0, 10))
    for engine in ("vllm", "trtllm", "sglang", "llama.cpp"):
        answer = plan("2xA100", constraints, engine=engine)
        reason = answer.rejected[0].reason
        assert answer.best is None and reason.code == "stages_share_gpu"
        assert (reason.values["engine"], reason.values["gpu"]) == (engine, 0)
    assert best(plan("2xA100", constraints, engine="transformers"))


def test_words_are_worked_out_for_each_precision() -> None:
    answer = plan("1xRTX3060+1xA100", Parallelism(device_map_strategy="sequential"), precisions=("bf16", "int4"))
    assert {it.cut.precision: it.layout.gpus for it in answer.candidates} == {"bf16": (0, 1), "int4": (0,)}


def test_the_cost_of_a_dictated_placement_is_told() -> None:
    answer = plan("2xRTX4090", stages((0, 30), (1, 2)))
    assert "free_layout" in [change.code for change in advice(answer)]
    tied = plan("2xA100", stages((0, 10), (1, 6)), model="Llama-3.2-1B")
    (copy,) = notes(tied.question, tied.best)
    assert (copy.code, copy.values["head_bytes"]) == ("head_copied", 525_336_576)


def test_a_gpu_that_triton_does_not_know_is_told_in_the_engine_s_words() -> None:
    volta = plan("1xV100", Parallelism(), precisions=("fp16",))
    (told,) = notes(volta.question, volta.best)
    assert told.code == "slow_kernels"
    has_values(told.values["reason"], "V100-SXM2-32GB", "7.0")
    turing = plan("1xT4", Parallelism(), model="Llama-3.2-1B", precisions=("fp16",))
    assert notes(turing.question, turing.best) == []


def test_a_split_by_weights_that_comes_to_other_shares_is_told() -> None:
    rough = plan("2xA100", Parallelism(tensor_parallel=2, tensor_split=(30.0, 1.0)))
    (note,) = notes(rough.question, rough.best)
    assert (note.code, note.values["split"], note.values["heads"]) == ("tensor_split_rounded", (30.0, 1.0), [28, 4])
    fine = plan("2xA100", Parallelism(tensor_parallel=2, tensor_split=(5.0, 3.0)))
    assert notes(fine.question, fine.best) == []


# --- the order of different GPUs ---


@pytest.mark.parametrize(
    "hardware", ["1xRTX4090+1xRTXA6000", "1xRTX3090+1xA100+1xRTX4090", "2xRTX3090+2xRTX4090+1xRTXA6000"]
)
def test_the_order_in_which_gpus_are_given_does_not_matter(hardware: str) -> None:
    terms = hardware.split("+")
    turned = ["+".join(terms[::-1]), "+".join(terms[1:] + terms[:1])]
    constraints = Parallelism(tensor_parallel=1, data_parallel=1)
    first, *others = (best(plan(it, constraints, "Qwen2.5-14B")).predicted.tpot_s for it in (hardware, *turned))
    assert others == pytest.approx([first] * len(others), rel=0.01)


def test_another_order_is_taken_where_it_pays() -> None:
    constraints, asked = (
        Parallelism(tensor_parallel=1, pipeline_parallel=5),
        {"precisions": ("int4",), "workload": Workload()},
    )
    found = best(plan("2xRTX3090+2xRTX4090+1xRTXA6000", constraints, "Llama-3.1-70B", **asked))
    assert sorted(found.layout.gpus) == [0, 1, 2, 3, 4] and found.layout.gpus != (0, 1, 2, 3, 4)
    # What the user says of each stage holds for the GPUs as they are given.
    said = Parallelism(tensor_parallel=1, pipeline_split=(16, 16, 16, 16, 16))
    told = best(plan("2xRTX3090+2xRTX4090+1xRTXA6000", said, "Llama-3.1-70B", precisions=("int4",)))
    assert told.layout.gpus == (0, 1, 2, 3, 4)


# --- at the command line ---


def told(*words: str) -> tuple[int, str, str]:
    return weft("plan", *words)


def half(layers: int = 32) -> dict[str, Any]:
    """Transformers' map of an untied model over two GPUs."""
    return {
        "model.embed_tokens": 0,
        **{f"model.layers.{n}": int(n >= layers // 2) for n in range(layers)},
        "model.norm": 1,
        "model.rotary_emb": 1,
        "lm_head": 1,
    }


WORDS = ("Llama-3.1-8B", "--gpus", "2xA100", "--json")


def test_maps_are_read_from_files_and_words(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(json.dumps(half(), indent=2))
    (tmp_path / "map.yaml").write_text("".join(f"{name}: cuda:{it}\n" for name, it in half().items()))
    (tmp_path / "map").write_text(json.dumps(half()))
    answers = [
        told(*WORDS, "--device-map", str(said))
        for said in (tmp_path / "map.json", tmp_path / "map.yaml", tmp_path / "map", json.dumps(half()), str(half()))
    ]
    assert {status for status, _, _ in answers} == {0}
    found = [json.loads(out) for _, out, _ in answers]
    assert all(it == found[0] for it in found)
    assert found[0]["best"]["pipeline_split"] == [16, 16]
    assert [rank["gpu_index"] for rank in found[0]["best"]["ranks"]] == [0, 1]
    (tmp_path / "config.yaml").write_text(f"device-map: {json.dumps(half())}\nmax-memory:\n  0: 30GB\n  1: 40GiB\n")
    bound = json.loads(told(*WORDS, "--config", str(tmp_path / "config.yaml"))[1])
    assert bound["best"]["pipeline_split"] == [16, 16]
    assert [rank["usable_bytes"] for rank in bound["best"]["ranks"]] == [30 * 10**9, 40 << 30]


def test_a_gpu_s_memory_is_shown_once_whatever_it_holds() -> None:
    split = json.dumps({"": 0, "model.layers.16": 1})
    best_ = json.loads(told(*WORDS, "--device-map", split)[1])["best"]
    first, _, last = best_["ranks"]
    used = sum(rank[f"{part}_bytes"] for rank in (first, last) for part in ("weight", "kv", "other"))
    assert first["free_bytes"] == last["free_bytes"] == first["memory_bytes"] - used > 0


@pytest.mark.parametrize(
    ("words", "status", "told_"),
    [
        (["--device-map", "even"], 1, ["even", "balanced_low_0"]),
        (["--device-map", "none.json"], 2, ["cannot read none.json"]),
        (["--device-map", '{"": 0'], 2, ["neither JSON nor YAML"]),
        (["--device-map", '{"a": 0, "b": 1, "a": 2}'], 2, ["'a' is there twice"]),
        (["--device-map", "{0: [}"], 2, ["neither JSON nor YAML"]),
        (["--device-map", '{"": 7}'], 1, ["GPU 7", "GPUs 0 to 1"]),
        (["--device-map", '{"model.layers.0": 0}'], 1, ["leaves out", "model.layers.1 to model.layers.31"]),
        (
            ["--device-map", '{"": 0, "model.layers.7.mlp": 1}'],
            1,
            ["splits model.layers.7", "model.layers.7.mlp on GPU 1"],
        ),
        (["--device-map", '{"": 0, "model.layers.3": "disk"}'], 1, ["436 MB", "on disk", "0.15 s", "3 GB/s"]),
        (["--device-map", "cpu"], 2, ["2 GPUs"]),
        (["--device-map", "balanced", "-tp", "2"], 1, ["--tensor-parallel-size 2"]),
        (["--device-map", "balanced", "--tensor-split", "2,1"], 1, ["--tensor-split 2,1"]),
        (["--device-map", "balanced", "--pipeline-split", "16,16"], 1, ["--pipeline-split"]),
        (["--device-map", "0", "--pipeline-split", "16,16"], 1, ["--pipeline-split 16,16", "32"]),
        (["--device-map", "0", "-pp", "2"], 1, ["--pipeline-parallel-size 2", "1 stage"]),
        (["--device-map", "0", "-dp", "2"], 1, ["--data-parallel-size 2"]),
        (["--device-map", "1", "--max-memory", "0=20GB"], 1, ["GPU 1", "--max-memory"]),
        (["--max-memory", "0"], 2, ["'0'", "0=40GB"]),
        (["--max-memory", "0=40"], 1, ["40 bytes", "40GB"]),
        (["--max-memory", "0=40GX"], 1, ["40GX", "40GiB"]),
        (["--max-memory", "0=-4GB"], 1, ["-4GB"]),
        (["--max-memory", "0=4GB,0=5GB"], 2, ["0 twice"]),
        (["--max-memory", "2=4GB"], 1, ["GPU 2", "GPUs 0 to 1"]),
        (["--max-memory", "gpu=4GB"], 1, ["'gpu'"]),
        (["--max-memory", "cpu=4GB"], 1, ["leaves no GPU"]),
        (["--max-memory", "0=40GB", "-tp", "2"], 2, ["2 ranks", "--max-memory", "1"]),
        (["--tensor-split", "2,1", "--pipeline-split", "16,16"], 2, ["2 x 2 = 4 ranks", "has 2"]),
    ],
)
def test_bad_placements_are_one_clear_line(words: list[str], status: int, told_: list[str]) -> None:
    got, out, err = told(*WORDS[:3], *words)
    assert got == status, err
    assert out == "" and err.count("\n") == 1 and err.startswith("weft: error: ")
    for word in told_:
        assert word in err, err


def test_a_model_beyond_its_caps_is_no_error_but_an_answer() -> None:
    status, out, _ = told(*WORDS, "--device-map", "balanced", "--max-memory", "0=8GB,1=8GB")
    found = json.loads(out)
    assert status == 3 and found["best"] is None and found["rejected"][0]["code"] == "weights_too_large"
    status, out, _ = told(*WORDS, "--max-memory", "0=20GB,cpu=64GB")
    assert status == 0
    assert json.loads(out)["note_codes"][-3:] == ["max_memory_without_effect", "max_memory", "gpus_left_out"]


# --- in an engine ---


def test_a_map_is_what_the_engine_runs() -> None:
    got = run("Llama-3.1-8B", rig(FOUR, FOUR), device_map=half())
    assert got.devices == named_devices("cuda:0", "cuda:1")
    assert [len(place.layers) for place in got.places] == [16, 16]
    turned = run("Llama-3.1-8B", rig(FOUR, FOUR), device_map={name: 1 - it for name, it in half().items()})
    assert turned.devices == named_devices("cuda:1", "cuda:0")
    back = run("Llama-3.1-8B", rig(FOUR, FOUR), device_map={"": 0, "model.layers.16": 1})
    assert back.devices == named_devices("cuda:0", "cuda:1", "cuda:0")
    assert [len(place.layers) for place in back.places] == [16, 1, 15]
    assert run("Llama-3.1-8B", rig(FOUR, FOUR), device_map="cuda:1").devices == named_devices("cuda:1")


def test_words_for_a_map_in_an_engine() -> None:
    for word in ("auto", "balanced"):
        got = run("Llama-3.1-8B", rig(FOUR, FOUR, FOUR), device_map=word)
        assert got.devices == named_devices("cuda:0", "cuda:1", "cuda:2")
        assert [len(place.layers) for place in got.places] == [10, 12, 10]
    assert run("Llama-3.1-8B", rig(FOUR, FOUR), device_map="sequential").devices == named_devices("cuda:0")
    assert run("Llama-3.1-8B", rig(FOUR, FOUR, FOUR), device_map="balanced_low_0").devices == named_devices(
        "cuda:1", "cuda:2"
    )


def test_a_cpu_is_a_device_where_there_is_no_other() -> None:
    for said in ("cpu", "balanced", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}):
        got = run("Llama-3.2-1B", rig(), device_map=said)
        assert got.devices == named_devices("cpu")
    assert run("Llama-3.2-1B", rig(FOUR), device_map="cpu").devices == named_devices("cpu")
    assert run("Llama-3.2-1B", rig(FOUR), device_map="balanced", device="cpu").devices == named_devices("cpu")


def test_max_memory_caps_an_engine_s_gpus() -> None:
    got = run("Llama-3.1-8B", rig(FOUR, FOUR), device_map=half(), max_memory={0: "20GB", 1: "12GiB"})
    total = 24564 << 20
    assert got.gpu_memory_utilization == (20 * 10**9 / total, (12 << 30) / total)
    assert got.max_memory == {"cuda:0": 20 * 10**9, "cuda:1": 12 << 30}
    # GPUs that are not named are not used.
    assert run("Llama-3.1-8B", rig(FOUR, FOUR), max_memory={1: "24GB"}).devices == named_devices("cuda:1")
    two = run("Llama-3.1-8B", rig(FOUR, FOUR, FOUR), max_memory={1: "24GB", 2: "24GB"}, tensor_parallel_size=2)
    assert two.devices == named_devices("cuda:1", "cuda:2")
    searched = run("Qwen3-32B", rig(SIX, SIX, FOUR), max_memory={0: "45GB", 1: "45GB"})
    assert set(searched.devices) == {*named_devices("cuda:0", "cuda:1")}
    assert all(share <= 45 * 10**9 / (49140 << 20) for share in searched.gpu_memory_utilization)
    assert run("Llama-3.1-8B", rig(H100), max_memory={0: 80 * 10**9}).gpu_memory_utilization == (0.9,)


# GPUs, flags, the code of what is wrong with them, and values of the message.
BAD_PLACEMENTS: list[tuple[int, dict[str, Any], str, list[str]]] = [
    (0, {"device_map": {"model.layers.0": 0}}, "map-without-gpu", ["GPU 0", "cpu"]),
    (0, {"device_map": half(16)}, "map-without-gpu", ["cpu"]),
    (0, {"device_map": {"": "disk"}}, "map-to-disk", ["disk", "cpu"]),
    (0, {"max_memory": {0: "4GB"}}, "max-memory-gpu-on-cpu", ["GPU 0", "cpu=8GB"]),
    (0, {"max_memory": {"cpu": "1GB"}}, "weights-exceed-max-memory", ["2.5 GB", "1.0 GB", "--max-memory"]),
    (2, {"device_map": {"": 2}}, "map-beyond-gpus", ["GPU 2", "GPUs 0 to 1"]),
    (2, {"device_map": {"": 0, "model.layers.3": "disk"}}, "map-to-disk", ["model.layers.3", "cpu"]),
    (
        2,
        {"device_map": {"": 0}, "tensor_parallel_size": 2},
        "device-map-beside-other-cut",
        ["--tensor-parallel-size 2"],
    ),
    (
        2,
        {"device_map": "balanced", "pipeline_parallel_size": 2},
        "device-map-makes-stages",
        ["--pipeline-parallel-size"],
    ),
    (2, {"device_map": {"": 0}, "device_ids": (1,)}, "device-map-beside-device-ids", ["--device-ids"]),
    (
        2,
        {"device_map": {"": 0}, "pipeline_split": (8, 8)},
        "device-map-contradicts-split",
        ["--pipeline-split 8,8", "16"],
    ),
    (2, {"device_map": "even"}, "unknown-device-map", ["even", "balanced"]),
    (2, {"device_map": {"": "cpu"}, "device": "cuda"}, "device-map-on-cpu-with-cuda", ["--device is cuda"]),
    (2, {"device_map": {"": 0}, "device": "cpu"}, "map-without-gpu", ["GPU 0", "cpu"]),
    (2, {"device_map": {"": 0}, "plan": "plan.json"}, "plan-beside-device-map", ["--plan", "--device-map"]),
    (2, {"max_memory": {5: "4GB"}}, "max-memory-beyond-gpus", ["GPU 5", "GPUs 0 to 1"]),
    (2, {"max_memory": {0: "4GB"}, "device_ids": (1,)}, "device-ids-outside-max-memory", ["GPU 1", "--max-memory"]),
    (
        2,
        {"max_memory": {0: "20GB"}, "tensor_parallel_size": 2},
        "max-memory-leaves-too-few-gpus",
        ["2 ranks", "--max-memory", "1"],
    ),
    (
        2,
        {"max_memory": {0: "1GB"}, "tensor_parallel_size": 1},
        "weights-exceed-max-memory",
        ["2.5 GB", "1.0 GB", "--max-memory"],
    ),
    (2, {"max_memory": {0: "4XB"}}, "bad-memory-size", ["4XB", "40GB"]),
]


@pytest.mark.parametrize(("gpus", "flags", "code", "words"), BAD_PLACEMENTS)
def test_bad_placements_of_an_engine(gpus: int, flags: dict[str, Any], code: str, words: list[str]) -> None:
    with refuses(WeftError, code, *words):
        run("Llama-3.2-1B", rig(*[FOUR] * gpus, memory_free_bytes=10**11), **flags)


def test_the_wording_of_bad_placements(golden: Callable[[str, str], None]) -> None:
    def place(case: tuple[int, dict[str, Any]]) -> None:
        run("Llama-3.2-1B", rig(*[FOUR] * case[0], memory_free_bytes=10**11), **case[1])

    golden("placement.txt", refusals(place, [(gpus, flags) for gpus, flags, *_ in BAD_PLACEMENTS]))


def test_maps_from_python() -> None:
    """Transformers' forms: dicts, and words."""
    from weft.engine.client.arguments import engine_config

    got = engine_config("m", {"device_map": {"": 0, "lm_head": "cuda:1"}, "max_memory": {0: "20GB", "cpu": 10**10}})
    assert got.device_map == {"": 0, "lm_head": "cuda:1"} and got.max_memory == {0: "20GB", "cpu": 10**10}
    assert engine_config("m", {"device_map": "auto"}).device_map == "auto"
    with refuses(WeftError, "invalid-argument", "device_map"):
        engine_config("m", {"device_map": [0, 1]})
