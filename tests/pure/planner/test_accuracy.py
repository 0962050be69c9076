"""The planner's speeds beside published ones, and the facts that its ranking has to reproduce."""

from __future__ import annotations

import pytest

from tests.pure.measured import LIMITS, Case, cases, layouts_compared, mean_errors, ranking_error
from weft.checkpoint.names.catalogue import find
from weft.machine.hardware.cluster import parse_gpus
from weft.plan.parallelism import Parallelism
from weft.planner.deployment import Workload, deploy
from weft.planner.memory.footprint import footprint
from weft.planner.profiles import load_profile
from weft.planner.report.plan_json import bands
from weft.planner.search.ranking import RANKING_ERROR
from weft.planner.speed.cost import Prediction, predict


def test_mean_errors_are_within_their_limits() -> None:
    found = mean_errors(cases())
    assert found.keys() == LIMITS.keys()
    assert all(found[kind] <= LIMITS[kind] for kind in LIMITS), found


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "sglang", "llama.cpp", "transformers"])
def test_no_engine_hides_behind_another(engine: str) -> None:
    rows = [case for case in cases() if case.engine == engine]
    assert rows
    assert max(mean_errors(rows).values()) <= 0.15


def test_most_rows_are_within_the_band_that_is_told() -> None:
    inside = [abs(case.error()) <= load_profile(case.engine).error.value for case in cases()]
    assert sum(inside) / len(inside) >= 0.85


def test_most_layouts_rank_within_the_error_that_makes_a_tie() -> None:
    errors = [ranking_error(pair) for pair in layouts_compared(cases())]
    assert len(errors) >= 20
    assert sum(error <= RANKING_ERROR for error in errors) / len(errors) >= 0.8


def test_bands_hold_what_was_measured_in_eight_rows_of_ten() -> None:
    inside = []
    for case in cases():
        predicted = case.prediction(load_profile(case.engine))
        name = {"single": "single_tok_s", "load": "tpot_s_at_concurrency", "peak": "saturated_tok_s"}[case.kind]
        low, high = bands(predicted)[name]
        unit = case.figure(predicted) / ((low + high) / 2)
        inside.append(low <= case.value / unit <= high)
    assert sum(inside) / len(inside) >= 0.8


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.label)
def test_measured_plans_fit(case: Case) -> None:
    memory = footprint(case.shape, case.layout, case.cluster, load_profile(case.engine), case.workload)
    assert memory.fits


def llama_70b(gpus: str, tensor: int, stages: int, prompt: int = 1000, answer: int = 1000) -> Prediction:
    """Llama-3.1-70B in FP8 with TensorRT-LLM, saturated."""
    shape, cluster = find("Llama-3.1-70B").shape, parse_gpus(gpus)
    layout = deploy(
        shape,
        Parallelism(
            tensor,
            pipeline_split=(len(shape.layers) // stages,) * stages,
            devices=tuple(range(len(cluster.gpus))),
        ),
        precision="fp8",
        kv_dtype="fp8",
    )
    return predict(shape, layout, cluster, Workload(input_len=prompt, output_len=answer), load_profile("trtllm"))


def test_eight_l40s_gain_little_over_four() -> None:
    four, eight = (llama_70b(f"{count}xL40S", count, 1).saturated_tok_s for count in (4, 8))
    assert four == pytest.approx(1209, rel=0.15)
    assert eight == pytest.approx(1334, rel=0.15)
    assert 1 < eight / four < 1.25  # 1.10 measured


def test_nvlink_scales_on_h200() -> None:
    found = [llama_70b(f"{count}xH200", count, 1).saturated_tok_s for count in (1, 2, 4)]
    assert found == [pytest.approx(value, rel=0.15) for value in (2823, 5165, 8911)]


@pytest.mark.parametrize("gpu", ["L40S", "RTX PRO 6000"])
def test_a_pipeline_over_eight_pcie_cards_gains_and_more_for_long_prompts(gpu: str) -> None:
    def gain(prompt: int, answer: int) -> float:
        pipeline = llama_70b(f"8x{gpu}", 1, 8, prompt, answer)
        return pipeline.saturated_tok_s / llama_70b(f"8x{gpu}", 8, 1, prompt, answer).saturated_tok_s

    assert gain(1000, 1000) > 1.8
    assert gain(5000, 500) > 1.15 * gain(1000, 1000)


def test_a_pipeline_is_no_help_to_one_request() -> None:
    one = llama_70b("1xH200", 1, 1).single_tok_s
    assert llama_70b("4xH200", 1, 4).single_tok_s <= one
    assert llama_70b("4xH200", 4, 1).single_tok_s > 2 * one
