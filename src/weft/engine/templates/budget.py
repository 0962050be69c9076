"""Budget: time and characters that one rendering of a chat template may still use.

A template comes with a checkpoint, from a stranger. Each construct that multiplies work or text charges the budget
first, and what it makes is charged as well. The process that renders has further limits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from jinja2 import TemplateError

from weft.engine.templates.limits import LIMITS

ITEM = 32  # characters that an item of a list counts as: to go through it takes longer than through a text
CONTAINERS = (list, tuple, dict)
T = TypeVar("T")


class BudgetExceeded(TemplateError):
    """A template takes too much time, or makes too much text: no other messages are tried with it."""


class Budget:
    """Remaining budget of one rendering: time until `deadline`, and characters that it may still create."""

    __slots__ = ("characters", "deadline")

    def __init__(self) -> None:
        self.deadline = time.monotonic() + LIMITS.template_s
        self.characters = LIMITS.template_work

    def check_time(self) -> None:
        """Raise BudgetExceeded after the deadline."""
        if time.monotonic() > self.deadline:
            raise BudgetExceeded(f"it has run for {LIMITS.template_s:g} s, which is the limit")

    def charge(self, characters: int) -> None:
        """Spend `characters`. Raises BudgetExceeded for one text that is too long, and if the budget is exceeded."""
        if characters > LIMITS.template_characters:
            raise BudgetExceeded(
                f"it makes a text or list of {characters:,} characters; the limit is {LIMITS.template_characters:,}"
            )
        self.characters -= characters
        if self.characters < 0:
            raise BudgetExceeded(f"it makes more than {LIMITS.template_work:,} characters in all, which is the limit")
        self.check_time()


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


def current_budget() -> Budget:
    """Budget of the current rendering, or of the current compiling: Jinja computes constant expressions there."""
    return _current.get() or Budget()


def run_within_budget(work: Callable[[], T]) -> T:
    """Run `work` with a new Budget."""
    token = _current.set(Budget())
    try:
        return work()
    finally:
        _current.reset(token)


def text_size(value: object) -> int:
    """Approximate number of characters of a value as text. Repeated occurrences in lists count each time."""
    if type(value) is str or isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, list | tuple | Mapping):
        return 1
    total, pending = 0, [value]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            pending += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            pending += part
        total += len(part) if isinstance(part, str | bytes) else ITEM
        if total > LIMITS.template_characters:
            break
    return total


def shallow_size(value: object) -> int:
    """Number of characters of a text, or of a list whose items are not copied."""
    if isinstance(value, str | bytes):
        return len(value)
    return ITEM * len(value) if isinstance(value, list | tuple) else 1


def charge_parts(*values: object) -> None:
    """Charge for work that goes through all parts of values, such as to compare or to spell them."""
    for value in values:
        if isinstance(value, CONTAINERS):
            current_budget().charge(text_size(value))


def join_texts(parts: Iterable[Any], separator: str = "") -> str:
    """`separator.join(parts)`, with every part converted to text, within the budget."""
    listed = list(parts)
    charge_join(listed, separator)
    return separator.join(map(str, listed))


def charge_join(parts: list[Any], separator: str | bytes) -> None:
    """Charge for parts that are joined to one text."""
    current_budget().charge(sum(map(text_size, parts)) + len(separator) * len(parts))


def check_small(number: object) -> None:
    """Raise TemplateError for a number that is too large for a width or a count."""
    limit = LIMITS.template_number
    if isinstance(number, int) and abs(number) > limit:
        raise TemplateError(f"the number {number:.3g} is over the limit of {limit:,} for a width or a count")


def check_bits(*values: object) -> None:
    """Raise TemplateError for an integer so long that arithmetic with it takes its time."""
    for value in values:
        if isinstance(value, int):
            check_small(value.bit_length())
