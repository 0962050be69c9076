"""Stop strings in text that comes in pieces, matched in one pass by an Aho-Corasick automaton."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopAutomaton:
    """The Aho-Corasick automaton of `stops`, shared by all choices of a request.

    A state stands for a prefix of a stop string, by the number of its node in the trie; state 0 is the empty
    prefix. The state after a text is the longest end of the text that is such a prefix. One character costs
    amortised constant time, whatever the number of stop strings.

    Aho and Corasick, "Efficient string matching: an aid to bibliographic search", CACM 18 (1975).
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.depths = [0]  # characters of each state's prefix
        self.matches: list[str | None] = [None]  # the longest stop string that each state's prefix ends with
        self._next: list[dict[str, int]] = [{}]
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._next)  # the longest proper end of each state's prefix that is a state too
        self._link()
        # A state that nothing extends begins no further stop string: its text need not be held back.
        self._open = list(range(len(self._next)))
        for state in self._by_depth():
            if not self._next[state]:
                self._open[state] = self._open[self._fail[state]]

    def advance(self, state: int, char: str) -> int:
        """State after one more character."""
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def extensible(self, state: int) -> int:
        """The longest end of the state's prefix that a stop string continues."""
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
                # The child's own stop string is the longer one.
                self.matches[child] = self.matches[child] or self.matches[self._fail[child]]

    def _by_depth(self) -> Iterable[int]:
        """All states, shorter prefixes first."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            yield state
            queue.extend(self._next[state].values())


class StopStrings:
    """Watches a text for the stop strings of `automaton`. The one that is complete first counts; of several that
    end together, the one that begins first. `match` is that string. Text that may be the beginning of one is held
    back, unless stop strings are to be kept (`keep`) anyway.
    """

    def __init__(self, automaton: StopAutomaton, *, keep: bool) -> None:
        self._automaton = automaton
        self._keep = keep
        self._state = 0
        self._held = ""  # the end of the text so far that may begin a stop string
        self.match: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that is certain now. Not `armed`, stop strings that end within `text` do not count."""
        automaton, state = self._automaton, self._state
        whole = self._held + text
        given = len(self._held) if self._keep else 0
        for end, char in enumerate(text, start=len(self._held) + 1):
            state = automaton.advance(state, char)
            if armed and (match := automaton.matches[state]):
                self.match = match
                self._held, self._state = "", 0
                return whole[given : end if self._keep else end - len(match)]
        self._state = automaton.extensible(state)
        cut = len(whole) - automaton.depths[self._state]
        self._held = whole[cut:]
        return whole[given:] if self._keep else whole[:cut]

    def flush(self) -> str:
        """The text that was held back, when no more comes."""
        held, self._held, self._state = "" if self._keep else self._held, "", 0
        return held
