"""weft plan --check CLAIM: the verdict on a claim about memory, speed or links, with its arithmetic."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weft.checkpoint import lookup
from weft.checkpoint.architectures.model import Model
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.names import catalogue
from weft.checkpoint.quantised.precision import canonical, meant_precisions
from weft.cli.flags.plan_flags import PlanArguments
from weft.cli.parser import UsageError
from weft.cli.plan_question import NOTHING_FITS, compared_precisions
from weft.errors import ConfigError, ModelError
from weft.formatting import format_bytes
from weft.machine.hardware.cluster import Cluster, parse_cluster
from weft.machine.hardware.gpus import GpuSpec, find_gpu, generic_gpu, nearest_gpu
from weft.planner.claims.claims import RESERVED_BYTES, ClaimVerdict, claimed_tokens, judge_claim
from weft.planner.claims.links import has_nvlink, judge_gain, judge_link
from weft.planner.claims.memory import fewest_gpus, judge_memory
from weft.planner.claims.text import GAIN_GPUS, Claim, GainClaim, LinkClaim, parse_claim
from weft.planner.deployment import DeploymentLayout, Workload
from weft.planner.note import Note, create_note
from weft.planner.profiles import load_profile
from weft.planner.question import Question
from weft.planner.report.plan_json import codes, sentences
from weft.planner.search.cuts import Cut
from weft.planner.search.objections import unsupported_reasons
from weft.planner.search.search import search
from weft.planner.speed import cost
from weft.planner.speed.cost import Prediction

# Flags for what the claim contains.
IN_CLAIM = ("model", "gpus", "nodes", "network", "precision", "quantization")
# The model and the cards of a gain by NVLink, if the claim names none: the guides speak of 70B models.
SERVED = Claim(model="Llama-3.3-70B-Instruct", precision="bf16", gpus=GAIN_GPUS)
Predicted = tuple[DeploymentLayout, Prediction] | str | None
_PARAMETERS = re.compile(r"\d+(?:\.\d+)?b\b", re.IGNORECASE)


@dataclass
class Judged:
    """A verdict: `aside` follows the word possible, `lines` are the arithmetic, `reasons` those against the claim."""

    possible: bool = True
    aside: str = ""
    lines: list[str] = field(default_factory=list)
    reasons: list[Note] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)

    def refuse(self, reasons: Sequence[Note]) -> None:
        """Make the verdict impossible, for these reasons."""
        self.possible = False
        self.reasons += reasons


def main(arguments: PlanArguments, text: str) -> int:
    """Print the verdict on the claim of --check; return 3 if it is impossible."""
    if arguments.answer.html is not None:
        raise UsageError("--check prints a verdict and --html writes a plan; give one of them", code="check-with-html")
    _refuse_flags_of_claim(arguments.given)
    claim = parse_claim(text)
    subject = ClaimSubject(arguments.subject.source.hf_token)
    judged = judge(claim, subject, arguments.subject.aim.engine)
    if arguments.answer.json:
        print(json.dumps(verdict_json(text, judged, subject.remarks)))
    else:
        print("\n".join(verdict_lines(judged, subject.remarks)))
    return 0 if judged.possible else NOTHING_FITS


def _refuse_flags_of_claim(given: frozenset[str]) -> None:
    """Raise UsageError for a flag whose value stands in the claim."""
    twice = [name for name in IN_CLAIM if name in given]
    if twice:
        flag = "MODEL" if twice[0] == "model" else f"--{twice[0]}"
        raise UsageError(f"--check has the model and the hardware in its claim; leave {flag} out", code="flag-in-claim")


def judge(claim: Claim | LinkClaim | GainClaim, subject: ClaimSubject, engine: str) -> Judged:
    """The verdict on a claim of any kind."""
    if isinstance(claim, LinkClaim):
        verdict = judge_link(subject.find_gpu(claim.gpu), claim.links, claim.link_Bps)
        judged = Judged(fields=_fields(verdict))
        if verdict.possible:
            judged.lines.append(str(verdict.note))
        else:
            judged.refuse([verdict.note])
        return judged
    if isinstance(claim, GainClaim):
        return _judge_gain(claim, subject, engine)
    return _judge_run(claim, subject, claim.engine or engine)


def _fields(verdict: msgspec.Struct) -> dict[str, Any]:
    """Figures of a verdict for its JSON."""
    kept = msgspec.structs.asdict(verdict)
    return {name: value for name, value in kept.items() if name not in ("possible", "layout", "note", "reasons")}


def _judge_gain(claim: GainClaim, subject: ClaimSubject, engine: str) -> Judged:
    run = claim.run or SERVED
    model, cluster = subject.find_model(run.model), subject.find_cluster(run.gpus)
    if not has_nvlink(cluster):
        judged = Judged()
        judged.refuse([judge_link(cluster.gpus[0], "nvlink", None).note])
        return judged
    precision = meant_precisions(run.precision or model.precision)[0]
    question = _question(run, model, precision, cluster, engine, claimed_tokens(model.shape, run.tokens))
    verdict = judge_gain(question, claim.low, claim.high)
    if verdict is None:
        raise UsageError(
            f"{model.name} does not fit {run.gpus}; name other hardware in the claim", code="claim-does-not-fit"
        )
    judged = Judged(possible=verdict.possible, lines=[str(verdict.note)], fields=_fields(verdict))
    if not verdict.possible:
        judged.reasons.append(verdict.note)
        judged.lines.clear()
    return judged


def _judge_run(claim: Claim, subject: ClaimSubject, engine: str) -> Judged:
    model = subject.find_model(claim.model)
    tokens = claimed_tokens(model.shape, claim.tokens)
    if tokens > model.shape.longest:
        judged = Judged()
        judged.refuse([create_note("claim_too_long", tokens=tokens, model=model.name, longest=model.shape.longest)])
        return judged
    cluster = subject.find_cluster(claim.gpus) if claim.gpus else None
    if claim.precision or cluster is None:
        precisions = meant_precisions(claim.precision or model.precision)
    else:
        precisions = compared_precisions(None, model, cluster)
    judged = Judged()
    if cluster is not None:
        _judge_hardware(claim, model, precisions, cluster, engine, judged)
    if claim.memory_bytes is not None:
        count = claim.count or (len(cluster.gpus) if cluster else 1)
        verdicts = [
            judge_memory(model.shape, precision, tokens, claim.memory_bytes, count, each=claim.each)
            for precision in precisions
        ]
        verdict = next((one for one in verdicts if one.possible), min(verdicts, key=lambda one: one.weight_bytes))
        judged.fields["memory"] = _fields(verdict) | {"code": verdict.note.code}
        if verdict.possible:
            judged.lines.append(str(verdict.note))
        else:
            judged.refuse([verdict.note])
    return judged


def _judge_hardware(
    claim: Claim, model: Model, precisions: Sequence[str], cluster: Cluster, engine: str, judged: Judged
) -> None:
    """Add the verdict on the hardware of a claim, in the precision with which most of it is possible."""
    shape, tokens = model.shape, claimed_tokens(model.shape, claim.tokens)
    verdicts = {
        precision: judge_claim(shape, precision, cluster, tokens, claim.tok_s, tensor=claim.tensor)
        for precision in precisions
    }
    wanted = claim.most_tok_s or claim.tok_s or 0.0
    precision = max(precisions, key=lambda name: (verdicts[name].possible, _reaches(verdicts[name], wanted)))
    verdict = verdicts[precision]
    if len(precisions) > 1:
        judged.lines.append(f"{claim.precision} is read as {precision}")
    judged.fields |= _fields(verdict)
    known = verdict.bound_tok_s is not None
    question = _question(claim, model, precision, cluster, engine, tokens)
    predicted = predict_claim(question, verdict.layout) if known else None
    judged.fields |= predicted_json(predicted)
    if not verdict.possible:
        judged.refuse(verdict.reasons)
    else:
        judged.lines += verdict_arithmetic(verdict, tokens)
        _judge_high_end(claim, verdict, judged)
    if claim.fewest and verdict.possible:
        _judge_fewest(shape, precision, cluster, tokens, judged)
    lacking = engine == "weft" and unsupported_reasons(shape, precision)
    judged.lines += predicted_lines(predicted, "weft (which does not run it yet)" if lacking else engine)
    _compare(claim, predicted, judged)


def _reaches(verdict: ClaimVerdict, tok_s: float) -> bool:
    return verdict.bound_tok_s is None or tok_s <= verdict.bound_tok_s


def _judge_high_end(claim: Claim, verdict: ClaimVerdict, judged: Judged) -> None:
    """Say if the high end of a range is more than the bandwidth allows, or if nothing can be said about speed."""
    if claim.tok_s and verdict.bound_tok_s is None:
        judged.aside = " by its memory; the speed depends on the card, so name one"
    elif claim.most_tok_s and not _reaches(verdict, claim.most_tok_s):
        judged.aside = f" up to {verdict.bound_tok_s:.1f} tok/s, not {claim.most_tok_s:g}"


def _judge_fewest(shape: ModelShape, precision: str, cluster: Cluster, tokens: int, judged: Judged) -> None:
    """Say if fewer of the GPUs suffice than the model is said to need."""
    fewest = fewest_gpus(shape, precision, cluster, tokens)
    judged.fields["fewest_gpus"] = fewest
    if fewest is not None and fewest < len(cluster.gpus):
        judged.aside = f", but {fewest} of the {len(cluster.gpus)} GPUs suffice"


def _compare(claim: Claim, predicted: Predicted, judged: Judged) -> None:
    """Say if the speed of a possible claim is above the predicted range."""
    if claim.tok_s is None or not isinstance(predicted, tuple):
        return
    _, prediction = predicted
    high = prediction.single_tok_s * (1 + prediction.error_band)
    judged.fields["as_predicted"] = claim.tok_s <= high
    if judged.possible and not judged.aside and claim.tok_s > high:
        judged.aside = f", but {claim.tok_s / prediction.single_tok_s:.1f} times the predicted speed"


def _question(claim: Claim, model: Model, precision: str, cluster: Cluster, engine: str, tokens: int) -> Question:
    """The question for the speed of one request of the claim's length."""
    half = max(1, tokens // 2)
    return Question(
        model=model.name,
        shape=model.shape,
        cluster=cluster,
        engine=engine,
        precisions=(precision,),
        workload=Workload(input_len=half, output_len=max(1, tokens - half), max_model_len=tokens),
        objective="latency",
    )


def predict_claim(question: Question, roomy: DeploymentLayout | None) -> Predicted:
    """The speed of one request in the fastest layout.

    If the engine's own memory leaves no room in any layout, the speed in `roomy`, or None if `roomy` is None too. If
    another reason than memory excludes all layouts, that reason.
    """
    answer = search(question)
    if answer.best:
        return answer.best.layout, answer.best.predicted
    if answer.rejected and not any(rejection.short_bytes for rejection in answer.rejected):
        return str(answer.rejected[0].reason)
    if roomy is None:
        return None
    profile = load_profile(question.engine)
    return roomy, cost.predict(question.shape, roomy, question.cluster, question.workload, profile)


def predicted_json(predicted: Predicted) -> dict[str, Any]:
    """The predicted speed; `objection` is the reason other than memory why the engine cannot run the deployment."""
    if not isinstance(predicted, tuple):
        return {"predicted": None, "objection": predicted}
    layout, prediction = predicted
    speed = {
        "layout": str(Cut(layout.parallelism, layout.precision)),
        "single_tok_s": prediction.single_tok_s,
        "error_band": prediction.error_band,
    }
    return {"predicted": speed, "objection": None}


def predicted_lines(predicted: Predicted, engine: str) -> list[str]:
    """The line on the predicted speed, or the reason why there is none."""
    if isinstance(predicted, str):
        return [f"but not with {engine}: {predicted}"]
    if predicted is None:
        return []
    layout, prediction = predicted
    tok_s, band = prediction.single_tok_s, prediction.error_band
    low, high = tok_s * (1 - band), tok_s * (1 + band)
    cut = Cut(layout.parallelism, layout.precision)
    return [f"predicted with {engine}: {tok_s:.1f} tok/s ({low:.0f} to {high:.0f}) as {cut}"]


def verdict_json(claim: str, judged: Judged, remarks: Sequence[str]) -> dict[str, Any]:
    """The verdict with its arithmetic; sizes are bytes of all GPUs together."""
    return {
        "claim": claim,
        "possible": judged.possible,
        **judged.fields,
        "reasons": sentences(judged.reasons),
        "reason_codes": codes(judged.reasons),
        "remarks": [*remarks, *([judged.aside.strip(" ,")] if judged.aside else [])],
    }


def verdict_arithmetic(verdict: ClaimVerdict, tokens: int) -> list[str]:
    """Lines with the memory of a possible claim, and the bound on its speed."""
    lines = [
        f"{format_bytes(verdict.weight_bytes)} of weights and {format_bytes(verdict.kv_bytes)} of KV for "
        f"{tokens:,} tokens; {format_bytes(verdict.usable_bytes)} usable after "
        f"{format_bytes(RESERVED_BYTES)} on each GPU for the driver and engine"
    ]
    if verdict.bound_tok_s is not None:
        read = format_bytes(verdict.read_bytes)
        lines.append(f"at most {verdict.bound_tok_s:.1f} tok/s: each token reads {read} of memory")
    return lines


def verdict_lines(judged: Judged, remarks: Sequence[str]) -> list[str]:
    """The verdict as text."""
    head = f"possible{judged.aside}" if judged.possible else "impossible"
    return [head, *(f"  {line}" for line in (*remarks, *map(str, judged.reasons), *judged.lines))]


class ClaimSubject:
    """Finds models and cards by the names of a claim; `remarks` lists what was taken for something else."""

    def __init__(self, hf_token: str | None) -> None:
        self._token = hf_token
        self.remarks: list[str] = []

    def find_model(self, name: str) -> Model:
        """The model of a name, or one of the same size and nearly the same name. Raises ModelError, and ConfigError for
        a name that ends in an unknown precision."""
        try:
            return lookup.look_up(name, hf_token=self._token)
        except ModelError as error:
            if error.code != "unknown-model":
                raise
            model, _, last = name.rpartition(" ")
            if model and catalogue.find_known(model) is not None:
                canonical(last)  # raises
            near = self._nearest_model(name)
            if near is None:
                raise
            self.remarks.append(f"there is no {name}: judged as {near.name}")
            return near

    def _nearest_model(self, name: str) -> Model | None:
        size = {match.lower() for match in _PARAMETERS.findall(name)}
        alike = (
            near for near in catalogue.nearest(name) if size and size == {*map(str.lower, _PARAMETERS.findall(near))}
        )
        nearest = next(alike, None)
        return catalogue.find(nearest) if nearest else None

    def find_cluster(self, gpus: str) -> Cluster:
        """The cluster of a description in which a card may be a size of memory. Raises ConfigError."""
        return parse_cluster(gpus, find=self.find_gpu)

    def find_gpu(self, name: str) -> GpuSpec:
        """The card of a name, of a memory, or the nearest one with the memory that a name has. Raises ConfigError."""
        try:
            return generic_gpu(name) or find_gpu(name)
        except ConfigError as error:
            near = nearest_gpu(name)
            if near is None or error.code not in ("unknown-gpu", "gpu-of-other-size"):
                raise
            remark = f"there is no {name}: judged as {near.name}"
            if remark not in self.remarks:
                self.remarks.append(remark)
            return near
