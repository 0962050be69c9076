"""Patterns of property names that only finitely many names match, such as `^(?:min|max)_[xy]$`."""

from __future__ import annotations

from collections.abc import Set
from itertools import product

# Bounds of the work for one pattern, of which a schema may have thousands: real ones list a few names.
MAX_NAMES = 128
MAX_JOINS = 256  # texts that are joined of two parts, all together
MAX_PATTERN = 128  # letters of the pattern
MAX_DEPTH = 16  # groups inside each other
SPECIAL = frozenset(".^$*+?{}[]()|\\")


class _NotFinite(Exception):
    """A pattern with too many names, or in which something stands that is not read here."""


def names_of(pattern: str) -> Set[str] | None:
    """All names in which a pattern is found; None for more than MAX_NAMES, or if that cannot be told."""
    if len(pattern) > MAX_PATTERN:
        return None
    try:
        reader = _PatternReader(pattern)
        names, anchored = reader.read_alternatives(0)
        return names if anchored and reader.at == len(pattern) else None
    except (_NotFinite, IndexError, ValueError):
        return None


class _PatternReader:
    """Reads a pattern from `at` on, and says the texts that its parts match."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0
        self._joins = 0

    def read_alternatives(self, depth: int) -> tuple[Set[str], bool]:
        """The texts of all alternatives, and True if each has an anchor at both ends."""
        if depth > MAX_DEPTH:
            raise _NotFinite
        texts, anchored = self._read_sequence(depth)
        while self._accept("|"):
            others, also = self._read_sequence(depth)
            texts, anchored = _checked(texts | others), anchored and also
        return texts, anchored

    def _read_sequence(self, depth: int) -> tuple[Set[str], bool]:
        begins, ends, inner = self._accept("^"), False, False
        texts: Set[str] = frozenset([""])
        parts = 0
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            if ends or (inner and parts):
                raise _NotFinite  # something behind an anchor
            if self._accept("$"):
                ends = True
                continue
            part, inner = self._read_part(depth)
            parts += 1
            if inner and (begins or parts > 1):
                raise _NotFinite
            texts = self._joined(texts, part)
        if inner and ends:
            raise _NotFinite
        if begins != ends:
            raise _NotFinite
        return texts, begins or inner

    def _read_part(self, depth: int) -> tuple[Set[str], bool]:
        """The texts of a part with its quantifier, and True for a group with anchors of its own."""
        texts, anchored = self._read_item(depth)
        least, most = self._read_quantifier()
        if anchored and (least, most) != (1, 1):
            raise _NotFinite
        repeated: Set[str] = frozenset([""])
        reached: Set[str] = repeated if least == 0 else frozenset()
        for count in range(1, most + 1):
            repeated = self._joined(repeated, texts)
            if count >= least:
                reached = _checked(reached | repeated)
        return reached, anchored

    def _read_item(self, depth: int) -> tuple[Set[str], bool]:
        if self._accept("("):
            if self._accept("?") and not self._accept(":"):
                raise _NotFinite
            texts, anchored = self.read_alternatives(depth + 1)
            self._expect(")")
            return texts, anchored
        if self._accept("["):
            return self._read_class(), False
        if self._accept("\\"):
            return self._read_escape(), False
        letter = self._take()
        if letter in SPECIAL:
            raise _NotFinite
        return frozenset([letter]), False

    def _read_class(self) -> Set[str]:
        if self._pattern[self.at] in "^]":
            raise _NotFinite
        texts: set[str] = set()
        while not self._accept("]"):
            part = self._read_escape() if self._accept("\\") else frozenset([self._take()])
            if self._pattern[self.at] == "-" and self._pattern[self.at + 1] != "]":
                self._expect("-")
                if len(part) > 1:
                    raise _NotFinite
                first, last = "".join(part), self._take()
                if last == "\\":
                    raise _NotFinite
                if ord(last) - ord(first) > MAX_NAMES:
                    raise _NotFinite
                part = frozenset(map(chr, range(ord(first), ord(last) + 1)))
            texts |= part
        return texts

    def _read_escape(self) -> Set[str]:
        letter = self._take()
        if letter == "d":
            return frozenset("0123456789")
        if letter.isalnum():
            raise _NotFinite
        return frozenset([letter])

    def _read_quantifier(self) -> tuple[int, int]:
        """The least and the most repetitions."""
        least = most = 1
        if self._accept("?"):
            least = 0
        elif self._accept("{"):
            end = self._pattern.index("}", self.at)
            first, comma, last = self._pattern[self.at : end].partition(",")
            self.at = end + 1
            least, most = int(first), int(last if comma else first)
        elif self.at < len(self._pattern) and self._pattern[self.at] in "*+":
            raise _NotFinite
        self._accept("?")
        if most > MAX_NAMES:
            raise _NotFinite
        return least, most

    def _joined(self, firsts: Set[str], seconds: Set[str]) -> Set[str]:
        count = len(firsts) * len(seconds)
        self._joins += count
        if count > MAX_NAMES or self._joins > MAX_JOINS:
            raise _NotFinite
        return frozenset(map("".join, product(firsts, seconds)))

    def _accept(self, letter: str) -> bool:
        accepted = self._pattern.startswith(letter, self.at)
        self.at += accepted
        return accepted

    def _expect(self, letter: str) -> None:
        if not self._accept(letter):
            raise _NotFinite

    def _take(self) -> str:
        self.at += 1
        return self._pattern[self.at - 1]


def _checked(texts: Set[str]) -> Set[str]:
    if len(texts) > MAX_NAMES:
        raise _NotFinite
    return texts
