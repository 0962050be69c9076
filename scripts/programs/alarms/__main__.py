"""`scripts/alarms`: one healthy server under mixed load, and every diagnosis that it makes meanwhile.

Goal: no false alarm. A diagnosis of a rank is no false one if the rank's cores were really taken: the kernel counts the
time in which its threads could have run and did not, and the time that the machine's host stole.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import psutil

from scripts.programs.soak.mixed import Kind, ask, chat, draw_kind
from scripts.programs.soak.processes import MODEL, weft_process
from weft.api.observe.monitoring import HISTORY_S
from weft.monitor.finding import LIMITS, Code

LAYOUTS = {"one": (), "tensor": ("-tp", "2"), "pipeline": ("-pp", "2")}
FLAGS = ("--max-model-len", "2048")
LOOK_S = 2.0
CLIENTS = (1, 2, 4, 8, 16)
WORDS = (5, 50, 300)  # of a prompt, besides those of draw_kind
TOKENS = (4, 40, 150)  # of an answer
OF_RANKS = (Code.STRAGGLER, Code.ALLREDUCE_WAIT, Code.STAGE_IMBALANCE)
REAL = 0.1  # of the time a rank's threads were kept from their cores, or cores were stolen: the alarm is a real one


class Moment(NamedTuple):
    """Seconds since some moment: of the clock, kept from its cores for each rank, and stolen from each core."""

    now_s: float
    delayed_s: dict[int, float]
    stolen_s: float


def main() -> int:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="weft-alarms-") as folder:
        report = asyncio.run(Watching(arguments, Path(folder)).watch_server())
    print(json.dumps(report, indent=1))
    return 1 if report["false"] else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/alarms", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="of load (default: %(default)g)")
    parser.add_argument("--layout", choices=LAYOUTS, default="tensor", help="(default: %(default)s)")
    parser.add_argument("--model", default="demo", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of weft serve, behind --")
    return parser.parse_args()


class Watching:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._given, self._log = arguments, folder / "server.log"
        self._random = Random(arguments.seed)
        flags = [*FLAGS, *LAYOUTS[arguments.layout], *arguments.flags]
        self._server = weft_process("server", arguments.model, flags, folder)
        self._outcomes: Counter[str] = Counter()
        self._alarms: list[dict[str, Any]] = []
        self._moments: deque[Moment] = deque()
        self._looks = 0

    async def watch_server(self) -> dict[str, Any]:
        """Start the server, load it and look at it, and end it. Returns the report."""
        try:
            await self._server.start("/health/ready")
            began_s = time.monotonic()
            looking = asyncio.create_task(self._look_on(began_s))
            await self._load(began_s + 60 * self._given.minutes)
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking
            return self._report(time.monotonic() - began_s)
        except BaseException:
            print(self._log.read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            await self._server.end()

    async def _load(self, until_s: float) -> None:
        """Phases with a number of clients and sizes of requests that stay, and pauses between them."""
        draw, limits = self._random, httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._server.url, timeout=None, limits=limits) as client:
            while time.monotonic() < until_s:
                end_s = min(until_s, time.monotonic() + draw.uniform(3.0, 45.0))
                sizes = draw.choice((None, (draw.choice(WORDS), draw.choice(TOKENS))))
                await asyncio.gather(*(self._ask_on(client, sizes, end_s) for _ in range(draw.choice(CLIENTS))))
                await asyncio.sleep(draw.choice((0.0, 1.0, 5.0)))

    async def _ask_on(self, client: httpx.AsyncClient, sizes: tuple[int, int] | None, end_s: float) -> None:
        """One request after the other."""
        while time.monotonic() < end_s:
            kind = draw_kind(self._random) if sizes is None else sized_kind(self._random, *sizes)
            self._outcomes[(await ask(client, kind)).outcome] += 1

    async def _look_on(self, began_s: float) -> None:
        """Ask for the diagnosis until cancelled."""
        async with httpx.AsyncClient(base_url=self._server.url, timeout=30.0) as client:
            while True:
                self._moments.append(self._moment())
                while self._moments[-1].now_s - self._moments[0].now_s > HISTORY_S:
                    self._moments.popleft()
                answer = (await client.get("/monitor")).json()
                self._looks += 1
                self._alarms += [self._alarm(row, time.monotonic() - began_s) for row in answer["diagnosis"]]
                await asyncio.sleep(LOOK_S)

    def _moment(self) -> Moment:
        ranks = sorted(one.pid for one in self._server.family if "weft.worker" in " ".join(one.cmdline()))
        delayed = {rank: delay_s(pid) for rank, pid in enumerate(ranks)}
        return Moment(time.monotonic(), delayed, psutil.cpu_times().steal / (os.cpu_count() or 1))

    def _alarm(self, row: dict[str, Any], at_s: float) -> dict[str, Any]:
        """A finding, with the delays of the window that it is of."""
        last = self._moments[-1]
        first = next((one for one in self._moments if last.now_s - one.now_s <= LIMITS.window_s), last)
        passed_s = max(LOOK_S, last.now_s - first.now_s)
        shares = {
            rank: round((seconds - first.delayed_s.get(rank, 0.0)) / passed_s, 3)
            for rank, seconds in last.delayed_s.items()
        }
        stolen = round((last.stolen_s - first.stolen_s) / passed_s, 3)
        real = row["code"] in OF_RANKS and max(stolen, *shares.values(), 0.0) > REAL
        evidence = {"delayed": shares, "stolen": stolen, "load": os.getloadavg()[0], "real": real}
        print(f"{at_s:.0f} s: {row['code']} {row['text']} {evidence}", file=sys.stderr, flush=True)
        return {"at_s": round(at_s, 1), "code": row["code"], "value": row["value"], "text": row["text"], **evidence}

    def _report(self, seconds: float) -> dict[str, Any]:
        first, last = self._moments[0], self._moments[-1]
        return {
            "layout": self._given.layout,
            "model": self._given.model,
            "seed": self._given.seed,
            "seconds": round(seconds, 1),
            "requests": dict(self._outcomes),
            "looks": self._looks,
            "stolen": round((last.stolen_s - first.stolen_s) / max(1.0, last.now_s - first.now_s), 3),
            "alarms": self._alarms,
            "real": dict(Counter(alarm["code"] for alarm in self._alarms if alarm["real"])),
            "false": dict(Counter(alarm["code"] for alarm in self._alarms if not alarm["real"])),
        }


def sized_kind(random: Random, words: int, tokens: int) -> Kind:
    """A chat of a size, as a stream or not."""
    text = " ".join(random.choice(("sea", "sky", "rain", "snow", "fire", "stone")) for _ in range(words))
    stream = random.random() < 0.6
    fields = {"max_tokens": tokens, "ignore_eos": True, "stream": stream, "temperature": random.random()}
    return Kind(f"sized {MODEL}", "/v1/chat/completions", chat(text, **fields))


def delay_s(pid: int) -> float:
    """Seconds for which threads of a process could have run, and had no core."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[1])
    return total / 1e9


if __name__ == "__main__":
    sys.exit(main())
