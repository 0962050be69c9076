"""The planner's figure for a change that a diagnosis proposes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import msgspec

from weft.errors import WeftError
from weft.formatting import format_bytes
from weft.monitor.finding import Change, Finding
from weft.monitor.history import History
from weft.plan.places import column_unit, cut_places
from weft.plan.plan import Plan
from weft.plan.split import split
from weft.planner.cost import Prediction, predict
from weft.planner.deployment import Workload
from weft.planner.footprint import footprint
from weft.planner.forecast import Forecast

log = logging.getLogger("weft.monitor")

DEFAULT_TOKENS = 256  # of a prompt and of an answer, while none has ended


def add_prices(findings: list[Finding], history: History, forecast: Callable[[int], Forecast | None]) -> list[Finding]:
    """The findings with the planner's figure behind each remedy; `forecast` gives that of a replica's plan."""
    priced = []
    for finding in findings:
        figure = ""
        if finding.change is not None:
            try:
                figure = price(finding.change, history, forecast(finding.change.replica))
            except (WeftError, ArithmeticError) as error:  # a cut that the planner does not know
                log.debug("no figure for %s: %s", finding.code, error)
        remedy = finding.remedy + (f" (planner: {figure})" if figure else "")
        priced.append(msgspec.structs.replace(finding, remedy=remedy))
    return priced


def price(change: Change, history: History, expected: Forecast | None) -> str:
    """What the planner predicts with a change beside what it predicts without; "" if it predicts neither."""
    if change.freed_bytes:
        return f"{format_bytes(change.freed_bytes)} hold {freed_tokens(change, history.plans[0]):,} more tokens of KV"
    if expected is None or not expected.tells_speed:
        return ""
    work = workload_of(history)
    now, then = predictions(change, expected, work)
    if now is None or then is None:
        return ""
    name = "at once" if change.requests else "in all"
    return f"{then.output_tok_s:,.0f} instead of {now.output_tok_s:,.0f} tokens/s {name}"


def freed_tokens(change: Change, plan: Plan) -> int:
    """Tokens of KV cache that the memory of one GPU would hold."""
    per_block = max(plan.block_bytes(rank) for rank in range(len(plan.places)))
    return change.freed_bytes // per_block * plan.block_size


def workload_of(history: History) -> Workload:
    """The mean request of the history, and the number of those that ran at once."""
    answers = max(1, history.grown("finished"))
    ended = history.grown("finished") > 0
    prompts = history.counted("prompt_tokens") / answers if ended else DEFAULT_TOKENS
    generated = history.counted("generation_tokens") / answers if ended else DEFAULT_TOKENS
    longest = max(2, history.plans[0].max_model_len)
    prompt = min(max(1, round(prompts)), longest - 1)
    running = [snapshot.total.running for snapshot in history.snapshots[1:]]
    return Workload(
        input_len=prompt,
        output_len=min(max(1, round(generated)), longest - prompt),
        concurrency=max(1, round(sum(running) / max(1, len(running)) / len(history.plans))),
    )


def predictions(change: Change, expected: Forecast, work: Workload) -> tuple[Prediction | None, Prediction | None]:
    """The speed as it is, and after the change, on devices as fast as they were measured."""
    if change.requests:
        before, after = change.requests
        return (
            expected.speed(work.input_len, work.output_len, before),
            expected.speed(work.input_len, work.output_len, after),
        )
    slowed = with_speeds(expected, change.speeds)
    changed = with_cut(slowed, change)
    return tuple(  # type: ignore[return-value]
        predict(one.plan.shape, one.layout, one.cluster, work, one.profile, one.memory) for one in (slowed, changed)
    )


def with_speeds(expected: Forecast, speeds: tuple[float, ...]) -> Forecast:
    """The forecast on devices of which each has the measured share of its speed; `speeds` by rank."""
    gpus = expected.cluster.gpus
    if len(speeds) != len(expected.layout.gpus) or len(set(expected.layout.gpus)) < len(speeds):
        return expected  # ranks share a device: which of them is slow is not its own property
    by_device = dict(zip(expected.layout.gpus, speeds, strict=True))
    scaled = [gpu.scaled(by_device.get(number, 1.0), by_device.get(number, 1.0)) for number, gpu in enumerate(gpus)]
    return _on(expected, cluster=expected.cluster.with_gpus(scaled))


def with_cut(expected: Forecast, change: Change) -> Forecast:
    """The forecast of the same model on the same devices, cut as the change says."""
    layout, shape = expected.layout, expected.plan.shape
    weights: tuple[float, ...] = change.tensor_split or layout.tensor_weights
    stages = change.pipeline_split or layout.stage_layers
    if change.as_pipeline:
        weights, count = (1.0,), layout.tensor_parallel * layout.pipeline_parallel
        stages = tuple(map(len, split(len(shape.layers), [1.0] * count)))
    places = cut_places(
        shape,
        weights,
        stages,
        data_parallel=expected.plan.data_parallel,
        expert_parallel=expected.plan.expert_parallel if expected.plan.deals_experts else 1,
        ffn_unit=column_unit(shape, layout.precision),
    )
    cut = msgspec.structs.replace(layout, tensor_weights=tuple(map(float, weights)), stage_layers=stages, places=places)
    return _on(expected, layout=cut)


def _on(expected: Forecast, **changes: object) -> Forecast:
    """The forecast with another layout or cluster, and the memory that follows."""
    changed: Forecast = replace(expected, **changes)  # type: ignore[arg-type]
    memory = footprint(changed.plan.shape, changed.layout, changed.cluster, changed.profile)
    return replace(changed, memory=memory)
