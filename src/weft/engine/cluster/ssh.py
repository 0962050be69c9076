"""A node reached with the system's ssh: the command, and the conversation with the agent that it starts there."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from typing import IO

import msgspec

from weft._version import __version__
from weft.engine.cluster.agent_messages import MARK, Reply
from weft.engine.cluster.hosts import Machine
from weft.errors import ConfigError, printable

CONNECT_S = 10
AGENT = "weft.cli.cluster.node_agent"
OPTIONS = (
    "BatchMode=yes",  # never a password, and no question
    "PasswordAuthentication=no",
    "KbdInteractiveAuthentication=no",
    f"ConnectTimeout={CONNECT_S}",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
    "ForwardX11=no",
    "PermitLocalCommand=no",
)
SSH_FAILED, NO_SUCH_PROGRAM = 255, (126, 127)
# Built here, not by the threads that read: msgspec may crash if two are the first to build it.
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
END_S = 20.0  # seconds for an agent that ends a server
# Words of ssh, and the way out.
REMEDIES = (
    ("permission denied", "put your public key there: ssh-copy-id {target}"),
    ("host key verification failed", "connect once by hand, and compare its key: ssh {target}"),
    ("no matching host key", "connect once by hand: ssh {target}"),
    ("could not resolve", "check host: in the file, or ~/.ssh/config"),
    ("", "check that sshd runs there, host:, port: and the firewall"),
)


class Gone(msgspec.Struct, frozen=True):
    """The end of a conversation: ssh's exit status, and the last line of its standard error."""

    status: int
    line: str


class SshNode:
    """A machine of the file, with its number among the nodes."""

    def __init__(self, number: int, machine: Machine) -> None:
        self.number, self.machine = number, machine

    @property
    def label(self) -> str:
        """The node in messages to the user."""
        return f"node {self.number} ({self.machine.host})"

    @property
    def target(self) -> str:
        """Words after `ssh` with which a person connects."""
        machine = self.machine
        port = f"-p {machine.port} " if machine.port else ""
        return port + (f"{machine.user}@" if machine.user else "") + machine.host

    def command(self, ssh: str = "ssh") -> list[str]:
        """The ssh command that starts the agent. Everything that differs from task to task goes to its input."""
        machine = self.machine
        argv = [ssh, "-T"]
        for option in OPTIONS:
            argv += ["-o", option]
        if machine.port:
            argv += ["-p", str(machine.port)]
        if machine.user:
            argv += ["-l", machine.user]
        return [*argv, "--", machine.host, f"{quoted(machine.python)} -P -m {AGENT}"]

    def reason(self, gone: Gone) -> str:
        """Reason why there was no answer, with the way out."""
        if gone.status == SSH_FAILED:
            remedy = next(remedy for symptom, remedy in REMEDIES if symptom in gone.line.lower())
            return f"ssh cannot connect: {gone.line or 'no reason given'}; {remedy.format(target=self.target)}"
        if f"No module named {AGENT!r}" in gone.line or re.search(r"No module named '?weft", gone.line):
            return (
                f"{self.machine.python} there has no Weft {__version__}; install it there, or set python: of this host"
            )
        if gone.status in NO_SUCH_PROGRAM:
            return f"{self.machine.python} does not run there: {gone.line}; set python: of this host"
        return f"the agent there has ended with status {gone.status}: {gone.line or 'no reason given'}"


def quoted(program: str) -> str:
    """A program's path for any login shell; `~/` stays outside the quotes. The path has no quote of its own."""
    home, rest = ("~/", program[2:]) if program.startswith("~/") else ("", program)
    return f"{home}'{rest}'"


class Conversation:
    """The agent of a node. `take` is called from threads with every reply, and once with Gone at the end."""

    def __init__(self, node: SshNode, task: msgspec.Struct, take: Callable[[SshNode, Reply | Gone], None]) -> None:
        """Raises ConfigError if there is no ssh."""
        program = shutil.which("ssh")
        if program is None:
            raise ConfigError("there is no program ssh on this machine; install OpenSSH's client", code="no-ssh")
        self.node, self._take = node, take
        self._process = subprocess.Popen(
            node.command(program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches us alone, and we end the task in order
        )
        self._errors: list[str] = []
        self._error_thread = threading.Thread(target=self._read_errors, daemon=True)
        self._error_thread.start()
        self._thread = threading.Thread(target=self._read_replies, daemon=True)
        self._thread.start()
        self.send(task)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; without effect if the other side is gone."""
        assert self._process.stdin
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def end_input(self) -> None:
        """End the agent's input. May be called twice."""
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self, within_s: float = END_S) -> None:
        """End the conversation; wait for its end for at most `within_s` seconds."""
        self.end_input()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()

    def _read_replies(self) -> None:
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                # A login shell's own lines may come before.
                _, mark, content = line.partition(MARK)
                if mark:
                    with contextlib.suppress(msgspec.DecodeError):
                        self._take(self.node, _replies.decode(content))
        self._process.wait()
        self._error_thread.join()
        self._take(self.node, Gone(self._process.returncode, self._errors[-1] if self._errors else ""))

    def _read_errors(self) -> None:
        assert self._process.stderr
        lines: IO[bytes]
        with self._process.stderr as lines:
            for line in lines:
                if text := printable(line.decode("utf-8", "replace").strip()):
                    self._errors = [text]
