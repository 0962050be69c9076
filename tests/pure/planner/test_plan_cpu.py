"""Plans for a machine without GPUs: its CPU is the device."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.commands import weft
from weft.checkpoint.names.catalogue import find
from weft.machine.hardware.cluster import Cluster
from weft.machine.hardware.cpu import Cpu, CpuSpeed
from weft.machine.hardware.host import Host
from weft.plan.memory import Capacity, kv_blocks
from weft.plan.parallelism import Parallelism
from weft.plan.places import cut_places
from weft.plan.plan import Plan, named_devices
from weft.planner.question import Question
from weft.planner.report.advice import advice
from weft.planner.report.binding import binding_constraint
from weft.planner.report.notes import notes
from weft.planner.search.search import SearchResult, search
from weft.probes import machine, stored_speeds
from weft.probes.stored_speeds import Speeds

GB = 10**9
ZEN = Cpu(model="AMD EPYC", sockets=1, cores=4, threads=4, features=("avx512_bf16",))


def host(free: int = 20 * GB) -> Host:
    return Host(hostname="here", cores=(0, 1, 2, 3), memory_total_bytes=64 * GB, memory_free_bytes=free, cpu=ZEN)


def cpu(free: int = 20 * GB, bandwidth: float = 50e9, flops: float = 1e12) -> Cluster:
    return machine.host_cluster(host(free), Speeds(machine="", cpu=CpuSpeed(bandwidth, flops)))


def ask(cluster: Cluster, name: str = "Qwen2.5-0.5B", **asked: Any) -> SearchResult:
    asked = {"engine": "weft", "precisions": ("bf16",), **asked}
    return search(Question(model=name, shape=find(name).shape, cluster=cluster, **asked))


def test_the_kv_cache_is_what_the_engine_takes() -> None:
    for free, cache in ((20 * GB, 4 * GB), (9 * GB, None)):
        best = ask(cpu(free)).best
        assert best is not None and str(best.cut) == "one CPU, bf16"
        (rank,) = best.memory.ranks
        left = free - rank.weights.total - rank.other_bytes
        assert rank.kv_room_bytes == (cache or left // 4) and rank.kv_room_bytes <= left // 4


@given(st.integers(8, 200), st.sampled_from([(1.0,), (1.0, 1.0), (2.0, 1.0), (3.0, 2.0, 2.0)]))
def test_ranks_of_a_cpu_have_the_blocks_that_the_engine_gives_them(free: int, weights: tuple[float, ...]) -> None:
    """Whichever way the heads are dealt out: the engine draws on one memory for all of them."""
    shape = find("Llama-3.2-1B").shape
    ranks = len(weights)
    answer = ask(
        machine.split_cpu(cpu(free * GB), ranks),
        "Llama-3.2-1B",
        constraints=Parallelism(tensor_parallel=ranks, tensor_split=weights if ranks > 1 else ()),
    )
    assert answer.best is not None
    memory = answer.best.memory
    plan = Plan(
        model="m",
        checkpoint="",
        load_format="dummy",
        shape=shape,
        dtype="bfloat16",
        places=cut_places(shape, weights, [len(shape.layers)]),
        devices=named_devices(*("cpu",) * ranks),
        cores=((0,),) * ranks,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=16,
    )
    held = sum(rank.weights.total + rank.other_bytes for rank in memory.ranks)
    reports = [
        Capacity(
            rank=rank,
            host="here",
            device="cpu",
            weight_bytes=0,
            activation_bytes=0,
            free_bytes=free * GB - held,
            block_bytes=plan.block_bytes(rank),
            load_s=0.0,
        )
        for rank in range(ranks)
    ]
    assert memory.kv_tokens == pytest.approx(16 * kv_blocks(plan, reports), abs=16 * ranks)


@given(st.integers(2, 100))
def test_more_memory_never_makes_it_unfit(free: int) -> None:
    if ask(cpu(free * GB)).best:
        assert ask(cpu((free + 1) * GB)).best


@given(st.floats(5e9, 5e11), st.floats(1e11, 1e14))
def test_speed_grows_with_the_cpu(bandwidth: float, flops: float) -> None:
    slow, fast = ask(cpu(20 * GB, bandwidth, flops)).best, ask(cpu(20 * GB, 2 * bandwidth, 2 * flops)).best
    assert slow and fast
    assert fast.predicted.single_tok_s > slow.predicted.single_tok_s
    assert fast.predicted.ttft_s < slow.predicted.ttft_s
    # Never faster than the memory is read.
    assert slow.predicted.single_tok_s < bandwidth / (2 * 400_000_000)


def test_the_limit_of_a_cpu_is_found_from_the_speed_of_its_kernels() -> None:
    one, crowd = (binding_constraint(ask(cpu(), objective=it)) for it in ("latency", "throughput"))
    assert one.resource == "bandwidth" and one.gains["bandwidth"] > 1.5
    assert crowd.gains["compute"] > 1.2 and crowd.gains["compute"] > one.gains["compute"]


def test_splitting_a_cpu_gains_nothing_but_can_be_asked_for() -> None:
    whole, halves = (
        ask(cpu()).best,
        ask(machine.split_cpu(cpu(), 2), constraints=Parallelism(tensor_parallel=2)).best,
    )
    assert whole and halves and str(halves.cut) == "TP 2, bf16"
    assert halves.predicted.single_tok_s < whole.predicted.single_tok_s


def test_a_model_that_does_not_fit_is_told_in_terms_of_a_cpu() -> None:
    answer = ask(cpu(9 * GB), "Llama-3.1-8B")
    assert answer.best is None
    reason = answer.rejected[0].reason
    assert reason.code == "weights_too_large" and 16.0e9 < reason.values["weight_bytes"] < 16.1e9
    usable = reason.values["usable"]
    assert (usable.code, usable.values["usable_bytes"]) == ("usable_beside_cpu", 9 * GB)
    assert "GPU" not in binding_constraint(answer).text
    changes = advice(answer)
    int4 = [it for it in changes if it.code == "smaller_checkpoint" and it.values["cut"] == "one CPU, int4"]
    assert int4 and not any("GPU" in str(it).replace("GPUs", "") for it in int4)
    (more,) = [it for it in changes if it.code == "more_memory"]
    assert 8e9 < more.values["more_bytes"] < 12e9 and more.values["cut"] == "one CPU, bf16"
    (gpu,) = [it for it in changes if it.code == "larger_gpu"]
    assert (gpu.values["count"], gpu.values["cut"]) == (1, "one GPU, bf16") and gpu.values["spare"].values["per_gpu"]
    assert "more_gpus" not in [it.code for it in changes]


def test_a_fit_is_not_told_to_buy_another_cpu() -> None:
    for engine in ("weft", "vllm", "llama.cpp", "transformers"):
        changes = advice(ask(cpu(), engine=engine))
        assert not {"added_gpus", "more_gpus", "larger_gpu"} & {change.code for change in changes}
        assert "GPU" not in " ".join(map(str, changes))


@pytest.mark.parametrize("engine", ["trtllm", "sglang"])
def test_an_engine_of_which_nothing_is_known_on_a_cpu(engine: str) -> None:
    answer = ask(cpu(), engine=engine)
    assert answer.best is None
    reason = answer.rejected[0].reason
    assert (reason.code, reason.values["engine"]) == ("engine_not_on_cpu", engine)
    assert "vllm" in reason.values["known"] and engine not in reason.values["known"]


def test_old_capabilities_do_not_stand_in_a_cpu_s_way() -> None:
    assert ask(cpu(), precisions=("bf16",)).best and ask(cpu(), precisions=("fp16",)).best


def test_a_request_beyond_the_usual_cache_is_noted() -> None:
    workload = msgspec.structs.replace(ask(cpu()).question.workload, max_model_len=32768)
    roomy = ask(cpu(200 * GB), "Llama-3.1-8B", workload=workload)
    assert roomy.best and roomy.best.memory.ranks[0].kv_room_bytes > 4 * GB
    (note,) = notes(roomy.question, roomy.best)
    assert note.code == "kv_cache_flag_on_cpu"
    assert note.values["flag_bytes"] == roomy.best.memory.ranks[0].kv_room_bytes
    usual = ask(cpu(200 * GB))
    assert notes(usual.question, usual.best) == []


# --- at the command line ---


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Any:
    """weft plan WORDS on such a machine: exit status, standard output, standard error."""
    monkeypatch.setattr("weft.machine.hardware.host.probe_host", lambda: host())
    monkeypatch.setattr(stored_speeds, "cpu_speed_of", lambda *_, **__: CpuSpeed(50e9, 1e12))

    return lambda words: weft("plan", *words.split())


def test_weft_plan_without_gpus(plan: Any) -> None:
    status, out, err = plan("Qwen2.5-0.5B")
    assert (status, err) == (0, "")
    assert "AMD EPYC (4 cores)" in out and "one CPU, bf16" in out and "more AMD" not in out
    found = json.loads(plan("Qwen2.5-0.5B --json")[1])
    assert found["best"]["name"] == "one CPU, bf16" and found["best"]["kv_tokens"] > 0


def test_weft_plan_with_ranks_that_share_the_cpu(plan: Any) -> None:
    for words, cut in (
        ("-tp 2", "TP 2"),
        ("-pp 2", "PP 2"),
        ("--tensor-split 1,1", "TP 2"),
        ("--pipeline-split 20,4", "PP 2"),
        ("-tp 2 -pp 2", "TP 2 x PP 2"),
    ):
        status, out, err = plan(f"Qwen2.5-0.5B {words} --json")
        assert (status, err) == (0, ""), words
        best = json.loads(out)["best"]
        assert best["name"] == f"{cut}, bf16" and best["links"]["tensor"] in (None, "memory")


def test_weft_plan_exits_with_3_where_nothing_fits(plan: Any) -> None:
    status, out, _ = plan("Llama-3.1-70B")
    assert status == 3 and "AMD EPYC" in out
    (reason,) = {it["code"] for it in json.loads(plan("Llama-3.1-70B --json")[1])["rejected"]}
    assert reason == "weights_too_large"
    assert plan("Qwen2.5-0.5B --engine trtllm")[0] == 3


def test_deterministic_plans_are_for_cpus_and_our_engine(plan: Any) -> None:
    found = json.loads(plan("Qwen2.5-0.5B --deterministic --json")[1])
    assert found["note_codes"] == ["deterministic_not_counted"] and "--deterministic" not in found["simulate"]
    assert " --deterministic" in plan("Qwen2.5-0.5B --deterministic --emit weft")[1]
    for words, status, values in (
        ("Qwen2.5-0.5B --deterministic --gpus 1xH100", 1, "--device cpu"),
        ("gemma-3-1b-it --deterministic", 1, "Gemma3"),
        ("Qwen2.5-0.5B --deterministic --engine vllm", 2, "not for vllm"),
        ("Qwen2.5-0.5B --deterministic --users 2 --slo ttft_p95=1s", 2, "not simulated"),
    ):
        found_status, out, err = plan(words)
        assert (found_status, out, err.count("\n")) == (status, "", 1) and values in err, err
