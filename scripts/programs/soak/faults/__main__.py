"""`scripts/soak faults`: injected faults, 200 of them with `--faults 200`, on one server of the demo. One JSON object.

Each fault is drawn at random: a kind, a process and a phase. Kinds: kill, stop (SIGSTOP), memory (a limit on the
address space), disk (a limit of 0 on the size of files, as a full disk that everything is written to), socket (the
connection to the parent is shut down), exception (raised in the main thread, as a kernel's). Processes: the ranks, the
core, the fork server and the one that serves HTTP, which this program starts again as a supervisor does. Phases:
loading, prefill, decode, idle. Goals: the last error in the log names the process, the phase and the cause in 95 % of
the faults; the server serves again within 10 s; nothing is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import psutil

from scripts.programs.soak.faults.stolen import shut_down_socket
from scripts.programs.soak.processes import MODEL, ROOT, free_port

AGAIN_S, RIGHT, GONE_S = 10.0, 0.95, 5.0
UP_S = 180.0
MODULES = {
    "rank": "weft.worker",
    "core": "weft.engine.replicas.process",
    "fork server": "weft.engine.processes.fork_server",
}
EXCEPTION_SIGNAL = signal.SIGUSR2
# Imported by every process of the server.
RAISER = """
import signal
def fail(number, frame):
    raise RuntimeError("injected into a kernel")
