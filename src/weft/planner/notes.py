"""Notes: what a reader of a plan has to know beside its figures."""

from __future__ import annotations

from collections.abc import Iterator

from weft.architectures.kv import kv_bytes_per_token
from weft.architectures.parameters import RUNNABLE
from weft.architectures.place import whole
from weft.formats.gguf_types import MIXES
from weft.formats.precision import as_held, as_published, scale_columns, summed, weight_bytes
from weft.formats.schemes import MADE
from weft.formatting import format_bytes, join_commas
from weft.plan.backends import KERNELS, no_triton
from weft.plan.memory import CPU_KV_BYTES, CPU_KV_SHARE
from weft.planner.objections import EVEN
from weft.planner.question import Question
from weft.planner.ranking import Candidate

ROUNDED = 0.05  # of all heads; what a share may be off without a word
MOST_CAPS = 8  # that are told one by one
TOLD = 1.02  # times a file's bytes that are held without a word


def notes(question: Question, best: Candidate | None) -> list[str]:
    """One line each; none where there is nothing to say."""
    return [
        *_too_long(question),
        *_held(question),
        *_on_cpu(question, best),
        *(_slow_kernels(question, best) if best else ()),
        *_guessing(question, best),
        *(_published(question, best) if best else ()),
        *(_unpacked(question, best) if best else ()),
        *question.remarks,
        *_capped(question),
        *(_padding(question, best) if best else ()),
        *(_rounded(question, best) if best else ()),
        *(_mapped(question, best) if best else ()),
    ]


def _too_long(question: Question) -> Iterator[str]:
    """The engine may be told to go further than the model was made for, so it is planned all the same."""
    asked, most = question.workload.longest, question.shape.longest
    if asked > most:
        yield f"a request of {asked:,} tokens is longer than the {most:,} that the model was made for"


def _held(question: Question) -> Iterator[str]:
    """On this machine, what is in use already."""
    for number, gpu in enumerate(question.cluster.gpus):
        if gpu.held_bytes:
            yield (
                f"{format_bytes(gpu.held_bytes)} of GPU {number}, {gpu.name}, are in use already and left out (on the "
                "machine itself weft hardware tells by whom)"
            )


def _slow_kernels(question: Question, best: Candidate) -> Iterator[str]:
    """Our own engine runs there all the same, in plain torch."""
    gpus = [question.cluster.gpus[number] for number in best.layout.gpus] if not question.cluster.on_cpu else []
    reason = no_triton(question.shape.head_dim, [(gpu.name, gpu.capability) for gpu in gpus]) if gpus else None
    if question.engine == "weft" and reason:
        yield f"{KERNELS['triton']} cannot be used: {reason}. The slower torch kernels take their place"


def _on_cpu(question: Question, best: Candidate | None) -> Iterator[str]:
    """Our own engine takes so much of a CPU's memory for its cache, unless it is told."""
    if question.engine != "weft" or not question.cluster.on_cpu:
        return
    if question.gpu_memory_utilization is not None:
        yield "a CPU has no share of memory to set; weft serve takes --kv-cache-memory-bytes there"
    if best is None:
        return
    ranks = best.memory.replicas[0].ranks
    usual = min(
        CPU_KV_BYTES, sum(rank.memory_bytes - rank.weights.total - rank.other_bytes for rank in ranks) // CPU_KV_SHARE
    )
    room = sum(rank.kv_room_bytes for rank in ranks)
    if room > usual:
        most = max(rank.kv_room_bytes for rank in ranks)
        yield (
            f"the request that must fit needs {format_bytes(room)} of KV cache, and by itself weft serve takes "
            f"{format_bytes(usual)} on this CPU: give it --kv-cache-memory-bytes {most}"
        )


def _guessing(question: Question, best: Candidate | None) -> Iterator[str]:
    """What speculation takes is counted; what it brings depends on what is asked."""
    how = question.speculation
    if how is None:
        return
    yield (
        f"speculation: every speed here is without it. A step confirms 1 to {1 + how.tokens} tokens of a request, as "
        "many as were guessed right, which depends on the texts: weft bench serve measures it"
    )
    if how.draft and best:
        *_, rank = best.layout.places[: best.layout.size : best.layout.tensor_parallel]
        memory = best.memory.replicas[0].ranks[rank.rank]
        own = kv_bytes_per_token(question.shape, best.layout.kv_dtype, rank)
        yield (
            f"the draft model {how.draft.model} runs whole on rank {rank.rank} of each replica, which samples: "
            f"{format_bytes(memory.draft_bytes)} of weights, and {memory.kv_bytes_per_token - own:,} of the "
            f"{memory.kv_bytes_per_token:,} bytes that a token's KV takes there"
        )


