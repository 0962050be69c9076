"""Cache file of the tile sizes of attention that were the fastest on this device, measured by `weft bench calibrate
MODEL` for the engines that start here."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import msgspec
import torch
import triton

from weft._version import __version__
from weft.cache import cache_path, write_cache_file
from weft.logs import event_fields
from weft.ranks.kernels.attention import AttentionShape
from weft.ranks.kernels.triton.tuning import DECODE_CANDIDATES, DEFAULT, PREFILL_CANDIDATES, Tunings

logger = logging.getLogger("weft")


class SavedTunings(msgspec.Struct, frozen=True):
    """Content of the file: the sizes, and what they were measured for, see `tunings_key`."""

    of: list[str]
    tunings: Tunings


def load_tunings(device: torch.device, shape: AttentionShape) -> Tunings:
    """The sizes that were measured on this device, or the defaults."""
    key = tunings_key(device, shape)
    try:
        saved = msgspec.json.decode(tunings_path(key).read_bytes(), type=SavedTunings)
    except (FileNotFoundError, RuntimeError):  # RuntimeError: there is no home, and so no cache
        return DEFAULT
    except (OSError, ValueError) as error:
        logger.debug("%s is damaged and ignored: %s", tunings_path(key), error)
        return DEFAULT
    decode, prefill = saved.tunings.decode, saved.tunings.prefill
    if saved.of != key or not decode or min(decode) < 1:
        logger.debug("%s is not about this device and ignored", tunings_path(key))
        return DEFAULT
    if not ({*decode.values()} <= {*DECODE_CANDIDATES} and prefill in PREFILL_CANDIDATES):
        logger.debug("%s has sizes that are no longer among the candidates and is ignored", tunings_path(key))
        return DEFAULT
    logger.info(
        "Attention in the sizes that were the fastest when they were measured (%s)",
        tunings_path(key),
        extra=event_fields("measured-sizes"),
    )
    return saved.tunings


def save_tunings(device: torch.device, shape: AttentionShape, tunings: Tunings) -> Path:
    """Write the sizes to the cache for the next start; return the file. Raises OSError, RuntimeError or WeftError if
    that is not possible."""
    key = tunings_key(device, shape)
    write_cache_file(tunings_path(key), msgspec.json.encode(SavedTunings(key, tunings)))
    return tunings_path(key)


def tunings_key(device: torch.device, shape: AttentionShape) -> list[str]:
    """Everything that a measurement depends on: the GPU, the heads and dtypes, and the versions that determine its
    code."""
    card = device.type
    if device.type == "cuda":
        card = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    heads = (shape.q_heads, shape.kv_heads, shape.head_dim, shape.dtype, shape.cache_dtype)
    return [card, *map(str, heads), str(torch.__version__), triton.__version__, __version__]


def tunings_path(key: list[str]) -> Path:
    """The cache file for a key. Raises RuntimeError if there is no home directory."""
    return cache_path() / f"tunings-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.json"
