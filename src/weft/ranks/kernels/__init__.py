"""Kernels: implementations of a decoder's operations for CPUs and GPUs, and the choice among them."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch

from weft.errors import ConfigError
from weft.logs import event_fields
from weft.plan.backends import ATTENTION_BACKENDS, BACKEND_NAMES, refusal
from weft.ranks.kernels import contest
from weft.ranks.kernels.attention import AttentionShape, PagedAttention
from weft.ranks.kernels.base import Kernels
from weft.ranks.kernels.usable import UnusableError, kernel_device
from weft.ranks.quant.rounding import Rounding

if TYPE_CHECKING:
    from weft.ranks.kernels.triton.attention import TritonAttention

logger = logging.getLogger("weft")


def create_kernels(backend: str, device: torch.device, shape: AttentionShape, products: str = "own") -> Kernels:
    """Create the kernels for a device. `backend` is one of BACKEND_NAMES; `products` is `Plan.product_backend`.

    `auto` takes the fastest that can run there, and logs a fallback. Raises ConfigError if the backend cannot be used.
    """
    assert backend in BACKEND_NAMES, backend
    attention = _fastest_attention(device, shape) if backend == "auto" else _create_attention(backend, device, shape)
    family = ATTENTION_BACKENDS[attention.name].rest
    kernels: Kernels = _module(family).complete_kernels(attention, device, shape)
    if products != "own" and family == "triton":
        from weft.ranks.kernels.humming import create_matrices

        kernels = replace(kernels, matrices=create_matrices(device, shape, races=products == "auto"))
    return kernels


def create_rounding(backend: str, device: torch.device, shape: AttentionShape) -> Rounding:
    """The function that rounds weights for these kernels, which need not be compiled yet."""
    if backend == "auto":
        fastest, last = _by_speed(device)
        backend = last if attention_obstacle(fastest, device, shape) else fastest
    rounding: Rounding = _module(ATTENTION_BACKENDS[backend].rest).create_rounding(device, shape)
    return rounding


def attention_obstacle(backend: str, device: torch.device, shape: AttentionShape) -> str | None:
    """Reason that an attention backend cannot run on a device, or None. Nothing is tried."""
    return ATTENTION_BACKENDS[backend].supports(shape.spec, kernel_device(device))


def _module(backend: str) -> ModuleType:
    return import_module(ATTENTION_BACKENDS[backend].module)


def _by_speed(device: torch.device) -> tuple[str, ...]:
    """Backends that every device of this kind may fall back on, the fastest first."""
    return ("triton" if device.type == "cuda" else "cpu", "torch")


def _create_attention(backend: str, device: torch.device, shape: AttentionShape) -> PagedAttention:
    """Raises ConfigError if the backend cannot be used."""
    try:
        return _try_attention(backend, device, shape)
    except UnusableError as error:
        raise ConfigError(refusal(backend, str(error)), code="attention-backend-not-usable") from error


def _try_attention(backend: str, device: torch.device, shape: AttentionShape) -> PagedAttention:
    """Raises UnusableError if the backend cannot be used."""
    if reason := attention_obstacle(backend, device, shape):
        raise UnusableError(reason)
    attention: PagedAttention = _module(backend).create_attention(device, shape)
    return attention


def _fastest_attention(device: torch.device, shape: AttentionShape) -> PagedAttention:
    """The fastest attention that can be used. A backend that takes the place of another one is logged."""
    fastest, last = _by_speed(device)
    try:
        own = _try_attention(fastest, device, shape)
    except UnusableError as error:
        _log_fallback(fastest, error, last)
        return _create_attention(last, device, shape)
    return _winner(own, device, shape) if device.type == "cuda" else own


def _winner(own: PagedAttention, device: torch.device, shape: AttentionShape) -> PagedAttention:
    """The fastest of our `own` attention, FlashInfer's if it is installed, and torch's for prompts if it has one: now,
    or when they were measured."""
    versions = _rival_versions(device, shape)
    path = contest.winner_path(device, shape, versions, cast("TritonAttention", own).tunings)
    best = contest.load_winner(path, (*versions, own.name)) if versions else own.name
    if best == own.name:
        return own
    rivals = {}
    for name in versions if best is None else (best,):
        try:
            rivals[name] = _try_attention(name, device, shape)
        except UnusableError as error:
            if name != "varlen":  # not installed: this torch may have none
                _log_fallback(name, error, own.name)
    if best is None and rivals:
        best = contest.measure_fastest((*rivals.values(), own), device, shape)
        contest.save_winner(path, best)
    return rivals.get(best or own.name, own)


def _rival_versions(device: torch.device, shape: AttentionShape) -> dict[str, str]:
    """Versions of the packages of other attention that may run on a GPU, by the name of the backend."""
    versions = {}
    installed = (kernel_device(device).packages or {}).get(ATTENTION_BACKENDS["flashinfer"].package or "")
    if installed is not None:
        versions["flashinfer"] = installed
    if attention_obstacle("varlen", device, shape) is None:
        versions["varlen"] = str(torch.__version__)
    return versions


def _log_fallback(backend: str, error: UnusableError, instead: str) -> None:
    kernels, others = (ATTENTION_BACKENDS[name].kernels for name in (backend, instead))
    logger.warning(
        "%s cannot be used: %s. %s take their place.",
        kernels[0].upper() + kernels[1:],
        error,
        others,
        extra=event_fields("attention-backend-replaced", backend=backend, instead=instead),
    )
