"""Kept: the sizes of the attention kernels that were the fastest on this device, as `weft bench calibrate MODEL` has
measured them, for the engines that start here."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import msgspec
import torch
import triton

from weft import __version__
from weft.cache import cache_path, write
from weft.kernels.base import AttentionShape
from weft.kernels.triton.tuning import DECODE_CANDIDATES, DEFAULT, PREFILL_CANDIDATES, Tunings

logger = logging.getLogger("weft")


class Note(msgspec.Struct, frozen=True):
    """A file of the cache: the sizes, and `of` what they are."""

    of: list[str]
    tunings: Tunings


def load_tunings(device: torch.device, shape: AttentionShape) -> Tunings:
    """What to attend with on this device: what was measured there, or else the sizes that were chosen by reading."""
    of = measured_of(device, shape)
    try:
        note = msgspec.json.decode(path(of).read_bytes(), type=Note)
    except (FileNotFoundError, RuntimeError):  # RuntimeError: there is no home, and so no cache
        return DEFAULT
    except (OSError, ValueError) as error:
        logger.debug("%s is damaged and ignored: %s", path(of), error)
        return DEFAULT
    decode, prefill = note.tunings.decode, note.tunings.prefill
    if note.of != of or not decode or min(decode) < 1:
        logger.debug("%s is not about this device and ignored", path(of))
        return DEFAULT
    if not ({*decode.values()} <= {*DECODE_CANDIDATES} and prefill in PREFILL_CANDIDATES):
        logger.debug("%s has sizes that are no longer among the candidates and is ignored", path(of))
        return DEFAULT
    logger.info("Attention in the sizes that were the fastest when they were measured (%s)", path(of))
    return note.tunings


def save_tunings(device: torch.device, shape: AttentionShape, tunings: Tunings) -> Path:
    """Have them known at the next start. Raises OSError, RuntimeError or WeftError where that is not possible."""
    of = measured_of(device, shape)
    write(path(of), msgspec.json.encode(Note(of, tunings)))
    return path(of)


def measured_of(device: torch.device, shape: AttentionShape) -> list[str]:
    """All that a measurement depends on: the card, what attends there, and the versions of what makes its code."""
    card = device.type
    if device.type == "cuda":
        card = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    heads = (shape.q_heads, shape.kv_heads, shape.head_dim, shape.dtype, shape.cache_dtype)
    return [card, *map(str, heads), str(torch.__version__), triton.__version__, __version__]


def path(of: list[str]) -> Path:
    """Where they are kept. Raises RuntimeError where there is no home."""
    return cache_path() / f"tunings-{hashlib.sha256(repr(of).encode()).hexdigest()[:16]}.json"
