"""Description of a checkpoint on the Hugging Face hub, without its weights: config.json and safetensors headers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from http.client import HTTPException
from threading import Semaphore, Thread
from typing import TypeVar
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import msgspec

from weft.checkpoint.config import config_json
from weft.checkpoint.files import safetensors
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.hub.hub import PATIENCE, WAYS_OUT, ways_out
from weft.errors import ModelError

T = TypeVar("T")

FIRST = 200_000  # bytes of a file in the first request: most headers are shorter
CONNECTIONS = 16
LARGEST_JSON = 50_000_000  # bytes; ten times the index of a model with a thousand files


class RepositoryDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of config.json, and the bytes of the weights.

    `stored_bytes` is None if the repository has no safetensors, or if their headers did not come in time.
    """

    config: Fields
    stored_bytes: int | None


def describe_repository(
    name: str, *, revision: str | None = None, token: str | None = None, patience: float = PATIENCE
) -> RepositoryDescription:
    """Fetch the description of the repository `name` within `patience` seconds.

    HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured. Raises ModelError if the repository does not exist, is not
    open to this user, is damaged, or does not answer in time.
    """
    hub = _Repository(name, revision, token, time.monotonic() + patience)
    config, files = _start_thread(hub.json, config_json.CONFIG), _start_thread(hub.files)
    fields = Fields(hub.wait(config), f"{hub.where}: {config_json.CONFIG}")
    try:
        headers = [_start_thread(hub.weight_bytes, file) for file in hub.wait(files)]
        stored = sum(map(hub.wait, headers)) or None
    except ModelError:
        stored = None
    return RepositoryDescription(config=fields, stored_bytes=stored)


def _start_thread(call: Callable[..., T], *arguments: object) -> Future[T]:
    """Call a function in a daemon thread: resolving a host's name has no time limit, and must not delay the exit."""
    future: Future[T] = Future()

    def set_result() -> None:
        try:
            future.set_result(call(*arguments))
        except Exception as error:  # raised again by Future.result
            future.set_exception(error)

    Thread(target=set_result, name="weft-hub", daemon=True).start()
    return future


class _Missing(ModelError):
    """The repository exists, but this file of it does not."""


class _Repository:
    """One revision of one repository. All requests end at `deadline` on the monotonic clock."""

    def __init__(self, name: str, revision: str | None, token: str | None, deadline: float) -> None:
        from huggingface_hub import constants, get_token

        self.name, self.deadline, self.endpoint = name, deadline, constants.ENDPOINT
        self.token = token or get_token()
        self.revision = revision or "main"
        self.where = f"{name} on {self.endpoint}"
        self.connections = Semaphore(CONNECTIONS)
        if constants.HF_HUB_OFFLINE:
            raise ModelError(
                f"Weft does not know {name!r} by itself, and HF_HUB_OFFLINE is set; {ways_out(name)}",
                code="unknown-model-offline",
            )

    def wait(self, future: Future[T]) -> T:
        """Wait for a result until the deadline, then raise ModelError."""
        try:
            return future.result(self.left())
        except TooLate:
            raise self.unreachable("no answer in time") from None

    def left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.01)

    def unreachable(self, reason: object) -> ModelError:
        return ModelError(
            f"Weft does not know {self.name!r} by itself, and the hub cannot be asked: {self.endpoint} ({reason}); "
            f"{ways_out(self.name)}",
            code="hub-unreachable",
        )

    def get(self, file: str, start: int, length: int) -> bytes:
        """Fetch at most `length` bytes of a file, from byte `start` on. Raises ModelError."""
        url = f"{self.endpoint}/{quote(self.name)}/resolve/{quote(self.revision, safe='')}/{quote(file)}"
        try:
            request = Request(url, headers={"Range": f"bytes={start}-{start + length - 1}", "User-Agent": "weft"})
            if self.token:
                # Unredirected: the token is not for the store that the hub redirects to.
                request.add_unredirected_header("Authorization", f"Bearer {self.token}")
            with self.connections, urlopen(request, timeout=self.left()) as answer:
                if start and answer.status != 206:
                    raise ModelError(
                        f"{self.where} does not answer range requests; {WAYS_OUT}", code="no-range-requests"
                    )
                data: bytes = answer.read(length)
                return data
        except HTTPError as error:
            with error:
                raise self.refused(error, file) from None
        except (OSError, HTTPException, ValueError) as error:  # the last for an HF_ENDPOINT that is no address
            raise self.unreachable(getattr(error, "reason", None) or error) from None

    def refused(self, error: HTTPError, file: str) -> ModelError:
        """The error for an HTTP status other than success."""
        code = error.headers.get("X-Error-Code", "")
        if code == "GatedRepo" or error.code == 403:
            return ModelError(
                f"{self.name} is gated: accept its terms at {self.endpoint}/{self.name} and give --hf-token or "
                "HF_TOKEN",
                code="gated-model",
            )
        if code == "RevisionNotFound":
            return ModelError(
                f"{self.name} has no revision {self.revision!r} on {self.endpoint}; check --revision",
                code="no-such-revision",
            )
        if code == "EntryNotFound":
            return _Missing(f"{self.where} has no {file}; {WAYS_OUT}", code="missing-hub-file")
        if error.code in (401, 404):
            return ModelError(
                f"there is no model {self.name!r}: neither known to Weft nor on {self.endpoint} (a private one needs "
                f"--hf-token or HF_TOKEN); {ways_out(self.name)}",
                code="no-such-model",
            )
        return self.unreachable(f"HTTP {error.code}")

    def json(self, file: str) -> Mapping[str, object]:
        try:
            return msgspec.json.decode(self.get(file, 0, LARGEST_JSON), type=dict[str, object])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ModelError(f"{self.where}: {file} is damaged ({error!s:.200})", code="damaged-hub-file") from None

    def files(self) -> list[str]:
        """Fetch the names of the files that hold the weights."""
        try:
            weight_map = self.json(safetensors.INDEX).get("weight_map")
        except _Missing:
            return [safetensors.SINGLE]
        if not isinstance(weight_map, dict):
            raise ModelError(
                f"{self.where}: {safetensors.INDEX} is damaged: it has no weight_map", code="index-without-weight-map"
            )
        return sorted({str(file) for file in weight_map.values()})

    def weight_bytes(self, file: str) -> int:
        """Fetch a file's header and return the bytes of its tensors."""
        data = self.get(file, 0, FIRST)
        end = safetensors.LENGTH_BYTES + int.from_bytes(data[: safetensors.LENGTH_BYTES], "little")
        if end > safetensors.LARGEST_HEADER:
            raise ModelError(f"{self.where}: {file} is no safetensors file", code="not-a-safetensors-file")
        if end > len(data):
            data += self.get(file, len(data), end - len(data))
        tensors = safetensors.decode_header(data[safetensors.LENGTH_BYTES : end], f"{self.where}: {file}")
        return sum(tensor.nbytes for tensor in tensors.values())
