"""Errors in tests: judged by their type, code and values, while their wording lies in golden files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from weft.errors import WeftError

T = TypeVar("T")


@contextmanager
def refuses(error: type[WeftError], code: str, *values: object) -> Iterator[pytest.ExceptionInfo[WeftError]]:
    """Assert that the block raises `error` with this code, and that its line has these values, in this order.

    Yields the raised error.
    """
    with pytest.raises(error) as raised:
        yield raised
    assert raised.value.code == code, f"{raised.value.code!r}: {raised.value}"
    assert "\n" not in str(raised.value)
    has_values(str(raised.value), *values)


def has_values(text: str, *values: object) -> None:
    """Assert that a text has these values, in this order."""
    rest = text
    for value in values:
        _, found, rest = rest.partition(str(value))
        assert found, f"{value!r} is not in {text!r}, or not after the values before it"


def refusal_line(error: WeftError, *hidden: object) -> str:
    """Line "code: message" of an error, for a golden file.

    `hidden` are texts of this machine or run, such as `tmp_path`; each becomes "...".
    """
    message = str(error)
    for text in hidden:
        message = message.replace(str(text), "...")
    assert "\n" not in message
    return f"{error.code}: {message}\n"


def refusal(call: Callable[[], object], *hidden: object) -> str:
    """The `refusal_line` of the error that a call raises."""
    with pytest.raises(WeftError) as raised:
        call()
    return refusal_line(raised.value, *hidden)


def refusals(call: Callable[[T], object], inputs: Iterable[T], *hidden: object) -> str:
    """The refused inputs of a call, each with its `refusal_line` below it, for a golden file."""

    def refused(given: T) -> str:
        return f"{given!r:.100}\n  {refusal(lambda: call(given), *hidden)}"

    return "".join(map(refused, inputs))
