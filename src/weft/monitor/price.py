"""The planner's figure for a change that a diagnosis proposes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec

from weft.errors import WeftError
from weft.monitor.finding import Change, Finding
from weft.monitor.history import History
from weft.plan.plan import Plan
from weft.plan.split import split
from weft.planner.deployment import Workload, deploy
from weft.planner.execution.forecast import Forecast
from weft.planner.memory.footprint import footprint
from weft.planner.speed.cost import Prediction, predict

log = logging.getLogger("weft.monitor")

DEFAULT_TOKENS = 256  # of a prompt and of an answer, while none has ended


def add_prices(findings: list[Finding], history: History, forecast: Callable[[int], Forecast | None]) -> list[Finding]:
    """The findings with the planner's figure behind each remedy; `forecast` gives the figure for a replica's plan."""
    priced = []
    for finding in findings:
        figure: Figure | None = None
        if finding.change is not None:
            try:
                figure = price(finding.change, history, forecast(finding.change.replica))
            except (WeftError, ArithmeticError) as error:  # a cut that the planner does not know
                log.debug("no figure for %s: %s", finding.code, error)
        priced.append(msgspec.structs.replace(finding, remedy=with_figure(finding, figure)))
    return priced


def with_figure(finding: Finding, figure: Figure | None) -> str:
    """The remedy with the planner's figure. One that the planner expects to make things worse gives way to its
    alternative, and so does a pipeline without a figure: it is rarely faster, even over PCIe."""
    if figure is None and finding.change is not None and finding.change.as_pipeline:
        return f"{finding.alternative}; {finding.remedy} only if weft plan has that faster"
    if figure is None:
        return finding.remedy
    remedy = f"{finding.remedy} ({figure.text}, by the planner)"
    if finding.alternative and not figure.better:
        return f"{finding.alternative}; do not {remedy}"
    return remedy


class Figure(NamedTuple):
    """The gain that the planner expects of a change: how much of a quantity there is more, as a share of that now."""

    gain: float
    quantity: str

    @property
    def text(self) -> str:
        """The gain as "+18% tokens/s"."""
        return f"{round(100 * self.gain):+d}% {self.quantity}"

    @property
    def better(self) -> bool:
        """True if the planner expects anything of the change that its figure shows."""
        return round(100 * self.gain) > 0


def price(change: Change, history: History, expected: Forecast | None) -> Figure | None:
    """The planner's prediction with a change and without it; None if it has none."""
    if change.freed_bytes:
        # At most: the cache is as large as the device with the least free memory allows.
        now_tokens = cache_tokens(history)
        return Figure(freed_tokens(change, history.plans[0]) / now_tokens, "KV cache at most") if now_tokens else None
    if expected is None or not expected.tells_speed:
        return None
    work = workload_of(history)
    now, then = predictions(change, expected, work)
    return Figure(then.output_tok_s / now.output_tok_s - 1, "tokens/s")


def cache_tokens(history: History) -> int:
    """Tokens that the KV cache of all replicas has room for, in whole blocks."""
    stats = history.last.stats
    return sum(one.blocks_total * plan.block_size for one, plan in zip(stats, history.plans, strict=False))


def freed_tokens(change: Change, plan: Plan) -> int:
    """Tokens of KV cache that the memory of one GPU would hold."""
    per_block = max(plan.block_bytes(rank) for rank in range(len(plan.places)))
    return change.freed_bytes // per_block * plan.block_size


def workload_of(history: History) -> Workload:
    """The mean request of the history, and the number of requests that ran at once."""
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


def predictions(change: Change, expected: Forecast, work: Workload) -> tuple[Prediction, Prediction]:
    """The speed as it is, and after the change, on devices as fast as they were measured."""
    if change.requests:
        before, after = change.requests
        return (
            expected.speed(work.input_len, work.output_len, before),
            expected.speed(work.input_len, work.output_len, after),
        )
    slowed = with_speeds(expected, change.speeds)
    changed = with_cut(slowed, change)
    now, then = (
        predict(one.plan.shape, one.layout, one.cluster, work, one.profile, one.memory) for one in (slowed, changed)
    )
    return now, then


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
    cut = layout.parallelism.changed(change.parallelism)
    if change.as_pipeline:
        even = tuple(map(len, split(len(shape.layers), [1.0] * cut.pipeline_parallel)))
        cut = msgspec.structs.replace(cut, pipeline_split=even)
    return _on(expected, layout=deploy(shape, cut, precision=layout.precision, kv_dtype=layout.kv_dtype))


def _on(expected: Forecast, **changes: object) -> Forecast:
    """The forecast with another layout or cluster, and the memory that follows."""
    changed: Forecast = replace(expected, **changes)  # type: ignore[arg-type]
    memory = footprint(changed.plan.shape, changed.layout, changed.cluster, changed.profile)
    return replace(changed, memory=memory)
