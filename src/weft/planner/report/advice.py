"""Advice: the next cheapest changes to a plan, each computed by planning again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import ceil

import msgspec

from weft.checkpoint.architectures.place import whole
from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.files import gguf_types
from weft.checkpoint.hub import model_names
from weft.checkpoint.names import gguf_reference
from weft.checkpoint.quantised.precision import held_precision, sum_by_kind, weight_bytes
from weft.checkpoint.quantised.schemes import ONLINE_QUANTIZATIONS
from weft.formatting import weft_command
from weft.machine.hardware.cluster import Cluster, Node, default_link
from weft.machine.hardware.cpus import typical_cpu
from weft.machine.hardware.gpus import GpuSpec, known_gpus
from weft.plan.parallelism import Parallelism
from weft.planner.memory.footprint import Footprint
from weft.planner.note import Note, create_note
from weft.planner.profiles import engine_profile
from weft.planner.question import Question
from weft.planner.report.binding import MEASURES, MIN_GAIN
from weft.planner.search.cuts import Cut
from weft.planner.search.domains import usable_devices
from weft.planner.search.objections import computes_in, unsupported_reasons
from weft.planner.search.ranking import Candidate, objective_value
from weft.planner.search.search import SearchResult, closest_miss, fitting_layouts, search

# Names of checkpoints in another precision, the closest to the original first.
CHECKPOINTS = {
    "fp8": "an FP8 checkpoint",
    "int8": "a GPTQ int8 checkpoint",
    "int4": "an AWQ or GPTQ int4 checkpoint",
}
GGUF_CHECKPOINTS = {"q8_0": "a Q8_0 GGUF checkpoint", "q4_k_m": "a Q4_K_M GGUF checkpoint"}
# The -q of each precision to which Weft compresses 16-bit weights while it loads them.
WEFT_SCHEMES = {ONLINE_QUANTIZATIONS[word]: word for word in ("int8", "int4")}
PRECISION_FLAGS = ("--precision", "-q")
LIMITS = {  # limits of a question that may leave no room for a model, with their flags
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "speculation": "--speculative-config",
}
FP8_CACHE = ("weft", "vllm", "sglang", "trtllm")  # engines that can keep KV in FP8
Fit = tuple[Cut, Footprint]
MAX_NODE_GPUS = 8  # GPUs per node
MAX_NODES = 64  # nodes of a cluster that is tried
MAX_MEMORY = "--max-memory"  # the flag that gives a plan a part of a CPU's memory
CPU_GB = (32, 64, 128, 256)  # of a host's memory, as machines have it; GB of 10^9 bytes, so that each leaves some


def advice(result: SearchResult) -> list[Note]:
    """The next changes, the cheapest first: to the request, to the checkpoint, to the hardware."""
    return list(_to_fit(result) if result.best is None else _to_improve(result, result.best))


# --- if nothing fits ---


def _to_fit(result: SearchResult) -> Iterator[Note]:
    question, miss = result.question, closest_miss(result.rejected)
    if miss is None or not miss.short_bytes:
        # Memory is not the reason: the constraints are in the way.
        yield from _without_constraints(question)
        return
    yield from _shorter_request(question)
    for name, flag in LIMITS.items():
        if getattr(question, name) is not None:
            yield from _without_limit(msgspec.structs.replace(question, **{name: None}), flag)
    yield from _with_fewer_bits(question)
    yield from layers_on_cpu(question)
    if question.constraints != Parallelism():
        fit = _roomiest(msgspec.structs.replace(question, constraints=Parallelism()))
        if fit:
            yield create_note("other_cut", cut=str(fit[0]), spare=_to_spare(*fit))
    if is_limited(question.cluster):
        free = msgspec.structs.replace(question, cluster=unlimited(question.cluster))
        without = list(_without_limit(free, "--max-memory"))
        if without:
            yield from without
            return
    if question.cluster.on_cpu:
        yield from _more_memory(question, miss.short_bytes)
    else:
        yield from _more_gpus(question)
    yield from _larger_gpu(question)


def _without_constraints(question: Question) -> Iterator[Note]:
    if question.constraints != Parallelism():
        free = search(msgspec.structs.replace(question, constraints=Parallelism()))
        if free.best:
            yield create_note("free_layout", cut=str(free.best.cut), gain=0.0, measure="")


def _shorter_request(question: Question) -> Iterator[Note]:
    length = _longest_that_fits(question)
    if length:
        code = "shorter_max_model_len" if question.workload.max_model_len else "shorter_request"
        yield create_note(code, tokens=length)


def _without_limit(free: Question, flag: str) -> Iterator[Note]:
    fit = _roomiest(free)
    if fit:
        yield create_note("without_limit", flag=flag, cut=str(fit[0]), spare=_to_spare(*fit))


def _with_fewer_bits(question: Question) -> Iterator[Note]:
    """Compression while loading, by Weft itself, the fastest first; then checkpoints that may be found: one that the
    engine computes in, the closest to the original, and the smallest. One that it does not compute in comes last."""
    smaller = dict(_smaller_checkpoints(question))
    compressed = []
    for precision in WEFT_SCHEMES.keys() & smaller:
        best = search(msgspec.structs.replace(question, precisions=(precision,))).best
        if best:
            compressed.append((best.predicted.single_tok_s, _compressed(question, best)))
        del smaller[precision]
    compressed.sort(key=lambda row: (row[0], str(row[1])), reverse=True)
    yield from (note for _, note in compressed)
    yield from _with_smaller_checkpoint(question, smaller)


def _with_smaller_checkpoint(question: Question, names: dict[str, str]) -> Iterator[Note]:
    """A checkpoint for each of three orders of the precisions in `names`, if any fits."""

    @cache
    def fits(precision: str) -> Fit | None:
        return _roomiest(msgspec.structs.replace(question, precisions=(precision,)))

    computing = [precision for precision in names if _computes(question, precision)]
    smallest = sorted(names, key=lambda precision: weight_bytes(question.shape, precision))
    # `next` tries no more of them than necessary.
    chosen = [next(filter(fits, order), None) for order in (computing, names, smallest)]
    for precision in sorted(filter(None, dict.fromkeys(chosen)), key=lambda name: not _computes(question, name)):
        fit = fits(precision)
        assert fit is not None
        yield create_note(
            "smaller_checkpoint",
            command=_plan_command(question, "--precision", precision),
            checkpoint=names[precision],
            cut=str(fit[0]),
            spare=_to_spare(*fit),
            runs=_runs(question, precision),
        )


def _compressed(question: Question, best: Candidate) -> Note:
    """The command that plans with the weights that Weft compresses while it loads them."""
    return create_note(
        "compress_on_load",
        command=_plan_command(question, "-q", WEFT_SCHEMES[best.layout.precision]),
        cut=str(best.cut),
        kv_tokens=best.memory.kv_tokens,
        tok_s=best.predicted.single_tok_s,
        runs=_runs(question, best.layout.precision),
    )


def _plan_command(question: Question, flag: str, precision: str) -> str:
    """The command that plans the same in another precision; -q is for the unquantised model."""
    flags = question.flags or (("", question.model),)
    reference = gguf_reference.parse_address(question.model)
    unquantised = model_names.whole_model(reference) if reference is not None and flag == "-q" else None
    if unquantised:
        flags = (("", unquantised), *flags[1:])
    return weft_command("plan", flags, flag, precision, without=PRECISION_FLAGS)


def _longest_that_fits(question: Question) -> int | None:
    """The longest request that some cut has room for, if the weights fit but not the request that was asked for."""
    least = question.workload.input_len + 1 if question.workload.max_model_len else 1
    if least >= question.workload.longest:
        return None
    most = engine_profile(question).utilization_most.value
    workload = msgspec.structs.replace(question.workload, max_model_len=least)
    shorter = msgspec.structs.replace(question, workload=workload, gpu_memory_utilization=most)
    return max((memory.longest for _, memory in _fits(shorter)), default=None)


def _fits(question: Question) -> Iterator[Fit]:
    """Every cut that fits, in each way of dividing the model."""
    for fitting in fitting_layouts(question, []):
        yield from ((fitting.cut, memory) for _, memory in fitting.divided)


def _roomiest(question: Question) -> Fit | None:
    """The cut that leaves most on its fullest GPU, or None if none fits."""
    return max(_fits(question), key=lambda fit: _spare(fit[1]), default=None)


def _spare(memory: Footprint) -> float:
    """Bytes that are left on the fullest GPU after the weights, the engine and one request."""
    return min(
        (rank.memory_bytes if rank.limit_bytes is None else rank.limit_bytes)
        - rank.weights.total
        - rank.other_bytes
        - rank.kv_request_bytes
        for rank in memory.ranks
    )


def _to_spare(cut: Cut, memory: Footprint) -> Note:
    return create_note("to_spare", spare_bytes=_spare(memory), per_gpu=cut.device == "GPU")


def _smaller_checkpoints(question: Question) -> Iterator[tuple[str, str]]:
    """(precision, name) of checkpoints with fewer bytes than the question's, in the same kind of file. Weft reads GGUF
    in place of any, and compresses to some precisions itself."""
    in_gguf = question.engine == "llama.cpp" or any(name in gguf_types.MIXES for name in question.precisions)
    if in_gguf:
        names = GGUF_CHECKPOINTS | (WEFT_SCHEMES if question.engine == "weft" else {})
    else:
        published = find_architecture(question.shape.architecture).published
        names = {name: f"the published {name.upper()} checkpoint" for name in published} or CHECKPOINTS
        if question.engine == "weft":
            names = names | GGUF_CHECKPOINTS | WEFT_SCHEMES
    now = min(_held_bytes(question, precision) for precision in question.precisions)
    yield from ((precision, name) for precision, name in names.items() if _held_bytes(question, precision) < now)


def _held_bytes(question: Question, precision: str) -> int:
    """Bytes of the weights in memory, where Weft holds some types with more bits than their file has."""
    shape = question.shape
    if question.engine != "weft":
        return weight_bytes(shape, precision)
    return sum_by_kind(shape, held_precision(precision), whole(shape)).total


def _computes(question: Question, precision: str) -> bool:
    """Return False if the engine is our own and does not compute in this precision yet."""
    return question.engine != "weft" or computes_in(precision)


def _runs(question: Question, precision: str) -> bool:
    """Return False if the engine is our own and does not run the model in this precision yet."""
    return question.engine != "weft" or not unsupported_reasons(question.shape, precision)


# --- other hardware ---


def _more_gpus(question: Question) -> Iterator[Note]:
    """The fewest more GPUs of this type with which the model fits."""
    cluster = question.cluster
    present, gpu = len(cluster.gpus), cluster.gpus[-1]
    # Fewer cannot even hold the weights.
    total = min(weight_bytes(question.shape, precision) for precision in question.precisions)
    held = sum(other.memory_bytes for other in cluster.gpus)
    least = max(1, -int(-(total - held) // gpu.memory_bytes))
    node = len(cluster.nodes[-1].gpus)
    counts = [*range(least, max(least, 9 - present)), *range(-(-least // node) * node, node * MAX_NODES, node)]
    for count in dict.fromkeys(counts):
        grown = grown_cluster(cluster, count)
        if grown is None:
            continue
        fit = _roomiest(msgspec.structs.replace(question, cluster=grown, constraints=Parallelism()))
        if fit:
            yield create_note("more_gpus", count=count, gpu=gpu.name, cut=str(fit[0]), spare=_to_spare(*fit))
        if fit or count > least + 4 * node:
            break


def _more_memory(question: Question, short_bytes: int) -> Iterator[Note]:
    """The free memory that a CPU's machine needs in addition, a little over what is lacking."""
    added, cluster = int(short_bytes * MIN_GAIN), question.cluster
    roomier = cluster.map_gpus(lambda gpu: msgspec.structs.replace(gpu, memory_bytes=gpu.memory_bytes + added))
    fit = _roomiest(msgspec.structs.replace(question, cluster=roomier))
    if fit:
        yield create_note("more_memory", more_bytes=added * len(cluster.gpus), cut=str(fit[0]))


