"""Advice: the next cheapest changes to a plan, each computed by planning again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import msgspec

from weft.formats import gguf_types
from weft.formats.precision import weight_bytes
from weft.formats.schemes import MADE
from weft.formatting import format_bytes, format_factor, weft_command
from weft.hardware.cluster import Cluster, Node, usual_link
from weft.hardware.gpus import gpus
from weft.planner.binding import MEASURES, WORTH
from weft.planner.cuts import Cut
from weft.planner.domains import usable
from weft.planner.footprint import Footprint
from weft.planner.objections import runs
from weft.planner.question import Question, Wish
from weft.planner.ranking import Candidate, worth
from weft.planner.search import Answer, closest, engine_profile, fitting, search

# What weights of another precision are called, those closest to the original first.
CHECKPOINTS = {
    "fp8": "an FP8 checkpoint",
    "int8": "a GPTQ int8 checkpoint",
    "int4": "an AWQ or GPTQ int4 checkpoint",
}
PUBLISHED = {"GptOssForCausalLM": {"mxfp4": "the published MXFP4 checkpoint"}}
GGUF_CHECKPOINTS = {"q8_0": "a Q8_0 GGUF checkpoint", "q4_k_m": "a Q4_K_M GGUF checkpoint"}
OWN = {MADE[word]: word for word in ("int8", "int4")}  # what Weft makes of 16-bit weights, by its precision
PRECISION_FLAGS = ("--precision", "-q")
LIMITS = {  # of a question, which may leave no room
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "speculation": "--speculative-config",
}
FP8_CACHE = ("weft", "vllm", "sglang", "trtllm")  # engines that can keep KV in FP8
NOT_YET = "; Weft does not run it yet"
MOST_NODES = 64  # of a cluster that is tried


def advice(answer: Answer) -> list[str]:
    """The next changes, the cheapest first: those of the request, of the checkpoint, of the hardware."""
    return list(_to_fit(answer) if answer.best is None else _to_improve(answer, answer.best))


def _to_fit(answer: Answer) -> Iterator[str]:
    question, lacking = answer.question, closest(answer.rejected)
    if lacking is None or not lacking.short_bytes:
        # Not for want of memory: what was asked for is in the way.
        if question.wish != Wish():
            free = search(msgspec.structs.replace(question, wish=Wish()))
            if free.best:
                yield f"left to itself the plan is {free.best.cut}"
        return
    length = _longest_that_fits(question)
    if length:
        if question.workload.max_model_len:
            yield f"with --max-model-len {length} it fits: that many tokens of KV are left"
        else:
            yield f"prompt and answer of up to {length:,} tokens together fit: that much KV is left"
    for name, flag in LIMITS.items():
        if getattr(question, name) is not None:
            found = _roomiest(msgspec.structs.replace(question, **{name: None}))
            if found:
                yield f"without {flag} it fits as {found[0]} with {_to_spare(*found)}"
    yield from _with_fewer_bits(question)
    if question.wish != Wish():
        found = _roomiest(msgspec.structs.replace(question, wish=Wish()))
        if found:
            yield f"cut as {found[0]} it fits with {_to_spare(*found)}"
    if any(gpu.limit_bytes is not None for gpu in question.cluster.gpus):
        found = _roomiest(msgspec.structs.replace(question, cluster=_unlimited(question.cluster)))
        if found:
            yield f"without --max-memory it fits as {found[0]} with {_to_spare(*found)}"
            return
    more = _with_more_memory(question, lacking.short_bytes) if question.cluster.on_cpu else _with_more(question)
    if more:
        yield more
    larger = _with_larger(question)
    if larger:
        yield larger


def _with_fewer_bits(question: Question) -> Iterator[str]:
    """What Weft makes of the weights by itself, the fastest first; then checkpoints that are to be had: one that the
    engine runs, the closest to the original, and the smallest. What it does not run yet comes last."""
    smaller = dict(_smaller_checkpoints(question))
    made = []
    for precision in [it for it in smaller if it in OWN]:
        best = search(msgspec.structs.replace(question, precisions=(precision,))).best
        if best:
            made.append((best.predicted.single_tok_s, _made(question, best)))
        del smaller[precision]
    yield from (line for _, line in sorted(made, reverse=True))

    @cache
    def fits(precision: str) -> str | None:
        found = _roomiest(msgspec.structs.replace(question, precisions=(precision,)))
        if found is None:
            return None
        told = f"{smaller[precision]} fits as {found[0]} with {_to_spare(*found)}{_yet(question, precision)}"
        return f"try: {_asked(question, '--precision', precision)} ({told})"

    running = [it for it in smaller if not _yet(question, it)]
    orders = (running, smaller, sorted(smaller, key=lambda it: weight_bytes(question.shape, it)))
    # No more are tried than that takes.
    told = dict.fromkeys(next(filter(None, map(fits, order)), None) for order in orders)
    yield from sorted(filter(None, told), key=lambda line: NOT_YET in line)


def _made(question: Question, best: Candidate) -> str:
    """The command that plans with what Weft makes of the weights."""
    word, tokens = OWN[best.layout.precision], best.memory.kv_tokens
    told = f"{best.cut}: {tokens:,} tokens of context, {best.predicted.single_tok_s:,.0f} tok/s for one user"
    return f"try: {_asked(question, '-q', word)} ({told})"


def _asked(question: Question, *more: str) -> str:
    """The command that asks the same in another precision."""
    flags = question.flags or (("", question.model),)
    return weft_command("plan", flags, *more, without=PRECISION_FLAGS)


def _longest_that_fits(question: Question) -> int | None:
    """The longest request that some cut has room for, which holds the weights but not what was asked for."""
    least = question.workload.input_len + 1 if question.workload.max_model_len else 1
    if least >= question.workload.longest:
        return None
    most = engine_profile(question).utilization_most.value
    workload = msgspec.structs.replace(question.workload, max_model_len=least)
    asked = msgspec.structs.replace(question, workload=workload, gpu_memory_utilization=most)
    return max((memory.longest for it in fitting(asked, []) for _, memory in it.layouts), default=None)


def _roomiest(question: Question) -> tuple[Cut, Footprint] | None:
    """Of all that fit, the cut that leaves the fullest GPU most."""
    found = [(it.cut, memory) for it in fitting(question, []) for _, memory in it.layouts]
    return max(found, key=lambda it: _spare(it[1]), default=None)


def _spare(memory: Footprint) -> float:
    """Bytes that are left on the fullest GPU beside the weights, the engine and one request."""
    length = memory.replicas[0].length
    return min(
        (rank.memory_bytes if rank.limit_bytes is None else rank.limit_bytes)
        - rank.weights.total
        - rank.other_bytes
        - length * rank.kv_bytes_per_token
        for rank in memory.ranks
    )


def _to_spare(cut: Cut, memory: Footprint) -> str:
    return f"{format_bytes(_spare(memory))} to spare" + (" on the fullest GPU" if cut.device == "GPU" else "")


def _smaller_checkpoints(question: Question) -> Iterator[tuple[str, str]]:
    """(precision, name) of those that take fewer bytes than what was asked for, in its own kind of file; Weft reads
    GGUF for any, and makes some itself."""
    in_gguf = question.engine == "llama.cpp" or any(it in gguf_types.MIXES for it in question.precisions)
    now = min(weight_bytes(question.shape, it) for it in question.precisions)
    both = question.engine == "weft" and not in_gguf
    published = PUBLISHED.get(question.shape.architecture, CHECKPOINTS)
    for precision, name in (
        GGUF_CHECKPOINTS if in_gguf else published | (GGUF_CHECKPOINTS | OWN if both else {})
    ).items():
        if weight_bytes(question.shape, precision) < now:
            yield precision, name


def _yet(question: Question, precision: str) -> str:
    """A warning, where the engine is our own and does not run what it plans."""
    run = question.engine != "weft" or runs(precision)
    return "" if run else NOT_YET


def _grown(cluster: Cluster, by: int) -> Cluster | None:
    """With `by` more GPUs like the last one in its last node, in nodes of at most eight; None where that is no
    cluster that can be, or for a CPU."""
    last = cluster.nodes[-1]
    if cluster.on_cpu:
        return None
    if len(cluster.nodes) == 1 and len(last.gpus) + by <= 8:
        grown = (*last.gpus, *[last.gpus[-1]] * by)
        link = usual_link(grown) if len(last.gpus) == 1 else last.link
        return Cluster((Node(grown, link, last.bridged),), cluster.network_Bps)
    nodes, rest = divmod(by, len(last.gpus))
    if rest or len(cluster.nodes) + nodes > MOST_NODES:
        return None
    return Cluster((*cluster.nodes, *[last] * nodes), cluster.network_Bps)


def _with_more(question: Question) -> str | None:
    """The fewest more GPUs of this type with which it fits."""
    present, gpu = len(question.cluster.gpus), question.cluster.gpus[-1]
    # Fewer cannot even hold the weights.
    total = min(weight_bytes(question.shape, precision) for precision in question.precisions)
    held = sum(it.memory_bytes for it in question.cluster.gpus)
    least = max(1, -int(-(total - held) // gpu.memory_bytes))
    node = len(question.cluster.nodes[-1].gpus)
    counts = [*range(least, max(least, 9 - present)), *range(-(-least // node) * node, node * MOST_NODES, node)]
    for by in dict.fromkeys(counts):
        cluster = _grown(question.cluster, by)
        if cluster is None:
            continue
        found = _roomiest(msgspec.structs.replace(question, cluster=cluster, wish=Wish()))
        if found:
            more = f"{by} more {gpu.name} {'makes' if by == 1 else 'make'} it fit"
            return f"{more}: {found[0]} with {_to_spare(*found)}"
        if by > least + 4 * node:
            break
    return None


def _with_more_memory(question: Question, short_bytes: int) -> str | None:
    """How much more free memory a CPU's machine needs, a little over what is lacking."""
    more, cluster = int(short_bytes * WORTH), question.cluster
    roomier = cluster.changed(lambda gpu: msgspec.structs.replace(gpu, memory_bytes=gpu.memory_bytes + more))
    found = _roomiest(msgspec.structs.replace(question, cluster=roomier))
    return f"{format_bytes(more * len(cluster.gpus))} more free memory make it fit: {found[0]}" if found else None


