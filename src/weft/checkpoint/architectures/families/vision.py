"""Vision-language models, of which Weft reads the language model and leaves the vision part out."""

from __future__ import annotations

from msgspec.structs import replace

from weft.checkpoint.architectures.architecture import Architecture

LANGUAGE_MODEL_MODULES = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
)


def inside_vision_model(
    language: Architecture, name: str, model_type: str, modules: tuple[tuple[str, str], ...]
) -> Architecture:
    """The architecture of a vision-language model around a language model, whose config lies in `text_config`."""
    names = {field: "language_model." + getattr(language.names, field) for field in ("embed", "layer", "norm", "head")}
    return replace(
        language,
        name=name,
        config=replace(language.config, model_type=model_type, inner="text_config"),
        names=replace(language.names, **names),
        gguf="",
        modules=modules,
    )
