"""Stop strings in streamed text, matched in one pass by an Aho-Corasick automaton."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopAutomaton:
    """Aho-Corasick automaton of `stops`, shared by all choices of a request.

    A state is a node of the trie and stands for a prefix of a stop string; state 0 is the empty prefix. The state after
    a text is the longest suffix of the text that is such a prefix. One character takes amortized constant time,
    regardless of the number of stop strings.

    Aho and Corasick, "Efficient string matching: an aid to bibliographic search", CACM 18 (1975).
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.depths = [0]  # characters of each state's prefix
        self.matches: list[str | None] = [None]  # longest stop string at the end of each state's prefix
        self._next: list[dict[str, int]] = [{}]
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._next)  # longest proper suffix of each state's prefix that is a state
        self._link()
        # A state without children begins no further stop string: its text need not be held back.
        self._open = list(range(len(self._next)))
        for state in self._by_depth():
            if not self._next[state]:
                self._open[state] = self._open[self._fail[state]]

    def advance(self, state: int, char: str) -> int:
        """The state after one more character."""
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def extensible(self, state: int) -> int:
        """Longest suffix of the state's prefix that a stop string continues, as a state."""
        return self._open[state]

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, start=1):
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self.depths.append(depth)
                self.matches.append(None)
            state = self._next[state][char]
        self.matches[state] = stop

    def _link(self) -> None:
        for state in self._by_depth():
            for char, child in self._next[state].items():
                if state:
                    self._fail[child] = self.advance(self._fail[state], char)
                # The child's own stop string is the longest.
                self.matches[child] = self.matches[child] or self.matches[self._fail[child]]

    def _by_depth(self) -> Iterable[int]:
        """All states, shorter prefixes first."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            yield state
            queue.extend(self._next[state].values())


class StopStrings:
    """Finds the first stop string of `automaton` in a streamed text.

    The stop string that ends first wins; of several that end together, the first to begin. `match` is that string. Text
    that may be the beginning of a stop string is held back, unless `keep` keeps stop strings in the text.
    """

    def __init__(self, automaton: StopAutomaton, *, keep: bool) -> None:
        self._automaton = automaton
        self._keep = keep
        self._state = 0
        self._held = ""  # end of the text so far, which may begin a stop string
        self.match: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Text that is final after `text`. Unless `armed`, stop strings that end within `text` do not count."""
        automaton, state = self._automaton, self._state
        whole = self._held + text
        sent = len(self._held) if self._keep else 0
        for end, char in enumerate(text, start=len(self._held) + 1):
            state = automaton.advance(state, char)
            match = automaton.matches[state]
            if armed and match:
                self.match = match
                self._held, self._state = "", 0
                return whole[sent : end if self._keep else end - len(match)]
        self._state = automaton.extensible(state)
        cut = len(whole) - automaton.depths[self._state]
        self._held = whole[cut:]
        return whole[sent:] if self._keep else whole[:cut]

    def flush(self) -> str:
        """Text that was held back; call it at the end of the text."""
        held, self._held, self._state = "" if self._keep else self._held, "", 0
        return held