def _with_larger(question: Question) -> str | None:
    """The smallest GPU of the catalogue of which as many are enough; in place of a CPU one."""
    present = question.cluster.gpus
    if len(set(present)) > 1:
        return None
    on_cpu = question.cluster.on_cpu
    if on_cpu:  # which its ranks share
        question = msgspec.structs.replace(question, wish=Wish())
    for gpu in sorted(gpus(), key=lambda it: (it.memory_bytes, it.bandwidth_Bps)):
        small = gpu.memory_bytes <= present[0].memory_bytes or gpu.capability < present[0].capability
        if gpu.gfx or (small and not on_cpu):
            continue
        rows = [(gpu,) * len(node.gpus) for node in question.cluster.nodes]
        nodes = tuple(Node(row, usual_link(row)) for row in rows)
        found = _roomiest(msgspec.structs.replace(question, cluster=Cluster(nodes, question.cluster.network_Bps)))
        if found:
            count = 1 if on_cpu else len(present)
            return f"on {count} x {gpu.name} it fits: {found[0]} with {_to_spare(*found)}"
    return None


def _to_improve(answer: Answer, best: Candidate) -> Iterator[str]:
    question = answer.question
    now = worth(question, best)
    free, there = best, len(usable(question.cluster))
    faster = max(answer.candidates, key=lambda it: worth(question, it))
    gains = worth(question, faster) >= WORTH * now
    idle = there - len(set(best.layout.gpus))
    if question.wish != Wish():
        # Who asked for nothing but dealing experts out has seen that half of all layouts.
        other = Wish(expert_parallel=False) if question.wish == Wish(expert_parallel=True) else Wish()
        free = search(msgspec.structs.replace(question, wish=other)).best or best
        if worth(question, free) >= WORTH * now:
            gain = f"{format_factor(worth(question, free) / now)} the {MEASURES[question.objective]}"
            yield f"left to itself the plan is {free.cut}, with {gain}"
    elif idle:
        are, better = "is" if idle == 1 else "are", "cheaper" if question.objective == "cost" else "faster"
        no_use = "" if gains else f"; no other use of them is {better}"
        yield f"{idle} of {there} GPUs {are} idle in this layout{no_use}"
    wide = best.layout.kv_dtype in ("bf16", "fp16")
    if wide and question.engine in FP8_CACHE and not question.cluster.on_cpu:
        changed = search(_as(question, best, kv_dtype="fp8"))
        yield from _gain("an FP8 KV cache (--kv-cache-dtype fp8)", question, best, changed, now)
    # What the engine runs comes first.
    for precision, checkpoint in sorted(_smaller_checkpoints(question), key=lambda it: bool(_yet(question, it[0]))):
        name = f"-q {OWN[precision]}" if precision in OWN else checkpoint
        changed = search(_as(question, best, precisions=(precision,)))
        if changed.best and worth(question, changed.best) >= WORTH * now:
            yield from (line + _yet(question, precision) for line in _gain(name, question, best, changed, now))
            break
    # What other hardware gives is no merit of letting go of a layout or a limit that was dictated.
    most = max(best, free, key=lambda it: worth(question, it))
    if any(gpu.limit_bytes is not None for gpu in question.cluster.gpus):
        changed = search(msgspec.structs.replace(question, cluster=_unlimited(question.cluster), wish=Wish()))
        yield from _gain("without --max-memory", question, most, changed, worth(question, most))
        return
    grown = _grown(question.cluster, 1) or _grown(question.cluster, len(question.cluster.nodes[-1].gpus))
    if grown:
        by = len(grown.gpus) - len(question.cluster.gpus)
        # Another node is used as those that are there.
        same = Wish(tensor_parallel=most.layout.tensor_parallel, expert_parallel=most.layout.expert_parallel > 1)
        wish = same if len(grown.nodes) > 1 else Wish()
        changed = search(msgspec.structs.replace(question, cluster=grown, wish=wish))
        name = f"+{by} {question.cluster.gpus[-1].name}"
        yield from _gain(name, question, most, changed, worth(question, most))


