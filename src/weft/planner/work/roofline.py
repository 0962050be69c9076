"""Roofline: seconds of one rank's work on its GPU, from bytes over bandwidth and operations over FLOPS."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from math import ceil, pow

import msgspec

from weft.machine.hardware.cpu import TOKENS
from weft.machine.hardware.gpus import GpuSpec
from weft.machine.hardware.kernel_shares import KernelShares, known_capability
from weft.planner.profiles import Constant, EngineProfile, WeightsRule
from weft.planner.work.work import AttentionWork, ExpertWork, MatrixProduct, RankWork

TILE = 16  # a matrix product computes tokens in multiples of this,
VECTORS = 8  # except that up to this many are computed separately, by matrix-vector kernels
EXPERT_TILE = 8
# Passes over the hidden state of a layer besides its products: norms, rotary embedding, activation, residuals.
PASSES = 10
FLOATS = ("fp32", "bf16", "fp16", "fp8")  # precisions that are multiplied as they are stored


class Seconds(msgspec.Struct, frozen=True):
    """The time of a step by what it is spent on."""

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
    """Number of (token, earlier token within the window) pairs of a prompt of `length` tokens."""
    seen = min(length, window or length)
    return length * seen - seen * seen / 2


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear interpolation at `x` between points ordered by `xs`; constant beyond the first and the last point."""
    right = bisect(xs, x)
    if right in (0, len(xs)):
        return ys[max(0, right - 1)]
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


def experts_touched(count: int, top_k: int, tokens: float) -> float:
    """Number of `count` experts that at least one of `tokens` tokens chooses, on average.

    Routing is taken as uniform: each token chooses `top_k` different experts, all equally likely, and independently of
    the other tokens. Real routers are less even, so real steps touch fewer experts.
    """
    return count * (1 - pow(1 - top_k / count, tokens))


def weights_rule(profile: EngineProfile, gpu: GpuSpec, precision: str) -> WeightsRule | None:
    """Return the rule for streaming weights of a precision on a GPU; None if they stream like 16-bit weights."""
    capability = known_capability(gpu)
    return next((rule for rule in profile.weights if rule.fits(precision, capability)), None)


