"""Structures and constants that C++ and Python share: each is declared in `cpp/`, and mirrored here and nowhere else.

`library.check_abi` compares the two sides whenever a library is loaded. A field or a constant that is added on one side
is added on the other one, and to the list in `cpp/abi.h`.
"""

from __future__ import annotations

import ctypes

from weft.checkpoint.quantised.schemes import UNIT

POINTER, SIZE, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

PANEL = 32  # rows of a weight that are packed together
WIDEST_HEAD = 256  # head_dim at most
WIDEST_GROUP = 96  # query heads per KV head at most
WIDEST_LATENT = 640  # values of a token's latent at most
LONGEST_GROUP = 128  # columns of a quantisation group that the library rounds, at most
# Parts of a layer whose times a traced step logs, in the order of C++'s `Phase`.
PHASES = ("products", "attention", "output", "sums", "feed-forward", "norms")
WORKSPACE_ALIGNMENT = 64  # bytes: the address of a stage's workspace is a multiple of it
# By the names of `Scheme.lowest`.
LOWEST_KINDS = {
    "middle": 0,
    "zero": 1,
    "minimum": 2,
    "mxfp4": 3,
    "nested": 4,
    "fp8": 5,
    "nf4": 6,
    "fp4": 7,
    "signed": 8,
}
WEIGHT_TYPES = {"bfloat16": 0, "float16": 1, "float32": 2}  # types of weights that are rounded

# Sampling, which torch, Triton and C++ do alike: see ranks/kernels/random.py.
SAMPLING_BLOCK = 256  # tokens that race as a group, then among themselves; near the square root of common vocabularies
MASK_BITS = 32  # tokens to a word of a mask, the first one in its lowest bit
NOT_FINITE = -1  # in place of a token: the greatest logit of its row is NaN or infinite, so nothing can be sampled
# SplitMix64 (Steele, Lea, Flood 2014): the step of its counter and the multipliers of its finaliser, 64 bits each.
SPLITMIX_STEP = 0x9E3779B97F4A7C15
SPLITMIX_FIRST = 0xBF58476D1CE4E5B9
SPLITMIX_SECOND = 0x94D049BB133111EB

# Sums a stage's result over the ranks; returns 0, or anything else if that failed.
SumCallback = ctypes.CFUNCTYPE(ctypes.c_int32)


class MatrixDescriptor(ctypes.Structure):
    """`Matrix` of matrix.h: a weight [rows, cols] that is packed for products."""

    _fields_ = (
        *((name, SIZE) for name in ("bits", "rows", "cols")),
        *((name, POINTER) for name in ("data", "scales", "lowest", "bias")),
        *((name, SIZE) for name in ("group", "lacking", "kind", "fixed_order")),
    )


class ExpertsDescriptor(ctypes.Structure):
    """`Experts` of experts.h: the experts of a rank, with the first expert's descriptor of each matrix."""

    _fields_ = (
        *((name, MatrixDescriptor) for name in ("gate_up", "down")),
        *((name, SIZE) for name in ("first", "count")),
        *((name, REAL) for name in ("gain", "limit", "up_offset")),
        ("routed", POINTER),
    )


class SharedExpertsDescriptor(ctypes.Structure):
    """`SharedExperts` of experts.h: the shared experts, together one MLP, and the projection that weighs it."""

    _fields_ = tuple((name, MatrixDescriptor) for name in ("gate_up", "down", "weigher"))


class RoutingDescriptor(ctypes.Structure):
    """`Routing` of routing.h: the choice of a token's experts."""

    _fields_ = (
        *((name, SIZE) for name in ("top_k", "normalised", "sigmoid", "groups", "top_groups", "group_best")),
        ("correction", POINTER),
        ("scaling", REAL),
    )


class MixtureDescriptor(ctypes.Structure):
    """`Mixture` of experts.h: a router and the experts of a rank."""

    _fields_ = (
        ("router", MatrixDescriptor),
        ("routing", RoutingDescriptor),
        ("experts", ExpertsDescriptor),
        ("shared", SharedExpertsDescriptor),
    )


class LatentProjectionDescriptor(ctypes.Structure):
    """`LatentProjection` of latent_products.h: the projection from latents to each head's keys and values."""

    _fields_ = (
        *((name, MatrixDescriptor) for name in ("keys", "values")),
        *((name, SIZE) for name in ("heads", "rope_dim")),
    )


class LatentDescriptor(ctypes.Structure):
    """`Latent` of workspace.h: the weights of latent attention, except the weights of its queries and its result."""

    _fields_ = (
        ("projection", LatentProjectionDescriptor),
        *((name, MatrixDescriptor) for name in ("q_down", "kv_down")),
        *((name, POINTER) for name in ("q_norm", "kv_norm")),
        *((name, SIZE) for name in ("interleaved", "expands_from", "expanded_bytes")),
        *((name, REAL) for name in ("q_eps", "kv_eps")),
    )


