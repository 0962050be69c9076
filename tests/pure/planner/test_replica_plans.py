"""Plans of replicas: each on GPUs or cores of its own, from flags, from the search and from plan files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pure.commands import weft_json
from tests.pure.machines import FOUR, H100, NOTHING, THREE, checkpoint, rig
from tests.refusals import refuses
from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError, WeftError
from weft.machine.hardware.cpu import CpuSpeed
from weft.machine.hardware.host import Host
from weft.machine.hardware.topology import Holder
from weft.planner.execution.replicas import ReplicaPlan, plan_replicas


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.probes.stored_speeds.load_speeds", lambda _: NOTHING)


def replicas(model: str, where: Host, *, whole: bool = False, **flags: Any) -> list[ReplicaPlan]:
    there = checkpoint(model)
    return plan_replicas(EngineConfig(model=there.model, **flags), there, where, whole=whole)


def devices(plans: list[ReplicaPlan]) -> list[list[str]]:
    return [[device.name for device in one.plan.devices] for one in plans]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Saves what weft plan says on several machines, one plan or a list of them, and returns the file's name."""

    def save(*questions: tuple[str, Host, tuple[str, ...]]) -> str:
        made = []
        for model, where, words in questions:
            monkeypatch.setattr("weft.machine.hardware.host.probe_host", lambda *_, where=where: where)
            monkeypatch.setattr("weft.probes.stored_speeds.cpu_speed_of", lambda *_, **__: CpuSpeed(40e9, 0.3e12))
            made.append(weft_json("plan", model, *words)[1])
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(made if len(made) > 1 else made[0]))
        return str(file)

    return save


def test_the_best_deployment_is_taken_whole() -> None:
    assert devices(replicas("Llama-3.2-1B", rig(FOUR, FOUR), whole=True)) == [["cuda:0"], ["cuda:1"]]
    assert devices(replicas("Llama-3.2-1B", rig(FOUR, FOUR))) == [["cuda:0"]]
    # It may be that the best one has one replica.
    assert len(replicas("Qwen3-32B", rig(FOUR, FOUR, FOUR, FOUR), whole=True)) == 1


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ({}, (2, 1)),
        ({"tensor_parallel_size": 2}, (2, 1)),
        ({"pipeline_parallel_size": 2}, (1, 2)),
        ({"tensor_split": (3.0, 1.0)}, (2, 1)),
        ({"tensor_parallel_size": 1}, (1, 1)),
    ],
)
def test_replicas_share_no_gpu(flags: dict[str, Any], sizes: tuple[int, int]) -> None:
    plans = replicas("Qwen3-14B", rig(H100, H100, H100, H100), data_parallel_size=2, **flags)
    assert len(plans) == 2
    used = [name for names in devices(plans) for name in names]
    assert len(set(used)) == len(used)
    if flags:
        assert {(one.plan.tensor_parallel, one.plan.stages) for one in plans} == {sizes}
    assert {one.weight for one in plans} == {1.0}


def test_named_gpus_are_dealt_out_in_their_order() -> None:
    plans = replicas(
        "Qwen3-14B", rig(FOUR, FOUR, FOUR, FOUR), data_parallel_size=2, tensor_parallel_size=2, device_ids=(3, 1, 2, 0)
    )
    assert devices(plans) == [["cuda:3", "cuda:1"], ["cuda:2", "cuda:0"]]


def test_replicas_count_the_stages_of_vllms_variable() -> None:
    where = rig(FOUR, FOUR, FOUR, FOUR, environment={"VLLM_PP_LAYER_PARTITION": "20,20"})
    plans = replicas("Qwen3-14B", where, data_parallel_size=2)
    assert devices(plans) == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
    assert [one.plan.parallelism.pipeline_split for one in plans] == [(20, 20)] * 2


def test_replicas_of_a_mixture_share_no_experts() -> None:
    plans = replicas("Qwen3-30B-A3B", rig(H100, H100), data_parallel_size=2)
    assert len(plans) == 2
    assert {one.plan.data_parallel for one in plans} == {1}
    (together,) = replicas("Qwen3-30B-A3B", rig(H100, H100), data_parallel_size=2, enable_expert_parallel=True)
    assert together.plan.data_parallel == 2


