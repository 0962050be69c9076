"""weft plan --check CLAIM: the verdict on a claim about memory and speed, with its arithmetic."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import msgspec

from weft.architectures.shape import ModelShape
from weft.cli import plan
from weft.cli.parser import UsageError
from weft.formats import lookup
from weft.formats.precision import canonical
from weft.formatting import format_bytes
from weft.hardware.cluster import Cluster, parse_cluster
from weft.planner import cost
from weft.planner.claims import RESERVED_BYTES, Claim, ClaimVerdict, judge_claim, parse_claim
from weft.planner.cost import Prediction
from weft.planner.cuts import cut_of
from weft.planner.deployment import DeploymentLayout, Workload
from weft.planner.objections import unsupported_reasons
from weft.planner.plan_json import codes, sentences
from weft.planner.profiles import load_profile
from weft.planner.question import Question
from weft.planner.search import search

# Flags for what the claim contains.
IN_CLAIM = ("model", "gpus", "nodes", "network", "precision", "quantization")


def main(arguments: Namespace) -> int:
    """Print the verdict; return 3 if the claim is impossible."""
    if hasattr(arguments, "html"):
        raise UsageError("--check prints a verdict and --html writes a plan; give one of them", code="check-with-html")
    _refuse_flags_of_claim(arguments)
    claim = parse_claim(arguments.check)
    model = lookup.look_up(claim.model, hf_token=getattr(arguments, "hf_token", None))
    cluster, precision = parse_cluster(claim.gpus), canonical(claim.precision)
    verdict = judge_claim(model.shape, precision, cluster, claim.tokens, claim.tok_s)
    predicted = predict_claim(model.shape, precision, cluster, claim, arguments.engine, verdict.layout)
    if getattr(arguments, "json", False):
        print(json.dumps(verdict_json(arguments.check, verdict, predicted)))
    else:
        lacking = arguments.engine == "weft" and unsupported_reasons(model.shape, precision)
        engine = "weft (which does not run it yet)" if lacking else arguments.engine
        print(verdict_text(verdict, predicted, claim, engine))
    return 0 if verdict.possible else plan.NOTHING_FITS


def _refuse_flags_of_claim(arguments: Namespace) -> None:
    """Raise UsageError for a flag whose value stands in the claim."""
    twice = [name for name in IN_CLAIM if hasattr(arguments, name)]
    if twice:
        flag = "MODEL" if twice[0] == "model" else f"--{twice[0]}"
        raise UsageError(f"--check has the model and the hardware in its claim; leave {flag} out", code="flag-in-claim")


def predict_claim(
    shape: ModelShape, precision: str, cluster: Cluster, claim: Claim, engine: str, roomy: DeploymentLayout | None
) -> tuple[DeploymentLayout, Prediction] | str | None:
    """The speed of one request in the fastest layout.

    If the engine's own memory leaves no room in any layout, the speed in `roomy`, or None if `roomy` is None too. If
    another reason than memory excludes all layouts, that reason.
    """
    half = max(1, claim.tokens // 2)
    question = Question(
        model=claim.model,
        shape=shape,
        cluster=cluster,
        engine=engine,
        precisions=(precision,),
        workload=Workload(input_len=half, output_len=max(1, claim.tokens - half), max_model_len=claim.tokens),
        objective="latency",
    )
    answer = search(question)
    if answer.best:
        return answer.best.layout, answer.best.predicted
    if answer.rejected and not any(rejection.short_bytes for rejection in answer.rejected):
        return str(answer.rejected[0].reason)
    if roomy is None:
        return None
    return roomy, cost.predict(shape, roomy, cluster, question.workload, load_profile(engine))


def verdict_json(
    claim: str, verdict: ClaimVerdict, predicted: tuple[DeploymentLayout, Prediction] | str | None
) -> dict[str, Any]:
    """The verdict with its arithmetic; sizes are bytes of all GPUs together.

    `objection` is the reason other than memory why the engine cannot run the claim's deployment.
    """
    figures = msgspec.structs.asdict(verdict)
    del figures["layout"]
    speed = None
    if isinstance(predicted, tuple):
        layout, prediction = predicted
        speed = {
            "layout": str(cut_of(layout)),
            "single_tok_s": prediction.single_tok_s,
            "error_band": prediction.error_band,
        }
    objection = predicted if isinstance(predicted, str) else None
    figures["reasons"] = sentences(verdict.reasons)
    figures["reason_codes"] = codes(verdict.reasons)
    return {"claim": claim, **figures, "predicted": speed, "objection": objection}


def verdict_text(
    verdict: ClaimVerdict, predicted: tuple[DeploymentLayout, Prediction] | str | None, claim: Claim, engine: str
) -> str:
    """The verdict as text."""
    if not verdict.possible:
        lines = ["impossible", *(f"  {reason}" for reason in verdict.reasons)]
    else:
        lines = [
            "possible",
            f"  {format_bytes(verdict.weight_bytes)} of weights and {format_bytes(verdict.kv_bytes)} of KV for "
            f"{claim.tokens:,} tokens; {format_bytes(verdict.usable_bytes)} usable after "
            f"{format_bytes(RESERVED_BYTES)} on each GPU for the driver and engine",
            f"  at most {verdict.bound_tok_s:.1f} tok/s: each token reads {format_bytes(verdict.read_bytes)} of memory",
        ]
    if isinstance(predicted, str):
        lines.append(f"  but not with {engine}: {predicted}")
    elif predicted:
        layout, prediction = predicted
        tok_s, band = prediction.single_tok_s, prediction.error_band
        low, high = tok_s * (1 - band), tok_s * (1 + band)
        lines.append(f"  predicted with {engine}: {tok_s:.1f} tok/s ({low:.0f} to {high:.0f}) as {cut_of(layout)!s}")
    return "\n".join(lines)
