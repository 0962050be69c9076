"""Published speeds (tests/data/measured_speed.csv), each as the question that the planner is asked about it."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import fmean

import msgspec

from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.names.catalogue import find
from weft.checkpoint.quantised.precision import canonical
from weft.machine.hardware.cluster import Cluster, parse_gpus
from weft.plan.parallelism import Parallelism
from weft.plan.split import split
from weft.planner.deployment import DeploymentLayout, Workload, deploy
from weft.planner.profiles import EngineProfile, load_profile
from weft.planner.speed.cost import Prediction, predict

TABLE = Path(__file__).parents[1] / "data/measured_speed.csv"
LIMITS = {"single": 0.12, "load": 0.15, "peak": 0.15}  # mean absolute error by kind, issue 3


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One row: what was run, and the figure that was published, in tokens per second or (load) milliseconds."""

    kind: str
    model: str
    gpu: str
    engine: str
    label: str
    value: float
    per_gpu: bool
    shape: ModelShape
    cluster: Cluster
    layout: DeploymentLayout
    workload: Workload

    def predicted(self, profiles: Mapping[str, EngineProfile] | None = None) -> float:
        """The planner's figure for it, with other constants where `profiles` gives them."""
        return self.figure(self.prediction((profiles or {}).get(self.engine) or load_profile(self.engine)))

    def prediction(self, constants: EngineProfile) -> Prediction:
        return predict(self.shape, self.layout, self.cluster, self.workload, constants)

    def figure(self, prediction: Prediction) -> float:
        match self.kind:
            case "single":
                return prediction.single_tok_s
            case "load":
                return prediction.tpot_s * 1e3
        return prediction.saturated_tok_s / (len(self.layout.gpus) if self.per_gpu else 1)

    def error(self, profiles: Mapping[str, EngineProfile] | None = None) -> float:
        """Relative, with its sign."""
        return self.predicted(profiles) / self.value - 1


@cache
def cases(table: Path = TABLE) -> tuple[Case, ...]:
    """Every row of the table."""
    with table.open(newline="") as lines:
        return tuple(case(row) for row in csv.DictReader(lines))


def case(row: Mapping[str, str]) -> Case:
    """A row as a question. DEP and attention-dp are data-parallel replicas that share one set of experts."""
    engine, model = row["engine"].split()[0], find(row["model"])
    precision = canonical(row["precision"])
    count, tensor, stages = int(row["n_gpu"]), int(row["tp"]), int(row["pp"])
    shared = row["other_parallel"].startswith(("DEP", "attention-dp"))
    layers = [len(part) for part in split(len(model.shape.layers), [1.0] * stages, minimum=1)]
    concurrency = None if row["concurrency"] == "max" else int(row["concurrency"])
    layout = deploy(
        model.shape,
        Parallelism(
            1 if shared else tensor,
            expert_parallel=count // stages if shared else 1,
            deals_experts=shared,
            pipeline_split=tuple(layers),
            devices=tuple(range(count)),
        ),
        precision=precision,
        kv_dtype=load_profile(engine).kv_dtype(precision),
    )
    split_as = f"TP {tensor}" * (tensor > 1 and not shared) + f"PP {stages}" * (stages > 1) + "DEP" * shared
    return Case(
        kind=row["kind"],
        model=row["model"],
        gpu=row["gpu"],
        engine=engine,
        label=f"{row['model']} {row['precision']}, {count}x {row['gpu']} {split_as}".strip()
        + f", {row['isl']}/{row['osl']} at {row['concurrency']}",
        value=float(row["value"]),
        per_gpu="/gpu" in row["metric"],
        shape=model.shape,
        cluster=parse_gpus(f"{count}x{row['gpu']}"),
        layout=layout,
        workload=Workload(input_len=int(row["isl"]), output_len=int(row["osl"]), concurrency=concurrency),
    )


def layouts_compared(some: Sequence[Case]) -> list[tuple[Case, Case]]:
    """Pairs that differ in nothing but the layout and the number of GPUs: as near as published rows come to layouts of
    one model on one machine."""

    def same(case: Case) -> tuple[object, ...]:
        return case.kind, case.model, case.gpu, case.engine, case.layout.precision, case.workload

    return [(one, other) for one, other in combinations(some, 2) if same(one) == same(other)]


def ranking_error(pair: tuple[Case, Case]) -> float:
    """Relative error of the ratio that is predicted between two rows, whichever of them is the first."""
    one, other = pair
    off = one.predicted() / other.predicted() / (one.value / other.value)
    return max(off, 1 / off) - 1


def mean_errors(some: Iterable[Case], profiles: Mapping[str, EngineProfile] | None = None) -> dict[str, float]:
    """Mean absolute error by kind."""
    by_kind: dict[str, list[float]] = {}
    for case in some:
        by_kind.setdefault(case.kind, []).append(abs(case.error(profiles)))
    return {kind: fmean(errors) for kind, errors in by_kind.items()}
