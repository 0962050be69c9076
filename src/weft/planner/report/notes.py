"""Notes: facts that a reader of a plan has to know in addition to its figures."""

from __future__ import annotations

from collections.abc import Iterator

from weft.checkpoint.architectures.kv import kv_bytes_per_token
from weft.checkpoint.architectures.library import PREFIX
from weft.checkpoint.architectures.place import whole
from weft.checkpoint.architectures.registry import RUNNABLE
from weft.checkpoint.files.gguf_types import MIXES
from weft.checkpoint.quantised.precision import (
    held_precision,
    own_quantization,
    scale_columns,
    sum_by_kind,
    weight_bytes,
)
from weft.checkpoint.quantised.schemes import ONLINE_QUANTIZATIONS
from weft.formatting import format_bytes
from weft.machine.hardware.gpus import FP8_CAPABILITY
from weft.plan.backends import ATTENTION_BACKENDS, AttentionSpec, KernelDevice, against_fused_experts
from weft.plan.memory import CPU_KV_BYTES, CPU_KV_SHARE
from weft.planner.note import Note, create_note
from weft.planner.profiles import engine_profile
from weft.planner.question import Question
from weft.planner.search.objections import EVEN
from weft.planner.search.ranking import Candidate
from weft.planner.work.replica import build_replicas

ROUNDED = 0.05  # of all heads: a share may be off by this much without a note
MAX_LISTED_LIMITS = 8  # limits of --max-memory that are listed one by one
UNPACKED = 1.02  # times a file's bytes: the memory that the weights may take without a note


def notes(question: Question, best: Candidate | None) -> list[Note]:
    """The notes on a plan, in the order in which they are shown; `best` is None if nothing fits."""
    listed = [
        *_request_too_long(question),
        *_gpus_in_use(question),
        *_on_cpu(question, best),
        *(_beside_cpu(question, best) if best else ()),
        *((*_slow_kernels(question, best), *_experts_on_gpus(question, best)) if best else ()),
        *(_latent_copies(question, best) if best else ()),
        *_library_model(question),
        *_speculation(question, best),
        *_deterministic(question),
    ]
    if best:
        listed += [*_checkpoint_format(question, best), *_unpacked_gguf(question, best), *_fp8_units(question, best)]
    listed += [*question.remarks, *_max_memory(question, best)]
    if best:
        listed += [*_padding(question, best), *_rounded_split(question, best), *_device_map(question, best)]
    return listed


def _request_too_long(question: Question) -> Iterator[Note]:
    """An engine may be told to go beyond the length that the model was made for, so the plan goes on."""
    tokens, most = question.workload.longest, question.shape.longest
    if tokens > most:
        yield create_note("request_too_long", tokens=tokens, model_tokens=most)


def _gpus_in_use(question: Question) -> Iterator[Note]:
    """Memory of this machine that other processes hold."""
    for number, gpu in enumerate(question.cluster.gpus):
        if gpu.held_bytes:
            yield create_note("gpu_in_use", held_bytes=gpu.held_bytes, gpu=number, name=gpu.name)


def _library_model(question: Question) -> Iterator[Note]:
    """Our own engine computes much of a model outside its kernels if it has no table of it."""
    if question.engine == "weft" and question.shape.library is not None:
        yield create_note("library_model", model=question.shape.architecture.removeprefix(PREFIX))


def _slow_kernels(question: Question, best: Candidate) -> Iterator[Note]:
    """Our own engine runs in plain torch if its kernels cannot be used."""
    if question.engine != "weft" or question.cluster.on_cpu:
        return
    gpus = [question.cluster.devices[number] for number in best.layout.gpus]
    cards = [(gpu.name, gpu.capability) for gpu in gpus if gpu.kind == "gpu"]
    device = KernelDevice(cards=cards, packages=None)
    triton = ATTENTION_BACKENDS["triton"]
    if reason := triton.supports(AttentionSpec.from_shape(question.shape, "bfloat16"), device):
        yield create_note("slow_kernels", kernels=triton.kernels, reason=reason)


def _experts_on_gpus(question: Question, best: Candidate) -> Iterator[Note]:
    """Speeds are for other engines' products of experts, also where our own engine's are slower."""
    experts, cluster = question.shape.experts, question.cluster
    if experts is None or question.engine != "weft" or cluster.on_cpu or question.shape.architecture not in RUNNABLE:
        return
    if reason := against_fused_experts("triton", experts):
        yield create_note("experts_one_by_one", reason=reason)
    else:
        yield create_note("experts_not_measured")


