"""weft plan --check CLAIM: whether it can be, and the arithmetic."""

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
from weft.hardware.cluster import Cluster, parse_cluster
from weft.planner import cost
from weft.planner.claims import RESERVED_BYTES, Claim, Verdict, judge, parse
from weft.planner.cost import Prediction
from weft.planner.cuts import cut_of
from weft.planner.deployment import Layout, Workload
from weft.planner.objections import not_run
from weft.planner.profiles import profile
from weft.planner.question import Question
from weft.planner.search import search
from weft.words import gigabytes

# They are the claim's to say.
SAID_BY_CLAIM = ("model", "gpus", "nodes", "network", "precision", "quantization")


def main(arguments: Namespace) -> int:
    """Print the verdict; 3 for what is impossible."""
    if hasattr(arguments, "html"):
        raise UsageError("--check gives a verdict, and --html draws a plan; give one of them")
    twice = [name for name in SAID_BY_CLAIM if hasattr(arguments, name)]
    if twice:
        raise UsageError(f"--check says the model and the hardware itself; leave out {twice[0].replace('_', '-')}")
    claim = parse(arguments.check)
    model = lookup.look_up(claim.model, hf_token=getattr(arguments, "hf_token", None))
    cluster, precision = parse_cluster(claim.gpus), canonical(claim.precision)
    found = judge(model.shape, precision, cluster, claim.tokens, claim.tok_s)
    predicted = predict(model.shape, precision, cluster, claim, arguments.engine, found.layout)
    if getattr(arguments, "json", False):
        print(json.dumps(as_json(arguments.check, found, predicted)))
    else:
        yet = arguments.engine == "weft" and not_run(model.shape, precision)
        print(told(found, predicted, claim, "weft (which does not run it yet)" if yet else arguments.engine))
    return 0 if found.possible else plan.NOTHING_FITS


def predict(
    shape: ModelShape, precision: str, cluster: Cluster, claim: Claim, engine: str, roomy: Layout | None
) -> tuple[Layout, Prediction] | str | None:
    """One request in the fastest layout; in `roomy` where what the engine keeps for itself leaves no room in any. Why
    there is none where it is not for want of memory."""
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
    if answer.rejected and not any(it.short_bytes for it in answer.rejected):
        return answer.rejected[0].reason
    if roomy is None:
        return None
    return roomy, cost.predict(shape, roomy, cluster, question.workload, profile(engine))


def as_json(claim: str, found: Verdict, predicted: tuple[Layout, Prediction] | str | None) -> dict[str, Any]:
    """The verdict with its arithmetic; sizes are bytes of all GPUs together. `objection` is what stands against the
    engine's running it, whatever the memory."""
    figures = msgspec.structs.asdict(found)
    del figures["layout"]
    speed = None
    if isinstance(predicted, tuple):
        layout, it = predicted
        speed = {"layout": str(cut_of(layout)), "single_tok_s": it.single_tok_s, "error_band": it.error_band}
    objection = predicted if isinstance(predicted, str) else None
    return {"claim": claim, **figures, "predicted": speed, "objection": objection}


def told(found: Verdict, predicted: tuple[Layout, Prediction] | str | None, claim: Claim, engine: str) -> str:
    """The verdict for a person."""
    if not found.possible:
        lines = ["impossible", *(f"  {reason}" for reason in found.reasons)]
    else:
        lines = [
            "possible",
            f"  {gigabytes(found.weight_bytes)} of weights and {gigabytes(found.kv_bytes)} of KV for "
            f"{claim.tokens:,} tokens; {gigabytes(found.have_bytes)} usable after {gigabytes(RESERVED_BYTES)} on each "
            f"GPU for the driver and engine",
            f"  at most {found.bound_tok_s:.1f} tok/s: each token reads {gigabytes(found.read_bytes)} of memory",
        ]
    if isinstance(predicted, str):
        lines.append(f"  but not with {engine}: {predicted}")
    elif predicted:
        layout, it = predicted
        low, high = it.single_tok_s * (1 - it.error_band), it.single_tok_s * (1 + it.error_band)
        lines.append(
            f"  predicted with {engine}: {it.single_tok_s:.1f} tok/s ({low:.0f} to {high:.0f}) as {cut_of(layout)!s}"
        )
    return "\n".join(lines)
