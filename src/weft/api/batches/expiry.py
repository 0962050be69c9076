"""Expiry: how long a client wants a file to be kept, as in OpenAI's API."""

from __future__ import annotations

from weft.api.batches.types import ExpiresAfter
from weft.api.batches.uploads import Form
from weft.errors import RequestError

ANCHOR = "created_at"
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 24 * 3600


def check_expiry(expiry: ExpiresAfter, param: str) -> None:
    """Raise RequestError for an expiry that OpenAI's API does not have."""
    if expiry.anchor != ANCHOR:
        raise RequestError(
            f"{param}.anchor is {expiry.anchor!r:.60}; it must be {ANCHOR!r}", param=param, code="unknown-anchor"
        )
    if not MIN_EXPIRY_S <= expiry.seconds <= MAX_EXPIRY_S:
        raise RequestError(
            f"{param}.seconds is {expiry.seconds}; it must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}",
            param=param,
            code="invalid-expiry",
        )


def form_expiry(form: Form) -> ExpiresAfter | None:
    """The expiry that the fields of an upload ask for; None if they leave that to the server. Raises RequestError."""
    anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    if seconds is None or not seconds.isascii() or not seconds.isdigit() or len(seconds) > 9:
        raise RequestError(
            f"expires_after[seconds] is {seconds!r:.60}; it must be a number",
            param="expires_after",
            code="invalid-expiry",
        )
    given = ExpiresAfter(anchor=anchor or "", seconds=int(seconds))
    check_expiry(given, "expires_after")
    return given
