"""A rank that is killed: seconds until no process of the engine holds memory of the card."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory

from scripts.programs.gpu_check.shapes import shape_of, write_config
from scripts.programs.gpu_check.work import Figure, Options
from scripts.programs.gpu_check.work.ranks import module_command

START_S, FREE_S, LOOK_S = 90.0, 30.0, 0.02
# In the place of `weft serve` on a stand-in for a card: a child that looks like a rank, and a parent that ends with it.
STAND_IN = """
import http.server, subprocess, sys, threading
rank = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", "weft.worker"])
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy)
threading.Thread(target=server.serve_forever, daemon=True).start()
rank.wait()
"""


def death(options: Options) -> Iterator[Figure]:
    """Serve on two ranks of one card, kill one with SIGKILL, and wait for the driver to hold nothing of them."""
    with TemporaryDirectory() as folder, socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        path = write_config(Path(folder) / "model", shape_of("Qwen3-0.6B"))
        command = served(path, port)
        if options["rehearse"]:
            command = [sys.executable, "-S", "-c", STAND_IN, str(port)]
        server = subprocess.Popen(command, start_new_session=True)
        try:
            yield killed(server, port)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def served(path: str, port: int) -> list[str]:
    flags = ["--load-format", "dummy", "--skip-tokenizer-init", "-tp", "2", "--device-ids", "0,0"]
    limits = ["--max-model-len", "4096", "--kv-cache-memory-bytes", "2000000000"]
    return module_command("weft", "serve", path, *flags, *limits, "--port", port)


def killed(server: subprocess.Popen[bytes], port: int) -> Figure:
    name = "killed rank: memory free again"
    if not wait_until(lambda: server.poll() is not None or healthy(port), START_S) or server.poll() is not None:
        return Figure(name, None, "s", ok=False, note=f"the server did not start within {START_S:.0f} s")
    family = process_tree(server.pid)
    ranks = [process for process in family[1:] if "weft.worker" in command_line(process)]
    if not ranks:
        return Figure(name, None, "s", ok=False, note="no rank among the server's processes")
    began = time.monotonic()
    os.kill(ranks[0], signal.SIGKILL)
    if not wait_until(lambda: server.poll() is not None and not holders(family), FREE_S):
        return Figure(name, None, "s", ok=False, note=f"memory is still held after {FREE_S:.0f} s")
    return Figure(name, round(time.monotonic() - began, 2), "s")


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """True once `condition` holds, false if it does not within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def holders(family: list[int]) -> list[int]:
    """Processes of `family` that live, or that the driver says hold memory of the card."""
    alive = [process for process in family if Path(f"/proc/{process}/stat").exists() and not is_zombie(process)]
    return alive or [process for process in card_processes() if process in family]


def card_processes() -> list[int]:
    """Processes that hold memory of the first card, as the driver numbers them; none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return [each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    except pynvml.NVMLError:
        return []


def process_tree(root: int) -> list[int]:
    """A process, its children, and theirs."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat_fields(int(entry.name))):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    family = [root]
    for process in family:
        family += parents.get(process, [])
    return family


def stat_fields(process: int) -> list[str]:
    """State, parent and so on from /proc; empty for a process that has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_zombie(process: int) -> bool:
    fields = stat_fields(process)
    return not fields or fields[0] == "Z"


def command_line(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
