"""How long a server takes from its start until it is ready to answer."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from weft.errors import WeftError

READY = "/health/ready"
PATIENCE_S = 120.0
POLL_S = 0.01


def seconds_to_ready(arguments: Sequence[str] = ("serve", "demo")) -> float:
    """Start `weft ARGUMENTS` on a free port, wait until it is ready, end it. Raises WeftError where it ends by
    itself or takes too long."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile("w+") as said:
        start = time.monotonic()
        server = subprocess.Popen(
            [sys.executable, "-m", "weft", *arguments, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"},
        )
        try:
            while not ready(port):
                if server.poll() is not None:
                    said.seek(0)
                    raise WeftError(f"weft {' '.join(arguments)} ended: {' '.join(said.read().split())[-500:]}")
                if time.monotonic() - start > PATIENCE_S:
                    raise WeftError(f"weft {' '.join(arguments)} was not ready after {PATIENCE_S:.0f} s")
                time.sleep(POLL_S)
            return time.monotonic() - start
        finally:
            server.terminate()
            try:
                server.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def ready(port: int) -> bool:
    """Whether the server at that port says so."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", READY)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