class Roofline:
    """One GPU with one engine and one precision; its methods give seconds."""

    def __init__(self, gpu: GpuSpec, profile: EngineProfile, precision: str) -> None:
        kernels = profile.kernels(gpu, precision)
        rule = weights_rule(profile, gpu, precision)
        self._set_streaming(gpu, kernels, profile, rule, precision)
        self._set_multiplying(gpu, kernels, profile, precision)
        own_kernels = rule is not None and rule.of_bandwidth
        self.kernel_s = 0.0 if own_kernels else kernels.kernel_us * 1e-6
        self.cache_byte_s = 1 / (gpu.bandwidth_Bps * kernels.decode_attention * profile.attention_scale.value)
        self.pass_byte_s = 1 / (gpu.bandwidth_Bps * kernels.rows)
        self.layer_s = profile.layer_us.value * 1e-6
        self.expert_layer_s = profile.expert_layer_us.value * 1e-6
        self.hot_rank = profile.hot_rank.value
        self.not_hidden = 1 - profile.overlap.value

    def _set_streaming(
        self, gpu: GpuSpec, kernels: KernelShares, profile: EngineProfile, rule: WeightsRule | None, precision: str
    ) -> None:
        """Seconds per byte of weights: in this precision, of matrices that are stored in 16 bits, and of experts."""
        wide = kernels.weights
        reached = kernels.fp8_weights if precision == "fp8" and kernels.fp8_weights else wide
        if rule:
            reached = rule.share.value * (1.0 if rule.of_bandwidth else reached)
            # An engine with kernels of its own has them for every precision.
            wide = reached if rule.of_bandwidth and not rule.precisions else wide
        self.byte_s = 1 / (gpu.bandwidth_Bps * reached)
        self.wide_byte_s = 1 / (gpu.bandwidth_Bps * wide)
        self.expert_byte_s = 1 / (gpu.bandwidth_Bps * wide * profile.experts_weights.value)

    def _set_multiplying(self, gpu: GpuSpec, kernels: KernelShares, profile: EngineProfile, precision: str) -> None:
        """Seconds per operation: in this precision, in 16 bits, in experts and in the attention of prompts."""
        flops16 = gpu.flops.get("bf16") or gpu.flops["fp16"]
        capability = known_capability(gpu)
        rule = next((rule for rule in profile.math if rule.fits(precision, capability)), None)
        unit, share = (rule.flops, rule.share) if rule else ("bf16", 1.0)
        flops = gpu.flops.get(unit, flops16) * share
        matmul = kernels.matmul * profile.matmul_scale.value
        self.flop_s = 1 / (flops * matmul)
        self.wide_flop_s = 1 / (flops16 * matmul)
        in_fp4 = unit == "fp4" and unit in gpu.flops
        self.expert_flop_s = 1 / (flops * _experts_share(profile, precision, in_fp4).value)
        self.attention_flop_s = 1 / (flops16 * kernels.prefill_attention)
        # Measured products, the most bits first: their bits, seconds per byte at each count of tokens in TOKENS, and
        # seconds per operation beyond the last of those.
        self.products = [
            (
                product.bits,
                [1 / (gpu.bandwidth_Bps * reached) for reached in product.weights],
                1 / (flops16 * product.matmul),
            )
            for product in sorted(kernels.products, key=lambda product: -product.bits)
        ]

    def product_s(self, product: MatrixProduct, tokens: float) -> float:
        """One matrix product with `tokens` tokens.

        If products with few tokens were measured: interpolated between those, and beyond them the measured time per
        further token. Otherwise the longer of streaming and multiplying, and the part of the shorter that does not
        overlap with it.
        """
        for bits, byte_s, flop_s in self.products:
            if product.bits >= bits:
                beyond = 2 * product.numbers * max(0.0, tokens - TOKENS[-1]) * flop_s
                return product.nbytes * interpolate(TOKENS, byte_s, tokens) + beyond
        computed = tokens if tokens <= VECTORS else ceil(tokens / TILE) * TILE
        flops = 2 * computed * product.numbers
        wide = product.wide
        stream = product.nbytes * (self.wide_byte_s if wide else self.byte_s)
        multiply = flops * (self.wide_flop_s if wide else self.flop_s)
        return max(stream, multiply) + self.not_hidden * min(stream, multiply) + self.kernel_s

    def experts_s(self, experts: ExpertWork, tokens: float, dealt: bool) -> float:
        """A layer's experts, with `tokens` tokens routed among all of them.

        The weights of an expert are read once if any token has chosen it. With `dealt`, whole experts are divided among
        ranks, and all ranks wait for the busiest.
        """
        share = experts.held / experts.count
        active = experts_touched(experts.count, experts.top_k, tokens)
        skew = min(self.hot_rank, 1 / share) if dealt else 1.0
        each = ceil(max(1.0, tokens * experts.top_k / active) / EXPERT_TILE) * EXPERT_TILE
        streamed = active * share * skew * experts.nbytes
        flops = 2 * active * share * skew * each * experts.numbers
        both = 2 * self.kernel_s  # up, and down
        return max(streamed * self.expert_byte_s, flops * self.expert_flop_s) + both + self.expert_layer_s

    def cached_token_s(self, attention: AttentionWork) -> float:
        """Each cached token that a new one attends to, in one layer."""
        return max(attention.cache_bytes * self.cache_byte_s, attention.decode_flops * self.attention_flop_s)

    def decode_attention_s(self, attention: AttentionWork, batch: float, context: float) -> float:
        """One new token of each of `batch` sequences with `context` tokens each."""
        tokens = batch * (min(context, attention.window) if attention.window else context)
        return tokens * self.cached_token_s(attention) + self.kernel_s

    def pair_s(self, attention: AttentionWork) -> float:
        """Each pair of tokens of a prompt, in one layer."""
        return attention.prefill_flops * self.attention_flop_s

    def prefill_attention_s(self, attention: AttentionWork, length: float, prompts: float = 1.0) -> float:
        """`prompts` whole prompts of `length` tokens, each attending to itself."""
        return prompts * attended_pairs(length, attention.window) * self.pair_s(attention) + self.kernel_s

    def layers_s(self, work: RankWork, tokens: float, routed: float, dealt: bool) -> Seconds:
        """All layers without attention and all-reduces, for `tokens` tokens; `routed` tokens reach the experts."""
        matrices = experts = overhead = 0.0
        for layer in work.layers:
            # An MLP works for the tokens of all replicas that share it, attention only for its own replica's.
            matrices += layer.count * sum(self.product_s(product, tokens) for product in layer.products)
            if layer.experts:
                experts += layer.count * self.experts_s(layer.experts, routed, dealt)
            overhead += layer.count * (self.layer_s + tokens * work.hidden * 2 * PASSES * self.pass_byte_s)
        return Seconds(matrices=matrices, experts=experts, overhead=overhead)

    def experts_alone_s(self, work: RankWork, routed: float, dealt: bool) -> float:
        """The experts of all layers, for a rank whose attention group has no tokens in the step."""
        layers = ((layer.count, layer.experts) for layer in work.layers)
        return sum(count * self.experts_s(experts, routed, dealt) for count, experts in layers if experts)

    def decode_s(self, work: RankWork, batch: float, context: float, routed: float, dealt: bool) -> Seconds:
        """One token for each of `batch` sequences with `context` tokens each."""
        attention = sum(layer.count * self.decode_attention_s(layer.attention, batch, context) for layer in work.layers)
        head = self.product_s(work.head, batch) if work.head else 0.0
        return self.layers_s(work, batch, routed, dealt) + Seconds(matrices=head, attention=attention)

    def prefill_s(self, work: RankWork, length: float, routed: float, dealt: bool, prompts: float = 1.0) -> Seconds:
        """`prompts` prompts of `length` tokens each, in one step."""
        attention = sum(
            layer.count * self.prefill_attention_s(layer.attention, length, prompts) for layer in work.layers
        )
        head = self.product_s(work.head, prompts) if work.head else 0.0
        return self.layers_s(work, length * prompts, routed, dealt) + Seconds(matrices=head, attention=attention)


def _experts_share(profile: EngineProfile, precision: str, in_fp4: bool) -> Constant:
    """The share of the dense FLOPS that experts reach in this precision."""
    if in_fp4:
        return profile.experts_matmul_fp4
    return profile.experts_matmul if precision in FLOATS else profile.experts_matmul_unpacked