def _larger_gpu(question: Question) -> Iterator[Note]:
    """The smallest GPU of the catalogue of which an equal number is enough; one in place of a CPU."""
    cluster, on_cpu = question.cluster, question.cluster.on_cpu
    if len(set(cluster.gpus)) > 1:
        return
    if on_cpu:  # which its ranks share
        question = msgspec.structs.replace(question, constraints=Parallelism())
    for gpu in _larger_gpus(cluster):
        fit = _roomiest(msgspec.structs.replace(question, cluster=with_gpu(cluster, gpu)))
        if fit:
            count = 1 if on_cpu else len(cluster.gpus)
            yield create_note("larger_gpu", count=count, gpu=gpu.name, cut=str(fit[0]), spare=_to_spare(*fit))
            return


def _larger_gpus(cluster: Cluster) -> list[GpuSpec]:
    """GPUs of the catalogue with more memory than the cluster's and at least their capability, the smallest first; for
    a CPU all of them."""
    present = cluster.gpus[0]

    def suits(gpu: GpuSpec) -> bool:
        larger = gpu.memory_bytes > present.memory_bytes and gpu.capability >= present.capability
        return not gpu.gfx and (cluster.on_cpu or larger)

    return sorted(filter(suits, known_gpus()), key=lambda gpu: (gpu.memory_bytes, gpu.bandwidth_Bps))


