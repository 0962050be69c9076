"""The header by which the front of a set names the client of a request to a model's server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
from starlette.datastructures import Headers

if TYPE_CHECKING:
    from weft.http.clients import Client

HEADER = "x-weft-client"


class FrontClient(msgspec.Struct, frozen=True):
    """The part of a `Client` that affects a model's engine."""

    name: str
    number: int
    weight: float
    salt: str


def header_of(client: Client) -> bytes:
    """Value of the header for a client of the front, in ASCII."""
    return json.dumps(
        {"name": client.name, "number": client.number, "weight": client.weight, "salt": client.salt}
    ).encode("ascii")


def client_from_header(own: Client, headers: Headers) -> Client:
    """The client that the front names in a request with its key; `own`, the front itself, if it names none."""
    text = headers.get(HEADER)
    if text is None:
        return own
    client = msgspec.json.decode(text, type=FrontClient)
    return own._replace(name=client.name, number=client.number, weight=client.weight, salt=client.salt)
