"""`scripts/soak`: one server under mixed requests, while a process of its engine is killed or stopped every minute.

Goals: every request ends exactly once, with an answer, the refusal that it deserves, or an error that tells the client
to try again; the memory of the whole server stays within 20 MB of its middle after the first sixth of the run, and so
does that of the process that serves HTTP, which lives all the time; no KV block is held afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx
import psutil

from scripts.programs.soak.mixed import DOUBLED, LOST, RETRYABLE, WRONG, Verdict, ask, draw_kind
from scripts.programs.soak.processes import weft_process

REQUESTS_PER_MINUTE = 10_000 / 30
SAMPLE_S = 5.0
# With a cache that is soon full: the memory of one that fills is no leak.
FLAGS = ["-tp", "2", "--max-model-len", "2048", "--kv-cache-memory-bytes", "64M"]
MINUTE = 12  # samples
FLAT_MB = 20.0
LATE_S = 5.0  # for the last requests
UP_S = 180.0  # for the server to serve again
VICTIMS = {"rank": "weft.worker", "core": "weft.engine.replicas.process"}
BLOWS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def main() -> int:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="weft-soak-") as folder:
        report = asyncio.run(Soak(arguments, Path(folder)).soak())
    print(json.dumps(report, indent=1))
    return 1 if report["missed"] else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M", help="of load (default: %(default)g)")
    parser.add_argument("--requests", type=int, metavar="N", help="in all (default: 10,000 in 30 minutes)")
    parser.add_argument("--every", type=float, default=60.0, metavar="S", help="between two faults")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="most requests at a time")
    parser.add_argument("--model", default="demo", help="(default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="--progress-timeout of the server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of weft serve, behind --")
    return parser.parse_args()


class Soak:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._given, self._log = arguments, folder / "server.log"
        self._random = Random(arguments.seed)
        flags = ["--progress-timeout", f"{arguments.timeout:g}", *(arguments.flags or FLAGS)]
        self._server = weft_process("server", arguments.model, flags, folder)
        self._verdicts: list[Verdict] = []
        self._faults: Counter[str] = Counter()
        self._recoveries: list[float] = []
        self._memory: list[tuple[float, float, float]] = []  # seconds, MB of all processes, MB of the first
        self._began_s = 0.0

    async def soak(self) -> dict[str, Any]:
        """Start the server, run the load, and end it. Returns the report."""
        try:
            await self._server.start("/health/ready")
            self._began_s = time.monotonic()
            others = [asyncio.create_task(work) for work in (self._disturb(), self._sample())]
            try:
                await self._load()
            finally:
                for task in others:
                    task.cancel()
                ended = await asyncio.gather(*others, return_exceptions=True)
            for fault in ended:
                if isinstance(fault, Exception):
                    raise fault
            await self._until_up()
            return await self._report()
        except BaseException:
            say(self._log.read_text()[-3000:])
            raise
        finally:
            await self._server.end()

    async def _load(self) -> None:
        """Send the requests, spread evenly over the time. Requests that find no room until its end are not sent."""
        given = self._given
        count = self._wanted
        room, pause_s = asyncio.Semaphore(given.concurrency), given.minutes * 60 / count
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        async with (
            httpx.AsyncClient(base_url=self._server.url, timeout=None, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(count):
                await asyncio.sleep(self._began_s + number * pause_s - time.monotonic())
                await room.acquire()
                if time.monotonic() > self._began_s + given.minutes * 60 + LATE_S:
                    break
                group.create_task(self._ask(client, room))

    @property
    def _wanted(self) -> int:
        """Number of requests that are sent if the machine keeps up."""
        return int(self._given.requests or round(REQUESTS_PER_MINUTE * self._given.minutes))

    async def _ask(self, client: httpx.AsyncClient, room: asyncio.Semaphore) -> None:
        try:
            self._verdicts.append(await ask(client, draw_kind(self._random)))
        finally:
            room.release()

    async def _disturb(self) -> None:
        """Kill or stop a process of the engine, until cancelled."""
        while True:
            await asyncio.sleep(self._given.every)
            name, blow = self._random.choice(list(VICTIMS)), self._random.choice(list(BLOWS))
            victims = [member for member in self._server.family if _runs(member, VICTIMS[name])]
            if not victims:
                continue
            self._faults[f"{blow} {name}"] += 1
            began = time.monotonic()
            self._random.choice(victims).send_signal(BLOWS[blow])
            while await self._is_up():
                await asyncio.sleep(0.05)
            await self._until_up()
            self._recoveries.append(time.monotonic() - began)
            say(f"{began - self._began_s:.0f} s: {blow} {name}: serves again after {self._recoveries[-1]:.1f} s")

    async def _sample(self) -> None:
        """Note the memory while the server is up, until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            family = self._server.family
            sizes = await asyncio.to_thread(list, map(pss_mb, [member.pid for member in family]))
            if await self._is_up() and all(sizes):
                self._memory.append((time.monotonic() - self._began_s, sum(sizes), sizes[0]))

    async def _is_up(self) -> bool:
        async with httpx.AsyncClient(timeout=5.0) as client:
            with contextlib.suppress(httpx.HTTPError):
                return (await client.get(f"{self._server.url}/health/ready")).status_code == 200
        return False

    async def _until_up(self) -> None:
        async with asyncio.timeout(UP_S):
            while not await self._is_up():
                await asyncio.sleep(0.05)

    async def _report(self) -> dict[str, Any]:
        held = await self._held()
        deadline = time.monotonic() + 20.0
        while any(held.values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            held = await self._held()
        outcomes = Counter(verdict.outcome for verdict in self._verdicts)
        errors = Counter(verdict.code for verdict in self._verdicts if verdict.outcome in (RETRYABLE, WRONG))
        log = self._log.read_text()
        settled = [row for row in self._memory if row[0] >= self._given.minutes * 10]
        flat = {name: _spread([row[at] for row in settled]) for at, name in ((1, "all"), (2, "http"))}
        goals = {
            "every request ends exactly once": not outcomes[LOST] and not outcomes[DOUBLED],
            "as it must": not outcomes[WRONG],
            "no blocks are held": not any(held.values()),
            "memory is flat": all(spread <= FLAT_MB for spread in flat.values()),
            # The last fault may strike when the load ends; the server is up again by now.
            "it serves again": sum(self._faults.values()) - len(self._recoveries) <= 1,
        }
        return {
            "requests": len(self._verdicts),
            "requests_wanted": self._wanted,
            "outcomes": dict(sorted(outcomes.items())),
            "errors": dict(sorted(errors.items())),
            "lost": outcomes[LOST],
            "doubled": outcomes[DOUBLED],
            "faults": dict(sorted(self._faults.items())),
            "restarts": log.count("the engine is back"),
            "serves_again_s": {"median": round(median(self._recoveries), 1), "longest": round(max(self._recoveries), 1)}
            if self._recoveries
            else {},
            "pss_mb": [[round(at), round(whole), round(first)] for at, whole, first in self._memory[:: self._stride]],
            "pss_spread_mb": flat,
            "held": held,
            "why": [verdict.why for verdict in self._verdicts if verdict.outcome in (LOST, DOUBLED, WRONG)][:20],
            "minutes": round((time.monotonic() - self._began_s) / 60, 1),
            "model": self._given.model,
            "missed": [goal for goal, met in goals.items() if not met],
        }

    @property
    def _stride(self) -> int:
        """One sample of the memory a minute, or all of a short run."""
        return max(1, len(self._memory) // 60)

    async def _held(self) -> dict[str, float]:
        """Figures of the server on what requests hold."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        async with httpx.AsyncClient(timeout=30.0) as client:
            page = (await client.get(f"{self._server.url}/metrics")).text.splitlines()
        return {
            name: sum(float(row.rpartition(" ")[2]) for row in page if row.startswith(f"{name}{{")) for name in names
        }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _runs(member: psutil.Process, module: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(module in word for word in member.cmdline())
    return False


def pss_mb(pid: int) -> float:
    """Memory of a process in MB, that which it shares divided among its sharers; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("Pss:")), 0.0)


def _spread(sizes: list[float]) -> float:
    """Half of the way from the smallest to the largest median of a minute."""
    medians = [median(sizes[at : at + MINUTE]) for at in range(0, len(sizes), MINUTE)]
    return round((max(medians) - min(medians)) / 2, 1) if medians else 0.0


if __name__ == "__main__":
    sys.exit(main())
