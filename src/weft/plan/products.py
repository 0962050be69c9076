"""Backends of products with quantised weights: Weft's own kernels, and a library that may be installed. One table says
which schemes the library multiplies, and why not the others; the plan and the ranks judge by it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from weft.checkpoint.architectures.parameters import parameter_dims, rank_parameters
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.published import ROW
from weft.checkpoint.quantised.schemes import ALL_SCHEMES, Scheme
from weft.errors import ConfigError
from weft.formatting import extra_hint, format_version
from weft.plan.backends import KernelDevice, Version, against_version, kernel_family
from weft.plan.decision import Decision
from weft.plan.fills import checkpoint_scheme
from weft.plan.plan import Plan

logger = logging.getLogger("weft")

PACKAGE = "humming-kernels"
# Its layouts and arguments are not promised to stay: exactly this version is called, and pinned in pyproject.toml.
VERSION = "0.1.20"
EXTRA = "humming"
# Meaning of `auto`: "own" until docs/benchmarks.md has a card's figures of both; with "race" the ranks race them, shape
# by shape. Nothing else is to be changed for a race.
AUTO: Literal["own", "race"] = "own"

# Rows and columns of a weight are padded to multiples of these, of which the library's tiles are divisors; vLLM pads
# alike.
ROW_MULTIPLE, COLUMN_MULTIPLE = 256, 128
BAND_BYTES = 16 << 20  # of a matrix that are repacked at once: a multiple of ROW_MULTIPLE rows
COPIES = 4  # of these, at once: on the device, in the library's order, padded, and repacked
# int32 zeros with which programs that share a tile wait for each other; as many as the library's own layer has.
LOCKS = 2048

CAPABILITY: dict[str, Version] = {"float16": (7, 5), "bfloat16": (8, 0)}
WAY_OUT = "leave --product-backend out for Weft's own kernels"

# How the library holds a scheme's numbers.
Format = Literal["integers", "zero points", "minima", "MXFP4", "FP8"]


@dataclass(frozen=True, kw_only=True)
class ProductSpec:
    """A product with a weight [rows, cols] in a scheme, and activations of `dtype`. The first group lacks `lacking`
    columns."""

    scheme: Scheme
    dtype: str
    rows: int
    cols: int
    lacking: int = 0


def format_of(scheme: Scheme) -> Format | None:
    """The library's form of a scheme's numbers, None if it has none."""
    if scheme.lowest in ("middle", "signed"):
        return "integers"
    if scheme.lowest == "zero":
        return "zero points"
    if scheme.lowest == "minimum" and scheme.bits == 4:
        return "minima"
    if scheme.lowest == "mxfp4":
        return "MXFP4"
    return "FP8" if scheme.lowest == "fp8" and scheme.group != ROW else None


def against_scheme(scheme: Scheme, dtype: str) -> str | None:
    """Reason that the library does not multiply weights of a scheme with activations of `dtype`, or None."""
    if dtype not in CAPABILITY:
        return f"it computes in {' and '.join(CAPABILITY)}, not in {dtype}"
    if scheme.lowest in ("mxfp4", "fp8", "signed") and dtype == "float16":
        return "it would hold the scales in float16, whose range is smaller than theirs"
    if format_of(scheme):
        return None
    if scheme.lowest == "nested":
        return "scales of 6 bits would have to grow to 16"
    if scheme.lowest == "minimum":
        return "it holds minima as 16-bit multiples of the scale, too coarse for numbers of 8 bits"
    if scheme.lowest == "fp8":
        return "torch multiplies rows of FP8 with one scale on FP8 units already"
    return "it has no tables of values"


def against_weight(spec: ProductSpec) -> str | None:
    """Reason that the library does not multiply a weight, or None."""
    if reason := against_scheme(spec.scheme, spec.dtype):
        return reason
    if spec.rows % 8:
        return f"it takes rows in multiples of 8, not {spec.rows}"
    if spec.scheme.group != ROW and (spec.lacking or spec.cols % spec.scheme.group):
        return f"groups of {spec.scheme.group} columns are cut between ranks"
    return None


def supports(spec: ProductSpec, device: KernelDevice) -> str | None:
    """Reason that the library cannot multiply a weight on a device; None if nothing is known against it.

    Nothing is tried: its kernels may still fail to compile.
    """
    return against_weight(spec) or against_device(device, spec.dtype)


def against_device(device: KernelDevice, dtype: str) -> str | None:
    """Reason that the library does not compute in `dtype` on a device, or None."""
    return next(filter(None, _against_device(device, dtype)), None)


def _against_device(device: KernelDevice, dtype: str) -> Iterator[str | None]:
    if not device.cards and not device.interpreted:
        yield "they run on GPUs, not on a CPU"
    if dtype not in CAPABILITY:
        yield f"they compute in {' and '.join(CAPABILITY)}, not in {dtype}"
    if device.packages is not None:
        installed = device.packages.get(PACKAGE)
        yield against_version(PACKAGE, installed, oldest=None, extra=EXTRA)
        if installed and installed != VERSION:
            yield f"{PACKAGE} {installed} is installed, and Weft knows the layouts of {VERSION}: {extra_hint(EXTRA)}"
    needed = CAPABILITY.get(dtype, (0, 0))
    for name, capability in device.cards:
        if capability < needed:
            yield (
                f"{name} has compute capability {format_version(capability)}, and they need {format_version(needed)} "
                f"for {dtype}"
            )


def refusal(reason: str) -> str:
    """Message for the library's products where they cannot be had."""
    return f"--product-backend humming: humming's kernels cannot be used: {reason}; {WAY_OUT}"


