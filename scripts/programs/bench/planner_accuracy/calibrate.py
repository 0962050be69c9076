"""Fit of the constants of planner/data/engines.toml to measured speeds: least squares in the logarithm, few constants,
each kept near a round figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log

import msgspec
import numpy as np

from tests.pure.measured import Case
from weft.formatting import format_version
from weft.planner.profiles import Constant, EngineProfile, engine_names, load_profile

Name = tuple[str, str]  # engine, empty for all, and constant

# Start of a fit, and its tolerance (natural logarithm). The figures are round and the same for every engine, so that
# they carry no information about a row that is left out of the fit.
LAUNCH = 4  # us of a kernel, a usual CUDA launch
EXPECTED: dict[Name, tuple[float, float]] = {
    ("", "matmul_scale"): (1.0, 0.3),  # the fit in kernels.toml, unscaled
    ("", "expert_layer_us"): (5 * LAUNCH, 1.0),  # router, top-k, sort, activation, gather
    ("", "experts_weights"): (0.5, 0.5),  # estimate: 0.3 to 0.7
    ("", "experts_matmul"): (0.2, 1.0),  # a quarter of a dense product; from a half, the fit for FP4 ends elsewhere
    ("", "experts_matmul_fp4"): (0.2, 1.0),
    ("", "experts_matmul_unpacked"): (0.2, 1.0),
    ("", "hot_rank"): (1.2, 0.3),  # "a skew"
    ("", "weights int8,int4"): (0.8, 0.2),  # kernels unpack them
    ("", "weights nvfp4,mxfp4"): (0.8, 0.2),
    ("trtllm", "attention_scale"): (1.0, 0.2),  # the fit in kernels.toml, unscaled
    ("llama.cpp", "layer_us"): (12 * LAUNCH, 1.0),  # kernels are launched one by one
    ("llama.cpp", "weights 8.0"): (0.8, 0.5),
    ("llama.cpp", "weights 9.0"): (0.8, 0.5),
    ("llama.cpp", "weights any"): (0.8, 0.5),
    ("transformers", "layer_us"): (50 * LAUNCH, 1.0),  # the same, but more launches, from Python
    ("transformers", "weights int8,int4"): (0.5, 0.5),
}
for _engine in ("vllm", "trtllm", "sglang"):
    EXPECTED[_engine, "step_us"] = (1000, 1.0)
    EXPECTED[_engine, "sequence_us"] = (10, 1.0)
    EXPECTED[_engine, "layer_us"] = (5 * LAUNCH, 1.0)  # norms, rotary embedding, activation, cache
RIDGE = 0.12  # weight of a constant's whole tolerance, as an error in the logarithm
FLOOR = 0.06  # errors above this count by their size, below it by their square


def profiles(constants: Mapping[Name, float]) -> dict[str, EngineProfile]:
    """The profile of every engine, with these constants in place of its own."""
    return {engine: _with(load_profile(engine), constants) for engine in engine_names()}


def _with(profile: EngineProfile, constants: Mapping[Name, float]) -> EngineProfile:
    changed: dict[str, object] = {}
    for (engine, name), value in constants.items():
        if engine in ("", profile.name) and name in profile.__struct_fields__:
            changed[name] = Constant(value, getattr(profile, name).source)
    rules = []
    for rule in profile.weights:
        where = ",".join(rule.precisions) or " ".join(map(format_version, rule.capabilities)) or "any"
        key = ("".join(rule.engine_names), f"weights {where}")
        share = constants.get(key, rule.share.value)
        rules.append(msgspec.structs.replace(rule, share=Constant(share, rule.share.source)))
    return msgspec.structs.replace(profile, weights=tuple(rules), **changed)


def expected() -> dict[Name, float]:
    return {name: value for name, (value, _) in EXPECTED.items()}


def fit(cases: Sequence[Case], rounds: int = 10) -> dict[Name, float]:
    """The constants that fit these rows best."""
    names, start = list(EXPECTED), expected()
    width = np.array([EXPECTED[name][1] for name in names])
    moved = np.zeros(len(names))

    def at(steps: np.ndarray) -> dict[Name, float]:
        return {name: start[name] * exp(step) for name, step in zip(names, steps, strict=True)}

    def errors(steps: np.ndarray, some: Sequence[Case]) -> np.ndarray:
        constants = profiles(at(steps))
        return np.array([log(case.predicted(constants) / case.value) for case in some])

    for _ in range(rounds):
        here = errors(moved, cases)
        slopes = np.zeros((len(cases), len(names)))
        for number in range(len(names)):
            nudged = moved.copy()
            nudged[number] += 1e-3
            slopes[:, number] = (errors(nudged, cases) - here) / 1e-3
        weight = 0.1 / np.maximum(np.abs(here), FLOOR)
        normal = (slopes.T * weight) @ slopes + np.diag((RIDGE / width) ** 2)
        pull = (slopes.T * weight) @ here + (RIDGE / width) ** 2 * moved
        moved = moved - np.clip(np.linalg.solve(normal, pull), -0.3, 0.3)
    return at(moved)
