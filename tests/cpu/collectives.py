"""Operations of a group of ranks against numpy: every rank knows what the others give, and checks what it gets."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from weft.ranks.comm import Group

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
MAX_RANKS = 4
HUGE = 2**40 + 1  # factor of integers, which no float carries


class Case(NamedTuple):
    """One operation in a group of ranks, in numbers that fit into a step's tokens.

    `rows[r][p]` is the number of rows that rank r sends to rank p; other operations have the sizes `rows[0]`.
    """

    operation: int
    ranks: int
    dtype: int
    columns: int
    source: int
    seed: int
    rows: tuple[tuple[int, ...], ...]

    def to_tokens(self) -> list[int]:
        return [*self[:-1], *chain.from_iterable(self.rows)]

    @classmethod
    def from_tokens(cls, tokens: list[int]) -> Case:
        fields, rows, ranks = tokens[: len(cls._fields) - 1], tokens[len(cls._fields) - 1 :], tokens[1]
        return cls(*fields, tuple(tuple(rows[begin : begin + ranks]) for begin in range(0, len(rows), ranks)))

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.rows[0]

    def given(self, rank: int, *shape: int) -> np.ndarray:
        """Numbers that a rank brings: integers, whose sums are exact in every dtype."""
        numbers = np.random.default_rng([self.seed, rank]).integers(-8, 9, shape)
        return numbers * HUGE if DTYPES[self.dtype] == torch.int64 else numbers

    def all_given(self, *shape: int) -> list[np.ndarray]:
        return [self.given(rank, *shape) for rank in range(self.ranks)]


# The tensor that a rank brings, by its number and a shape; and the result of an operation beside the right one.
Bring = Callable[..., torch.Tensor]
Result = tuple[torch.Tensor | None, np.ndarray | None]


def sum_rows(group: Group, case: Case, rank: int, bring: Bring) -> Result:
    shape = (case.sizes[0], case.columns)
    return group.sum(bring(rank, *shape)), sum(case.all_given(*shape))


def gather(group: Group, case: Case, rank: int, bring: Bring) -> Result:
    got = group.gather(bring(rank, case.columns, case.sizes[rank]), case.sizes)
    parts = [case.given(peer, case.columns, size) for peer, size in enumerate(case.sizes)]
    return got, np.concatenate(parts, axis=-1) if rank == 0 else None


def all_gather(group: Group, case: Case, rank: int, bring: Bring) -> Result:
    got = group.all_gather(bring(rank, case.sizes[rank], case.columns, 2), case.sizes)
    return got, np.concatenate([case.given(peer, size, case.columns, 2) for peer, size in enumerate(case.sizes)])


def reduce_scatter(group: Group, case: Case, rank: int, bring: Bring) -> Result:
    shape, begin = (sum(case.sizes), case.columns), sum(case.sizes[:rank])
    got = group.reduce_scatter(bring(rank, *shape), case.sizes)
    return got, sum(case.all_given(*shape))[begin : begin + case.sizes[rank]]


def all_to_all(group: Group, case: Case, rank: int, bring: Bring) -> Result:
    receive = [rows[rank] for rows in case.rows]
    got = group.all_to_all(bring(rank, sum(case.rows[rank]), case.columns), case.rows[rank], receive)
    want = []
    for peer, rows in enumerate(case.rows):
        begin = sum(rows[:rank])
        want.append(case.given(peer, sum(rows), case.columns)[begin : begin + rows[rank]])
    return got, np.concatenate(want)


def broadcast(group: Group, case: Case, rank: int, bring: Bring) -> Result:
    shape = (case.sizes[0], case.columns)
    return group.broadcast(bring(rank, *shape), case.source), case.given(case.source, *shape)


OPERATIONS: tuple[Callable[[Group, Case, int, Bring], Result], ...] = (
    sum_rows,
    gather,
    all_gather,
    reduce_scatter,
    all_to_all,
    broadcast,
)


def check_case(group: Group, case: Case, device: str = "cpu") -> None:
    """Run one rank's part of a case. Raises AssertionError if it gets anything but what numpy computes."""

    def bring(rank: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(case.given(rank, *shape)).to(device, DTYPES[case.dtype])

    got, want = OPERATIONS[case.operation](group, case, group.rank, bring)
    assert (got is None) == (want is None), case
    if got is not None and want is not None:
        assert got.dtype == DTYPES[case.dtype], (case, got.dtype)
        assert got.shape == want.shape, (case, got.shape, want.shape)
        assert np.array_equal(got.to("cpu", torch.int64).numpy(), want), (case, got, want)
