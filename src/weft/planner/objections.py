"""Objections: why an engine or a GPU cannot run a cut, whatever its memory."""

from __future__ import annotations

from weft.architectures.kv import number_bytes
from weft.architectures.parameters import RUNNABLE
from weft.architectures.shape import ModelShape
from weft.formats import gguf_types
from weft.formats.precision import OF_DTYPE
from weft.formatting import format_version
from weft.hardware.gpus import BF16_CAPABILITY
from weft.plan.backends import no_narrow_cache
from weft.planner.cuts import Draft
from weft.planner.profiles import engines, runs_on_cpu
from weft.planner.question import Question

# Engines that
EVEN = ("vllm", "trtllm", "sglang")  # cut heads evenly,
LAYERS_ONLY = ("llama.cpp", "transformers")  # know no tensor parallelism,
SHARING = ("weft", "transformers")  # run several stages on one GPU
# Precisions that Weft computes with: whole numbers, and few bits (formats.schemes), as it does with GGUF's mixes.
WHOLE, KEPT = tuple(OF_DTYPE.values()), ("int8", "int4")
# What kernels unpack to bfloat16, or is that.
NEED_BF16 = ("bf16", "fp8", "mxfp4", "nvfp4")


def objection(question: Question, draft: Draft) -> str | None:
    """The first thing that stands against a draft, in numbers, or None."""
    return (
        _cpu(question, draft)
        or _gpu(draft)
        or _cache(question, draft)
        or _format(question, draft)
        or _heads(question, draft)
        or _depth(question, draft)
        or _turns(question, draft)
    )


def _cpu(question: Question, draft: Draft) -> str | None:
    on_cpu = draft.devices[0].gpu.kind == "cpu"
    if not on_cpu or runs_on_cpu(question.engine):
        return None
    known = ", ".join(filter(runs_on_cpu, engines()))
    return f"nothing is known of {question.engine} on a CPU; --engine takes {known} there, or describe GPUs with --gpus"


def _gpu(draft: Draft) -> str | None:
    if draft.cut.precision not in NEED_BF16:
        return None
    for gpu in (device.gpu for device in draft.devices):
        if gpu.kind == "gpu" and gpu.capability < BF16_CAPABILITY:
            other = "--precision fp16" if draft.cut.precision == "bf16" else "--precision int8 or int4"
            return (
                f"{gpu.name} has compute capability {format_version(gpu.capability)}; {draft.cut.precision} needs "
                f"{format_version(BF16_CAPABILITY)}: use {other}"
            )
    return None


def _cache(question: Question, draft: Draft) -> str | None:
    """Of our own engine; others take what they are told."""
    if question.engine != "weft" or question.kv_dtype is None or number_bytes(question.kv_dtype) > 1:
        return None
    gpus = [device.gpu for device in draft.devices if device.gpu.kind == "gpu"]
    return no_narrow_cache(question.kv_dtype, [(gpu.name, gpu.capability) for gpu in gpus])


def _format(question: Question, draft: Draft) -> str | None:
    in_gguf = draft.cut.precision in gguf_types.MIXES
    if in_gguf and question.engine in ("trtllm", "transformers"):
        return f"{question.engine} does not run GGUF's {draft.cut.precision}; llama.cpp and weft do"
    if question.engine == "llama.cpp" and draft.cut.precision in ("fp8", "int8", "int4", "nvfp4"):
        return f"llama.cpp reads GGUF: of {draft.cut.precision} checkpoints it has none; use q8_0 or q4_k_m"
    return None


def _heads(question: Question, draft: Draft) -> str | None:
    ranks, shape, engine = draft.cut.tensor_parallel, question.shape, question.engine
    if engine in LAYERS_ONLY and (ranks > 1 or draft.cut.expert_parallel > 1):
        those = f"{ranks} ranks" if ranks > 1 else f"{draft.cut.data_parallel} replicas"
        return f"{engine} puts whole layers on GPUs; {those} cannot share one"
    if len(set(question.wish.tensor_split or ())) > 1 and engine in EVEN:
        return f"{engine} cuts evenly; --tensor-split is for weft"
    if engine not in EVEN or ranks == 1:
        return None
    even = [
        size for size in range(1, shape.q_heads + 1) if shape.q_heads % size == 0 and _kv_even(shape.kv_heads, size)
    ]
    if ranks not in even:
        return (
            f"{shape.q_heads} query and {shape.kv_heads} KV heads are not even over {ranks} ranks, as {engine} needs "
            f"them: {', '.join(map(str, even))}"
        )
    return None


def _turns(question: Question, draft: Draft) -> str | None:
    gpus = draft.gpus
    again = next((number for number in gpus if gpus.count(number) > 1), None) if question.wish.devices else None
    if again is None or question.engine in SHARING:
        return None
    stages = " and ".join(str(stage) for stage, number in enumerate(gpus) if number == again)
    return f"{question.engine} runs one stage on a GPU; GPU {again} has stages {stages}, which {', '.join(SHARING)} run"


def _kv_even(kv_heads: int, ranks: int) -> bool:
    return kv_heads % ranks == 0 or ranks % kv_heads == 0


def _depth(question: Question, draft: Draft) -> str | None:
    stages, layers = draft.cut.pipeline_parallel, question.shape.layers
    return f"{stages} stages for {layers} layers" if stages > layers else None


def not_run(shape: ModelShape, precision: str) -> list[str]:
    """What Weft's own engine lacks to run this model, in words; nothing where it does."""
    missing = []
    if shape.architecture not in RUNNABLE:
        missing.append(f"{shape.architecture} (it runs {', '.join(RUNNABLE)})")
    if not runs(precision):
        missing.append(f"{precision} weights (it runs {', '.join((*WHOLE, *KEPT))} and GGUF files)")
    return missing


def runs(precision: str) -> bool:
    """Whether Weft's own engine holds weights in this precision and computes with them; what it does not run yet it
    plans for all the same."""
    return precision in (*WHOLE, *KEPT, *gguf_types.MIXES)
