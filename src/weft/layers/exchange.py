"""The way of tokens to the experts that they chose and back, if several attention groups share one set of experts.

Every rank of a stage takes part in each exchange, also one whose group has no tokens in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from weft.architectures.place import Place
from weft.comm import Group, Links
from weft.comm.base import rank_range
from weft.kernels.fused import ExchangeRanks


class RoutedTokens(NamedTuple):
    """T tokens: hidden states `x` [T, hidden], and the experts that each has chosen.

    `chosen` [T, top_k] int64 are their numbers in the whole model, `shares` [T, top_k] float32 their shares.
    """

    x: torch.Tensor
    chosen: torch.Tensor
    shares: torch.Tensor


class TokenExchange(Protocol):
    """An exchange among the ranks of a stage of all attention groups: `dispatch`, then `combine`, for each layer.

    `ranks` says who exchanges, for fused kernels, which do so themselves.
    """

    ranks: ExchangeRanks

    def dispatch(self, tokens: RoutedTokens, group_tokens: Sequence[int]) -> RoutedTokens:
        """Return the tokens that this rank computes its experts on; `tokens` are those of its attention group.

        `group_tokens[g]` is the number of tokens of group g in this step.
        """
        ...

    def combine(self, parts: torch.Tensor) -> torch.Tensor:
        """Return this rank's part [T, hidden] of its group's results, to be summed over the tensor-parallel ranks.

        `parts` has a row for each token that `dispatch` returned: the sum of what this rank's experts make of it.
        """
        ...


class GatherExchange:
    """Every rank gets the tokens of all groups, from the rank with its own share of each; `data` are these ranks."""

    def __init__(self, data: Group) -> None:
        self._data = data
        self.ranks = ExchangeRanks(data, lambda group_tokens: group_tokens, data.rank, complete=False)
        self._sizes: Sequence[int] = ()

    def dispatch(self, tokens: RoutedTokens, group_tokens: Sequence[int]) -> RoutedTokens:
        self._sizes = group_tokens
        return unpack_tokens(self._data.all_gather(pack_tokens(tokens), group_tokens), tokens)

    def combine(self, parts: torch.Tensor) -> torch.Tensor:
        return self._data.reduce_scatter(parts, self._sizes)


class DispatchExchange:
    """A token is sent to the ranks that have its experts, and each returns one row of results.

    The tensor-parallel ranks of a group divide its tokens. `experts` are the ranks of a stage of all groups; `places`
    are theirs, in the same order.
    """

    def __init__(self, experts: Group, places: Sequence[Place], device: torch.device) -> None:
        self._experts, self._place = experts, places[experts.rank]
        count = max(place.experts.stop for place in places)
        # holds[rank, expert]: True if the rank has columns of the expert.
        self._holds = torch.zeros(len(places), count, dtype=torch.bool, device=device)
        for row, place in zip(self._holds, places, strict=True):
            row[place.experts.start : place.experts.stop] = True
        self.ranks = ExchangeRanks(experts, self._divide_tokens, experts.rank - self._place.tp_rank, complete=True)
        self._ones = [1] * len(places)
        self._sent: _SentTokens | None = None

    def dispatch(self, tokens: RoutedTokens, group_tokens: Sequence[int]) -> RoutedTokens:
        total, group = len(tokens.x), self._experts
        own = self._own_rows(total)
        tokens = RoutedTokens(*(part[own.start : own.stop] for part in tokens))
        wanted = self._holds[:, tokens.chosen].any(dim=-1)  # [ranks, own tokens]
        counts = wanted.sum(dim=1)
        send = counts.tolist()
        receive = group.all_to_all(counts[:, None], self._ones, self._ones).flatten().tolist()
        numbers = wanted.nonzero()[:, 1].split(send)
        self._sent = _SentTokens(total, own, numbers, send, receive)
        rows = pack_tokens(tokens)[torch.cat(numbers)]
        return unpack_tokens(group.all_to_all(rows, send, receive), tokens)

    def combine(self, parts: torch.Tensor) -> torch.Tensor:
        assert self._sent, "combine comes after dispatch"
        total, own, numbers, send, receive = self._sent
        returned = self._experts.all_to_all(parts, receive, send).split(send)
        # In the order of ranks, whatever arrives first; rounded once.
        dtype = torch.promote_types(parts.dtype, torch.float32)
        sums = parts.new_zeros(len(own), parts.shape[1], dtype=dtype)
        for rows, results in zip(numbers, returned, strict=True):
            sums[rows] += results
        if len(own) == total:
            return sums.to(parts.dtype)
        out = parts.new_zeros(total, parts.shape[1])
        out[own.start : own.stop] = sums
        return out

    def _own_rows(self, tokens: int) -> range:
        """The tokens of this rank's group that this rank sends."""
        return rank_range(self._divide_tokens([tokens]), self._place.tp_rank)

    def _divide_tokens(self, group_tokens: Sequence[int]) -> list[int]:
        """Number of tokens that each rank sends, group by group."""
        ranks = range(self._place.tp_size)
        return [(tokens + len(ranks) - 1 - rank) // len(ranks) for tokens in group_tokens for rank in ranks]


class _SentTokens(NamedTuple):
    """Number of tokens of the group, the rank's range of them, and by rank those sent to it, with their counts."""

    total: int
    own: range
    numbers: Sequence[torch.Tensor]
    send: list[int]
    receive: list[int]


def create_exchange(
    kind: str | None, links: Links, places: Sequence[Place], rank: int, device: torch.device
) -> TokenExchange | None:
    """The exchange of a rank; `kind` is `Plan.exchange`, `places` are those of all ranks."""
    match kind:
        case "gather":
            return GatherExchange(links.data)
        case "dispatch":
            stage = [place for place in places if place.stage == places[rank].stage]
            return DispatchExchange(links.expert, stage, device)
    return None


def pack_tokens(tokens: RoutedTokens) -> torch.Tensor:
    """One row of bytes per token, so that a token travels in one message: [T, bytes] uint8."""
    columns = tokens.x, tokens.chosen.int(), tokens.shares
    return torch.cat([part.contiguous().view(torch.uint8) for part in columns], dim=1)


def unpack_tokens(rows: torch.Tensor, like: RoutedTokens) -> RoutedTokens:
    """The tokens in rows of bytes, in the widths of `like` and with its dtype of `x`."""
    choices = 4 * like.chosen.shape[1]
    x, chosen, shares = (
        part.contiguous() for part in rows.split([like.x.shape[1] * like.x.itemsize, choices, choices], dim=1)
    )
    return RoutedTokens(x.view(like.x.dtype), chosen.view(torch.int32).long(), shares.view(torch.float32))
