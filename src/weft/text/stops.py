"""Stop strings, found in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a text for any of `stops`. The one that is complete first counts; of several that end together,
    the one that begins first. `found` is that string. Text that may be the beginning of one is held back, unless
    stop strings are to be kept (`keep`) anyway.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool) -> None:
        self._stops = stops
        self._keep = keep
        self._tail = ""  # the end of the text so far, from where a stop string may have begun
        self.found: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that is certain now. Not `armed`, stop strings that end within `text` do not count."""
        text = self._tail + text
        given = len(self._tail) if self._keep else 0
        match = self._match(text, len(self._tail)) if armed else None
        if match is not None:
            start, self.found = match
            self._tail = ""
            return text[given : start + len(self.found) if self._keep else start]
        cut = self._beginning(text)
        self._tail = text[cut:]
        return text[given:] if self._keep else text[:cut]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._tail = "" if self._keep else self._tail, ""
        return held

    def _match(self, text: str, seen: int) -> tuple[int, str] | None:
        """Start and string of the first match that ends after `seen` characters."""
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(0, seen + 1 - len(stop)))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        return min(matches)[1:] if matches else None

    def _beginning(self, text: str) -> int:
        """Where the longest end of `text` starts that is the beginning of a stop string; its length if none is."""
        first = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) + 1 - len(stop)), first)
            while at >= 0 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1, first)
            if at >= 0:
                first = at
        return first