def _as(question: Question, best: Candidate, **changes: object) -> Question:
    """The same cut, with something else changed."""
    layout = best.layout
    wish = msgspec.structs.replace(
        question.wish,
        tensor_parallel=layout.tensor_parallel,
        pipeline_parallel=layout.pipeline_parallel,
        data_parallel=layout.data_parallel,
        expert_parallel=layout.expert_parallel > 1,
    )
    return msgspec.structs.replace(question, wish=wish, **{"precisions": (layout.precision,), **changes})


def _gain(name: str, question: Question, best: Candidate, changed: Answer, now: float) -> Iterator[str]:
    """A line where the change is worth it."""
    found = changed.best
    if found is None:
        return
    tokens, speed = found.memory.kv_tokens / best.memory.kv_tokens, worth(question, found) / now
    parts = [f"{format_factor(tokens)} the context"] * (tokens >= WORTH)
    parts += [f"{format_factor(speed)} the {MEASURES[question.objective]}"] * (speed >= WORTH)
    if parts:
        yield f"{name}: {', '.join(parts)} (as {found.cut}: {found.memory.kv_tokens:,} tokens)"


def _unlimited(cluster: Cluster) -> Cluster:
    """Without --max-memory."""
    return cluster.changed(lambda gpu: msgspec.structs.replace(gpu, limit_bytes=None))
