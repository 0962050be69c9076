"""Plan file: the output of `weft plan --json`, read back. `planner.execution.run_plan_file` applies it to this
machine."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import msgspec

from weft.errors import ConfigError, error_reason
from weft.plan.limits import EngineLimits
from weft.plan.parallelism import Parallelism
from weft.plan.plan import RankDevice
from weft.regular_files import read_regular

# Format of the output of weft plan --json; grows if a field that is read here changes its meaning, or is new and
# needed. Files of older formats are upgraded when they are read.
FORMAT = 2


class PlannedRank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's device and share of the model; sizes are bytes. Other processes held `held_bytes` of the
    `memory_bytes`, and the engine takes `usable_bytes`."""

    gpu: str
    device: RankDevice
    first_layer: int
    layers: int
    first_q_head: int
    q_heads: int
    first_kv_head: int
    kv_heads: int
    first_expert: int = 0
    experts: int = 0
    weight_bytes: int
    kv_bytes: int
    held_bytes: int
    usable_bytes: int
    memory_bytes: int


class PlannedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout to run. `enable_expert_parallel` is None in files from before experts could be cut over replicas."""

    name: str
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    expert_parallel: int
    enable_expert_parallel: bool | None = None
    precision: str
    kv_cache_dtype: str
    tensor_split: tuple[float, ...]
    pipeline_split: tuple[int, ...]
    kv_tokens: int
    max_num_batched_tokens: int | None = None  # None in files from before it was chosen per model
    ranks: tuple[PlannedRank, ...]

    @property
    def parallelism(self) -> Parallelism:
        dealt = self.expert_parallel > 1 if self.enable_expert_parallel is None else self.enable_expert_parallel
        return Parallelism(
            self.tensor_parallel,
            self.pipeline_parallel,
            self.data_parallel,
            self.expert_parallel,
            dealt,
            self.tensor_split,
            self.pipeline_split,
        )


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    architecture: str
    params: int


class PlannedHardware(msgspec.Struct, frozen=True, kw_only=True):
    """The types of the devices, by name."""

    types: dict[str, Any]


class PlannedWorkload(msgspec.Struct, frozen=True, kw_only=True):
    max_model_len: int
    max_model_len_given: bool


class PlanFile(EngineLimits, frozen=True, kw_only=True):
    """The part of `planner.report.plan_json.plan_json` that an engine needs. `path` is the file that it was read
    from. The limits are as the user gave them."""

    format: int
    engine: str
    model: PlannedModel
    hardware: PlannedHardware
    workload: PlannedWorkload
    best: PlannedLayout | None
    speculative_config: dict[str, Any] | None = None
    path: str = ""

    @property
    def ranks(self) -> tuple[PlannedRank, ...]:
        """The ranks that run: of the first replica, or of all replicas if they share their experts."""
        return self.layout.ranks[: self.layout.parallelism.engine_ranks]

    @property
    def layout(self) -> PlannedLayout:
        assert self.best is not None
        return self.best

    @property
    def on_cpu(self) -> bool:
        return all(rank.device.kind == "cpu" for rank in self.ranks)

    @property
    def engines(self) -> list[PlanFile]:
        """The plan of each engine: of each replica, or of all together if they share their experts."""
        best, cut = self.layout, self.layout.parallelism
        if cut.engines == 1:
            return [self]
        size = cut.replica_size
        parts = [best.ranks[start : start + size] for start in range(0, len(best.ranks), size)]
        layouts = [msgspec.structs.replace(best, ranks=part, data_parallel=1) for part in parts]
        return [msgspec.structs.replace(self, best=layout) for layout in layouts]


class _Head(msgspec.Struct):
    """Fields that tell a plan from other JSON."""

    format: int
    engine: str
    best: msgspec.Raw


PLAN_BYTES = 100_000_000  # a plan of thousands of ranks has some MB
HOW_TO_WRITE = "write one with: weft plan MODEL --json > plan.json"


def load_plan_file(path: str) -> PlanFile:
    """Read a plan file; of a list of plans, the first one. Raises as `load_plan_files`."""
    return load_plan_files(path)[0]


def load_plan_files(path: str) -> list[PlanFile]:
    """Read a plan file: one plan, or a list of plans whose replicas run side by side.

    Raises ConfigError, in one line with the way out, for a file that is no plan, is of another version, or has no
    layout to run.
    """
    plans = [_checked(path, plan) for plan in _decode(path)]
    for other in plans[1:]:
        if other.model != plans[0].model:
            raise ConfigError(
                f"{path} has plans for {plans[0].model.name} and for {other.model.name}; its replicas must have one "
                "model",
                code="plans-for-several-models",
            )
    return plans


def _checked(path: str, plan: PlanFile) -> PlanFile:
    if plan.best is None:
        raise ConfigError(
            f"{path} has no layout: nothing fitted that hardware; weft plan {plan.model.name} says why",
            code="plan-without-layout",
        )
    if plan.engine != "weft":
        raise ConfigError(
            f"{path} is a plan for the engine {plan.engine}; plan again without --engine", code="plan-for-other-engine"
        )
    _check_ranks(path, plan, plan.best)
    return msgspec.structs.replace(plan, path=path)


def _decode(path: str) -> list[PlanFile]:
    try:
        text = read_regular(path, PLAN_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the plan {path}: {error_reason(error)}; {HOW_TO_WRITE}", code="cannot-read-plan"
        ) from None
    is_list = text.lstrip()[:1] == b"["
    try:
        parts: list[msgspec.Raw] = msgspec.json.decode(text, type=list[msgspec.Raw]) if is_list else [msgspec.Raw(text)]
        heads = [msgspec.json.decode(part, type=_Head) for part in parts]
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path} is not the output of weft plan --json: {error}; {HOW_TO_WRITE}", code="not-a-plan"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}; {HOW_TO_WRITE}", code="plan-not-json") from None
    if not heads:
        raise ConfigError(f"{path} is an empty list; {HOW_TO_WRITE}", code="not-a-plan")
    return [_convert(path, part, head.format) for part, head in zip(parts, heads, strict=True)]


def _convert(path: str, text: msgspec.Raw, number: int) -> PlanFile:
    """One plan of a format. Raises ConfigError."""
    if not 1 <= number <= FORMAT:
        raise ConfigError(
            f"{path} is a plan of format {number}, and this Weft reads 1 to {FORMAT}; plan again",
            code="plan-of-other-format",
        )
    try:
        plan = msgspec.json.decode(text)
        return msgspec.convert(_from_format_1(plan) if number == 1 else plan, PlanFile)
    except msgspec.ValidationError as error:
        raise _damaged(path, str(error)) from None
    except KeyError as error:
        raise _damaged(path, f"it has no {error}") from None
    except (IndexError, TypeError):
        raise _damaged(path, "its ranks and its hardware do not fit together") from None


def _from_format_1(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan of format 1 converted to FORMAT: its ranks have a GPU's number among the GPUs of all nodes, and no device.

    Raises KeyError, IndexError and TypeError for a plan that is damaged.
    """
    best, hardware = plan["best"], plan["hardware"]
    if best is None:
        return plan
    before = [0, *accumulate(len(node["gpus"]) for node in hardware["nodes"])]

    def device(rank: dict[str, Any]) -> dict[str, Any]:
        on_cpu = hardware["types"][rank["gpu"]]["kind"] == "cpu"
        index = 0 if on_cpu else rank["gpu_index"] - before[rank["node"]]
        return {"node": rank["node"], "kind": "cpu" if on_cpu else "cuda", "index": index}

    ranks = [{**rank, "device": device(rank)} for rank in best["ranks"]]
    return {**plan, "best": {**best, "ranks": ranks}}


def _check_ranks(path: str, plan: PlanFile, best: PlannedLayout) -> None:
    sizes = (len(best.tensor_split), len(best.pipeline_split), len(best.ranks))
    ranks = best.tensor_parallel * best.pipeline_parallel * best.data_parallel
    if sizes != (best.tensor_parallel, best.pipeline_parallel, ranks) or not ranks:
        raise _damaged(path, f"{best.name} has {ranks} ranks, and it lists {sizes[2]}", "plan-ranks-differ")
    unknown = {rank.gpu for rank in best.ranks} - plan.hardware.types.keys()
    if unknown:
        raise _damaged(path, f"its hardware has no {unknown.pop()}", "plan-gpu-unknown")


def _damaged(path: str, fault: str, code: str = "damaged-plan") -> ConfigError:
    return ConfigError(f"{path} is a damaged plan: {fault}; {HOW_TO_WRITE}", code=code)
