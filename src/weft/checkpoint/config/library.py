"""Shape of a model that runs through Transformers' class for it, as that class describes itself.

This package does not import Transformers: a child process builds the class without memory for its weights
(`weft.ranks.models.library.describe`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec

from weft.checkpoint.architectures.library import PREFIX, LibraryModel
from weft.checkpoint.architectures.shape import Attention, Dense, DType, LayerSpec, ModelShape, Rope
from weft.checkpoint.files.fields import Fields
from weft.errors import ModelError
from weft.formatting import extra_hint

DESCRIBER = "weft.ranks.models.library.describe"
SECONDS = 300  # the child's limit; it takes a few
NAMES = "models/auto/modeling_auto.py"  # of Transformers: the classes that it knows
OLDEST = 5  # major version of Transformers whose classes describe their cuts and let their attention be replaced
EXTRA = extra_hint("transformers")


class LibraryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The child's answer: what Weft has to know of a model, or the reason not to run it (`refusal`, else "").

    `scale` is the factor on the product of query and key; `windows` has each layer's sliding window in tokens, None for
    the whole context. The other fields are as in ModelShape and its parts.
    """

    refusal: str = ""
    name: str = ""
    model: LibraryModel | None = None
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    scale: float = 0.0
    windows: tuple[int | None, ...] = ()
    ffn: int = 0
    hidden: int = 0
    vocab: int = 0
    max_positions: int = 0
    tied: bool = False
    dtype: str | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()


def knows(architecture: str) -> bool:
    """Return True if Transformers is installed and has a class of this name."""
    folder = library_folder()
    if folder is None or not (folder / NAMES).is_file():
        return False
    return f'"{architecture}"' in (folder / NAMES).read_text()


def is_installed() -> bool:
    """Return True if Transformers is installed, in whatever version."""
    return bool(_package_places())


def _package_places() -> list[str] | None:
    spec = find_spec("transformers")
    return None if spec is None else spec.submodule_search_locations


def library_folder() -> Path | None:
    """Folder of the package transformers; None if it is not installed. Raises ModelError if its version is too old."""
    places = _package_places()
    if not places:
        return None
    version = metadata.version("transformers")
    if int(version.partition(".")[0]) < OLDEST:
        raise ModelError(
            f"models that Weft has no table of run through Transformers {OLDEST} or newer, and {version} is installed: "
            f"{EXTRA}",
            code="transformers-too-old",
        )
    return Path(places[0])


def shape_from_library(config: Fields, own: DType = "bfloat16") -> ModelShape:
    """The shape that Transformers' class gives a model with this config; `own` is the tensors' dtype.

    Raises ModelError if Transformers is missing, or for a model that cannot be run this way, with the reason.
    """
    report = _describe(msgspec.json.encode(config.values).decode(), config.where)
    assert report.model is not None
    ffn = Dense(width=report.ffn)
    layers = tuple(
        LayerSpec(
            mixer=Attention(
                heads=report.heads,
                kv_heads=report.kv_heads,
                head_dim=report.head_dim,
                scale=report.scale,
                rope=Rope(kind="none"),
                window=window,
            ),
            ffn=ffn,
        )
        for window in report.windows
    )
    dtypes: dict[str | None, DType] = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
    return ModelShape(
        architecture=PREFIX + report.name,
        layers=layers,
        hidden=report.hidden,
        vocab=report.vocab,
        max_positions=report.max_positions,
        tied=report.tied,
        dtype=dtypes.get(report.dtype, own),
        library=report.model,
        bos=report.bos,
        eos=report.eos,
    )


def _describe(config: str, where: str) -> LibraryReport:
    if library_folder() is None:
        raise ModelError(
            f"{where}: this model runs through Transformers' class for it, and Transformers is not installed: {EXTRA}",
            code="transformers-not-installed",
        )
    report = _ask_child(config)
    if report.refusal:
        raise ModelError(
            f"{where}: {report.refusal}; docs/models.md lists the models that run", code="not-run-through-transformers"
        )
    return report


@lru_cache(maxsize=8)
def _ask_child(config: str) -> LibraryReport:
    """The report of the child process on a config.json."""
    command = [sys.executable, "-P", "-m", DESCRIBER]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            command, input=config, capture_output=True, text=True, timeout=SECONDS, env=offline, check=True
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=LibraryReport)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"status {error.returncode}"
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError, IndexError) as error:
        reason = str(error)
    raise ModelError(f"Transformers cannot describe the model: {reason:.300}", code="cannot-describe-model")
