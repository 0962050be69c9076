"""Log lines in tests: judged by the code and the values of their event, while their wording may change."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest


def logged(caplog: pytest.LogCaptureFixture, code: str) -> list[dict[str, Any]]:
    """The values of each line that was logged with this code."""
    events = (getattr(record, "fields", {}) for record in caplog.records)
    return [{name: value for name, value in event.items() if name != "code"} for event in events if is_of(event, code)]


def logged_json(lines: Iterable[str], code: str) -> list[dict[str, Any]]:
    """The JSON lines of this code among the lines that a process has printed."""
    return [row for row in map(json.loads, (line for line in lines if line.startswith("{"))) if is_of(row, code)]


def is_of(event: dict[str, Any], code: str) -> bool:
    return bool(event.get("code") == code)