class LayerDescriptor(ctypes.Structure):
    """`Layer` of workspace.h: the weights and the KV cache of one decoder layer."""

    _fields_ = (
        *((name, POINTER) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm", "keys", "values")),
        *((name, MatrixDescriptor) for name in ("qkv", "out", "gate_up", "down")),
        ("mixture", ctypes.POINTER(MixtureDescriptor)),
        *((name, SIZE) for name in ("q_heads", "kv_heads", "head_dim", "window", "group")),
        ("sinks", POINTER),
        ("latent", ctypes.POINTER(LatentDescriptor)),
        *((name, REAL) for name in ("scale", "head_eps", "eps")),
    )


class StepDescriptor(ctypes.Structure):
    """`Step` of stage.h: the tokens of one call, and how their results are summed over the ranks."""

    _fields_ = (
        *((name, POINTER) for name in ("residual", "angles", "angle_rows", "slots", "row_starts", "context", "tables")),
        *((name, SIZE) for name in ("tokens", "rows", "table_width", "block_size")),
        ("shared", POINTER),
        ("sum", SumCallback),
        ("exchange", POINTER),
        ("phases", POINTER),
        ("fixed_order", SIZE),
    )


class PhaseEntry(ctypes.Structure):
    """`PhaseEntry` of stage.h: a phase of a layer, counted from the call's first one, and its end in ns."""

    _fields_ = tuple((name, SIZE) for name in ("layer", "phase", "ended_ns"))


class PhaseLogDescriptor(ctypes.Structure):
    """`PhaseLog` of stage.h: the ends of the phases of one call, by the monotonic clock."""

    _fields_ = (
        ("entries", ctypes.POINTER(PhaseEntry)),
        *((name, SIZE) for name in ("room", "count", "began_ns")),
    )


class SharedDescriptor(ctypes.Structure):
    """`Shared` of sum.h: memory that the ranks of one host share."""

    _fields_ = (
        ("memory", POINTER),
        *((name, SIZE) for name in ("rank", "size", "head", "slot_bytes")),
        ("times", POINTER),
    )


class ExchangeDescriptor(ctypes.Structure):
    """`Exchange` of exchange.h: the ranks that exchange tokens in a step, and who brings which."""

    _fields_ = (("shared", SharedDescriptor), ("begins", POINTER), *((name, SIZE) for name in ("first", "complete")))


class RoundingDescriptor(ctypes.Structure):
    """`Rounding` of rounding.h: a weight that is to be rounded to the numbers of a scheme."""

    _fields_ = tuple((name, SIZE) for name in ("type", "rows", "width", "group", "bits", "kind", "lacking", "cols"))


# By their names in C++.
STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "Matrix": MatrixDescriptor,
    "Experts": ExpertsDescriptor,
    "SharedExperts": SharedExpertsDescriptor,
    "Routing": RoutingDescriptor,
    "Mixture": MixtureDescriptor,
    "LatentProjection": LatentProjectionDescriptor,
    "Latent": LatentDescriptor,
    "Layer": LayerDescriptor,
    "Step": StepDescriptor,
    "Shared": SharedDescriptor,
    "Exchange": ExchangeDescriptor,
    "PhaseEntry": PhaseEntry,
    "PhaseLog": PhaseLogDescriptor,
    "Rounding": RoundingDescriptor,
}
CONSTANTS = {
    "PANEL": PANEL,
    "BLOCK": UNIT,
    "WIDEST_HEAD": WIDEST_HEAD,
    "WIDEST_GROUP": WIDEST_GROUP,
    "WIDEST_LATENT": WIDEST_LATENT,
    "LONGEST_GROUP": LONGEST_GROUP,
    "WORKSPACE_ALIGNMENT": WORKSPACE_ALIGNMENT,
    **{f"Lowest::{name.upper()}": number for name, number in LOWEST_KINDS.items()},
    "PHASES": len(PHASES),
    "BF16": WEIGHT_TYPES["bfloat16"],
    "FP16": WEIGHT_TYPES["float16"],
    "FP32": WEIGHT_TYPES["float32"],
    "SAMPLING_BLOCK": SAMPLING_BLOCK,
    "MASK_BITS": MASK_BITS,
    "NOT_FINITE": NOT_FINITE,
    "SPLITMIX_STEP": SPLITMIX_STEP,
    "SPLITMIX_FIRST": SPLITMIX_FIRST,
    "SPLITMIX_SECOND": SPLITMIX_SECOND,
}
