"""Decision: a value of a plan, with what decided it."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value", bound=str)


class Decision(NamedTuple, Generic[Value]):
    """A value, and what decided it: an option, a variable of the environment, or a fact."""

    value: Value
    reason: str