def choose_product_backend(
    wanted: str,
    attention: str,
    dtype: str,
    schemes: Collection[str],
    device: KernelDevice,
) -> Decision[str]:
    """The backend of products, by what the ranks do: "own", "humming", or "auto" if they race both.

    `attention` is the attention backend, `schemes` are the names of the schemes of the model's weights. Raises
    ConfigError for products that were asked for and cannot be had on these devices or for this model, before any weight
    is read.
    """
    if wanted == "own" or (wanted == "auto" and AUTO == "own"):
        return Decision("own", "--product-backend" if wanted == "own" else "the default")
    reason = against_device(device, dtype) or against_schemes(schemes, dtype)
    if reason is None and kernel_family(attention, on_cpu=False) != "triton":
        reason = f"they replace products of the Triton kernels, and --attention-backend {attention} has none"
    if reason is None:
        return Decision(wanted, "--product-backend")
    if wanted == "humming":
        raise ConfigError(refusal(reason), code="product-backend-not-usable")
    return Decision("own", reason)


def against_schemes(schemes: Collection[str], dtype: str) -> str | None:
    """Reason that the library multiplies none of a model's weights, whose schemes are given; None if it does some."""
    if not schemes:
        return "no weights of this model are quantised"
    reasons = {name: against_scheme(ALL_SCHEMES[name], dtype) for name in sorted(schemes)}
    if None in reasons.values():
        return None
    return ", ".join(f"{name}: {reason}" for name, reason in reasons.items())


def repacking_bytes(plan: Plan, rank: int) -> int:
    """Bytes that a rank needs besides its weights, at most, if the library multiplies them.

    These are what the weights are padded by, and locks. While weights are repacked there is also a second one of the
    largest parameter, a third one if it races Weft's kernels, and COPIES of a band of it.
    """
    if plan.product_backend == "own" or plan.devices[rank].kind == "cpu":
        return 0
    padding = most = 0
    place = plan.places[rank]
    for _, parameter, layer in rank_parameters(plan.shape, place):
        axis, dims = parameter.parts[0].cols, parameter_dims(place, parameter)
        name = checkpoint_scheme(parameter, layer, plan.schemes) if axis else None
        if name is None or axis is None:
            continue
        scheme, span, count = ALL_SCHEMES[name], axis.owned(place), prod(dims[:-2])
        spec = ProductSpec(scheme=scheme, dtype=plan.dtype, rows=dims[-2], cols=len(span))
        if against_weight(spec):
            continue
        padded = scheme.nbytes(round_up(dims[-2], ROW_MULTIPLE), Span(0, round_up(len(span), COLUMN_MULTIPLE)))
        padding += count * (padded - scheme.nbytes(dims[-2], span))
        band = max(BAND_BYTES, scheme.nbytes(ROW_MULTIPLE, span))
        most = max(most, padded * count * (2 if plan.product_backend == "auto" else 1) + COPIES * band)
    return padding + most + 4 * LOCKS


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below a number."""
    return -(-number // multiple) * multiple
