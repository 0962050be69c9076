"""Sharded state: a checkpoint as the ranks of one layout hold it, a safetensors file for each rank.

The files have the names of vLLM's sharded state. A parameter is a tensor of its file; one that is quantised has a
tensor for each of its parts, NAME.PART. The header of every file says what the files hold: a `ShardedState` as JSON, in
the format's own metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import DType, ModelShape
from weft.checkpoint.files import safetensors
from weft.checkpoint.files.tensor import TensorInfo
from weft.errors import ModelError

KEY = "weft.sharded_state"  # in a file's metadata
FORMAT: Literal[1] = 1  # grows if a field changes its meaning, or the ranks hold something in another way
TOKENIZER = "tokenizer.gguf"  # tokenizer and settings of a model that was a GGUF file, without tensors


class ShardedState(msgspec.Struct, frozen=True, kw_only=True):
    """A layout, and the form of the weights that its ranks hold.

    - `cut`: the options of an EngineConfig that cut the model so.
    - `precision`: name of the precision that the weights are held in, as `weft plan` shows it.
    - `quantization`: as in the EngineConfig. `quantised`: types of the original checkpoint's tensors, as in
      `Checkpoint`. `schemes`: as in `Plan`.
    - `rank`: the rank of the file that this was read from.
    """

    format: Literal[1]
    rank: int
    model: str
    shape: ModelShape
    dtype: DType
    precision: str
    quantization: str
    quantised: dict[str, str]
    schemes: dict[str, str]
    places: tuple[Place, ...]
    cut: dict[str, Any]
    generation: dict[str, float | int | bool]


def file_name(rank: int) -> str:
    """Name of a rank's file."""
    return f"model-rank-{rank}-part-0.safetensors"


def is_sharded(folder: Path) -> bool:
    """Return True if a directory holds sharded state."""
    return (folder / file_name(0)).is_file()


def read_state(folder: Path, rank: int = 0) -> ShardedState:
    """Read what the file of a rank says about all files. Raises ModelError, also if the file of any rank is missing."""
    path = folder / file_name(rank)
    text = safetensors.read_metadata(path).get(KEY)
    if text is None:
        raise ModelError(
            f"{path} does not say which layout it is for; weft shard writes files that do", code="shard-without-layout"
        )
    try:
        state = msgspec.json.decode(text, type=ShardedState)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(
            f"{path} describes its layout in a way that this version does not read ({error!s:.200}); write it "
            "again with weft shard",
            code="damaged-shard-layout",
        ) from None
    missing = [number for number in range(len(state.places)) if not (folder / file_name(number)).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {file_name(missing[0])}, one of the files of its {len(state.places)} ranks; copy it "
            "there, or write all again with weft shard",
            code="missing-weight-file",
        )
    return state


def read_rank(folder: Path, rank: int) -> tuple[ShardedState, dict[str, TensorInfo]]:
    """Read what the file of a rank says about all files, and locate its tensors. Raises ModelError."""
    state = read_state(folder, rank)
    if state.rank != rank:
        raise ModelError(
            f"{folder / file_name(rank)} is the file of rank {state.rank}; give each its own name again",
            code="shard-of-other-rank",
        )
    return state, safetensors.read_safetensors(folder / file_name(rank))


def cut_words(cut: Mapping[str, object]) -> str:
    """The options of a cut as flags, for messages."""
    words = []
    for name, value in cut.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value not in (None, False):
            words.append(
                f"{flag} {','.join(f'{part:g}' for part in value) if isinstance(value, list | tuple) else value}"
            )
    return " ".join(words) or "--tensor-parallel-size 1"