def test_replicas_divide_cores_and_memory() -> None:
    where = rig(cores=(1, 2, 5, 6, 7))
    plans = replicas("Llama-3.2-1B", where, data_parallel_size=2, tensor_parallel_size=2, max_memory={"cpu": 24 << 30})
    assert [one.plan.cores for one in plans] == [((1, 2), (5,)), ((6,), (7,))]
    assert [one.weight for one in plans] == [1.0, pytest.approx(2 / 3)]
    (alone,) = replicas("Llama-3.2-1B", where, max_memory={"cpu": 24 << 30})
    assert alone.plan.engines == 1
    assert {one.plan.engines for one in plans} == {2}
    assert {one.plan.max_memory["cpu"] for one in plans} == {alone.plan.max_memory["cpu"] // 2}
    assert {one.host.memory_free_bytes for one in plans} == {where.memory_free_bytes // 2}


def test_a_plan_file_runs_all_its_replicas(saved: Any) -> None:
    where = rig(FOUR, FOUR, FOUR, FOUR)
    file = saved(("Llama-3.1-8B", where, ("-dp", "2", "-tp", "2")))
    ranks = json.loads(Path(file).read_text())["best"]["ranks"]
    planned = [f"cuda:{rank['device']['index']}" for rank in ranks]
    plans = replicas("Llama-3.1-8B", where, plan=file)
    assert devices(plans) == [planned[:2], planned[2:]]
    assert devices(replicas("Llama-3.1-8B", where, plan=file, device_ids=(2, 3, 0, 1))) == [
        ["cuda:2", "cuda:3"],
        ["cuda:0", "cuda:1"],
    ]
    assert len(replicas("Llama-3.1-8B", where, plan=file, data_parallel_size=2)) == 2


def test_a_plan_for_a_cpu_divides_it(saved: Any) -> None:
    plans = replicas("Llama-3.2-1B", rig(), plan=saved(("Llama-3.2-1B", rig(), ("-dp", "2"))))
    assert [one.plan.cores for one in plans] == [(tuple(range(8)),), (tuple(range(8, 16)),)]


def test_uneven_replicas_weigh_what_the_planner_predicts(saved: Any) -> None:
    """Two plans in one file: two small GPUs together, beside a large one."""
    file = saved(("Llama-3.1-8B", rig(FOUR, FOUR), ("-tp", "2", "-dp", "1")), ("Llama-3.1-8B", rig(H100), ("-tp", "1")))
    two, one = replicas("Llama-3.1-8B", rig(FOUR, FOUR, H100), plan=file, device_ids=(0, 1, 2))
    assert devices([two, one]) == [["cuda:0", "cuda:1"], ["cuda:2"]]
    assert two.weight == 1.0
    (other,) = replicas("Llama-3.1-8B", rig(H100))
    assert one.weight > 1.0, "an H100 is faster than two of the others"
    assert other.plan.places == one.plan.places


def test_gpus_of_several_kinds_have_their_own_weights() -> None:
    first, second = replicas("Llama-3.2-1B", rig(H100, FOUR), data_parallel_size=2)
    names = {
        one.host.gpus_of(device.name for device in one.plan.devices)[0].name: one.weight for one in (first, second)
    }
    assert names[H100] > names[FOUR] > 0


@pytest.mark.parametrize(
    ("kind", "code", "values", "where", "flags"),
    [
        (PlanError, "more-replicas-than-gpus", ["3", "3", "2"], rig(FOUR, FOUR), {}),
        (
            PlanError,
            "more-replicas-than-gpus",
            ["2", "2", "4", "3"],
            rig(FOUR, FOUR, THREE),
            {"tensor_parallel_size": 2},
        ),
        (ConfigError, "more-replicas-than-cores", ["3", "here", "1 core", "1"], rig(cores=(4,)), {}),
        (ConfigError, "replicas-share-gpu", ["0,0,1"], rig(FOUR, FOUR), {"device_ids": (0, 0, 1)}),
        (ConfigError, "device-map-beside-other-cut", ["3"], rig(FOUR, FOUR), {"device_map": "auto"}),
    ],
)
def test_too_many_replicas_are_refused(
    kind: type[WeftError], code: str, values: list[str], where: Host, flags: dict[str, Any]
) -> None:
    count = int(values[0]) if values[0].isdecimal() else 3
    with refuses(kind, code, *values):
        replicas("Llama-3.2-1B", where, data_parallel_size=count, **flags)


def test_gpus_that_are_not_one_per_rank_are_refused(saved: Any) -> None:
    where = rig(FOUR, FOUR, FOUR, FOUR)
    flags: dict[str, Any] = {"tensor_split": (3.0, 1.0), "data_parallel_size": 2}
    with refuses(PlanError, "more-replicas-than-gpus", "4", "3"):
        replicas("Llama-3.1-8B", where, device_ids=(0, 1, 2), **flags)
    file = saved(("Llama-3.1-8B", where, ("-dp", "2", "-tp", "1", "-pp", "1")))
    with refuses(ConfigError, "device-ids-not-per-rank", "3", "plan.json", "2"):
        replicas("Llama-3.1-8B", where, plan=file, device_ids=(0, 1, 2))
    with refuses(ConfigError, "flag-contradicts-plan", "4", "2"):
        replicas("Llama-3.1-8B", where, plan=file, data_parallel_size=4)
    with refuses(PlanError, "replicas-share-gpu", "plan.json", "GPU 1"):
        replicas("Llama-3.1-8B", where, plan=file, device_ids=(1, 1))


def test_a_plan_whose_gpus_are_taken_is_refused(saved: Any) -> None:
    """Also if only the second replica's are."""
    where = rig(FOUR, FOUR)
    file = saved(("Llama-3.1-8B", where, ("-dp", "2")))
    holder = Holder(pid=42, name="game", nbytes=20 << 30)
    used = msgspec.structs.replace(where.gpus[1], free_bytes=2 << 30, holders=(holder,))
    with refuses(PlanError, "plan-gpu-in-use", "plan.json", "GPU 1", "game"):
        replicas("Llama-3.1-8B", msgspec.structs.replace(where, gpus=(where.gpus[0], used)), plan=file)


def test_plans_for_several_models_are_refused(saved: Any) -> None:
    file = saved(("Llama-3.1-8B", rig(H100), ()), ("Llama-3.2-1B", rig(H100), ()))
    with refuses(ConfigError, "plans-for-several-models", "plan.json", "Llama-3.1-8B", "Llama-3.2-1B"):
        replicas("Llama-3.1-8B", rig(H100, H100), plan=file)
