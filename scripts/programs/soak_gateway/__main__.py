"""`scripts/soak_gateway`: four replicas behind a gateway, killed, stopped, slowed and restarted at random.

Two are `weft serve` of one model, one is another vendor's server (`llama_cpp.server` where it is installed and the
model is a GGUF file, else a stub that is named as such), one is a stub of a cloud with a bill. Goals: every request
ends exactly once, with an answer that one replica alone gives, or, if a server that is not ours broke it, with a
visible error; in the undisturbed phase each Weft replica gets within 10 % of half of their requests; the cloud's bill
stays within the budget. At most one Weft replica is disturbed at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import httpx
import yaml

from scripts.programs.soak.processes import MODEL, ServerProcess, free_port, llama_process, stub_process, weft_process
from scripts.programs.soak_gateway.requests import WRONG, Load, count_outcomes, expected_answers, kinds

BALANCE = 0.10
PRICE = {"input": 10.0, "output": 30.0}  # dollars per million tokens, of the cloud
ACTIONS = ("kill", "stop", "slow", "restart")


def main() -> int:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="weft-soak-") as folder:
        report = asyncio.run(Soak(arguments, Path(folder)).soak())
    print(json.dumps(report, indent=1))
    return 1 if report["missed"] else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak_gateway", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo", help="model of the Weft replicas (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=5000, metavar="N", help="requests under disturbances")
    parser.add_argument("--undisturbed", type=int, default=500, metavar="N", help="requests before them")
    parser.add_argument("--concurrency", type=int, default=12, metavar="N", help="clients (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="of an answer (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=2.0, metavar="S", help="between two disturbances")
    parser.add_argument("--longest", type=float, default=12.0, metavar="S", help="longest stop of a replica")
    parser.add_argument("--budget", type=float, default=0.05, metavar="DOLLARS", help="of the cloud, for the day")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--llama-python",
        metavar="FILE",
        default=sys.executable if find_spec("llama_cpp") is not None else None,
        help="Python interpreter that has llama_cpp.server, which serves a GGUF model as the third replica",
    )
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of weft serve, behind --")
    return parser.parse_args()


class Soak:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._given, self._folder = arguments, folder
        self._random = Random(arguments.seed)
        self._wefts = [weft_process(f"weft{at}", arguments.model, arguments.flags, folder) for at in (0, 1)]
        python = arguments.llama_python if arguments.model.endswith(".gguf") else None
        self._vendor_is_stub = python is None
        self._vendor = (
            stub_process("vendor", 0.01, folder) if python is None else llama_process(python, arguments.model, folder)
        )
        self._cloud = stub_process("cloud", 0.005, folder)
        self._disturbances: Counter[str] = Counter()
        port = free_port()
        command = [sys.executable, "-m", "weft", "gateway", "--config", str(folder / "gateway.yaml")]
        self._gateway = ServerProcess("gateway", port, [*command, "--port", str(port)], folder / "gateway.log")

    @property
    def _replicas(self) -> list[ServerProcess]:
        return [*self._wefts, self._vendor, self._cloud]

    async def soak(self) -> dict[str, Any]:
        """All phases. Returns the report."""
        self._write_config()
        try:
            await asyncio.gather(*(replica.start() for replica in self._replicas))
            await self._gateway.start("/v1/models")
            return await self._measure()
        finally:
            await asyncio.gather(*(process.end() for process in (self._gateway, *self._replicas)))

    async def _measure(self) -> dict[str, Any]:
        given = self._given
        vendors = [] if self._vendor_is_stub else [self._vendor.url]
        stubs = ["vendor", "cloud"] if self._vendor_is_stub else ["cloud"]
        expected = await expected_answers([weft.url for weft in self._wefts], vendors, kinds(given.tokens), stubs)
        load = Load(self._gateway.url, expected, given.seed, [self._vendor.url, self._cloud.url])
        await self._until_known()
        before = [await self._successes(weft) for weft in self._wefts]
        began = time.monotonic()
        await load.send(given.undisturbed, given.concurrency, 0.0)
        undisturbed_s = time.monotonic() - began
        shares = [await self._successes(weft) - count for weft, count in zip(self._wefts, before, strict=True)]
        say(f"undisturbed: {shares} in {undisturbed_s:.0f} s; {count_outcomes(load.verdicts)}")
        disturbing = [asyncio.create_task(self._disturb(group)) for group in (self._wefts, [self._vendor, self._cloud])]
        began = time.monotonic()
        try:
            await load.send(given.requests, given.concurrency, 0.0)
        finally:
            for task in disturbing:
                task.cancel()
            ended = await asyncio.gather(*disturbing, return_exceptions=True)
        for fault in ended:
            if isinstance(fault, Exception):
                raise fault
        return await self._report(load, shares, time.monotonic() - began)

    async def _disturb(self, group: list[ServerProcess]) -> None:
        """Disturb the servers of a group, one at a time, until cancelled."""
        while True:
            await asyncio.sleep(self._random.random() * 2 * self._given.pause)
            victim, action = self._random.choice(group), self._random.choice(ACTIONS)
            seconds = self._random.uniform(0.2, self._given.longest)
            self._disturbances[f"{action} {victim.name}"] += 1
            say(f"{action} {victim.name}")
            if action == "stop":
                await victim.stop(seconds)
            elif action == "slow":
                await victim.slow(seconds)
            else:
                await (victim.kill() if action == "kill" else victim.end())
                await victim.start()
            await self._until_healthy(victim)

    async def _status(self) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=30.0) as client:
            answer = await client.get(f"{self._gateway.url}/gateway/status")
            status: dict[str, Any] = answer.raise_for_status().json()
            return status

    async def _until_healthy(self, victim: ServerProcess) -> None:
        while True:
            rows = (await self._status())["upstreams"]
            if next(row for row in rows if row["url"] == victim.url)["breaker"] == "closed":
                return
            await asyncio.sleep(0.2)

    async def _until_known(self) -> None:
        """Wait until the gateway knows which upstreams continue answers."""
        while sum(row["is_weft"] for row in (await self._status())["upstreams"]) < len(self._wefts):
            await asyncio.sleep(0.1)

    async def _successes(self, weft: ServerProcess) -> int:
        async with httpx.AsyncClient(timeout=30.0) as client:
            page = (await client.get(f"{weft.url}/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith("vllm:request_success_total{")]
        return int(sum(float(line.rpartition(" ")[2]) for line in lines))

    async def _report(self, load: Load, shares: list[int], disturbed_s: float) -> dict[str, Any]:
        given, status = self._given, await self._status()
        deadline = time.monotonic() + 30.0
        while any(row["connections"] for row in status["upstreams"]) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            status = await self._status()
        bill = (self._folder / "cloud.bill").read_bytes() if (self._folder / "cloud.bill").exists() else b""
        spent = (bill.count(b"p") * PRICE["input"] + bill.count(b"c") * PRICE["output"]) / 1e6
        wrong = [verdict.why for verdict in load.verdicts if verdict.outcome == WRONG]
        asked = given.requests + given.undisturbed
        logged = len((self._folder / "access.log").read_text().splitlines())
        ideal = sum(shares) / 2
        imbalance = max(abs(share - ideal) for share in shares) / ideal
        goals = {
            "every request ends once": len(load.verdicts) == asked == logged,
            "with a right answer": not wrong,
            "nothing is left running": not any(row["connections"] for row in status["upstreams"]),
            "balance": imbalance <= BALANCE,
            "budget": spent <= given.budget and status["spending"]["dollars_day"] <= given.budget,
        }
        return {
            "requests": asked,
            "outcomes": count_outcomes(load.verdicts),
            "wrong": wrong[:20],
            "disturbances": dict(sorted(self._disturbances.items())),
            "disturbed_s": round(disturbed_s, 1),
            "undisturbed_requests_of_weft_replicas": shares,
            "imbalance": round(imbalance, 4),
            "cloud_bill_dollars": round(spent, 6),
            "gateway_counts_dollars": round(status["spending"]["dollars_day"], 6),
            "budget_dollars": given.budget,
            "model": given.model,
            "vendor": "a stub: without --llama-python, or the model is no GGUF file"
            if self._vendor_is_stub
            else "llama_cpp.server",
            "missed": [goal for goal, met in goals.items() if not met],
        }

    def _write_config(self) -> None:
        theirs = {MODEL: "theirs"}
        upstreams: list[dict[str, Any]] = [{"url": weft.url} for weft in self._wefts]
        upstreams.append({"url": self._vendor.url, "models": theirs})
        upstreams.append({"url": self._cloud.url, "models": theirs, "overflow": True, "price": PRICE})
        config = {
            "policy": "least_conn",
            "upstreams": upstreams,
            "objective": {"queue": 2},
            "budget": {"day": self._given.budget},  # a run may go on into the next hour
            "ledger": str(self._folder / "ledger"),
            "access_log": str(self._folder / "access.log"),
            "timeouts": {"connect": 1, "first_byte": 20, "idle": 8},
        }
        (self._folder / "gateway.yaml").write_text(yaml.safe_dump(config))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
