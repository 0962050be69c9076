"""TokenIds: the token ids of a prompt, packed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import msgspec


class TokenIds(msgspec.Struct, frozen=True, array_like=True):
    """32-bit token ids, in one piece of memory and of a message.

    A list takes 40 bytes per id. Its integers also lie among other objects, so that the interpreter can seldom give
    their memory back, and decoding them from a message keeps all other threads waiting.
    """

    packed: bytes

    @classmethod
    def pack(cls, ids: Iterable[int]) -> TokenIds:
        """Pack ids. Raises OverflowError for an id that has more than 32 bits."""
        return cls(array("i", ids).tobytes())

    def __len__(self) -> int:
        return len(self.packed) // 4

    def __iter__(self) -> Iterator[int]:
        return iter(array("i", self.packed))


NO_IDS = TokenIds(b"")
