"""Roofline: seconds that one rank's GPU takes for its work, from bytes over bandwidth and FLOPS over rates."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from math import ceil, pow

import msgspec

from weft.hardware.cpu import TOKENS
from weft.hardware.gpus import GpuSpec
from weft.planner.profiles import Profile
from weft.planner.work import AttentionWork, ExpertWork, MatrixProduct, RankWork

TILE = 16  # tokens of a matrix product are computed in multiples of it,
VECTORS = 8  # but so few one by one, by the kernels for a matrix and a vector
EXPERT_TILE = 8
# Passes over the hidden state of a layer beside its products: norms, rotary embedding, activation, residuals.
PASSES = 10
FLOATS = ("fp32", "bf16", "fp16", "fp8")  # precisions that are multiplied as they are stored


class Seconds(msgspec.Struct, frozen=True):
    """Where the time of a step goes."""

    matrices: float = 0.0
    experts: float = 0.0
    attention: float = 0.0
    links: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        return self.matrices + self.experts + self.attention + self.links + self.overhead

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.matrices + other.matrices,
            self.experts + other.experts,
            self.attention + other.attention,
            self.links + other.links,
            self.overhead + other.overhead,
        )


def attended_pairs(length: float, window: int | None) -> float:
    """How many tokens the tokens of a prompt see, all together: those before each, within the window."""
    seen = min(length, window or length)
    return length * seen - seen * seen / 2


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """What lies at x on straight lines between points in order of xs; beyond them as at the nearest."""
    right = bisect(xs, x)
    if right in (0, len(xs)):
        return ys[max(0, right - 1)]
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


class Roofline:
    """One GPU with one engine and one precision; its methods give seconds."""

    def __init__(self, gpu: GpuSpec, profile: Profile, precision: str) -> None:
        kernels = profile.kernels(gpu, precision)
        capability = gpu.capability
        wide = kernels.weights
        reached = kernels.fp8_weights if precision == "fp8" and kernels.fp8_weights else wide
        rule = next((rule for rule in profile.weights if rule.fits(precision, capability)), None)
        if rule:
            reached = rule.share.value * (1.0 if rule.of_bandwidth else reached)
            # An engine with kernels of its own has them for every precision.
            wide = reached if rule.of_bandwidth and not rule.precisions else wide
        flops16 = gpu.flops.get("bf16") or gpu.flops["fp16"]
        math = next((rule for rule in profile.math if rule.fits(precision, capability)), None)
        wanted = math.flops if math else "bf16"
        flops = gpu.flops.get(wanted, flops16) * (math.share if math else 1.0)
        matmul = kernels.matmul * profile.matmul_scale.value
        if wanted == "fp4" and wanted in gpu.flops:
            experts_matmul = profile.experts_matmul_fp4
        elif precision in FLOATS:
            experts_matmul = profile.experts_matmul
        else:
            experts_matmul = profile.experts_matmul_unpacked
        own_kernels = rule is not None and rule.of_bandwidth
        self.kernel_s = 0.0 if own_kernels else kernels.kernel_us * 1e-6
        self.byte_s = 1 / (gpu.bandwidth_Bps * reached)
        self.wide_byte_s = 1 / (gpu.bandwidth_Bps * wide)
        self.flop_s = 1 / (flops * matmul)
        self.wide_flop_s = 1 / (flops16 * matmul)
        self.expert_byte_s = 1 / (gpu.bandwidth_Bps * wide * profile.experts_weights.value)
        self.expert_flop_s = 1 / (flops * experts_matmul.value)
        self.cache_byte_s = 1 / (gpu.bandwidth_Bps * kernels.decode_attention * profile.attention_scale.value)
        self.attention_flop_s = 1 / (flops16 * kernels.prefill_attention)
        self.pass_byte_s = 1 / (gpu.bandwidth_Bps * kernels.rows)
        self.layer_s = profile.layer_us.value * 1e-6
        self.expert_layer_s = profile.expert_layer_us.value * 1e-6
        self.hot_rank = profile.hot_rank.value
        self.shown = 1 - profile.overlap.value
        # By bits, the most first: seconds of a byte with so many tokens as TOKENS says, and of an operation beyond.
        self.products = [
            (it.bits, [1 / (gpu.bandwidth_Bps * share) for share in it.weights], 1 / (flops16 * it.matmul))
            for it in sorted(kernels.products, key=lambda it: -it.bits)
        ]

    def product_s(self, product: MatrixProduct, tokens: float) -> float:
        """One matrix with this many tokens. Where it was measured for a few, a straight line between those, and from
        there on what each token more takes; else the longer of streaming it and multiplying with it, and what of the
        shorter does not hide behind it."""
        for bits, byte_s, flop_s in self.products:
            if product.bits >= bits:
                more = 2 * product.numbers * max(0.0, tokens - TOKENS[-1]) * flop_s
                return product.nbytes * interpolate(TOKENS, byte_s, tokens) + more
        computed = tokens if tokens <= VECTORS else ceil(tokens / TILE) * TILE
        flops = 2 * computed * product.numbers
        wide = product.wide
        stream = product.nbytes * (self.wide_byte_s if wide else self.byte_s)
        multiply = flops * (self.wide_flop_s if wide else self.flop_s)
        return max(stream, multiply) + self.shown * min(stream, multiply) + self.kernel_s

    def experts_s(self, experts: ExpertWork, tokens: float, dealt: bool) -> float:
        """A layer's experts with this many tokens routed among all of them. `dealt`: whole experts are dealt out
        to ranks, and all wait for the busiest."""
        share = experts.held / experts.count
        active = experts.count * (1 - pow(1 - experts.top_k / experts.count, tokens))
        skew = min(self.hot_rank, 1 / share) if dealt else 1.0
        each = ceil(max(1.0, tokens * experts.top_k / active) / EXPERT_TILE) * EXPERT_TILE
        streamed = active * share * skew * experts.nbytes
        flops = 2 * active * share * skew * each * experts.numbers
        both = 2 * self.kernel_s  # up, and down
        return max(streamed * self.expert_byte_s, flops * self.expert_flop_s) + both + self.expert_layer_s

    def cached_token_s(self, attention: AttentionWork) -> float:
        """Each cached token that a new one sees, in one layer."""
        return max(attention.cache_bytes * self.cache_byte_s, attention.decode_flops * self.attention_flop_s)

    def decode_attention_s(self, attention: AttentionWork, batch: float, context: float) -> float:
        """One new token of each of `batch` sequences, each `context` tokens long."""
        tokens = batch * (min(context, attention.window) if attention.window else context)
        return tokens * self.cached_token_s(attention) + self.kernel_s

    def pair_s(self, attention: AttentionWork) -> float:
        """Each token of a prompt that one of its tokens sees, in one layer."""
        return attention.prefill_flops * self.attention_flop_s

    def prefill_attention_s(self, attention: AttentionWork, length: float, prompts: float = 1.0) -> float:
        """Whole prompts, each by itself."""
        return prompts * attended_pairs(length, attention.window) * self.pair_s(attention) + self.kernel_s

    def layers_s(self, work: RankWork, tokens: float, routed: float, dealt: bool) -> Seconds:
        """All layers but their attention and sums, for `tokens` tokens; `routed` tokens meet the experts."""
        matrices = experts = overhead = 0.0
        for layer in work.layers:
            # What an MLP does for the tokens of all replicas that share it, attention does for its own.
            matrices += layer.count * sum(self.product_s(product, tokens) for product in layer.products)
            if layer.experts:
                experts += layer.count * self.experts_s(layer.experts, routed, dealt)
            overhead += layer.count * (self.layer_s + tokens * work.hidden * 2 * PASSES * self.pass_byte_s)
        return Seconds(matrices=matrices, experts=experts, overhead=overhead)

    def decode_s(self, work: RankWork, batch: float, context: float, routed: float, dealt: bool) -> Seconds:
        """One token for each of `batch` sequences that are `context` tokens long."""
        attention = sum(layer.count * self.decode_attention_s(layer.attention, batch, context) for layer in work.layers)
        head = self.product_s(work.head, batch) if work.head else 0.0
        return self.layers_s(work, batch, routed, dealt) + Seconds(matrices=head, attention=attention)

    def prefill_s(self, work: RankWork, length: float, routed: float, dealt: bool, prompts: float = 1.0) -> Seconds:
        """So many prompts of `length` tokens in one step."""
        attention = sum(
            layer.count * self.prefill_attention_s(layer.attention, length, prompts) for layer in work.layers
        )
        head = self.product_s(work.head, prompts) if work.head else 0.0
        return self.layers_s(work, length * prompts, routed, dealt) + Seconds(matrices=head, attention=attention)
