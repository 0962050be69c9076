"""The checkpoint that an engine loads for a plan, or a description of the checkpoint that the user must find."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from weft.checkpoint.architectures.model import Model
from weft.checkpoint.files import gguf_types
from weft.checkpoint.hub import demo, model_names
from weft.checkpoint.names import catalogue, gguf_reference
from weft.checkpoint.names.gguf_reference import GgufReference
from weft.checkpoint.quantised.precision import canonical
from weft.checkpoint.quantised.schemes import online_quantization
from weft.study.export.shell import Placeholder

# Engines convert between these while loading; all engines use these names.
FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Common names of published checkpoints by precision.
CALLED = {
    "int4": "an AWQ or GPTQ 4-bit checkpoint",
    "int8": "a GPTQ or W8A16 8-bit checkpoint",
    "fp8": "an FP8 checkpoint",
    "mxfp4": "an MXFP4 checkpoint",
    "nvfp4": "an NVFP4 checkpoint",
}
DEMO = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the demo's model for other engines, which do not include it
MODEL = "MODEL"  # the placeholder's name


class CheckpointSource(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint to load. `name` is a name on the hub or (`local`) a path; if it is "", `wanted` describes the
    checkpoint to look for. `quantised` is the precision that the engine makes of it while loading. `title` is its name
    for people. `whole` is the unquantised model of a GGUF file on the hub.
    """

    name: str = ""
    wanted: str = ""
    local: bool = False
    quantised: str = ""
    title: str
    whole: str = ""

    @property
    def placeholders(self) -> list[Placeholder]:
        """The checkpoint as a variable that the user must set, if its name is not known."""
        return [] if self.name else [Placeholder(MODEL, self.wanted)]

    @property
    def shell(self) -> str:
        """The checkpoint in a command line."""
        return self.name or self.placeholders[0].shell

    @property
    def compose(self) -> str:
        """The checkpoint in a Compose file, in which $ begins a variable and $$ is a dollar sign."""
        return self.name.replace("$", "$$") or self.placeholders[0].demand

    @property
    def word(self) -> str:
        """The checkpoint in a file without variables."""
        return self.name or "REPLACE_WITH_" + re.sub(r"\W+", "_", self.wanted).upper()


def find_checkpoint(typed: str, model: Model, precision: str, engine: str) -> CheckpointSource:
    """Find what `engine` loads for `model`, which the user named as `typed`, in `precision`."""
    own, path = canonical(model.precision), Path(typed).expanduser()
    reference = gguf_reference.parse_address(typed)
    if reference is not None:
        return _of_reference(reference, own, precision, engine)
    title = path.name.removesuffix(".gguf") if path.exists() else model.name
    stored = _stored(typed, model, own, engine, title)
    if precision == own or {precision, own} <= {*FLOATS}:
        return stored
    if is_quantised_at_load(precision, own, engine):
        quantised = "none" if precision in FLOATS else online_quantization(precision) or precision
        return msgspec.structs.replace(stored, quantised=quantised)
    return CheckpointSource(wanted=f"{describe_precision(precision)} of {title}", title=title)


def _of_reference(reference: GgufReference, own: str, precision: str, engine: str) -> CheckpointSource:
    """The checkpoint of a GGUF file on the hub; in another precision, its unquantised model."""
    title, whole = gguf_reference.short_name(reference), model_names.whole_model(reference) or ""
    if precision == own:
        name = f"{reference.repository}:{reference.quantization}" if engine == "vllm" else str(reference)
        return CheckpointSource(name=name, title=title, whole=whole)
    if precision in FLOATS and whole:
        return CheckpointSource(name=whole, title=whole)
    return CheckpointSource(wanted=f"{describe_precision(precision)} of {whole or title}", title=title)


def is_quantised_at_load(precision: str, own: str, engine: str) -> bool:
    """Return True if the engine converts a checkpoint's `own` precision to `precision` while loading."""
    if engine == "vllm":
        return precision == "fp8" and own in FLOATS
    return engine == "weft" and (precision in FLOATS or online_quantization(precision) is not None)


def describe_precision(precision: str) -> str:
    """Description of a checkpoint of a precision."""
    if precision in gguf_types.MIXES:
        return f"a GGUF file in {precision.upper()}"
    return CALLED.get(precision, f"a {precision} checkpoint")


def _stored(typed: str, model: Model, precision: str, engine: str, title: str) -> CheckpointSource:
    """The checkpoint with the precision that the model's name stands for."""
    if Path(typed).expanduser().exists():
        return CheckpointSource(name=f"{Path(typed).expanduser().resolve()}", local=True, title=title)
    if model.name == demo.NAME and engine == "weft":
        return CheckpointSource(name=demo.NAME, title=demo.NAME)
    if model.name == demo.NAME:
        return CheckpointSource(wanted=f"{describe_precision(precision)} of {DEMO}", title=DEMO)
    if "/" in typed:
        same = typed.casefold() == model.name.casefold()
        return CheckpointSource(name=model.name if same else typed, title=model.name if same else typed)
    known = catalogue.find_known(model.name)
    if known and known.precision == model.precision:
        return CheckpointSource(name=model.name, title=title)
    # A short name that ends in -AWQ: several people publish such a copy.
    return CheckpointSource(wanted=f"{describe_precision(precision)} of {title}", title=title)
