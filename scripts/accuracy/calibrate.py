"""The constants of planner/data/engines.toml from measured speeds: least squares in the logarithm, few constants, each
held near a round figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log

import msgspec
import numpy as np

from tests.pure.measured import Case
from weft.planner.profiles import Constant, Profile, engine_names, load_profile

Name = tuple[str, str]  # engine, empty for all, and constant

# Where a fit starts, and how far off that may be (natural logarithm): round figures that say no more than the source
# in the comment does, the same for every engine, so that a row that is left out has no voice by way of them.
LAUNCH = 4  # us of a kernel, a usual CUDA launch
EXPECTED: dict[Name, tuple[float, float]] = {
    ("", "matmul_scale"): (1.0, 0.3),  # the fit in kernels.toml as it is
    ("", "expert_layer_us"): (5 * LAUNCH, 1.0),  # router, top-k, sort, activation, gather
    ("", "experts_weights"): (0.5, 0.5),  # estimate: 0.3 to 0.7
    ("", "experts_matmul"): (0.2, 1.0),  # a quarter of a dense product; from a half, FP4's ends elsewhere
    ("", "experts_matmul_fp4"): (0.2, 1.0),
    ("", "experts_matmul_unpacked"): (0.2, 1.0),
    ("", "hot_rank"): (1.2, 0.3),  # "a skew"
    ("", "weights int8,int4"): (0.8, 0.2),  # unpacking them has its price
    ("", "weights nvfp4,mxfp4"): (0.8, 0.2),
    ("trtllm", "attention_scale"): (1.0, 0.2),  # the fit in kernels.toml as it is
    ("llama.cpp", "layer_us"): (12 * LAUNCH, 1.0),  # launched one by one
    ("llama.cpp", "weights 8.0"): (0.8, 0.5),
    ("llama.cpp", "weights 9.0"): (0.8, 0.5),
    ("llama.cpp", "weights any"): (0.8, 0.5),
    ("transformers", "layer_us"): (50 * LAUNCH, 1.0),  # the same, more of them, from Python
    ("transformers", "weights int8,int4"): (0.5, 0.5),
}
for _engine in ("vllm", "trtllm", "sglang"):
    EXPECTED[_engine, "step_us"] = (1000, 1.0)
    EXPECTED[_engine, "sequence_us"] = (10, 1.0)
    EXPECTED[_engine, "layer_us"] = (5 * LAUNCH, 1.0)  # norms, rotary embedding, activation, cache
RIDGE = 0.12  # of an error in the logarithm, what a constant's whole deviation weighs
FLOOR = 0.06  # errors above this count by their size, below it by their square


def profiles(constants: Mapping[Name, float]) -> dict[str, Profile]:
    """Every engine's profile with these in the place of its own."""
    return {engine: _with(load_profile(engine), constants) for engine in engine_names()}


def _with(it: Profile, constants: Mapping[Name, float]) -> Profile:
    changed: dict[str, object] = {}
    for (engine, name), value in constants.items():
        if engine in ("", it.name) and name in it.__struct_fields__:
            changed[name] = Constant(value, getattr(it, name).source)
    rules = []
    for rule in it.weights:
        where = ",".join(rule.precisions) or ".".join(map(str, rule.capability or ("any",)))
        name = ("".join(rule.engines), f"weights {where}")
        share = constants.get(name, rule.share.value)
        rules.append(msgspec.structs.replace(rule, share=Constant(share, rule.share.source)))
    return msgspec.structs.replace(it, weights=tuple(rules), **changed)


def expected() -> dict[Name, float]:
    return {name: value for name, (value, _) in EXPECTED.items()}


def fit(cases: Sequence[Case], rounds: int = 10) -> dict[Name, float]:
    """The constants that these rows ask for."""
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
