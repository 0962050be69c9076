"""A small hub on the loopback interface, in the form that huggingface_hub speaks, with the faults that hubs have."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    first: int  # byte that a range begins with
    token: str | None


@dataclass
class Fault:
    """A fault that the first `times` requests meet whose path has `part` in it.

    They get `status` with `headers`, or break off after `bytes`.
    """

    part: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    times: int = 10**6


class Hub(ThreadingHTTPServer):
    """Repositories by name, each with files by name. `changed` are contents that files are sent with instead."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.changed: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def asked(self, method: str, part: str) -> list[Request]:
        """The requests of a method whose path has `part` in it."""
        return [request for request in self.requests if request.method == method and part in request.path]


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        first = re.match(r"bytes=(\d+)-", self.headers["Range"] or "")
        request = Request(self.command, self.path, int(first[1]) if first else 0, self.headers["Authorization"])
        self.server.requests.append(request)
        fault = next((fault for fault in self.server.faults if fault.part in self.path and fault.times), None)
        if fault is not None and (fault.status or self.command == "GET"):
            fault.times -= 1
            if fault.status:
                self.send(fault.status, b"", fault.headers)
                return
        else:
            fault = None
        match = re.match(r"/api/models/(\w+/\w+)(/tree)?", self.path)
        if match:
            self.list_files(match[1], is_tree=match[2] is not None)
            return
        match = re.match(r"/(\w+/\w+)/resolve/[^/]+/([^?]+)", self.path)
        files = self.server.repositories.get(match[1], {}) if match else {}
        if match is None or match[2] not in files:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound" if files else "RepoNotFound"})
            return
        self.send_file(match[2], files[match[2]], request.first, fault)

    def list_files(self, name: str, *, is_tree: bool) -> None:
        files = self.server.repositories.get(name)
        if files is None:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        rows = [description(file, content, is_tree=is_tree) for file, content in files.items()]
        self.send(200, json.dumps(rows if is_tree else {"id": name, "sha": COMMIT, "siblings": rows}).encode())

    def send_file(self, name: str, content: bytes, first: int, fault: Fault | None) -> None:
        about = description(name, content, is_tree=True)
        etag = about["lfs"]["oid"] if "lfs" in about else about["oid"]
        content = self.server.changed.get(name, content)
        headers = {
            "ETag": f'"{etag}"',
            "X-Linked-Etag": f'"{etag}"',
            "X-Linked-Size": str(len(content)),
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self.send(206 if first else 200, content[first:], headers, fault.bytes if fault else None)

    def send(
        self, status: int, content: bytes, headers: dict[str, str] | None = None, broken_at: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content if broken_at is None else content[:broken_at])
        if broken_at is not None:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Nothing."""


def description(name: str, content: bytes, *, is_tree: bool) -> dict[str, Any]:
    """A file as the hub lists it: with its SHA-256 if it is large, which weights always are."""
    git_hash = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    row: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": git_hash}
    sha256 = hashlib.sha256(content).hexdigest()
    large = {"size": len(content), "pointerSize": 134, "oid" if is_tree else "sha256": sha256}
    if not is_tree:
        row = {"rfilename": name, "size": len(content), "blobId": git_hash}
    return row | {"lfs": large} if name.endswith((".safetensors", ".gguf")) else row


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
