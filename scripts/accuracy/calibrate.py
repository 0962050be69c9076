"""The constants of facts/data/engines.toml from measured speeds: least squares in the logarithm, few constants, each
held near what it was expected to be before any row was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log

import msgspec
import numpy as np

from measured import Case
from weft.planner.profiles import Constant, Profile, engines, profile

Name = tuple[str, str]  # engine, empty for all, and constant

# What each constant was thought to be without these rows, and how far off that may be (natural logarithm).
EXPECTED = {
    ("", "matmul_scale"): (0.8, 0.15),
    ("", "expert_layer_us"): (15, 0.5),
    ("", "experts_weights"): (0.8, 0.25),
    ("", "experts_matmul"): (0.2, 0.5),
    ("", "experts_matmul_fp4"): (0.1, 0.5),
    ("", "experts_matmul_mxfp4"): (0.12, 0.5),
    ("", "hot_rank"): (1.2, 0.2),
    ("", "bubble"): (0.11, 0.5),
    ("vllm", "step_us"): (1000, 0.5),
    ("vllm", "sequence_us"): (20, 0.5),
    ("vllm", "layer_us"): (15, 0.5),
    ("trtllm", "step_us"): (1000, 0.5),
    ("trtllm", "sequence_us"): (5, 0.5),
    ("trtllm", "layer_us"): (10, 0.5),
    ("trtllm", "attention_scale"): (1.0, 0.15),
    ("sglang", "step_us"): (500, 0.5),
    ("sglang", "sequence_us"): (10, 0.5),
    ("sglang", "layer_us"): (15, 0.5),
    ("llama.cpp", "layer_us"): (70, 0.5),
    ("transformers", "layer_us"): (250, 0.3),
    ("llama.cpp", "weights 8.0"): (0.6, 0.3),
    ("llama.cpp", "weights 9.0"): (0.6, 0.3),
    ("llama.cpp", "weights any"): (0.9, 0.15),
    ("transformers", "weights int8,int4"): (0.35, 0.5),
    ("", "weights int8,int4"): (1.0, 0.2),
    ("", "weights nvfp4,mxfp4"): (0.6, 0.3),
}
RIDGE = 0.12  # of an error in the logarithm, what a constant's whole deviation weighs
FLOOR = 0.06  # errors above this count by their size, below it by their square


def profiles(constants: Mapping[Name, float]) -> dict[str, Profile]:
    """Every engine's profile with these in the place of its own."""
    return {engine: _with(profile(engine), constants) for engine in engines()}


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