signal.signal(signal.SIGUSR2, fail)
"""
LOADING = "loading"
PHASES = (LOADING, "prefill", "decode", "idle")
# Victims and phases in which a fault of a kind does something.
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "kill": (("rank", "rank", "core", "fork server", "http"), PHASES),
    "stop": (("rank", "rank", "core", "fork server"), PHASES),
    "memory": (("rank",), (LOADING, "prefill")),
    "disk": (("rank", "core"), (LOADING,)),
    "socket": (("rank", "rank", "core"), PHASES),
    "exception": (("rank", "rank", "core"), PHASES),
}
WORDS = {
    "kill": r"killed by SIGKILL|most likely killed",
    "stop": r"stopped \(SIGSTOP\)",
    "memory": r"memory|bad_alloc|can't start new thread",
    "disk": r"File too large|EFBIG|No space left",
    "socket": r"connection .*closed|closed its connection",
    "exception": r"injected into a kernel",
}
FAILURE = re.compile(
    r"ERROR .*(?:starts again|does not start): (rank \d+|the engine core) failed during ([\w-]+): (.*)"
)


class ServerEndedError(Exception):
    """A server that no fault has ended by itself; its log, which is printed, tells why."""


class Fault(NamedTuple):
    kind: str
    victim: str
    phase: str


class Result(NamedTuple):
    """`right` is None if the fault has ended nothing, or if nobody is left to name the cause."""

    fault: Fault
    right: bool | None
    again_s: float
    left: list[str]
    line: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak faults", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=200, metavar="N")
    parser.add_argument("--minutes", type=float, metavar="M", help="begin no fault after that time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="--progress-timeout of the server")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of weft serve, behind --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-faults-") as folder:
        report = Injector(given, Path(folder)).inject()
    print(json.dumps(report, indent=1))
    return 1 if report["missed"] else 0


class Injector:
    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given, self._folder, self._random = given, folder, Random(given.seed)
        (folder / "sitecustomize.py").write_text(RAISER)
        self._log, self._temporary = folder / "server.log", folder / "temporary"
        self._temporary.mkdir()
        self._port = free_port()
        self._url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._known: set[psutil.Process] = set()

    def inject(self) -> dict[str, Any]:
        """Inject all faults. Returns the report."""
        self._start()
        try:
            until(self._answers, UP_S)
            descriptors = self._first.num_fds()
            results: list[Result] = []
            latest_s = time.monotonic() + (self._given.minutes * 60 if self._given.minutes else float("inf"))
            for number in range(self._given.faults):
                if time.monotonic() > latest_s:
                    break
                result = self._inject(self._draw())
                results.append(result)
                say(f"{number}: {result}")
            grown = 0 if any(one.fault.victim == "http" for one in results) else self._first.num_fds() - descriptors
        except BaseException:
            say(self._log.read_text()[-3000:])
            raise
        finally:
            family = self._family
            self._stop()
        left = [member for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
        return self._report(results, [*map(str, left), *map(str, self._temporary.iterdir())], grown)

    def _start(self) -> None:
        paths = (str(self._folder), str(ROOT / "src"), str(ROOT))
        flags = self._given.flags or ["-tp", "2", "--max-model-len", "2048"]
        words = [self._given.model, "--port", str(self._port), "--served-model-name", MODEL, *flags]
        words += ["--progress-timeout", f"{self._given.timeout:g}"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weft", "serve", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(self._temporary),
                },
            )

    def _stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _first(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    @property
    def _family(self) -> list[psutil.Process]:
        """The server's processes, with those whose fork server has been killed, and their children."""
        self._known = {member for member in self._known if lives(member)}
        with contextlib.suppress(psutil.Error):
            self._known.add(self._first)
        pids = {member.pid for member in self._known}
        # In the order of their numbers, children come after their parents.
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid not in pids and process.ppid() in pids and lives(process):
                    self._known.add(process)
                    pids.add(process.pid)
        return sorted(self._known, key=lambda member: member.pid)

    def _members(self, victim: str) -> list[psutil.Process]:
        """The processes of a kind, ranks in their order."""
        if victim == "http":
            return [self._first]
        members = [member for member in self._family if runs(member, MODULES[victim])]
        if victim == "fork server":  # without a fork that does not have a name of its own yet
            pids = {member.pid for member in members}
            members = [member for member in members if parent_of(member) not in pids]
        return sorted(members, key=lambda member: member.pid)

    def _draw(self) -> Fault:
        kind = self._random.choice(list(CASES))
        victims, phases = CASES[kind]
        return Fault(kind, self._random.choice(victims), self._random.choice(phases))

    def _inject(self, fault: Fault) -> Result:
        """Bring the server into the phase, inject the fault, and wait until the server answers again."""
        before = {member.pid for victim in ("rank", "core") for member in self._members(victim)}
        busy = self._enter(fault.phase, before)
        offset = self._log.stat().st_size
        members = self._wait_for_victims(fault, before)
        chosen = self._random.randrange(len(members)) if members else 0
        old = [member for member in self._family if not runs(member, MODULES["fork server"]) and member != self._first]
        began = time.monotonic()
        if members:
            strike(fault.kind, members[chosen])
        if fault.victim == "http" and members:
            return self._supervise(fault, began, busy)
        again_s = self._until_served(began, members[chosen] if members else None, fault)
        if busy:
            busy.join(UP_S)
        name = f"rank {chosen}" if fault.victim == "rank" else "the engine core"
        right, line = self._judge(fault, name, offset)
        # A fault without effect has cost no time: the first answer waited for the request that ran.
        return Result(fault, right, round(again_s, 1) if line else 0.0, self._left(old, line), line)

    def _enter(self, phase: str, before: set[int]) -> threading.Thread | None:
        """Begin the phase. Returns the thread of the request that runs in it."""
        if phase == "idle":
            time.sleep(0.3)
            return None
        if phase == LOADING:
            with contextlib.suppress(psutil.Error):
                self._members("rank")[0].kill()
            until(lambda: not before & {member.pid for member in self._family}, UP_S)
            return None
        self._number += 1
        first = self._random.randrange(10, 200)
        prompt = [first + (at * self._number) % 1000 for at in range(1500 if phase == "prefill" else 20)]
        tokens = 4 if phase == "prefill" else 100
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        begun = threading.Event()
        thread = threading.Thread(target=self._stream, args=(body, begun), daemon=True)
        thread.start()
        if phase == "decode":
            begun.wait(UP_S)
        time.sleep(0.1)
        return thread

    def _stream(self, body: dict[str, Any], begun: threading.Event) -> None:
        url = f"{self._url}/v1/completions"
        with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", url, json=body, timeout=UP_S) as answer:
            for _ in answer.iter_bytes():
                begun.set()
        begun.set()

    def _wait_for_victims(self, fault: Fault, before: set[int]) -> list[psutil.Process]:
        """The processes of the fault's kind; while loading, new ones, some time after they have started."""
        if fault.phase != LOADING or fault.victim == "http":
            return self._members(fault.victim)

        def fresh() -> list[psutil.Process]:
            return [member for member in self._members(fault.victim) if member.pid not in before]

        # The fault may hit one of two ranks and a core that were there.
        count = len(before) - 1 if fault.victim == "rank" else 1
        until(lambda: len(fresh()) >= count, UP_S)
        time.sleep(self._random.uniform(0.0, 0.2))
        return fresh()

    def _until_served(self, began: float, victim: psutil.Process | None, fault: Fault) -> float:
        """Wait for an answer that comes after the fault has taken effect. Returns the seconds since the fault."""
        try:
            if fault.kind in ("kill", "stop", "socket") and fault.victim in ("rank", "core") and victim:
                until(lambda: not lives(victim), UP_S)
            elif fault.kind in ("memory", "disk", "exception"):
                time.sleep(0.2)
            until(self._answers, UP_S)
        finally:
            if victim is not None and lives(victim):
                release(fault.kind, victim)
        return time.monotonic() - began

    def _supervise(self, fault: Fault, began: float, busy: threading.Thread | None) -> Result:
        """Wait until all is gone, and start the server again."""
        assert self._process is not None
        self._process.wait()
        left = self._left_of_http
        self._start()
        until(self._answers, UP_S)
        if busy:
            busy.join(UP_S)
        return Result(fault, None, round(time.monotonic() - began, 1), left, "")

    @property
    def _left_of_http(self) -> list[str]:
        ours = [one for one in psutil.process_iter() if str(self._folder) in environment_of(one)]
        with contextlib.suppress(TimeoutError):
            until(lambda: not any(map(lives, ours)), GONE_S)
        return [str(one) for one in ours if lives(one)]

    def _left(self, old: list[psutil.Process], line: str) -> list[str]:
        """Processes of the engine that has failed; none if it has not."""
        if not line:
            return []
        with contextlib.suppress(TimeoutError):
            until(lambda: not any(map(lives, old)), GONE_S)
        return [str(member) for member in old if lives(member)]

    def _judge(self, fault: Fault, name: str, offset: int) -> tuple[bool | None, str]:
        """Compare the last failure in the log with the fault."""
        with self._log.open("rb") as log:
            log.seek(offset)
            found = FAILURE.findall(log.read().decode(errors="replace"))
        if not found:
            return (
                None if fault.victim == "fork server" or fault.kind in ("memory", "disk", "exception") else False
            ), ""
        who, phase, cause = found[-1]
        is_loading = phase not in ("step", "shutdown")
        right = who == name and bool(re.search(WORDS[fault.kind], cause))
        # Memory may run out later than it was limited, and a rank that loads may have become ready meanwhile.
        right = right and (is_loading or fault.phase != "idle" or phase == "step")
        if fault.phase != LOADING:
            right = right and not is_loading
        return right, f"{who} failed during {phase}: {cause}"

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise ServerEndedError(f"the server has ended with status {self._process.returncode}")
        with contextlib.suppress(httpx.HTTPError):
            body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1}
            return httpx.post(f"{self._url}/v1/completions", json=body, timeout=UP_S).status_code == 200
        return False

    def _report(self, results: list[Result], left: list[str], grown: int) -> dict[str, Any]:
        judged = [one for one in results if one.right is not None]
        right = sum(bool(one.right) for one in judged)
        late = [one for one in results if one.again_s > AGAIN_S]
        left = left + [name for one in results for name in one.left]
        goals = {
            "the cause is right": right >= RIGHT * len(judged),
            "serves again in time": not late,
            "nothing is left": not left and grown <= 8,
        }
        times = sorted(one.again_s for one in results)
        return {
            "faults": len(results),
            "kinds": dict(sorted(Counter(one.fault.kind for one in results).items())),
            "causes_judged": len(judged),
            "causes_right": right,
            "without_effect": sum(one.right is None and one.fault.victim != "http" for one in results),
            "serves_again_s": {"median": times[len(times) // 2], "longest": times[-1]} if times else {},
            "late": [[*one.fault, one.again_s] for one in late],
            "wrong": [[*one.fault, one.line] for one in judged if not one.right],
            "left": left,
            "descriptors_grown": grown,
            "missed": [goal for goal, met in goals.items() if not met],
        }


def strike(kind: str, victim: psutil.Process) -> None:
    """Inject a fault into a process."""
    with contextlib.suppress(psutil.Error, OSError, StopIteration):  # it has just ended
        match kind:
            case "kill":
                victim.kill()
            case "stop":
                victim.suspend()
            case "memory":
                resource.prlimit(victim.pid, resource.RLIMIT_AS, (victim.memory_info().vms, resource.RLIM_INFINITY))
            case "disk":
                resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            case "socket":
                shut_down_socket(victim.pid, next(int(word) for word in victim.cmdline() if word.isdigit()))
            case _:
                victim.send_signal(EXCEPTION_SIGNAL)


def release(kind: str, victim: psutil.Process) -> None:
    """Undo what a fault without effect has done to a process."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    with contextlib.suppress(psutil.Error, OSError, StopIteration):  # it has just ended
        match kind:
            case "stop":
                victim.resume()
            case "memory":
                resource.prlimit(victim.pid, resource.RLIMIT_AS, unlimited)
            case "disk":
                resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, unlimited)


def runs(member: psutil.Process, module: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(module in word for word in member.cmdline())
    return False


def parent_of(member: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(member.ppid())
    return 0


def environment_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.environ().get("PYTHONPATH", ""))
    return ""


def lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def until(check: Callable[[], bool], limit_s: float) -> None:
    """Wait until a check holds. Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    while not check():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
