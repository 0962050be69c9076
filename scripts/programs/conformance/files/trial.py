"""One trial: a model is planned and read in a child process with limits, and what comes of it is judged."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

MEMORY_BYTES = 2 << 30  # of a child beyond what it begins with
CPU_S = 10  # of a child; the wall clock is no measure on a machine that does other work
WALL_S = 120  # after which a child has stopped
LONGEST_LINE = 700  # characters of an error, without the names of folders
TEXTS = ("Hello, world: 12 + 30 = 42\n", "ﷺ①½ 日本語 🙂 a\u0301", "a" * 300)


class Verdict(NamedTuple):
    """The end of a trial. `fault` is what is wrong about that, "" if nothing is."""

    outcome: str
    line: str
    fault: str
    cpu_s: float
    memory_bytes: int


def try_model(folder: Path, scratch: Path) -> Verdict:
    """Plan and read the model of a folder in a fork. The process must have no other thread."""
    out, before = scratch / "out", _pages(1) * resource.getpagesize()
    child = os.fork()
    if child == 0:
        _run_child(folder, out)
    began = time.monotonic()
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() - began > WALL_S:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    text = out.read_text(errors="replace")
    cpu_s = usage.ru_utime + usage.ru_stime
    memory = max(0, usage.ru_maxrss * 1024 - before)
    outcome, line = _ending(text)
    return Verdict(outcome, line, _fault(status, outcome, line, text, folder, memory), cpu_s, memory)


def _ending(text: str) -> tuple[str, str]:
    """The last line of a child, which says how it ended, and the error that it tells."""
    last = text.rstrip("\n").rpartition("\n")[2]
    try:
        outcome, line = json.loads(last)
    except ValueError:
        return "died", last
    return str(outcome), str(line)


def _fault(status: int, outcome: str, line: str, text: str, folder: Path, memory: int) -> str:
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    if outcome not in ("read", "refused"):
        return outcome
    if "panicked at" in text or "Traceback" in text:
        return "a panic or a traceback on standard error"
    if "\n" in line or len(line.replace(str(folder), "")) > LONGEST_LINE:
        return f"an error of {len(line)} characters"
    return f"{memory >> 20} MiB" if memory > MEMORY_BYTES else ""


def _run_child(folder: Path, out: Path) -> None:
    """Read the model; the file gets what it writes, and at its end how it ended."""
    outcome, line = "died", ""
    try:
        descriptor = os.open(out, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)
        for target in (1, 2):
            os.dup2(descriptor, target)
        _limit()
        outcome, line = _outcome(folder)
    except BaseException:
        line = traceback.format_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(1, f"\n{json.dumps([outcome, line])}\n".encode())
        os._exit(0)


def _pages(field: int) -> int:
    """Pages of this process: 0 for those that are mapped, 1 for those in memory."""
    return int(Path("/proc/self/statm").read_text().split()[field])


def _limit() -> None:
    address_space = _pages(0) * resource.getpagesize() + MEMORY_BYTES + (4 << 30)  # mapped files and threads' stacks
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + CPU_S + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _outcome(folder: Path) -> tuple[str, str]:
    from weft.errors import WeftError

    try:
        read_model(folder)
    except WeftError as error:
        return "refused", str(error)
    except Exception as error:
        return f"{type(error).__name__}", traceback.format_exc()
    return "read", ""


def read_model(folder: Path) -> None:
    """Do what a start does with the files of a model: the tokenizer, the checkpoint, a plan, and all weights."""
    import torch

    from weft.checkpoint import lookup, outline
    from weft.checkpoint.checkpoint import resolve
    from weft.config import EngineConfig
    from weft.engine.text.tokenizer import load_tokenizer
    from weft.machine.hardware import host
    from weft.plan.layout import build_plan
    from weft.ranks.weights.load import allocate_parameters, load_weights

    if any(folder.glob("token*")) or any(folder.glob("*.tiktoken")) or folder.name.startswith("gguf"):
        tokenizer = load_tokenizer(_tokenizer_path(folder))
        for text in TEXTS:
            tokenizer.decode(tokenizer.encode(text))
    has_config, ggufs = (folder / "config.json").exists(), any(folder.glob("*.gguf"))
    if not has_config and (not ggufs or folder.name.startswith("gguf")):
        return  # a vocabulary without a model
    if has_config:
        lookup.look_up(str(folder))
    outline.read_outline(str(folder))
    checkpoint = resolve(str(folder))
    plan = build_plan(EngineConfig(model=str(folder)), checkpoint, host.probe_host())
    for place in plan.places:
        load_weights(plan, place, allocate_parameters(plan, place, torch.device("cpu")))


def _tokenizer_path(folder: Path) -> str:
    files = sorted(folder.glob("*.gguf"))
    return str(files[0] if files else folder)
