"""RequestIdentity: the values other than its tokens that a request's KV depends on."""

from __future__ import annotations

from hashlib import sha256

import msgspec


class RequestIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """Adapter, cache salt and digests of the non-text parts of a request's prompt, in the prompt's order.

    Requests of different identity never share KV blocks, even if their tokens are equal. The adapter is the name of
    the adapter that runs with the model, None for the model alone.
    """

    adapter: str | None = None
    cache_salt: str | None = None
    content: tuple[bytes, ...] = ()

    def digest(self) -> bytes:
        """SHA-256 digest (32 bytes) that the digests of the request's blocks begin from; empty for the default."""
        if self == PLAIN:
            return b""
        # Read as 64-bit tokens, the prefix is an id that no vocabulary has: no block has the same digest.
        return sha256(b"identity" + msgspec.msgpack.encode(self)).digest()


PLAIN = RequestIdentity()  # of a request of the model alone, without a salt