# --- if something fits ---


def _to_improve(result: SearchResult, best: Candidate) -> Iterator[Note]:
    question = result.question
    free = best
    if question.constraints != Parallelism():
        free = _free_candidate(question, best)
        yield from _gain_without_constraints(question, best, free)
    else:
        yield from _idle_gpus(result, best)
    if best.layout.kv_dtype in ("bf16", "fp16") and question.engine in FP8_CACHE and not question.cluster.on_cpu:
        changed = search(_with_same_cut(question, best, kv_dtype="fp8"))
        gains = _gains(question, best, changed)
        if gains:
            yield create_note("fp8_kv_cache", gains=gains)
    yield from _gain_of_fewer_bits(question, best)
    # The gain of other hardware must not count the gain of dropping a constraint.
    most = max(best, free, key=lambda candidate: objective_value(question, candidate))
    yield from _gain_of_hardware(question, most)


def _free_candidate(question: Question, best: Candidate) -> Candidate:
    """The best candidate without the constraints."""
    constraints = Parallelism()
    # The only constraint was to divide experts: half of all layouts have been searched already.
    if question.constraints == Parallelism(deals_experts=True):
        constraints = Parallelism(deals_experts=False)
    return search(msgspec.structs.replace(question, constraints=constraints)).best or best


def _gain_without_constraints(question: Question, best: Candidate, free: Candidate) -> Iterator[Note]:
    gain = objective_value(question, free) / objective_value(question, best)
    if gain >= MIN_GAIN:
        yield create_note("free_layout", cut=str(free.cut), gain=gain, measure=MEASURES[question.objective])


