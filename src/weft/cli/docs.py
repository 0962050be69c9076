"""docs/cli.md, from the same data as the parser: `python -m weft.cli.docs` writes it, and docs/glossary.md."""

from __future__ import annotations

from pathlib import Path

from weft.cli import glossary
from weft.cli.commands import COMMANDS, Command
from weft.cli.dispatch import ABOUT
from weft.cli.flags import ENGINE, Flag
from weft.cli.parser import default_text
from weft.cli.vllm import ARITY

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"

INTRODUCTION = f"""# The command line

<!-- Written by `python -m weft.cli.docs`. Change commands.py and the *flags.py of src/weft/cli, not this page. -->

{ABOUT}

Flags have vLLM's names and meanings where vLLM has them. In a flag's name `_` is as good as `-`; a switch `--x` has its
`--no-x`; `--config FILE.yaml` holds flags by name, and those on the command line win. A flag of `vllm serve` that Weft
does not have is ignored with a warning that names it; any other unknown flag is an error, with the nearest name.

Exit status: 0 done, 1 an error (one line on standard error), 2 words that make no command, 3 for `weft plan`, `cost`
and `simulate` where nothing fits, a claim is impossible or nothing meets the promise, 130 Ctrl-C. Answers and
reports go to standard output, everything else to standard error. `VLLM_LOGGING_LEVEL` sets how much that is.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    parts += [section(command) for command in COMMANDS.values()]
    engines = ", ".join(f"`weft {it.name}`" for it in COMMANDS.values() if ENGINE[0] in it.groups)
    parts.append(f"## Flags of every engine\n\nTaken by the commands that start one: {engines}.\n")
    parts += [table(title, flags) for title, flags in ENGINE]
    ignored = ", ".join(f"`--{name}`" for name in sorted(ARITY))
    parts.append(f"## Ignored with a warning\n\nvLLM has these and Weft does not: {ignored}.\n")
    return "\n".join(parts)


def section(command: Command) -> str:
    """A command, with the flags that are its own."""
    own = [(title, flags) for title, flags in command.groups if (title, flags) not in ENGINE]
    head = f"## {command.usage}\n\n{command.summary}\n\n```\n{command.example}\n```\n"
    return "\n".join([head, *(table(title, flags) for title, flags in own)])


def table(title: str, flags: tuple[Flag, ...]) -> str:
    lines = [f"### {title}\n", "| flag | meaning |", "|---|---|"]
    return "\n".join([*lines, *map(line, flags)]) + "\n"


def line(flag: Flag) -> str:
    value = "" if flag.parse is None else " " + (flag.metavar or flag.name.rpartition("-")[2].upper())
    if flag.choices:
        value = " {" + ",".join(flag.choices) + "}"
    names = [f"`{flag.option}{value}`", *([f"`{flag.short}`"] if flag.short else [])]
    meaning = f"{flag.help}{default_text(flag)}".replace("|", "\\|")
    return f"| {', '.join(names)} | {meaning} |"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    glossary.PAGE.write_text(glossary.page(), encoding="utf-8")