def _latent_copies(question: Question, best: Candidate) -> Iterator[Note]:
    """Tensor parallelism does not divide a cache of latents, attention groups do."""
    shape, ranks = question.shape, best.layout.parallelism.tensor_parallel
    if not shape.has_latents or ranks == 1:
        return
    yield create_note(
        "latent_kv_copied",
        ranks=ranks,
        token_bytes=kv_bytes_per_token(shape, best.layout.kv_dtype),
        groups=ranks * best.layout.parallelism.groups,
        experts=shape.experts is not None,
    )


def _on_cpu(question: Question, best: Candidate | None) -> Iterator[Note]:
    """Our own engine takes a fixed part of a CPU's memory for its KV cache, unless a flag gives another size."""
    if question.engine != "weft" or not question.cluster.on_cpu:
        return
    if question.gpu_memory_utilization is not None:
        yield create_note("no_share_on_cpu")
    if best is None:
        return
    ranks = best.memory.replicas[0].ranks
    free = sum(rank.memory_bytes - rank.weights.total - rank.other_bytes for rank in ranks)
    usual = min(CPU_KV_BYTES, free // CPU_KV_SHARE)
    room = sum(rank.kv_room_bytes for rank in ranks)
    if room > usual:
        most = max(rank.kv_room_bytes for rank in ranks)
        yield create_note("kv_cache_flag_on_cpu", need_bytes=room, usual_bytes=usual, flag_bytes=most)


def uses_cpu(question: Question, best: Candidate) -> bool:
    """Return True if layers run on the CPU as well as on GPUs."""
    return len(question.cluster.gpus) in best.layout.gpus


def _beside_cpu(question: Question, best: Candidate) -> Iterator[Note]:
    """The layers on the CPU if the others are on GPUs, and what they cost."""
    cluster, layout = question.cluster, best.layout
    if cluster.cpu is None or not uses_cpu(question, best):
        return
    replica = build_replicas(question.shape, layout, cluster, engine_profile(question))[0]
    seconds = [stage.decode_s(1.0, question.workload.context(0.5), 1).total for stage in replica.stages]
    for rank, number in enumerate(layout.gpus):
        if number != len(cluster.gpus):
            continue
        layers = layout.places[rank].layers
        yield create_note(
            "layers_on_cpu",
            first=layers.start,
            last=layers.stop - 1,
            nbytes=best.memory.ranks[rank].weights.total,
            cpu=cluster.cpu.name,
            cpu_s=seconds[rank],
            share=seconds[rank] / sum(seconds),
        )
    yield create_note(
        "cpu_beside_gpus", cpu=cluster.cpu.name, bandwidth=cluster.cpu.bandwidth_Bps / 1e9, source=cluster.cpu.source
    )


def _deterministic(question: Question) -> Iterator[Note]:
    """Sums in a fixed order take longer; the speeds are without them."""
    if question.deterministic:
        yield create_note("deterministic_not_counted")


def _speculation(question: Question, best: Candidate | None) -> Iterator[Note]:
    """The memory of speculative decoding is counted; its gain depends on the requests."""
    speculation = question.speculation
    if speculation is None:
        return
    yield create_note("speculation_not_predicted", most=1 + speculation.tokens)
    if speculation.draft and best:
        *_, rank = best.layout.places[: best.layout.parallelism.replica_size : best.layout.parallelism.tensor_parallel]
        memory = best.memory.replicas[0].ranks[rank.rank]
        own = kv_bytes_per_token(question.shape, best.layout.kv_dtype, rank)
        yield create_note(
            "draft_model_memory",
            model=speculation.draft.model,
            rank=rank.rank,
            weight_bytes=memory.draft_bytes,
            draft_kv_bytes=memory.kv_bytes_per_token - own,
            kv_bytes=memory.kv_bytes_per_token,
        )


def _checkpoint_format(question: Question, best: Candidate) -> Iterator[Note]:
    """The checkpoint that our own engine needs for this plan, and the form in which it holds the weights."""
    shape, precision = question.shape, best.layout.precision
    if question.engine != "weft" or shape.architecture not in RUNNABLE:
        return
    own = own_quantization(shape, precision)
    if own and own.ordered:
        yield create_note("unordered_groups")
    if precision == "int4" and own is None:
        scheme = ONLINE_QUANTIZATIONS[precision]
        yield create_note("int4_is_a_checkpoint", scheme=scheme, scheme_bytes=weight_bytes(shape, scheme))


def _unpacked_gguf(question: Question, best: Candidate) -> Iterator[Note]:
    """Memory of a GGUF file's weights in our own engine, if it is more than the size of the file."""
    shape, precision = question.shape, best.layout.precision
    if question.engine != "weft" or precision not in MIXES:
        return
    stored, held = weight_bytes(shape, precision), sum_by_kind(shape, held_precision(precision), whole(shape)).total
    if held > UNPACKED * stored:
        yield create_note("gguf_unpacked", precision=precision, file_bytes=stored, held_bytes=held)


def _fp8_units(question: Question, best: Candidate) -> Iterator[Note]:
    """Our own engine multiplies FP8 weights on every GPU, but in 16 bits on one without FP8 units."""
    if question.engine != "weft" or best.layout.precision != "fp8" or question.cluster.on_cpu:
        return
    gpus = (question.cluster.devices[number] for number in best.layout.gpus)
    older = next((gpu for gpu in gpus if gpu.kind == "gpu" and gpu.capability < FP8_CAPABILITY), None)
    if older:
        yield create_note("no_fp8_units", gpu=older.name, capability=older.capability, needed=FP8_CAPABILITY)


def _padding(question: Question, best: Candidate) -> Iterator[Note]:
    """Engines that cut evenly need whole groups of columns that share a scale on every rank."""
    ranks, precision = best.layout.parallelism.tensor_parallel, best.layout.precision
    group = scale_columns(question.shape, precision)
    if question.engine not in EVEN or ranks == 1 or group == 1:
        return
    for part, width in _ffn_widths(question, best).items():
        padded = -(-width // (group * ranks)) * group * ranks
        if padded != width:
            yield create_note(
                "padded_columns",
                engine=question.engine,
                group=group,
                width=width,
                part=part,
                ranks=ranks,
                precision=precision,
                padded=padded,
            )


def _ffn_widths(question: Question, best: Candidate) -> dict[str, int]:
    """Columns of the MLP and of each expert that ranks divide, 0 for none."""
    shape, experts = question.shape, question.shape.experts
    if experts is None:
        return {"MLP": shape.ffn}
    whole_experts = best.layout.parallelism.expert_parallel > 1
    return {"MLP": shape.ffn, "experts": 0 if whole_experts else experts.width}


def _max_memory_of_unused_cpu(question: Question, best: Candidate | None) -> Iterator[Note]:
    cpu = question.cluster.cpu
    used = best is not None and uses_cpu(question, best)
    if cpu is not None and cpu.limit_bytes and not used:
        yield create_note("max_memory_without_effect", device="cpu", limit=f"{cpu.limit_bytes / 1e9:g}GB")


def _max_memory(question: Question, best: Candidate | None) -> Iterator[Note]:
    """The part of the GPUs that --max-memory leaves, and a CPU that is allowed but gets no layers."""
    yield from _max_memory_of_unused_cpu(question, best)
    limits = [(number, gpu.limit_bytes) for number, gpu in enumerate(question.cluster.gpus)]
    given = [_limit(question, number, size) for number, size in limits if size]
    if given:
        yield create_note("max_memory", limits=given[:MAX_LISTED_LIMITS], others=len(given[MAX_LISTED_LIMITS:]))
    out = [number for number, size in limits if size == 0]
    if out:
        yield create_note("gpus_left_out", count=len(out), gpus=out)


def _limit(question: Question, number: int, size: int) -> str:
    """ "20.0 GB of GPU 0" """
    return f"{format_bytes(size)} of {'the memory of the CPU' if question.cluster.on_cpu else f'GPU {number}'}"


def _rounded_split(question: Question, best: Candidate) -> Iterator[Note]:
    """A tensor split is in whole groups of heads, for any weights."""
    weights = question.constraints.tensor_split
    if not weights:
        return
    shape = question.shape
    heads = [len(place.q_heads) for place in best.layout.places[: best.layout.parallelism.tensor_parallel]]
    shares = [weight / sum(weights) for weight in weights]
    off = max(abs(count / shape.q_heads - share) for count, share in zip(heads, shares, strict=True))
    if off > ROUNDED:
        yield create_note(
            "tensor_split_rounded", split=weights, heads=heads, q_heads=shape.q_heads, kv_heads=shape.kv_heads
        )


def _device_map(question: Question, best: Candidate) -> Iterator[Note]:
    """Costs of a device map that a pipeline chosen by the search would not have."""
    layout = best.layout
    if not question.constraints.devices:
        return
    if question.shape.tied and layout.parallelism.pipeline_parallel > 1:
        yield create_note("head_copied", gpu=layout.gpus[-1], head_bytes=best.memory.ranks[-1].weights.head)
    if len(set(layout.gpus)) < len(layout.gpus):
        yield create_note("stages_take_turns", gpus=layout.gpus, own_process=question.engine == "weft")
