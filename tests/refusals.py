"""Errors in tests: judged by their type and code, while their wording lives in golden files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from weft.errors import WeftError


@contextmanager
def refuses(error: type[WeftError], code: str) -> Iterator[pytest.ExceptionInfo[WeftError]]:
    """Assert that the block raises `error` with this code. Yields the raised error, for its values."""
    with pytest.raises(error) as raised:
        yield raised
    assert raised.value.code == code, f"{raised.value.code!r}: {raised.value}"
