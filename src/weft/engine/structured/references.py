"""References within a schema: JSON pointers in the fragment of an address."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

# Characters that an address may hold as they are, besides letters and digits (RFC 3986).
ADDRESS = "-._~:/?#@!$&'()*+,;="
LONE_PERCENT = re.compile(r"%(?![0-9a-fA-F]{2})")


def steps_of(reference: str) -> list[str]:
    """The keys on the way to what a reference such as "#/$defs/name" names; none for "#" and for other forms."""
    if not reference.startswith("#/"):
        return []
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in reference[2:].split("/")]


def as_address(reference: str) -> str:
    """A reference whose characters an address may hold: generators write names of types as they are."""
    return quote(LONE_PERCENT.sub("%25", reference), safe=ADDRESS + "%")
