"""TokenExchange: sends tokens to the ranks that hold their experts, and results back, if several attention groups share
one set of experts.

Every rank of a stage takes part in each exchange, even one whose attention group has no tokens in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from weft.checkpoint.architectures.place import Place
from weft.ranks.comm import Group, Links
from weft.ranks.comm.base import rank_range
from weft.ranks.kernels.fused import ExchangeRanks


class RoutedTokens(NamedTuple):
    """T tokens: hidden states `x` [T, hidden], and the experts that each has chosen.

    `chosen` [T, top_k] int64: indices of the experts in the whole model. `shares` [T, top_k] float32: the router's
    weight of each.
    """

    x: torch.Tensor
    chosen: torch.Tensor
    shares: torch.Tensor


class TokenExchange(Protocol):
    """An exchange among the ranks that hold one pipeline stage, in all attention groups.

    Each layer calls `dispatch`, then `combine`. Fused kernels do the exchange natively and read only `ranks`; they
    never call `dispatch`. A CUDA graph can hold the exchange if it is `capturable`. While `as_in_graphs` is True, as
    during the measurement of the graphs' memory, `dispatch` behaves as if `static`. `GatherExchange` is always static.
    """

    ranks: ExchangeRanks
    as_in_graphs: bool

    @property
    def capturable(self) -> bool: ...

    def dispatch(self, tokens: RoutedTokens, group_tokens: Sequence[int], *, static: bool = False) -> RoutedTokens:
        """Return the tokens that this rank computes its experts on; `tokens` are its attention group's.

        `group_tokens[g]` is the number of tokens of attention group g in this step. If `static`, no size depends on
        what the tokens choose, and nothing waits for the device.
        """
        ...

    def combine(self, parts: torch.Tensor) -> torch.Tensor:
        """Return this rank's part [T, hidden] of its attention group's results.

        Parts are to be summed over the tensor-parallel ranks.

        `parts` has a row for each token that `dispatch` returned: the sum of what this rank's experts make of it.
        """
        ...


class GatherExchange:
    """Each rank gathers the tokens of all attention groups from its counterparts, and reduces their results.

    Counterparts are the ranks with the same share of the model in each attention group. `data` is their communication
    group.
    """

    as_in_graphs = False

    def __init__(self, data: Group) -> None:
        self._data, self.capturable = data, data.capturable
        self.ranks = ExchangeRanks(data, lambda group_tokens: group_tokens, data.rank, complete=False)
        self._sizes: Sequence[int] = ()

    def dispatch(self, tokens: RoutedTokens, group_tokens: Sequence[int], *, static: bool = False) -> RoutedTokens:
        self._sizes = group_tokens
        return gather_tokens(tokens, self._data, group_tokens)

    def combine(self, parts: torch.Tensor) -> torch.Tensor:
        return self._data.reduce_scatter(parts, self._sizes)


class DispatchExchange:
    """A token is sent to the ranks that have its experts, and each returns one row of results.

    The tensor-parallel ranks of an attention group divide its tokens. In a static exchange every token is sent to every
    rank, so that the host need not wait for the device to learn what the tokens chose. `expert_ranks` is the
    communication group of the ranks that hold one pipeline stage; `places` are theirs, in the same order.
    """

    as_in_graphs = False

    def __init__(self, expert_ranks: Group, places: Sequence[Place], device: torch.device) -> None:
        self._expert_ranks, self._place = expert_ranks, places[expert_ranks.rank]
        self.capturable = expert_ranks.capturable
        count = max(place.experts.stop for place in places)
        # holds[rank, expert]: True if the rank has columns of the expert.
        self._holds = torch.zeros(len(places), count, dtype=torch.bool, device=device)
        for row, place in zip(self._holds, places, strict=True):
            row[place.experts.start : place.experts.stop] = True
        # The tensor-parallel ranks of an attention group are consecutive in `expert_ranks`.
        first_rank = expert_ranks.rank - self._place.tp_rank
        self.ranks = ExchangeRanks(expert_ranks, self._divide_tokens, first_rank, complete=True)
        self._ones = [1] * len(places)
        self._total, self._own_span = 0, range(0)  # tokens of the attention group, and this rank's of them
        # The parts that this rank computed, returned to the senders: [tokens dispatched, hidden] -> [own, hidden].
        self._return_parts: Callable[[torch.Tensor], torch.Tensor] | None = None

    def dispatch(self, tokens: RoutedTokens, group_tokens: Sequence[int], *, static: bool = False) -> RoutedTokens:
        self._total, self._own_span = len(tokens.x), self._own_rows(len(tokens.x))
        tokens = RoutedTokens(*(part[self._own_span.start : self._own_span.stop] for part in tokens))
        if not (static or self.as_in_graphs):
            return self._dispatch_chosen(tokens)
        sizes = self._divide_tokens(group_tokens)
        self._return_parts = partial(self._expert_ranks.reduce_scatter, sizes=sizes)
        return gather_tokens(tokens, self._expert_ranks, sizes)

    def combine(self, parts: torch.Tensor) -> torch.Tensor:
        assert self._return_parts, "combine comes after dispatch"
        sums, own = self._return_parts(parts).to(parts.dtype), self._own_span
        if len(own) == self._total:
            return sums
        out = parts.new_zeros(self._total, parts.shape[1])
        out[own.start : own.stop] = sums
        return out

    def _dispatch_chosen(self, tokens: RoutedTokens) -> RoutedTokens:
        """Send this rank's tokens to the ranks whose experts they chose; return the tokens that it receives."""
        ranks = self._expert_ranks
        wanted = self._holds[:, tokens.chosen].any(dim=-1)  # [ranks, own tokens]
        counts = wanted.sum(dim=1)
        send = counts.tolist()
        receive = ranks.all_to_all(counts[:, None], self._ones, self._ones).flatten().tolist()
        numbers = wanted.nonzero()[:, 1].split(send)
        self._return_parts = partial(self._sum_returned, _SentTokens(len(tokens.x), numbers, send, receive))
        rows = pack_tokens(tokens)[torch.cat(numbers)]
        return unpack_tokens(ranks.all_to_all(rows, send, receive), tokens)

    def _sum_returned(self, sent: _SentTokens, parts: torch.Tensor) -> torch.Tensor:
        """Return `parts` to the ranks that sent the tokens; sum what comes back for each of this rank's tokens."""
        returned = self._expert_ranks.all_to_all(parts, sent.receive, sent.send).split(sent.send)
        # In the order of ranks, whatever arrives first; rounded once.
        dtype = torch.promote_types(parts.dtype, torch.float32)
        sums = parts.new_zeros(sent.own_count, parts.shape[1], dtype=dtype)
        for rows, results in zip(sent.numbers, returned, strict=True):
            sums[rows] += results
        return sums

    def _own_rows(self, tokens: int) -> range:
        """The tokens of this rank's attention group that this rank sends."""
        return rank_range(self._divide_tokens([tokens]), self._place.tp_rank)

    def _divide_tokens(self, group_tokens: Sequence[int]) -> list[int]:
        """Number of tokens that each rank sends, attention group by attention group."""
        ranks = range(self._place.tp_size)
        return [(tokens + len(ranks) - 1 - rank) // len(ranks) for tokens in group_tokens for rank in ranks]


class _SentTokens(NamedTuple):
    """State that `combine` needs from `dispatch`.

    `own_count`: number of this rank's tokens. `numbers[r]`: indices of those sent to rank r. `send[r]`, `receive[r]`:
    rows sent to and received from rank r.
    """

    own_count: int
    numbers: Sequence[torch.Tensor]
    send: list[int]
    receive: list[int]


def create_exchange(
    kind: str | None, links: Links, places: Sequence[Place], rank: int, device: torch.device
) -> TokenExchange | None:
    """The exchange of a rank; `kind` is `Plan.exchange`, `places` are the places of all ranks."""
    match kind:
        case "gather":
            return GatherExchange(links.data)
        case "dispatch":
            stage = [place for place in places if place.stage == places[rank].stage]
            return DispatchExchange(links.expert, stage, device)
    return None


def gather_tokens(tokens: RoutedTokens, group: Group, sizes: Sequence[int]) -> RoutedTokens:
    """The tokens of all ranks of a communication group, `sizes[r]` of rank r, on every rank."""
    return unpack_tokens(group.all_gather(pack_tokens(tokens), sizes), tokens)


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
