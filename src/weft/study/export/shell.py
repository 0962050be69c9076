"""Command lines and scripts for bash, with one flag per line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

import msgspec

Value = str | int | float | bool | tuple[str, ...]
Flags = Mapping[str, Value]  # by name without dashes; True is a flag without value, a tuple several values

STRICT = "set -euo pipefail"
INDENT = "    "
TRAP = "trap 'kill $(jobs -p) || true; wait; exit 143' INT TERM"  # 143: ended by SIGTERM
# 127: no process is left to wait for.
WATCH = """\
status=0
while true; do
    wait -n && continue || ended=$?
    [ "$ended" -ne 127 ] || exit "$status"
    status=$ended
    echo "a server has failed with status $status; the others go on" >&2
done"""
_SYNTAX = re.compile(r"[^\w .,:/()+@=-]")  # characters that may be syntax between ${X:? and }


class Raw(str):
    """A word that is shell syntax and is not to be quoted."""

    __slots__ = ()


class Placeholder(msgspec.Struct, frozen=True):
    """A variable that the user must set: its name, and its meaning in words."""

    name: str
    meaning: str

    @property
    def demand(self) -> str:
        """The variable with a demand: bash and Compose stop with its meaning if it is not set."""
        # Characters that could be syntax are left out of the message.
        return f"${{{self.name}:?{_SYNTAX.sub('', self.meaning)}}}"

    @property
    def shell(self) -> Raw:
        """The variable in a script that demands it."""
        return Raw(f"${self.name}")


def quote(word: str) -> str:
    """Quote a word so that bash reads it unchanged."""
    return f'"{word}"' if isinstance(word, Raw) else shlex.quote(word)


def flag_words(flags: Flags) -> list[list[str]]:
    """Words of each flag with its values, not quoted."""
    lines: list[list[str]] = []
    for name, value in flags.items():
        if isinstance(value, tuple):
            lines.append([f"--{name}", *value])
        elif value is True:
            lines.append([f"--{name}"])
        elif value is not False:
            lines.append([f"--{name}", value if isinstance(value, str) else f"{value}"])
    return lines


def command_line(start: Sequence[str], flags: Flags, variables: Mapping[str, str] | None = None) -> str:
    """Command `start` with each flag on a line of its own; `variables` are set for this command only."""
    given = [f"{name}={value}" for name, value in (variables or {}).items()]
    lines = [["env", *given], start, *flag_words(flags)] if given else [start, *flag_words(flags)]
    return (f" \\\n{INDENT}" if flags else " ").join(" ".join(map(quote, line)) for line in lines)


def export_lines(variables: Mapping[str, str]) -> list[str]:
    """Lines that export the variables."""
    return [f"export {name}={quote(value)}" for name, value in variables.items()]


def bash_script(comment: str, body: Sequence[str], demanded: Sequence[Placeholder] = ()) -> str:
    """A whole bash script; it stops at its start if one of the `demanded` variables is not set."""
    demands = [f': "{placeholder.demand}"' for placeholder in demanded]
    return "\n".join(["#!/usr/bin/env bash", comment, STRICT, *demands, "", *body]).rstrip("\n") + "\n"


def run_together(commands: Sequence[str]) -> list[str]:
    """Lines that run commands until the script is stopped.

    A single command replaces the script. Several run at the same time; a failure is reported at once, and by the
    script's exit status.
    """
    if len(commands) == 1:
        return [f"exec {commands[0]}"]
    body = [TRAP, ""]
    for line in commands:
        body += [f"{line} &", ""]
    return [*body, *WATCH.splitlines()]
