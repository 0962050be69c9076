"""docs/cli.md, from the same data as the parser; `python -m weft.cli.docs` writes it and docs/glossary.md."""

from __future__ import annotations

from pathlib import Path

from weft.cli import glossary
from weft.cli.commands import COMMANDS, Command
from weft.cli.flags.declared import Flag, flag_groups
from weft.cli.flags.flags import EngineFlags
from weft.cli.parser import default_text
from weft.cli.short_help import ABOUT
from weft.engine.client.vllm import VLLMArgument, vllm_arguments

ENGINE = flag_groups(EngineFlags)
PAGE = Path(__file__).parents[3] / "docs" / "cli.md"

INTRODUCTION = f"""# The command line

<!-- Written by `python -m weft.cli.docs`. Change what it is written from, not this page. In src/weft: cli/commands.py
and cli/*flags.py, and for the flags of engine and server config.py and http/options.py. -->

{ABOUT}

Flags have vLLM's names and meanings if vLLM has the flag. In the name of a flag `_` means `-`; every switch `--x` also
has the form `--no-x`; `--config FILE.yaml` holds flags by name, and flags on the command line override it. `--tp --pp
--dp --ep` are the same flags as `-tp -pp -dp -ep`. A flag of `vllm serve` that Weft does not have is
[refused](#vllms-flags-that-are-refused) if it changes what is served or how safe it is; all others are
[ignored](#vllms-flags-that-are-ignored) with a warning. Any other unknown flag is an error, which names Weft's flag for
the same purpose if there is one.

MODEL is a directory, a `.gguf` file, a name on the hub, `demo`, or a short name: `Qwen3-8B` means `Qwen/Qwen3-8B`.
A tag of Ollama's, `qwen3:8b`, means the Q4_K_M file that `weft pull qwen3:8b` fetches. A path that exists, or a model
in the hub's cache, takes precedence over short names. If a short name stands for a model with another name, the
command says so on standard error.

Exit status: 0 success, 1 an error (one line on standard error), 2 wrong usage, 3 if nothing fits, a claim is impossible
or nothing keeps the promise (`weft plan`, `cost`, `simulate`), 130 Ctrl-C, 141 the reader of the output has left.
Answers and reports go to standard output, everything else to standard error. `VLLM_LOGGING_LEVEL` sets how much is
logged.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    parts += [section(command) for command in COMMANDS.values()]
    engines = ", ".join(f"`weft {command.name}`" for command in COMMANDS.values() if ENGINE[0] in command.groups)
    parts.append(f"## Flags of every engine\n\nFor the commands that start an engine: {engines}.\n")
    parts += [flag_table(title, flags) for title, flags in ENGINE]
    parts.append("## vLLM's flags that are refused\n\n" + vllm_table(refused=True))
    parts.append("## vLLM's flags that are ignored\n\n" + vllm_table(refused=False))
    return "\n".join(parts)


def section(command: Command) -> str:
    """A command with its own flags; the flags of every engine have a section of their own."""
    own = [(title, flags) for title, flags in command.groups if (title, flags) not in ENGINE]
    head = f"## {command.usage}\n\n{command.summary}\n\n```\n{command.example}\n```\n"
    return "\n".join([head, *(flag_table(title, flags) for title, flags in own)])


def flag_table(title: str, flags: tuple[Flag, ...]) -> str:
    """A Markdown table of flags under a heading."""
    lines = [f"### {title}\n", "| flag | meaning |", "|---|---|"]
    return "\n".join([*lines, *map(flag_row, flags)]) + "\n"


def vllm_table(*, refused: bool) -> str:
    """A Markdown table of the vLLM flags that Weft does not have, by topic and reason."""
    groups: dict[tuple[str, str], list[VLLMArgument]] = {}
    for flag in vllm_arguments().values():
        if flag.refused == refused:
            groups.setdefault((flag.topic, flag.why), []).append(flag)
    rows = [
        f"| {topic} | {', '.join(map(flag_with_values, flags))} | {why} |" for (topic, why), flags in groups.items()
    ]
    return "\n".join(["| topic | flags | why |", "|---|---|---|", *rows]) + "\n"


def flag_with_values(flag: VLLMArgument) -> str:
    """The name of a vLLM flag, and the values of it that are accepted."""
    return f"`--{flag.name}`" + (f" (but {', '.join(f'`{value}`' for value in flag.fine)})" if flag.fine else "")


def flag_row(flag: Flag) -> str:
    """A row of the table: the flag with its value, and its meaning."""
    value = "" if flag.parse is None else " " + (flag.metavar or flag.name.rpartition("-")[2].upper())
    if flag.choices:
        value = " {" + ",".join(flag.choices) + "}"
    names = [f"`{flag.long}{value}`", *([f"`{flag.short}`"] if flag.short else [])]
    meaning = f"{flag.help}{default_text(flag)}".replace("|", "\\|")
    return f"| {', '.join(names)} | {meaning} |"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    glossary.PAGE.write_text(glossary.page(), encoding="utf-8")