def _published(question: Question, best: Candidate) -> Iterator[str]:
    """What has to be there for our own engine to run it, and what it does with it."""
    shape, precision = question.shape, best.layout.precision
    if question.engine != "weft" or shape.architecture not in RUNNABLE:
        return
    own = as_published(shape, precision)
    if own and own.ordered:
        yield (
            "the columns of a group lie apart in this checkpoint (desc_act), for which Weft has no kernels: it holds "
            "the weights in 16 bits, and that is counted"
        )
    if precision == "int4" and own is None:
        made = MADE[precision]
        yield (
            "int4 here is a GPTQ or AWQ checkpoint, in groups of 128, which weft serve has to be given; to compress "
            f"the usual checkpoint while it loads use -q int4 ({made}, {format_bytes(weight_bytes(shape, made))})"
        )


def _unpacked(question: Question, best: Candidate) -> Iterator[str]:
    """What a GGUF file's weights take in our own engine, where that is more than in the file."""
    shape, precision = question.shape, best.layout.precision
    if question.engine != "weft" or precision not in MIXES:
        return
    stored, held = weight_bytes(shape, precision), summed(shape, as_held(precision), whole(shape)).total
    if held > TOLD * stored:
        yield (
            f"a {precision} file has {format_bytes(stored)} but takes {format_bytes(held)} of memory, because Weft "
            "converts some of its layers to 8 bits"
        )


def _padding(question: Question, best: Candidate) -> Iterator[str]:
    """Engines that cut evenly need whole groups of columns, those that share a scale, on every rank."""
    ranks, precision = best.layout.tensor_parallel, best.layout.precision
    group, experts = scale_columns(question.shape, precision), question.shape.experts
    if question.engine not in EVEN or ranks == 1 or group == 1:
        return
    widths = {"MLP": question.shape.ffn}
    if experts:
        dealt = best.layout.expert_parallel > 1
        # Where every layer has experts there is no other MLP.
        widths = {"MLP": question.shape.ffn if experts.dense_layers else 0, "experts": 0 if dealt else experts.ffn}
    for name, width in widths.items():
        padded = -(-width // (group * ranks)) * group * ranks
        if padded != width:
            yield (
                f"{question.engine} cuts evenly and in whole groups of {group} columns: {width:,} of the {name} over "
                f"{ranks} ranks need an {precision} checkpoint that is padded to {padded:,}"
            )


def _capped(question: Question) -> Iterator[str]:
    """What --max-memory leaves of the GPUs."""
    gpus = list(enumerate(question.cluster.gpus))
    limits = {number: gpu.limit_bytes for number, gpu in gpus if gpu.limit_bytes}
    if limits:
        on_cpu = question.cluster.on_cpu
        names = {number: "the CPU's memory" if on_cpu else f"GPU {number}" for number in limits}
        told = [f"{format_bytes(size)} of {names[number]}" for number, size in limits.items()]
        more = f" and {len(told) - MOST_CAPS} more" if len(told) > MOST_CAPS else ""
        yield f"--max-memory: at most {', '.join(told[:MOST_CAPS])}{more}, for weights, KV and the engine together"
    out = [number for number, gpu in gpus if gpu.limit_bytes == 0]
    if out:
        those = f"GPU {out[0]} is" if len(out) == 1 else f"GPUs {', '.join(map(str, out))} are"
        yield f"{those} not in --max-memory, and so not used, as with accelerate"


def _rounded(question: Question, best: Candidate) -> Iterator[str]:
    """A split by tensors is in whole groups of heads, whatever the weights."""
    weights = question.wish.tensor_split
    if not weights:
        return
    shape = question.shape
    ranks = best.layout.places[: best.layout.tensor_parallel]
    off = max(abs(len(it.q_heads) / shape.q_heads - w / sum(weights)) for it, w in zip(ranks, weights, strict=True))
    if off > ROUNDED:
        heads = ", ".join(str(len(it.q_heads)) for it in ranks)
        yield (
            f"--tensor-split {join_commas(weights)} comes to {heads} of {shape.q_heads} query heads: they are cut in "
            f"whole groups, one for each of {shape.kv_heads} KV heads"
        )


def _mapped(question: Question, best: Candidate) -> Iterator[str]:
    """What a device map costs that a pipeline of our own would not."""
    layout = best.layout
    if not question.wish.devices:
        return
    if question.shape.tied and layout.pipeline_parallel > 1:
        head = best.memory.ranks[-1].weights.head
        yield (
            f"the head is tied to the embedding, which lies on another stage: the last one, on GPU {layout.gpus[-1]}, "
            f"holds a copy of {format_bytes(head)}"
        )
    again = sorted({gpu for gpu in layout.gpus if layout.gpus.count(gpu) > 1})
    if again:
        order = ", ".join(map(str, layout.gpus))
        own = ", each in a process of its own with what that takes" if question.engine == "weft" else ""
        yield f"the layers go back and forth between GPUs ({order}): stages on one GPU take turns{own}"
