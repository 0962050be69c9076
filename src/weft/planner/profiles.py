"""Profiles: what each engine adds to the arithmetic, every constant with where it is from."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from math import log2
from typing import Any

import msgspec

from weft.errors import ConfigError


class Constant(msgspec.Struct, frozen=True, array_like=True):
    """A figure, and its provenance."""

    value: float
    source: str


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Figures for 1, 2, 4 and 8 ranks, and their provenance."""

    values: tuple[float, float, float, float]
    source: str

    def at(self, ranks: int) -> float:
        """In a straight line over log2 of the ranks, beyond 8 as at 8."""
        x = min(log2(ranks), 3.0)
        left = min(int(x), 2)
        return self.values[left] + (x - left) * (self.values[left + 1] - self.values[left])


class _For(msgspec.Struct, frozen=True, kw_only=True):
    """Which engines, precisions and GPUs a rule is for; empty is all."""

    engines: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None

    def fits(self, precision: str, capability: tuple[int, int]) -> bool:
        return (not self.precisions or precision in self.precisions) and self.capability in (None, capability)


class WeightsRule(_For, frozen=True, kw_only=True):
    """How fast a precision's weights stream: a share of what 16-bit ones reach, or of the bandwidth itself."""

    share: Constant
    of_bandwidth: bool = False


class MathRule(_For, frozen=True, kw_only=True):
    """The FLOPS that a precision's matrices are multiplied with, by their name in `GpuSpec.flops`."""

    flops: str


class KvRule(_For, frozen=True, kw_only=True):
    """The dtype of the KV cache beside weights of a precision."""

    dtype: str
    source: str


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of one engine; `facts/data/engines.toml` says what each is."""

    name: str
    step_us: Constant
    sequence_us: Constant
    layer_us: Constant
    expert_layer_us: Constant
    matmul_scale: Constant
    attention_scale: Constant
    experts_weights: Constant
    experts_matmul: Constant
    experts_matmul_fp4: Constant
    experts_matmul_unpacked: Constant
    hot_rank: Constant
    bubble: Constant
    graphs: Constant
    utilization: Constant
    utilization_most: Constant
    utilization_of_free: Constant
    runtime_MiB: Constant
    graphs_MiB: Constant
    max_num_seqs: Constant
    max_num_batched_tokens: Constant
    small_GiB: Constant
    small_num_seqs: Constant
    small_num_batched_tokens: Constant
    max_num_seqs_by_stage: Constant
    window_cache: Constant
    pipelined: Constant
    own_activations: Constant
    activations_dense: Row
    activations_experts: Row
    activations_least_MiB: Constant
    nccl_MiB: Row
    error: Constant
    weights: tuple[WeightsRule, ...] = ()
    math: tuple[MathRule, ...] = ()
    kv: tuple[KvRule, ...] = ()

    def batch(self, memory_bytes: int) -> tuple[int, int]:
        """The most tokens of a step, and the most sequences that run at once, on cards of so much memory; 0 is the
        smallest."""
        tokens, sequences = self.max_num_batched_tokens.value, self.max_num_seqs.value
        if not memory_bytes or memory_bytes < self.small_GiB.value * (1 << 30):
            tokens = min(tokens, self.small_num_batched_tokens.value)
            sequences = min(sequences, self.small_num_seqs.value)
        return int(tokens), int(sequences)

    def kv_dtype(self, precision: str) -> str:
        """What the engine keeps keys and values in, unless it is told."""
        return next((rule.dtype for rule in self.kv if rule.fits(precision, (0, 0))), "bf16")

    def provenance(self) -> dict[str, str]:
        """Every constant as "value: source"."""
        found: dict[str, str] = {}
        for name in self.__struct_fields__:
            it = getattr(self, name)
            if isinstance(it, Constant):
                found[name] = f"{it.value:g}: {it.source}"
            elif isinstance(it, Row):
                found[name] = f"{', '.join(f'{value:g}' for value in it.values)}: {it.source}"
        for rule in self.weights:
            where = [*rule.precisions, *(".".join(map(str, rule.capability or ())).split())]
            found["weights " + " ".join(where or ["any"])] = f"{rule.share.value:g}: {rule.share.source}"
        return found


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads((files("weft.facts") / "data/engines.toml").read_text())


def engines() -> tuple[str, ...]:
    """Names of all profiles."""
    return tuple(_data()["engine"])


@cache
def profile(engine: str) -> Profile:
    """The profile of an engine. Raises ConfigError with the nearest name for one that there is none of."""
    data = _data()
    if engine not in data["engine"]:
        near = get_close_matches(engine, engines(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"unknown engine {engine!r}; {hint}known: {', '.join(engines())}")
    rules = {
        kind: [rule for rule in data[kind] if engine in rule.get("engines", [engine])]
        for kind in ("weights", "math", "kv")
    }
    return msgspec.convert({"name": engine, **data["common"], **data["engine"][engine], **rules}, Profile)
