"""PrefixMap: the beginnings of prompts that replicas got recently, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

CAPACITY = 2**16  # beginnings that are remembered, of about 200 bytes each
MAX_REPLICAS = 2**14  # names that are remembered; beyond it, the map is cleared


class PrefixMap:
    """For each beginning of a prompt, the replicas that got a prompt with it.

    A beginning is a digest, and a prompt is the digests of its beginnings, shortest first. The least recently used
    beginnings are forgotten, the longest of a prompt first: long beginnings are useless without the short ones.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[int, int] = OrderedDict()  # digest → replicas, as bits
        self._bits: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, prefix: Sequence[int], names: Sequence[str]) -> list[int]:
        """For each replica, the number of leading digests of `prefix` that it has."""
        wanted = {self._bits.get(name, 0) for name in names}
        matched = dict.fromkeys(wanted, 0)
        left = sum(wanted)
        for count, digest in enumerate(prefix, 1):
            left &= self._holders.get(digest, 0)
            if not left:
                break
            for bit in wanted:
                if bit & left:
                    matched[bit] = count
        return [matched[self._bits.get(name, 0)] for name in names]

    def insert(self, prefix: Sequence[int], name: str) -> None:
        """Remember that the replica got a prompt with these digests; only the beginning of a very long prompt."""
        if name not in self._bits:
            if len(self._bits) >= MAX_REPLICAS:
                self._bits.clear()
                self._holders.clear()
            self._bits[name] = 1 << len(self._bits)
        bit, holders = self._bits[name], self._holders
        for digest in reversed(prefix[: self._capacity]):
            holders[digest] = holders.get(digest, 0) | bit
            holders.move_to_end(digest)
        while len(holders) > self._capacity:
            holders.popitem(last=False)
