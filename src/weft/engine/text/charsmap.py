"""The character maps of SentencePiece's normalizers: a trie of texts, and the texts that take their place.

The tokenizers library reads a map without checking it, and panics in the middle of a text if the map is damaged.
Layout: four bytes with the size of the trie in bytes, the trie, and the texts, each with a zero byte behind it. The
trie is a double array of 32-bit units, as in https://github.com/s-yata/darts-clone.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_BYTES = 8_000_000  # nmt_nfkc_cf, the largest that is published, has 250 KB
LEAF = 1 << 31  # a unit with a value instead of children
HAS_LEAF = 1 << 8


def check_charsmap(data: bytes) -> int:
    """The most characters that a map puts in the place of one character. Raises ValueError for a map that is
    damaged."""
    import numpy as np  # imported here: few vocabularies have a map

    if len(data) > MAX_BYTES:
        raise ValueError(f"a character map of {len(data):,} bytes; at most {MAX_BYTES:,} are read")
    size = int.from_bytes(data[:4], "little")
    if len(data) < 8 or size % 4 or not 4 <= size <= len(data) - 4:
        raise ValueError(f"a character map of {len(data):,} bytes with a trie of {size:,}")
    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    texts = data[4 + size :]
    texts.decode()  # raises ValueError
    starts = _values(units)
    if not texts.endswith(b"\0"):
        raise ValueError("a character map whose last text has no end")
    if starts.size and (starts.max() >= len(texts) or any(texts[at] & 0xC0 == 0x80 for at in starts.tolist())):
        raise ValueError("a character map with a place outside its texts")
    return max((decomposed_length(text.decode()) for text in texts.split(b"\0")), default=0)


def decomposed_length(text: str) -> int:
    """Characters of a text after every step that decomposes some: a later one cannot make more of them."""
    return len(unicodedata.normalize("NFKD", text.lower()))


def _values(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """Values of all texts in a trie. Raises ValueError if a way from its root leads out of it."""
    import numpy as np

    every_label = np.arange(1, 256)
    seen = np.zeros(len(units), dtype=bool)
    bases, values = _offset(units[:1]), [np.zeros(0, np.int64)]
    while bases.size:
        if (bases | 0xFF).max() >= len(units):
            raise ValueError("a character map with a damaged trie")
        places = (bases[:, None] ^ every_label[None, :]).ravel()
        labels = np.tile(every_label, len(bases))
        # A unit belongs to its parent only if its label is the byte that led to it.
        nodes = np.unique(places[(units[places] & (LEAF | 0xFF)) == labels])
        nodes = nodes[~seen[nodes]]
        seen[nodes] = True
        bases = nodes ^ _offset(units[nodes])
        ends = bases[(units[nodes] & HAS_LEAF) != 0]
        if ends.size and ends.max() >= len(units):
            raise ValueError("a character map with a damaged trie")
        values.append(units[ends] & (LEAF - 1))
    return np.concatenate(values)


def _offset(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """Distance from units to their children, as an operand of exclusive or."""
    return (units >> 10) << ((units & (1 << 9)) >> 6)
