"""From command-line words to a Namespace that holds only what was said."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from weft.cli import hints, vllm
from weft.cli.commands import COMMANDS, Command
from weft.cli.flags import DEFAULTS, Flag
from weft.errors import WeftError, error_reason
from weft.formats.yaml_text import load_yaml

logger = logging.getLogger("weft.cli")


class UsageError(WeftError):
    """Words that make no command: exit status 2."""


class Parser(argparse.ArgumentParser):
    """argparse that raises instead of leaving with a page of usage, and takes no abbreviations."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def print_help(self, file: Any = None) -> None:
        # argparse's own swallows the error of a reader that has left.
        print(self.format_help(), end="", file=file, flush=True)

    def _get_option_tuples(self, option_string: str) -> Any:
        # Without abbreviations argparse still takes -t for -tp, and -hf for -h with a value.
        return [
            match
            for match in super()._get_option_tuples(option_string)
            if option_string.startswith(match[1]) and match[0].nargs != 0
        ]


def find(argv: Sequence[str]) -> tuple[Command, list[str]]:
    """The command that the words begin with, and the words after its name."""
    for length in (2, 1):
        command = COMMANDS.get(" ".join(argv[:length]))
        if command is not None and len(argv) >= length:
            return command, list(argv[length:])
    begun = [name for name in COMMANDS if name.startswith(f"{argv[0]} ")]
    if begun:
        raise UsageError(f"weft {argv[0]} needs one of: {', '.join(name.split()[1] for name in begun)}")
    known = sorted({name.split()[0] for name in COMMANDS})
    raise UsageError(f"unknown command {argv[0]!r}{hints.unknown_command(argv[0], known)}")


def parse(command: Command, words: Sequence[str]) -> argparse.Namespace:
    """The Namespace of a command's words: `command`, `argument`, and by field each flag that was given or has a
    default of its own; `model` from the argument, or from the plan file. Raises UsageError, and ConfigError for a plan
    that cannot be read; --help prints and exits."""
    parser = build(command)
    options = option_names(command)
    argv, warnings = without_foreign([dashes(word) for word in words], options)
    argv = with_config_file(command, argv)
    arguments, extra = parser.parse_known_args(argv)
    for word in extra:
        if word.startswith("-") and word != "-":
            name = word.partition("=")[0]
            raise UsageError(f"unknown flag {name} for weft {command.name}{hints.unknown_flag(command, name)}")
    if command.takes_prompt:
        take_prompt(arguments, extra)
    elif extra:
        raise UsageError(f"unexpected argument {extra[0]!r} for weft {command.name}; for example: {command.example}")
    if command.argument == "MODEL":
        if arguments.argument is not None:
            arguments.model = arguments.argument
        if hasattr(arguments, "plan") and not getattr(arguments, "model", ""):
            from weft.planner import plan_file

            arguments.model = plan_file.load_plan_file(arguments.plan).model.name
        # A claim to be checked names its model itself, and so does a node's configuration.
        itself = ("check", "infernet_config")
        named = getattr(arguments, "model", "") or any(hasattr(arguments, name) for name in itself)
        if command.needs_model and not named:
            raise UsageError(f"which model? For example: {command.example}")
    arguments.command = command.name
    for warning in warnings:
        logger.warning(warning)
    return arguments


def take_prompt(arguments: argparse.Namespace, extra: list[str]) -> None:
    """Take the words that argparse left over as the prompt; with --model, the first word belongs to it too."""
    arguments.prompt_words = extra
    if arguments.argument is not None and hasattr(arguments, "model"):
        arguments.prompt_words = [arguments.argument, *extra]
        arguments.argument = None