def _idle_gpus(result: SearchResult, best: Candidate) -> Iterator[Note]:
    question = result.question
    usable = len(usable_devices(question.cluster))
    idle = usable - len(set(best.layout.gpus))
    if not idle:
        return
    highest = max(objective_value(question, candidate) for candidate in result.candidates)
    gains = highest >= MIN_GAIN * objective_value(question, best)
    better = "cheaper" if question.objective == "cost" else "faster"
    yield create_note("idle_gpus", idle=idle, usable=usable, no_better=not gains, better=better)


def _gain_of_fewer_bits(question: Question, best: Candidate) -> Iterator[Note]:
    """The first smaller precision that helps; precisions that the engine computes in are tried first."""
    smaller = sorted(_smaller_checkpoints(question), key=lambda row: not _computes(question, row[0]))
    for precision, checkpoint in smaller:
        changed = search(_with_same_cut(question, best, precisions=(precision,)))
        if changed.best and objective_value(question, changed.best) >= MIN_GAIN * objective_value(question, best):
            name = f"-q {WEFT_SCHEMES[precision]}" if precision in WEFT_SCHEMES else checkpoint
            runs = _runs(question, precision)
            yield create_note("fewer_bits", name=name, gains=_gains(question, best, changed), runs=runs)
            return


def _gain_of_hardware(question: Question, best: Candidate) -> Iterator[Note]:
    """All of the memory, if --max-memory limits it; else one more GPU, or one more node."""
    if is_limited(question.cluster):
        free = msgspec.structs.replace(question, cluster=unlimited(question.cluster), constraints=Parallelism())
        gains = _gains(question, best, search(free))
        if gains:
            yield create_note("unlimited_memory", gains=gains)
        return
    cluster = question.cluster
    grown = grown_cluster(cluster, 1) or grown_cluster(cluster, len(cluster.nodes[-1].gpus))
    if grown is None:
        return
    constraints = Parallelism()
    if len(grown.nodes) > 1:  # another node is used as the present ones
        constraints = Parallelism(
            best.cut.parallelism.tensor_parallel,
            expert_parallel=question.constraints.expert_parallel,
            deals_experts=best.cut.parallelism.deals_experts,
        )
    changed = search(msgspec.structs.replace(question, cluster=grown, constraints=constraints))
    gains = _gains(question, best, changed)
    if gains:
        count = len(grown.gpus) - len(cluster.gpus)
        yield create_note("added_gpus", count=count, gpu=cluster.gpus[-1].name, gains=gains)


