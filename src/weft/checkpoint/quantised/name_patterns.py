"""Lists of modules in a quantization_config: names, and regular expressions that are matched without backtracking.

A model's publisher writes the expressions. Python's `re` may take longer than the age of the universe for an expression
of 20 characters, so they become automata here: a set of states moves along the name once. An expression that no
automaton can match, or only with too much work, is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

from weft.errors import ModelError

PATTERNS = 1_000  # regular expressions in a list; published files have up to 20
PATTERN_CHARACTERS = 200  # of an expression; published ones have up to 100
NAMES = 100_000  # in a list; published files name each expert, some 30,000
STATES = 5_000  # of an automaton, of which repetitions like {100} make many
STEPS = 4_000_000  # of all automata of a list for all names of a model: some seconds; 20 for large models take 1.5

_parser: Any = re._parser  # type: ignore[attr-defined]  # the tree of an expression; `re` offers no other way to it
PREFIX = "re:"  # marks a regular expression among names
ACCEPT = 0  # the state of an expression that has matched

CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda char: char.isalnum() or char == "_",
    "CATEGORY_NOT_DIGIT": lambda char: not char.isdecimal(),
    "CATEGORY_NOT_SPACE": lambda char: not char.isspace(),
    "CATEGORY_NOT_WORD": lambda char: not (char.isalnum() or char == "_"),
}


class ModuleList:
    """Names of modules and regular expressions, each of which matches the beginning of a name, as `re.match` does.

    Raises ModelError for more of them, or longer ones, than any published list has.
    """

    def __init__(self, names: Collection[str], patterns: Iterable[str], where: str) -> None:
        self._where, self._names, self._steps = where, frozenset(names), 0
        sources = list(dict.fromkeys(patterns))
        if len(sources) > PATTERNS or len(names) > NAMES:
            raise ModelError(
                f"{where} has {len(names):,} names and {len(sources):,} regular expressions; at most {NAMES:,} and "
                f"{PATTERNS:,} are read",
                code="too-many-patterns",
            )
        self._automata = [self._compile(source) for source in sources]

    def __contains__(self, name: str) -> bool:
        return name in self._names or any(self._matches(automaton, name) for automaton in self._automata)

    def _matches(self, automaton: _Automaton, name: str) -> bool:
        before = automaton.steps
        is_match = automaton.matches(name)
        self._steps += automaton.steps - before
        if self._steps > STEPS:
            raise ModelError(
                f"{self._where}: its regular expressions take more than {STEPS:,} steps; write simpler ones",
                code="pattern-too-complex",
            )
        return is_match

    def _compile(self, source: str) -> _Automaton:
        if len(source) > PATTERN_CHARACTERS:
            raise ModelError(
                f"{self._where} has a regular expression of {len(source):,} characters; at most "
                f"{PATTERN_CHARACTERS} are read",
                code="pattern-too-long",
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about what may mean something else some day
                tree = _parser.parse(source)
            if tree.state.flags & ~re.UNICODE:
                raise ValueError("it sets flags")
            return _Automaton(tree)
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise ModelError(
                f"{PREFIX + source!r:.100} in {self._where} is no regular expression that is read: {error!s:.100}",
                code="bad-regular-expression",
            ) from error


class _Automaton:
    """States of an expression. A state takes a character that it accepts, or leads on to other states, or to both ends.

    `steps` counts the work that was done. Raises ValueError for what an automaton cannot do.
    """

    def __init__(self, tree: Any) -> None:
        self.steps = 0
        # By state: a kind with its condition, and the states after it.
        self._conditions: list[tuple[str, Any]] = [("accept", None)]
        self._next: list[list[int]] = [[]]
        self._is_local = True  # the next states depend on the next character alone
        self._start = self._sequence(tree, ACCEPT)
        # The states after a character, by those before it and whether it is the name's last one.
        self._moves: dict[tuple[frozenset[int], str, bool], frozenset[int]] = {}

    def matches(self, name: str, start: int = 0) -> bool:
        """Return True if the expression matches some characters of a name from a place on."""
        states = self._begin(name, start)
        for place in range(start, len(name)):
            if ACCEPT in states or not states:
                break
            self.steps += 1
            key = states, name[place], place + 1 == len(name)
            known = self._moves.get(key)
            states = self._move(key, name, place) if known is None else known
        return ACCEPT in states

    def _begin(self, name: str, start: int) -> frozenset[int]:
        """The states before the character at `start`."""
        self.steps += 1
        key = frozenset[int](), str(start == 0), start == len(name)
        return self._moves.get(key) or self._keep(key, self._reach([self._start], name, start))

    def _move(self, key: tuple[frozenset[int], str, bool], name: str, place: int) -> frozenset[int]:
        """The states after the character at `place`."""
        states, char, _ = key
        self.steps += len(states)
        after = [self._next[state][0] for state in states if self._takes(state, char)]
        return self._keep(key, self._reach(after, name, place + 1))

    def _keep(self, key: tuple[frozenset[int], str, bool], states: frozenset[int]) -> frozenset[int]:
        if self._is_local:
            self._moves[key] = states
        return states

    def _takes(self, state: int, char: str) -> bool:
        kind, accepts = self._conditions[state]
        return kind == "take" and accepts(char)

    def _reach(self, states: list[int], name: str, place: int) -> frozenset[int]:
        """All states that some lead to without a character."""
        reached: set[int] = set()
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state in reached:
                continue
            self.steps += 1
            reached.add(state)
            if self._leads_on(state, name, place):
                waiting += self._next[state]
        return frozenset(reached)

    def _leads_on(self, state: int, name: str, place: int) -> bool:
        kind, condition = self._conditions[state]
        if kind == "ahead":
            automaton, wanted = condition
            before = automaton.steps
            is_match = automaton.matches(name, place)
            self.steps += automaton.steps - before
            return bool(is_match is wanted)
        at_place = {"split": True, "begin": place == 0, "end": place == len(name)}
        return at_place.get(kind, False)

    # --- From the tree of an expression

    def _add(self, kind: str, condition: Any, *following: int) -> int:
        if len(self._conditions) >= STATES:
            raise ValueError(f"it has more than {STATES:,} states")
        self._conditions.append((kind, condition))
        self._next.append(list(following))
        return len(self._conditions) - 1

    def _sequence(self, items: Any, following: int) -> int:
        """First state of some parts side by side, before the state `following`."""
        for operator, argument in reversed(list(items)):
            following = self._part(str(operator), argument, following)
        return following

    def _part(self, operator: str, argument: Any, following: int) -> int:
        if operator in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return self._add("take", _accepted(operator, argument), following)
        if operator in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, items = argument
            return self._repeat(least, most, items, following)
        if operator == "BRANCH":
            return self._add("split", None, *[self._sequence(branch, following) for branch in argument[1]])
        if operator == "SUBPATTERN" and not argument[1] and not argument[2]:
            return self._sequence(argument[3], following)
        if operator in ("ASSERT", "ASSERT_NOT") and argument[0] > 0:
            self._is_local = False
            return self._add("ahead", (_Automaton(argument[1]), operator == "ASSERT"), following)
        if operator == "AT" and str(argument) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return self._add("begin", None, following)
        if operator == "AT" and str(argument) in ("AT_END", "AT_END_STRING"):
            return self._add("end", None, following)
        raise ValueError(f"an automaton has no {operator.lower()}")

    def _repeat(self, least: int, most: int, items: Any, following: int) -> int:
        is_endless = most == _parser.MAXREPEAT
        if max(least, 0 if is_endless else most) > STATES:
            raise ValueError(f"it repeats a part more than {STATES:,} times")
        first = following
        if is_endless:
            first = self._add("split", None, following)
            self._next[first].append(self._sequence(items, first))
        else:
            for _ in range(most - least):
                first = self._add("split", None, following, self._sequence(items, first))
        for _ in range(least):
            first = self._sequence(items, first)
        return first


def _accepted(operator: str, argument: Any) -> Callable[[str], bool]:
    """Return True for the characters that one part of an expression stands for."""
    if operator == "ANY":
        return lambda char: char != "\n"
    if operator != "IN":
        wanted, is_same = chr(argument), operator == "LITERAL"
        return lambda char: (char == wanted) is is_same
    is_negated = bool(argument) and str(argument[0][0]) == "NEGATE"
    members = [_member(str(kind), value) for kind, value in argument[is_negated:]]
    return lambda char: any(accepts(char) for accepts in members) is not is_negated


def _member(kind: str, value: Any) -> Callable[[str], bool]:
    if kind == "LITERAL":
        return lambda char: ord(char) == value
    if kind == "RANGE":
        return lambda char: value[0] <= ord(char) <= value[1]
    return CATEGORIES[str(value)]
