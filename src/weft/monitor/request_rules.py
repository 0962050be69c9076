"""Diagnosis rules of requests: of the KV cache, of prefixes and of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from statistics import median

from weft.formatting import format_bytes
from weft.monitor.finding import Change, Code, Finding, RuleLimits
from weft.monitor.history import History


def has_served(history: History, limits: RuleLimits) -> bool:
    """Return True for a history that is long enough, with enough moments and steps, to tell how requests are served."""
    enough = history.seconds >= limits.seconds and len(history.snapshots) > 2
    return enough and history.counted("steps") >= limits.steps


def always_waiting(history: History) -> bool:
    """Return True if requests waited at every moment but the first, from which it is known what came since."""
    return all(snapshot.total.waiting > 0 for snapshot in history.snapshots[1:])


def kv_starved(history: History, limits: RuleLimits) -> Iterator[Finding]:
    """Requests that wait because the KV cache has no room for them.

    It need not be in use as a whole: room is kept for the growth of the requests that run.
    """
    total = history.last.total
    if not has_served(history, limits) or not always_waiting(history):
        return
    starved = history.counted("starved_steps") / history.counted("steps")
    if starved <= limits.starved:
        return
    wanted = min(sum(plan.max_running for plan in history.plans), total.running + total.waiting)
    cache_bytes = needed_cache_bytes(history, wanted)
    yield Finding(
        code=Code.KV_STARVED,
        text=f"{total.waiting} requests are queued because the KV cache is full, while {total.running} run: in "
        f"{starved:.0%} of the steps it had no room for the next (alarm above {limits.starved:.0%})",
        value=starved,
        limit=limits.starved,
        remedy=f"restart with --kv-cache-memory-bytes {cache_bytes} ({format_bytes(cache_bytes)} per rank), which has "
        f"room for {wanted} requests at once",
        change=Change(requests=(max(1, total.running), wanted)),
    )


def needed_cache_bytes(history: History, requests: int) -> int:
    """Bytes per rank of a KV cache for `requests` requests at once of the size that those have which run now."""
    plan, total = history.plans[0], history.last.total
    blocks = ceil(total.blocks_used / max(1, total.running)) * requests / len(history.plans)
    return ceil(blocks) * max(plan.block_bytes(rank) for rank in range(len(plan.places)))


def preemption_storm(history: History, limits: RuleLimits) -> Iterator[Finding]:
    """Requests that lose their KV again and again, and compute it again."""
    preemptions, total = history.counted("preemptions"), history.last.total
    ratio = preemptions / max(1, history.grown("finished") + total.running)
    if preemptions < limits.fewest_preemptions or ratio <= limits.preemptions or not has_served(history, limits):
        return
    running = [snapshot.total.running for snapshot in history.snapshots[1:]]
    fewer = max(1, int(0.75 * median(running) / len(history.plans)))
    wanted = max(1, total.running + total.waiting)
    yield Finding(
        code=Code.PREEMPTION_STORM,
        text=f"{preemptions:.0f} requests were preempted in {history.seconds:.0f} s, {ratio:.1f} for each that ended "
        f"or runs (alarm above {limits.preemptions:.1f}): the KV cache has no room for them all",
        value=ratio,
        limit=limits.preemptions,
        remedy=f"restart with --max-num-seqs {fewer}, or with --kv-cache-memory-bytes "
        f"{needed_cache_bytes(history, wanted)}",
        change=Change(requests=(max(1, total.running), wanted)),
    )


def prefix_unused(history: History, limits: RuleLimits) -> Iterator[Finding]:
    """Prompts that begin alike, and are computed each time."""
    prompts, repeated = history.grown("prompts"), history.grown("repeated_prompts")
    tokens = history.grown("repeated_tokens")
    if prompts < limits.prompts or repeated <= limits.repeated * prompts or not tokens:
        return
    hits = history.counted("prefix_hits") / tokens
    if hits >= limits.hits:
        return
    doubled = 2 * needed_cache_bytes(history, max(1, history.last.total.running))
    # Nothing says how much, if nothing runs.
    larger = f"restart with --kv-cache-memory-bytes {doubled}" if doubled else "a larger --kv-cache-memory-bytes"
    if not history.caching:
        remedy = "restart with --enable-prefix-caching, which is off"
    elif len(history.plans) > 1:
        remedy = f"weft gateway --policy prefix over single servers, or {larger}"
    else:
        remedy = f"{larger}, so that prefixes stay; with a cache_salt per request nothing is shared"
    yield Finding(
        code=Code.PREFIX_UNUSED,
        text=f"{repeated} of {prompts} prompts begin like an earlier one, and the cache had {hits:.0%} of these tokens "
        f"(alarm below {limits.hits:.0%})",
        value=hits,
        limit=limits.hits,
        remedy=remedy,
        change=None,
    )


def batch_small(history: History, limits: RuleLimits) -> Iterator[Finding]:
    """Requests that wait only because of --max-num-seqs, while the KV cache has room."""
    total, most = history.last.total, sum(plan.max_running for plan in history.plans)
    if not has_served(history, limits) or not always_waiting(history) or total.running < most:
        return
    later = [snapshot.total for snapshot in history.snapshots[1:]]
    used = max(one.blocks_used / max(1, one.blocks_total) for one in later)
    if 1 - used <= limits.batch_room:
        return
    room = int(total.running * 0.9 / max(used, 0.01))
    wanted = min(total.running + total.waiting, room)
    each = max(1, wanted // len(history.plans))
    if wanted <= most:
        return
    yield Finding(
        code=Code.BATCH_SMALL,
        text=f"{total.waiting} requests wait although {1 - used:.0%} of the KV cache is free "
        f"(alarm above {limits.batch_room:.0%}): only {most} may run at once",
        value=1 - used,
        limit=limits.batch_room,
        remedy=f"restart with --max-num-seqs {each}",
        change=Change(requests=(total.running, wanted)),
    )
