"""Request and response types of Ollama's API (docs/api.md of github.com/ollama/ollama). Durations are nanoseconds."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class ModelRequest(Struct, kw_only=True):
    """A request about one model; old clients say `name`."""

    model: str | None = None
    name: str | None = None


class PullRequest(ModelRequest, kw_only=True):
    """`insecure` is accepted and changes nothing: HF_ENDPOINT says where models come from."""

    stream: bool | None = None
    insecure: bool | None = None


class ShowRequest(ModelRequest, kw_only=True):
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


class ModelDetails(Struct, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelRow(Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ModelList(Struct):
    models: list[ModelRow]


class RunningRow(Struct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class RunningList(Struct):
    models: list[RunningRow]


class ShowAnswer(Struct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    license: str = ""


class VersionAnswer(Struct):
    version: str


class PullStatus(Struct, kw_only=True):
    """One step of a download; `total` and `completed` are bytes of the file with this `digest`."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET
