"""A check of the doctor: what was found, its limit, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

Status = Literal["ok", "warn", "fail", "skipped"]


class Check(msgspec.Struct, frozen=True):
    """Result of one check. `value` is what was found and `limit` what it is compared with, both as text; `remedy` is
    empty if there is nothing to do. A check is skipped if its subject is not on this machine."""

    name: str
    status: Status
    value: str
    limit: str = ""
    remedy: str = ""


def checks_json(checks: Iterable[msgspec.Struct]) -> dict[str, Any]:
    """Checks with the fields of `Check` as JSON: `ok` unless one of them fails."""
    entries = [msgspec.to_builtins(check) for check in checks]
    return {"ok": all(entry["status"] != "fail" for entry in entries), "checks": entries}


def skipped(name: str, why: str) -> Check:
    """A check without a subject on this machine."""
    return Check(name, "skipped", why)
