"""The first screen of help: the commands, or the flags of a command that people use first, one a line."""

from __future__ import annotations

import re
from collections.abc import Iterable

from weft._version import __version__
from weft.cli.commands import COMMANDS, Command
from weft.cli.flags.declared import Flag

ABOUT = "Runs one large language model across the GPUs you really have."
LINES = 40  # of a screen, which all of this fits into
WIDTH = 100  # columns of a line; a longer explanation is cut
NAMES = 34  # columns of a flag's names
FAMILIES = {
    "bench": "Measure an engine or a server, and compare results",
    "cluster": "Run one engine on several machines, or look at them",
}
STATUS = "Exit status: 0 done, 1 error, 2 wrong usage, 3 does not fit or keep a promise, 130 Ctrl-C."
# Flags of the first screen. A command that has no more than fit shows all of them.
COMMON = frozenset(
    (
        # engines
        *("quantization", "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "device-ids"),
        *("max-model-len", "gpu-memory-utilization", "max-memory", "objective", "plan", "device"),
        # servers and answers
        *("host", "port", "api-key", "served-model-name", "tool-call-parser", "reasoning-parser", "nnodes"),
        *("prompt", "system-prompt", "temperature", "top-p", "max-tokens", "verbose", "show-layout", "model", "ray"),
        # plans
        *("gpus", "network", "price", "precision", "engine", "concurrency", "input-len", "output-len", "check"),
        *("html", "emit", "emit-to", "rate", "users", "slo", "json", "find", "rates", "duration", "plot"),
        *("against", "api-price", "demand", "trace", "policy"),
        # measurements
        *("base-url", "request-rate", "max-concurrency", "num-prompts", "dataset-name", "dataset-path", "goodput"),
        *("save-result", "save", "batch-size"),
    )
)


def command_help(command: Command) -> str:
    """The first screen of a command's help, at most LINES lines."""
    flags = [
        flag for flag in command.flags if flag.name != "model" or command.argument == "MODEL" or command.model_flag
    ]
    shown = flags if len(flags) <= LINES - 10 else [flag for flag in flags if flag.name in COMMON]
    left = len(flags) - len(shown)
    lines = [f"usage: {command.usage} [flags]", "", command.summary, ""]
    if command.argument and command.argument != "MODEL":
        lines.append(_row(command.argument, command.about))
    lines += [flag_line(flag) for flag in shown]
    lines.append(_row("--config FILE", "YAML file with flags; flags on the command line override it"))
    more = f", and the other {left} flags" if left else ""
    lines += [
        "",
        f"weft {command.name} --help-all has the whole of each explanation{more}",
        f"example: {command.example}",
    ]
    return "\n".join(lines) + "\n"


def flag_line(flag: Flag) -> str:
    """A flag, its value, and the first words about it."""
    word = flag.name.rpartition("-")[2].upper()
    values = ("",) if flag.parse is None else (f" {flag.metavar or '|'.join(flag.choices) or word}", f" {word}")
    short = (f", {flag.short}",) if flag.short else ()
    spellings = [f"{flag.long}{also}{value}" for value in values for also in (*short, "")]
    return _row(next((names for names in spellings if len(names) <= NAMES), flag.long), flag.help)


def _row(names: str, about: str) -> str:
    return f"  {names:{NAMES}}  {clipped(about, WIDTH - NAMES - 4)}".rstrip()


def clipped(text: str, room: int) -> str:
    """A text without its last full stop, or the clauses of it that there is room for, or some words."""
    text = text.rstrip(".")
    if len(text) <= room:
        return text
    ends = [match.start() for match in re.finditer(r"[;:,.] | \(", text[: room + 2]) if match.start() > room // 3]
    return text[: ends[-1]] if ends else f"{text[: room - 1].rpartition(' ')[0]} …"


def overview(listed: Iterable[Command] | None = None) -> str:
    """A line for each command, or family of commands; for `listed` ones of a family also an example each."""
    if listed is not None:
        return _family(tuple(listed))
    rows: dict[str, str] = {}
    for name, command in COMMANDS.items():
        family, _, _ = name.partition(" ")
        rows.setdefault(family, FAMILIES.get(family, "") if " " in name else command.summary)
    width = max(map(len, rows))
    lines = [f"weft {__version__}: {ABOUT}", ""]
    lines += [f"  {name:{width}}  {clipped(summary, WIDTH - width - 4)}" for name, summary in rows.items()]
    lines += ["", "MODEL is a name on the hub, a tag of Ollama's, a directory, a .gguf file, or demo, a small model."]
    lines += ["weft COMMAND --help shows the first flags of a command, --help-all all of them.", STATUS, ""]
    return "\n".join([*lines, *(f"  {COMMANDS[name].example}" for name in ("run", "plan", "serve"))])


def everything() -> str:
    """A line and an example for each command."""
    return f"{overview()}\n\n{_family(tuple(COMMANDS.values()))}"


def _family(commands: tuple[Command, ...]) -> str:
    width = max(len(command.name) for command in commands)
    lines = [f"  weft {command.name:{width}}  {command.summary}" for command in commands]
    return "\n".join(["commands:", *lines, "", "examples:", *(f"  {command.example}" for command in commands)])
