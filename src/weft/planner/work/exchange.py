"""Seconds in which the tokens of attention groups travel to the experts of a layer and back
(ranks/layers/exchange.py)."""

from __future__ import annotations

from math import prod

import msgspec

from weft.checkpoint.architectures.shape import Experts, ModelShape
from weft.machine.hardware.links import LinkCost
from weft.plan.plan import exchange_kind
from weft.planner.deployment import DeploymentLayout

HIDDEN_BYTES = 2  # bytes of a number that passes between ranks
CHOICE_BYTES = 8  # bytes of a token's choice of one expert: its number and its share
GRAPH_ROWS = 512  # rows of the largest CUDA graph (ranks/worker/graphs.py)
COUNT_BYTES = 8  # bytes of a number of tokens, which ranks send each other first


class ExchangeCost(msgspec.Struct, frozen=True):
    """Cost of the exchange of one layer. `link` is the all-reduce among the ranks that exchange tokens.

    An all-gather of b bytes, and a reduce-scatter, carries half of the bytes of an all-reduce of b bytes. An all-to-all
    in which each rank sends or receives b bytes, its own part included, carries as many.

    - `sent`: number of ranks to which a token is sent, on average; None if all groups gather all tokens.
    - `senders`: number of ranks of an attention group, which divide its tokens; `ranks`: number of ranks of all groups.
    - `graph_tokens`: a step of as many tokens or fewer is taken for a CUDA graph: all groups gather all tokens.
    """

    link: LinkCost
    token_bytes: float
    result_bytes: float
    sent: float | None = None
    senders: int = 1
    ranks: int = 1
    graph_tokens: int = 0

    def seconds(self, tokens: float, routed: float) -> float:
        """Seconds for an attention group with `tokens` of the `routed` tokens of all groups."""
        if self.sent is None or routed <= self.graph_tokens:
            return self._half_reduce_s(routed * self.token_bytes) + self._half_reduce_s(routed * self.result_bytes)
        # A rank of a group without tokens still receives the tokens of the others.
        rows = max(tokens / self.senders, routed / self.ranks) * self.sent
        counts = self.link.seconds(COUNT_BYTES)
        return counts + self._half_reduce_s(rows * self.token_bytes) + self._half_reduce_s(rows * self.result_bytes)

    def _half_reduce_s(self, nbytes: float) -> float:
        return self.link.seconds(nbytes / 2)


def exchange_cost(
    shape: ModelShape, layout: DeploymentLayout, link: LinkCost, *, graphs: bool = False
) -> ExchangeCost | None:
    """Cost of the exchange of our engine for a layout; None without attention groups.

    `link` is between `exchanging_ranks`. With `graphs`, decode steps are CUDA graphs.
    """
    experts = shape.experts
    kind = exchange_kind(shape, layout.parallelism.groups, layout.parallelism.expert_parallel)
    if kind is None or experts is None:
        return None
    result_bytes = shape.hidden * HIDDEN_BYTES
    token_bytes = result_bytes + experts.top_k * CHOICE_BYTES
    if kind == "gather":
        return ExchangeCost(link, token_bytes, result_bytes)
    cut = layout.parallelism
    parts, ranks = cut.expert_parallel, cut.tensor_parallel * cut.data_parallel
    sent = parts_chosen(experts, parts) * ranks / parts
    graph_tokens = GRAPH_ROWS * cut.data_parallel if graphs else 0
    return ExchangeCost(link, token_bytes, result_bytes, sent, cut.tensor_parallel, ranks, graph_tokens)


def parts_chosen(experts: Experts, parts: int) -> float:
    """Number of parts of the experts that have one of a token's choices, on average.

    Routing is taken as uniform: every choice of `top_k` of the experts is equally likely.
    """
    held = experts.count / parts
    none = prod(max(0.0, experts.count - held - number) / (experts.count - number) for number in range(experts.top_k))
    return parts * (1 - none)


def stage_ranks(layout: DeploymentLayout, stage: int) -> list[int]:
    """Numbers of the ranks of a stage of all replicas."""
    tensor, size = layout.parallelism.tensor_parallel, layout.parallelism.replica_size
    firsts = range(stage * tensor, len(layout.gpus), size)
    return [first + t for first in firsts for t in range(tensor)]


def exchanging_ranks(shape: ModelShape, layout: DeploymentLayout, stage: int) -> list[int]:
    """Numbers of the ranks that exchange tokens with the first rank of a stage, itself included, in our engine."""
    ranks = stage_ranks(layout, stage)
    kind = exchange_kind(shape, layout.parallelism.groups, layout.parallelism.expert_parallel)
    return ranks[:: layout.parallelism.tensor_parallel] if kind == "gather" else ranks
