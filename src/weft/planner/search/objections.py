"""Objections: the reasons for which an engine or a GPU cannot run a layout, whatever its memory."""

from __future__ import annotations

from collections.abc import Callable

from weft.checkpoint.architectures.kv import number_bytes
from weft.checkpoint.architectures.registry import RUNNABLE
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.files import gguf_types
from weft.checkpoint.quantised.precision import OF_DTYPE
from weft.machine.hardware.gpus import BF16_CAPABILITY
from weft.plan.backends import no_narrow_cache
from weft.planner.note import Note, create_note
from weft.planner.profiles import engine_names, runs_on_cpu
from weft.planner.question import Question
from weft.planner.search.cuts import CandidateLayout

EVEN = ("vllm", "trtllm", "sglang")  # engines that cut heads evenly
LAYERS_ONLY = ("llama.cpp", "transformers")  # engines without tensor parallelism
SHARING = ("weft", "transformers")  # engines that run several stages on one GPU
# Precisions that Weft computes with: dtypes, and few bits (formats.schemes), as it does with GGUF's mixes.
WHOLE, KEPT = tuple(OF_DTYPE.values()), ("int8", "int4", "fp8", "mxfp4")
# bfloat16, and precisions that kernels unpack to it.
NEED_BF16 = ("bf16", "fp8", "mxfp4", "nvfp4")
NO_GGUF = ("trtllm", "transformers")
NOT_IN_GGUF = ("fp8", "int8", "int4", "nvfp4")


def objection(question: Question, layout: CandidateLayout) -> Note | None:
    """The first reason against a layout, or None."""
    rules: tuple[Callable[[Question, CandidateLayout], Note | None], ...] = (
        _engine_on_cpu,
        _bf16_on_gpu,
        _kv_cache_dtype,
        _file_format,
        _whole_layers,
        _even_heads,
        _depth,
        _shared_gpus,
        _draft_model,
    )
    return next((note for rule in rules if (note := rule(question, layout))), None)


def _engine_on_cpu(question: Question, layout: CandidateLayout) -> Note | None:
    kinds = {device.gpu.kind for device in layout.devices}
    if len(kinds) > 1 and question.engine != "weft":
        return create_note("engine_not_beside_cpu", engine=question.engine)
    if "cpu" not in kinds or runs_on_cpu(question.engine):
        return None
    known = [engine for engine in engine_names() if runs_on_cpu(engine)]
    return create_note("engine_not_on_cpu", engine=question.engine, known=known)


def _bf16_on_gpu(question: Question, layout: CandidateLayout) -> Note | None:
    precision = layout.cut.precision
    if precision not in NEED_BF16 or (precision == "fp8" and question.engine == "weft"):
        return None  # our own engine's kernels compute with FP8 weights in float16 too
    for gpu in (device.gpu for device in layout.devices):
        if gpu.kind == "gpu" and gpu.capability < BF16_CAPABILITY:
            return create_note(
                "gpu_without_bf16",
                gpu=gpu.name,
                capability=gpu.capability,
                precision=precision,
                needed=BF16_CAPABILITY,
                instead="--precision fp16" if precision == "bf16" else "--precision int8 or int4",
            )
    return None


def _kv_cache_dtype(question: Question, layout: CandidateLayout) -> Note | None:
    """For our own engine only; other engines are assumed to support the cache that was asked for."""
    if question.engine != "weft" or question.kv_dtype is None or number_bytes(question.kv_dtype) > 1:
        return None
    kinds = {device.gpu.kind for device in layout.devices}
    gpus = [device.gpu for device in layout.devices if kinds == {"gpu"}]
    reason = no_narrow_cache(question.kv_dtype, [(gpu.name, gpu.capability) for gpu in gpus], question.shape)
    return create_note("kv_cache_dtype", reason=reason) if reason else None


def _file_format(question: Question, layout: CandidateLayout) -> Note | None:
    precision = layout.cut.precision
    if precision in gguf_types.MIXES and question.engine in NO_GGUF:
        return create_note("gguf_not_in_engine", engine=question.engine, precision=precision)
    if question.engine == "llama.cpp" and precision in NOT_IN_GGUF:
        return create_note("only_gguf", precision=precision)
    return None


def _whole_layers(question: Question, layout: CandidateLayout) -> Note | None:
    engine, cut = question.engine, layout.cut
    if engine not in LAYERS_ONLY:
        return None
    if cut.parallelism.tensor_parallel > 1:
        return create_note("ranks_share_layer", engine=engine, ranks=cut.parallelism.tensor_parallel)
    if cut.parallelism.deals_experts:
        return create_note("replicas_share_layer", engine=engine, replicas=cut.parallelism.data_parallel)
    return None


def _even_heads(question: Question, layout: CandidateLayout) -> Note | None:
    ranks, shape, engine = layout.cut.parallelism.tensor_parallel, question.shape, question.engine
    if engine not in EVEN:
        return None
    if len(set(question.constraints.tensor_split or ())) > 1:
        return create_note("uneven_tensor_split", engine=engine)
    if ranks == 1 or _even(shape, ranks):
        return None
    even = [size for size in range(1, shape.q_heads + 1) if _even(shape, size)]
    return create_note(
        "heads_not_even", q_heads=shape.q_heads, kv_heads=shape.kv_heads, ranks=ranks, engine=engine, even=even
    )


def _even(shape: ModelShape, ranks: int) -> bool:
    """Return True if query heads are even over the ranks, and KV heads are even or evenly replicated."""
    kv_heads = shape.kv_heads
    return shape.q_heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _depth(question: Question, layout: CandidateLayout) -> Note | None:
    stages, layers = layout.cut.parallelism.pipeline_parallel, len(question.shape.layers)
    return create_note("more_stages_than_layers", stages=stages, layers=layers) if stages > layers else None


def _shared_gpus(question: Question, layout: CandidateLayout) -> Note | None:
    if not question.constraints.devices or question.engine in SHARING:
        return None
    gpus = layout.gpus
    shared = next((number for number in gpus if gpus.count(number) > 1), None)
    if shared is None:
        return None
    stages = " and ".join(str(stage) for stage, number in enumerate(gpus) if number == shared)
    return create_note("stages_share_gpu", engine=question.engine, gpu=shared, stages=stages, engines=SHARING)


def _draft_model(question: Question, layout: CandidateLayout) -> Note | None:
    """The rule of `plan.speculation.check_draft_groups`."""
    drafts = question.speculation is not None and question.speculation.draft is not None
    if not drafts or not layout.cut.parallelism.shares_experts:
        return None
    return create_note("draft_of_groups", groups=layout.cut.parallelism.data_parallel)


def unsupported_reasons(shape: ModelShape, precision: str, *, draft: bool = False) -> list[Note]:
    """Features that Weft's own engine lacks to run this model, as a draft model if `draft`; empty if it runs it."""
    missing = []
    if shape.architecture not in RUNNABLE and shape.library is None:
        missing.append(
            create_note("architecture_not_run", architecture=shape.architecture, known=RUNNABLE, draft=draft)
        )
    if not computes_in(precision):
        missing.append(create_note("precision_not_run", precision=precision, known=(*WHOLE, *KEPT), draft=draft))
    return missing


def computes_in(precision: str) -> bool:
    """Return True if Weft's own engine holds weights in this precision and computes with them.

    The planner plans other precisions all the same.
    """
    return precision in (*WHOLE, *KEPT, *gguf_types.MIXES)
