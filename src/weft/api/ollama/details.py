"""Facts of models in Ollama's form: of the served model, and of models in the hub's cache."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from weft.api.ollama.types import ModelDetails, ModelRow, RunningRow
from weft.api.service.service import Service
from weft.checkpoint.architectures.parameters import parameter_count
from weft.checkpoint.architectures.registry import find_architecture
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.files import gguf
from weft.checkpoint.files.gguf_types import FILE_TYPES
from weft.checkpoint.hub.local_models import LocalModel
from weft.checkpoint.hub.model_names import tagged
from weft.checkpoint.quantised.precision import OF_DTYPE
from weft.errors import WeftError
from weft.plan.plan import Plan

NEVER = "2318-01-01T00:00:00Z"  # Ollama's time for a model that stays loaded


def timestamp(seconds: float) -> str:
    """Seconds since 1970 as RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def size_label(parameters: int) -> str:
    """A number of parameters as "8.0B" or "134.52M"."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 10**9 else f"{parameters / 1e6:.2f}M"


def served_details(plan: Plan) -> ModelDetails:
    """Facts of the model that an engine runs."""
    family = family_of(plan.shape)
    return ModelDetails(
        format="gguf" if plan.load_format == "gguf" else "safetensors",
        family=family,
        families=[family],
        parameter_size=size_label(parameter_count(plan.shape)),
        quantization_level=quantization_of(plan),
    )


def family_of(shape: ModelShape) -> str:
    """The architecture's name as in GGUF files, else the name of its class."""
    if shape.library is not None:
        return shape.architecture
    return find_architecture(shape.architecture).gguf or shape.architecture


def quantization_of(plan: Plan) -> str:
    """Quantisation of the weights in Ollama's spelling, such as "Q4_K_M" or "BF16"."""
    if plan.quantization not in ("none", "gguf"):
        return plan.quantization.upper()
    kind = gguf_metadata(plan).get("general.file_type")
    if isinstance(kind, int) and kind in FILE_TYPES:
        return FILE_TYPES[kind].upper()
    if plan.shape.published is not None:
        return plan.shape.published.precision.upper()
    return OF_DTYPE[plan.shape.dtype].upper()


def gguf_metadata(plan: Plan) -> Mapping[str, gguf.Scalar]:
    """The single values of a GGUF file's header; {} for another checkpoint, or a file that was removed."""
    return _metadata(plan.checkpoint) if plan.load_format == "gguf" else {}


@cache
def _metadata(path: str) -> Mapping[str, gguf.Scalar]:
    try:
        metadata = gguf.read_gguf(path).metadata
    except WeftError:
        return {}
    return {name: value for name, value in metadata.items() if not isinstance(value, gguf.Array)}


def model_info(plan: Plan) -> dict[str, object]:
    """Figures of a model under the keys of GGUF files; for a GGUF file, its own figures."""
    own = {name: value for name, value in gguf_metadata(plan).items() if "chat_template" not in name}
    return {**figures_of(plan.shape), **own}


def figures_of(shape: ModelShape) -> dict[str, object]:
    """Figures of a model under the keys of GGUF files."""
    family = family_of(shape)
    return {
        "general.architecture": family,
        "general.parameter_count": parameter_count(shape),
        f"{family}.block_count": len(shape.layers),
        f"{family}.context_length": shape.max_positions,
        f"{family}.embedding_length": shape.hidden,
        f"{family}.attention.head_count": shape.q_heads,
        f"{family}.attention.head_count_kv": shape.kv_heads,
    }


def weight_bytes(plan: Plan) -> int:
    """Bytes of the weights of all ranks."""
    return sum(plan.weight_bytes(rank) for rank in range(len(plan.places)))


def served_digest(service: Service) -> str:
    """A hash that changes with the checkpoint's path and the weights' size: the files themselves are not hashed."""
    plan = service.plan
    return hashlib.sha256(f"{plan.checkpoint}:{weight_bytes(plan)}".encode()).hexdigest()


def served_row(service: Service, name: str) -> ModelRow:
    """The served model in /api/tags."""
    plan = service.plan
    path = Path(plan.checkpoint)
    modified_s = path.stat().st_mtime if plan.checkpoint and path.exists() else service.created
    return ModelRow(
        name=tagged(name),
        model=tagged(name),
        modified_at=timestamp(modified_s),
        size=weight_bytes(plan),
        digest=served_digest(service),
        details=served_details(plan),
    )


def running_row(service: Service, name: str) -> RunningRow:
    """The served model in /api/ps. A server keeps the model that it was started with."""
    plan = service.plan
    size = sum(
        weight_bytes(replica.plan) + sum(replica.ready.num_blocks * rank.block_bytes for rank in replica.ready.ranks)
        for replica in service.engine.replicas
    )
    return RunningRow(
        name=tagged(name),
        model=tagged(name),
        size=size,
        digest=served_digest(service),
        details=served_details(plan),
        expires_at=NEVER,
        size_vram=0 if plan.on_cpu else size,
        context_length=service.frontend.max_model_len,
    )


def local_row(model: LocalModel) -> ModelRow:
    """A model of the hub's cache in /api/tags."""
    family, size, level = _facts(model.files[0], model.format)
    return ModelRow(
        name=tagged(model.name),
        model=tagged(model.name),
        modified_at=timestamp(model.modified_s),
        size=model.nbytes,
        digest=model.digest,
        details=ModelDetails(
            format=model.format,
            family=family,
            families=[family] if family else [],
            parameter_size=size,
            quantization_level=model.quantization or level,
        ),
    )


@cache
def _facts(file: str, format: str) -> tuple[str, str, str]:
    """Family, number of parameters and precision of a local model; "" for what its headers do not say."""
    from weft.checkpoint.lookup import look_up

    try:
        model = look_up(file if format == "gguf" else str(Path(file).parent))
    except WeftError:
        return "", "", ""
    return family_of(model.shape), size_label(model.params), model.precision.upper()
