"""Shell: command lines as bash reads them, one flag to a line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

import msgspec

Value = str | int | float | bool | tuple[str, ...]
Flags = Mapping[str, Value]  # by name without dashes; True is a flag alone, a tuple several words

STRICT = "set -euo pipefail"
INDENT = "    "
TRAP = "trap 'kill $(jobs -p) || true; wait; exit 143' INT TERM"  # 143: ended by SIGTERM
# 127: nobody is left to wait for.
WATCH = """\
status=0
while true; do
    wait -n && continue || ended=$?
    [ "$ended" -ne 127 ] || exit "$status"
    status=$ended
    echo "a server has failed with status $status; the others go on" >&2
done"""
_SYNTAX = re.compile(r"[^\w .,:/()+@=-]")  # what may be more than text between ${X:? and }


class Raw(str):
    """A word that is in the shell's own syntax already."""

    __slots__ = ()


class Placeholder(msgspec.Struct, frozen=True):
    """A variable that the user has to set: its name, and what it stands for."""

    name: str
    meaning: str

    @property
    def demand(self) -> str:
        """The variable; where it is not set, bash and Compose end with what is wanted. Nothing in that is syntax."""
        return f"${{{self.name}:?{_SYNTAX.sub('', self.meaning)}}}"

    @property
    def shell(self) -> Raw:
        """Its value in a script that demands it."""
        return Raw(f"${self.name}")


def quote(word: str) -> str:
    """`word` as bash takes it for itself."""
    return f'"{word}"' if isinstance(word, Raw) else shlex.quote(word)


def flag_words(flags: Flags) -> list[list[str]]:
    """Each flag with its values, not quoted."""
    found: list[list[str]] = []
    for name, value in flags.items():
        if isinstance(value, tuple):
            found.append([f"--{name}", *value])
        elif value is True:
            found.append([f"--{name}"])
        elif value is not False:
            found.append([f"--{name}", value if isinstance(value, str) else f"{value}"])
    return found


def command_line(start: Sequence[str], flags: Flags, variables: Mapping[str, str] | None = None) -> str:
    """`start` with `variables` set for it alone, and each flag on a line of its own."""
    given = [f"{name}={value}" for name, value in (variables or {}).items()]
    lines = [["env", *given], start, *flag_words(flags)] if given else [start, *flag_words(flags)]
    return (f" \\\n{INDENT}" if flags else " ").join(" ".join(map(quote, line)) for line in lines)


def export_lines(variables: Mapping[str, str]) -> list[str]:
    """A line for each variable."""
    return [f"export {name}={quote(value)}" for name, value in variables.items()]


def bash_script(comment: str, body: Sequence[str], demanded: Sequence[Placeholder] = ()) -> str:
    """A whole bash script, which ends before it does anything where one of the `demanded` is not set."""
    demands = [f': "{it.demand}"' for it in demanded]
    return "\n".join(["#!/usr/bin/env bash", comment, STRICT, *demands, "", *body]).rstrip("\n") + "\n"


def run_together(commands: Sequence[str]) -> list[str]:
    """Commands that run until the script is ended: a single one takes its place, several run side by side, and one that
    fails is told at once, and by the script's status at the end."""
    if len(commands) == 1:
        return [f"exec {commands[0]}"]
    body = [TRAP, ""]
    for line in commands:
        body += [f"{line} &", ""]
    return [*body, *WATCH.splitlines()]
