"""Keys that clients send: their places in a request, and a comparison in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers


def digest_key(key: str) -> bytes:
    """SHA-256 of a key, the only form in which it is compared."""
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


def sent_key(headers: Headers) -> str:
    """The key of `Authorization: Bearer KEY`, else of `x-api-key`; "" without a key."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    # Starlette reads header fields as latin-1; keys are configured as text, and sent in UTF-8.
    return given.encode("latin-1").decode("utf-8", errors="replace")


def matching_index(digests: Sequence[bytes], key: str) -> int | None:
    """Index of the first digest that is the key's; None for "" and for an unknown key.

    Every digest is compared: the time taken reveals nothing about a key, not even its length.
    """
    given = digest_key(key)
    equal = [hmac.compare_digest(given, digest) for digest in digests]
    return equal.index(True) if key and any(equal) else None
