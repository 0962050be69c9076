"""Plan file: what `weft plan --json` printed, read again. `planner.run_plan_file` carries it out on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from weft.errors import ConfigError, error_reason

FORMAT = 1  # of what weft plan --json prints; grows when a field that is read here changes its meaning


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's GPU and what it holds; sizes are bytes. Of `memory_bytes`, others held `held_bytes` and the engine
    takes `usable_bytes`."""

    gpu: str
    gpu_index: int
    node: int
    first_layer: int
    layers: int
    first_q_head: int
    q_heads: int
    first_kv_head: int
    kv_heads: int
    weight_bytes: int
    kv_bytes: int
    held_bytes: int
    usable_bytes: int
    memory_bytes: int


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """The layout that is carried out."""

    name: str
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    expert_parallel: int
    precision: str
    kv_cache_dtype: str
    tensor_split: tuple[float, ...]
    pipeline_split: tuple[int, ...]
    kv_tokens: int
    max_num_batched_tokens: int | None = None  # of files that were written before there was a choice
    ranks: tuple[Rank, ...]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    architecture: str
    params: int


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A type of device."""

    kind: Literal["gpu", "cpu"]


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    types: dict[str, Device]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    max_model_len: int
    max_model_len_given: bool


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `planner.answer.as_json` that an engine needs. `path` is where it was read."""

    format: int
    engine: str
    model: Model
    hardware: Hardware
    workload: Workload
    best: Best | None
    max_num_seqs: int | None = None  # as it was asked for
    speculative_config: dict[str, Any] | None = None
    path: str = ""

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Those of the first replica, which is the one that runs."""
        best = self.layout
        return best.ranks[: best.tensor_parallel * best.pipeline_parallel]

    @property
    def layout(self) -> Best:
        assert self.best is not None
        return self.best


class _Any(msgspec.Struct):
    """What tells a plan from other JSON."""

    format: int
    engine: str
    best: msgspec.Raw


def read(path: str) -> PlanFile:
    """Raises ConfigError, in one line with the way out, for a file that is none, or of another version, or without a
    layout to carry out."""
    make = "write one with: weft plan MODEL --json > plan.json"
    try:
        text = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the plan {path}: {error_reason(error)}; {make}") from None
    try:
        kind = msgspec.json.decode(text, type=_Any)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is not what weft plan --json prints: {error}; {make}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}; {make}") from None
    if kind.format != FORMAT:
        raise ConfigError(f"{path} is a plan of format {kind.format}, and this Weft reads {FORMAT}; plan again")
    try:
        found = msgspec.json.decode(text, type=PlanFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is a damaged plan: {error}; {make}") from None
    if found.best is None:
        raise ConfigError(f"{path} has no layout: nothing fitted that hardware; weft plan {found.model.name} says why")
    if found.engine != "weft":
        raise ConfigError(f"{path} is a plan for the engine {found.engine}; plan again without --engine")
    best = found.best
    sizes = (len(best.tensor_split), len(best.pipeline_split), len(best.ranks))
    ranks = best.tensor_parallel * best.pipeline_parallel * best.data_parallel
    if sizes != (best.tensor_parallel, best.pipeline_parallel, ranks) or not ranks:
        raise ConfigError(f"{path} is a damaged plan: {best.name} has {ranks} ranks, and it lists {sizes[2]}; {make}")
    if unknown := {rank.gpu for rank in best.ranks} - found.hardware.types.keys():
        raise ConfigError(f"{path} is a damaged plan: its hardware has no {unknown.pop()}; {make}")
    return msgspec.structs.replace(found, path=path)
