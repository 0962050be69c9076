"""A server to measure: `weft serve` in a process of its own, from its start to its end."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType

from weft.errors import WeftError

READY = "/health/ready"
PATIENCE_S = 600.0  # a large checkpoint from a slow disk
POLL_S = 0.01


class ServeProcess:
    """`weft serve ARGUMENTS` on a free port of this host, ready to answer; a context manager.

    `seconds` is the time from its start until it was ready. Raises WeftError, with the server's last line, if it ends
    by itself or takes too long.
    """

    def __init__(self, arguments: Sequence[str], *, patience_s: float = PATIENCE_S) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by close)
        start = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weft", "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"},
        )
        try:
            while not is_ready(port):
                if self._process.poll() is not None:
                    raise WeftError(f"weft serve {' '.join(arguments)} ended: {self._last_line()}", code="server-ended")
                if time.monotonic() - start > patience_s:
                    raise WeftError(
                        f"weft serve {' '.join(arguments)} was not ready after {patience_s:.0f} s",
                        code="server-not-ready",
                    )
                time.sleep(POLL_S)
            self.seconds = time.monotonic() - start
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def _last_line(self) -> str:
        self._output.seek(0)
        lines = [line.strip() for line in self._output if line.strip()]
        return (
            lines[-1].removeprefix("weft: error: ") if lines else f"status {self._process.returncode}, without output"
        )

    def close(self) -> None:
        """End the server; may be called twice."""
        self._process.terminate()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_ready(port: int) -> bool:
    """Return True if the server at this port reports that it is ready."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", READY)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