def without_foreign(argv: list[str], own: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """`argv` without vLLM's flags that are none of our `own`, and the warnings. Raises UsageError for one that changes
    what is served."""
    try:
        return vllm.strip(argv, frozenset(own))
    except vllm.RefusedFlag as error:
        raise UsageError(str(error)) from None


def build(command: Command) -> Parser:
    """The argparse parser of one command."""
    parser = Parser(
        prog=f"weft {command.name}",
        usage=f"{command.usage} [flags]",
        description=command.summary,
        epilog=f"example: {command.example}",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    if command.argument == "MODEL":
        told = "a name on the hub, a directory, a .gguf file, or demo"
        parser.add_argument("argument", metavar="MODEL", nargs="?", default=None, help=told)
    elif command.argument:
        parser.add_argument("argument", metavar=command.argument, nargs="*", default=[], help=command.about)
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags; those given here win")
    for title, flags in command.groups:
        group = parser.add_argument_group(title)
        for flag in flags:
            if not (flag.name == "model" and command.argument != "MODEL"):
                add(group, flag)
    return parser


def add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    names = [flag.option, *([flag.short] if flag.short else [])]
    told = flag.help.replace("%", "%%") + default_text(flag).replace("%", "%%")
    if flag.parse is None:
        group.add_argument(*names, dest=flag.dest, action=argparse.BooleanOptionalAction, help=told)
        return
    details: dict[str, Any] = {"dest": flag.dest, "type": flag.parse, "help": told}
    if flag.default is not None:
        details["default"] = flag.default
    if flag.choices:
        details["choices"] = flag.choices
    else:
        details["metavar"] = flag.metavar or flag.name.rpartition("-")[2].upper()
    if flag.several:
        details.update(nargs="+", action="extend")
    elif flag.repeated:
        details["action"] = "append"
    group.add_argument(*names, **details)


def default_text(flag: Flag) -> str:
    """ " (default: X)" where there is one worth telling."""
    value = flag.default if flag.default is not None else DEFAULTS.get(flag.dest)
    if value is None or value in ("", (), {}) or callable(value) or (flag.choices and value not in flag.choices):
        return ""
    if isinstance(value, bool):
        value = "on" if value else "off"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f" (default: {value})"


def option_names(command: Command) -> list[str]:
    """Every spelling of every flag of a command."""
    names = ["--config", "--help", "-h"]
    for flag in command.flags:
        names += [flag.option, *([flag.short] if flag.short else [])]
        if flag.parse is None:
            names.append(f"--no-{flag.name}")
    return names


def dashes(word: str) -> str:
    """--max_model_len=8 is --max-model-len=8, and --tp 2 is --tensor-parallel-size 2."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    name = name.replace("_", "-")
    return hints.ALIASES.get(name, name) + equals + value


def with_config_file(command: Command, argv: list[str]) -> list[str]:
    """`argv` with the flags of its --config file before it, less those that `argv` has itself."""
    finder = Parser(prog=f"weft {command.name}", add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    path = finder.parse_known_args(argv)[0].config
    if path is None:
        return argv
    flags = {name: flag for flag in command.flags for name in (flag.name, flag.dest.replace("_", "-"))}
    given = {word.partition("=")[0] for word in argv if word.startswith("-")}
    ahead: list[str] = []
    spelt: dict[Flag, Any] = {}
    for key, value in read_yaml(path).items():
        option = dashes(f"--{key}")
        flag = flags.get(option[2:])
        if flag is not None and spelt.setdefault(flag, key) != key:
            raise UsageError(f"{path} has {spelt[flag]!r} and {key!r}, which are one flag; give one of them")
        if flag is None:
            written = json.dumps(value) if isinstance(value, dict | list) else value
            stripped, warnings = without_foreign([f"{option}={written}"])
            if stripped:
                raise UsageError(f"unknown flag {key!r} in {path}{hints.unknown_flag(command, option)}")
            for warning in warnings:
                logger.warning(warning)
        elif value is not None and not given & {flag.option, flag.short, f"--no-{flag.name}"}:
            ahead += words_of(flag, value, path)
    return ahead + argv


def words_of(flag: Flag, value: Any, path: str) -> list[str]:
    """A YAML value as it would be typed."""
    if flag.parse is None:
        if not isinstance(value, bool):
            raise UsageError(f"{flag.name} in {path} is {value!r}; it must be true or false")
        return [flag.option if value else f"--no-{flag.name}"]
    if isinstance(value, bool):
        raise UsageError(f"{flag.name} in {path} is {value}; it takes a value")
    if flag.several or flag.repeated:
        listed = value if isinstance(value, list) else [value]
        return [f"{flag.option}={one}" for one in listed]
    if isinstance(value, dict):
        return [f"{flag.option}={json.dumps(value)}"]
    return [f"{flag.option}={','.join(map(str, value)) if isinstance(value, list) else value}"]


def read_yaml(path: str) -> dict[Any, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read --config {path}: {error_reason(error)}") from None
    try:
        found = load_yaml(text)
    except ValueError as error:
        raise UsageError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(found or {}, dict):
        raise UsageError(f"--config {path} must hold flags with values, as in: max-model-len: 4096")
    return found or {}