def _with_same_cut(question: Question, best: Candidate, **changes: object) -> Question:
    """The question with the cut of the best candidate, and something else changed."""
    constraints = question.constraints.changed(best.cut.parallelism)
    return msgspec.structs.replace(
        question, constraints=constraints, **{"precisions": (best.cut.precision,), **changes}
    )


def _gains(question: Question, best: Candidate, changed: SearchResult) -> Note | None:
    """The factors by which a change improves the best candidate, or None if it is not worth a line."""
    after = changed.best
    if after is None:
        return None
    context = after.memory.kv_tokens / best.memory.kv_tokens
    speed = objective_value(question, after) / objective_value(question, best)
    more_context, faster = context >= MIN_GAIN, speed >= MIN_GAIN
    if not more_context and not faster:
        return None
    return create_note(
        "gains",
        context=context if more_context else 0.0,
        speed=speed if faster else 0.0,
        both=more_context and faster,
        measure=MEASURES[question.objective],
        cut=str(after.cut),
        kv_tokens=after.memory.kv_tokens,
    )


def grown_cluster(cluster: Cluster, by: int) -> Cluster | None:
    """The cluster with `by` more GPUs like the last one, in its last node or in nodes of the same size, of at most
    eight. None if there is no such cluster, or for a CPU."""
    last = cluster.nodes[-1]
    if cluster.on_cpu:
        return None
    if len(cluster.nodes) == 1 and len(last.gpus) + by <= MAX_NODE_GPUS:
        grown = (*last.gpus, *[last.gpus[-1]] * by)
        link = default_link(grown) if len(last.gpus) == 1 else last.link
        return Cluster((Node(grown, link, last.bridged),), cluster.network_Bps)
    nodes, left_over = divmod(by, len(last.gpus))
    if left_over or len(cluster.nodes) + nodes > MAX_NODES:
        return None
    return Cluster((*cluster.nodes, *[last] * nodes), cluster.network_Bps, network_s=cluster.network_s)


def with_gpu(cluster: Cluster, gpu: GpuSpec) -> Cluster:
    """The cluster with this GPU in place of each of its own."""
    rows = [(gpu,) * len(node.gpus) for node in cluster.nodes]
    nodes = tuple(Node(row, default_link(row)) for row in rows)
    return Cluster(nodes, cluster.network_Bps, network_s=cluster.network_s)


def is_limited(cluster: Cluster) -> bool:
    """Return True if --max-memory limits a GPU."""
    return any(gpu.limit_bytes is not None for gpu in cluster.gpus)


def unlimited(cluster: Cluster) -> Cluster:
    """The cluster without --max-memory."""
    return cluster.map_gpus(lambda gpu: msgspec.structs.replace(gpu, limit_bytes=None))


def layers_on_cpu(question: Question) -> Iterator[Note]:
    """The least of CPU_GB with which the model fits, with the command that plans it."""
    cluster = question.cluster
    one_host = len(cluster.nodes) == 1 and not cluster.on_cpu and cluster.cpu is None
    if question.engine != "weft" or not one_host or question.constraints != Parallelism():
        return
    if all(unsupported_reasons(question.shape, precision) for precision in question.precisions):
        return
    room = sum(gpu.memory_bytes if gpu.limit_bytes is None else gpu.limit_bytes for gpu in cluster.gpus)
    least = min(weight_bytes(question.shape, precision) for precision in question.precisions) - room
    for size in CPU_GB:
        if size * 10**9 <= least:
            continue
        cpu = msgspec.structs.replace(typical_cpu(), limit_bytes=size * 10**9)
        best = search(msgspec.structs.replace(question, cluster=cluster.with_cpu(cpu))).best
        if best:
            yield create_note(
                "try_layers_on_cpu",
                command=_cpu_command(question, size),
                cut=str(best.cut),
                kv_tokens=best.memory.kv_tokens,
                tok_s=best.predicted.single_tok_s,
            )
            return


def _cpu_command(question: Question, size: int) -> str:
    """The command that plans the same with the CPU. A GPU without a limit would not be used, so that all have one."""
    flags = question.flags or (("", question.model),)
    given = next((flag[1] for flag in flags if flag[0] == MAX_MEMORY), "")
    gpus = ",".join(f"{number}={ceil(gpu.memory_bytes / 1e9)}GB" for number, gpu in enumerate(question.cluster.gpus))
    return weft_command("plan", flags, MAX_MEMORY, f"{given or gpus},cpu={size}GB", without=(MAX_MEMORY,))
