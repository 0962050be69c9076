"""Checks of security: who can reach this user's servers, their keys, TLS, and the permissions of files."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from weft.cache import cache_path
from weft.checkpoint.files.yaml_text import load_yaml
from weft.machine.check import Check, skipped
from weft.machine.hardware.listeners import Listener, listeners, socket_inodes
from weft.monitor.processes import SERVERS, Process
from weft.regular_files import SETTINGS_BYTES, read_regular_text

KEY_FLAGS = ("--api-key", "--admin-key")
KEY_FIELDS = ("api-key", "api-key-file", "keys")
KEY_FILES = ("--api-key-file", "--ssl-keyfile", "--cluster-key-file", "--cluster-cert-file", "--keys")
KEY_VARIABLES = ("VLLM_API_KEY", "WEFT_API_KEY")
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check_security(processes: Sequence[Process], root: Path = Path("/")) -> Iterator[Check]:
    """Checks of every server of this user, and of Weft's cache."""
    servers = [process for process in processes if process.role in SERVERS]
    if not servers:
        yield skipped("endpoints", "no server of this user is running")
    for process in servers:
        variables = process_variables(process.pid, root)
        inodes = socket_inodes(process.pid, root)
        for listener in listeners(root):
            if listener.inode in inodes:
                yield check_endpoint(process, listener, variables)
        yield from check_arguments(process)
    yield check_private(cache_path(), "cache")


def check_endpoint(process: Process, listener: Listener, variables: Mapping[str, str]) -> Check:
    """One address on which a server listens, its keys and TLS."""
    where = f"{listener.address}:{listener.port}"
    settings = config_fields(process)
    has_key = any(flag_values(process.command, f"--{name}") or settings.get(name) for name in KEY_FIELDS)
    has_key = has_key or any(variables.get(name) for name in KEY_VARIABLES)
    has_tls = bool(flag_values(process.command, "--ssl-certfile") or settings.get("ssl-certfile"))
    value = f"weft {process.role} ({process.pid}) on {where}, {'a key' if has_key else 'no key'}, "
    value += "TLS" if has_tls else "no TLS"
    name = f"endpoint-{listener.port}"
    if listener.is_loopback:
        return Check(name, "ok", value)
    if not has_key:
        return Check(name, "fail", value, "a key, or loopback", "set VLLM_API_KEY, or serve with --host 127.0.0.1")
    if not has_tls:
        return Check(name, "warn", value, "TLS", "--ssl-certfile and --ssl-keyfile, or a proxy with TLS in front")
    return Check(name, "ok", value)


def check_arguments(process: Process) -> Iterator[Check]:
    """Keys among a server's arguments, which `ps` shows to everybody, and the files that hold keys."""
    for flag in KEY_FLAGS:
        if flag_values(process.command, flag):
            remedy = "give the key in the environment: VLLM_API_KEY, WEFT_ADMIN_KEY"
            yield Check(f"key-in-arguments-{process.pid}", "warn", f"{flag} is visible in ps", "", remedy)
    for flag in KEY_FILES:
        for value in flag_values(process.command, flag):
            yield check_private(Path(value), f"file-{Path(value).name}")


def check_private(path: Path, name: str) -> Check:
    """A file or folder that only its owner should read."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return skipped(name, f"{path}: {error.strerror}")
    private = 0o700 if stat.S_ISDIR(mode) else 0o600
    value = f"{path} has mode {stat.S_IMODE(mode):04o}"
    if mode & OTHERS:
        return Check(name, "warn", value, f"{private:04o}", f"chmod {private:o} {path}")
    return Check(name, "ok", value, f"{private:04o}")


def flag_values(words: Sequence[str], flag: str) -> list[str]:
    """Values of a flag among a command's arguments, in both spellings: FLAG VALUE and FLAG=VALUE."""
    names = {flag, flag.replace("-", "_").replace("__", "--", 1)}
    values = []
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            values.append(value if equals else "".join(words[number + 1 : number + 2]))
    return values


def config_fields(process: Process, root: Path = Path("/")) -> dict[str, object]:
    """Fields of a server's --config file, with dashes in their names; empty without one that can be read."""
    fields: dict[str, object] = {}
    for value in flag_values(process.command, "--config"):
        with contextlib.suppress(OSError, ValueError):
            folder = os.readlink(root / "proc" / str(process.pid) / "cwd")
            content = load_yaml(read_regular_text(Path(folder) / value, SETTINGS_BYTES))
            if isinstance(content, dict):
                fields |= {str(name).replace("_", "-"): field for name, field in content.items()}
    return fields


def process_variables(pid: int, root: Path = Path("/")) -> dict[str, str]:
    """The environment that a process was started with; empty if this user may not read it."""
    try:
        text = (root / "proc" / str(pid) / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in text.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}
