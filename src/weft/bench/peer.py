"""A peer: another system in a process of its own, asked for the same work as ours."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import msgspec

from weft.bench.workload import Ask
from weft.errors import WeftError

# No part of the package: it imports torch, which nothing here may, and needs the extra that the tests need.
SCRIPT = Path(__file__).parents[3] / "scripts" / "peers" / "transformers_peer.py"


class PeerError(WeftError):
    """The peer could not be started, or ended."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a peer: seconds to the first token of the batch, and to the end of the last."""

    ttft_s: float
    seconds: float


class Peer:
    """Transformers on a GGUF file, dequantised to bfloat16; a context manager."""

    def __init__(self, checkpoint: Path, device: str, script: Path = SCRIPT) -> None:
        if not script.is_file():
            raise PeerError(f"there is no {script}: the comparison with Transformers runs in a checkout of Weft")
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by close)
        # -P: a user's random.py in the current folder is no part of it.
        command = [sys.executable, "-P", str(script), str(checkpoint.parent), checkpoint.name, device]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        try:
            self.threads = int(self._answer()["threads"])
        except BaseException:
            self.close()
            raise

    def run(self, asks: Sequence[Ask]) -> Timing:
        """One static batch. All asks must want the same number of tokens."""
        (new,) = {ask.output_len for ask in asks}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": [ask.prompt for ask in asks], "new": new}) + "\n")
        self._process.stdin.flush()
        return msgspec.convert(self._answer(), Timing)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print what they like
                found: dict[str, Any] = json.loads(line)
                return found
        self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()]
        raise PeerError(f"Transformers ended with status {self._process.returncode}: {said[-1] if said else 'no word'}")

    def close(self) -> None:
        """End the process; may be called twice."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def decode_tok_s(timings: Sequence[Timing], output_len: int) -> float:
    """Median tokens per second after the first token, of runs with one request."""
    return median((output_len - 1) / (t.seconds - t.ttft_s) for t in timings)
