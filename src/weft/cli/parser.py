"""Parse the arguments of a command line into the struct of its command."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from weft.checkpoint.files.yaml_text import load_yaml
from weft.cli import hints, short_help
from weft.cli.commands import COMMANDS, Command
from weft.cli.flags import vllm
from weft.cli.flags.declared import Flag, fill
from weft.cli.flags.flags import flags_of_engine
from weft.errors import WeftError, error_reason
from weft.regular_files import SETTINGS_BYTES, read_regular_text

T = TypeVar("T")

logger = logging.getLogger("weft.cli")

# Keys of a --config file that holds several models.
LIST = "models"
BOOK = ("vllm_instances", "served_models")  # keys of The Infernet Book
SET_KEYS = (LIST, *BOOK)


class UsageError(WeftError):
    """A command line that is wrong: exit status 2."""


class Parser(argparse.ArgumentParser):
    """argparse that raises UsageError instead of exiting with a page of usage, and takes no abbreviations."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)", code="invalid-flag-value")

    def print_help(self, file: Any = None) -> None:
        # argparse's own method hides the error of a closed pipe.
        print(self.format_help(), end="", file=file, flush=True)

    def _get_option_tuples(self, option_string: str) -> Any:
        # Even without abbreviations argparse takes -t for -tp, and -hf for -h with a value.
        return [
            match
            for match in super()._get_option_tuples(option_string)
            if option_string.startswith(match[1]) and match[0].nargs != 0
        ]


class ShortHelp(argparse.Action):
    """--help of a command: its first screen, and the end."""

    def __init__(self, option_strings: Sequence[str], command: Command, **details: Any) -> None:
        super().__init__(option_strings, nargs=0, **{**details, "dest": argparse.SUPPRESS})
        self._command = command

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(short_help.command_help(self._command), end="", flush=True)
        parser.exit()


def find_command(argv: Sequence[str]) -> tuple[Command, list[str]]:
    """The command at the beginning of `argv`, and the arguments after its name. Raises UsageError if there is none."""
    for length in (2, 1):
        command = COMMANDS.get(" ".join(argv[:length]))
        if command is not None and len(argv) >= length:
            return command, list(argv[length:])
    family = [name for name in COMMANDS if name.startswith(f"{argv[0]} ")]
    if family:
        raise UsageError(
            f"weft {argv[0]} needs one of: {', '.join(name.split()[1] for name in family)}", code="subcommand-missing"
        )
    known = sorted({name.split()[0] for name in COMMANDS})
    raise UsageError(f"unknown command {argv[0]!r}{hints.unknown_command(argv[0], known)}", code="unknown-command")


def parse_command(command: Command, argv: Sequence[str]) -> Any:
    """The arguments after a command's name, as its struct.

    Its `model` is the argument or the plan file's model. Raises UsageError, and ConfigError for a plan that cannot be
    read. --help prints the help and exits.
    """
    parser = build_parser(command)
    argv, warnings = without_vllm_flags([full_spelling(word) for word in argv], option_names(command))
    if not command.own_config:
        argv = with_config_file(command, argv)
    namespace, extra = parser.parse_known_args(argv)
    refuse_unknown_flags(command, extra)
    if extra and not command.takes_prompt:
        raise UsageError(
            f"unexpected argument {extra[0]!r} for weft {command.name}; for example: {command.example}",
            code="unexpected-argument",
        )
    parsed = parsed_values(namespace)
    if command.takes_prompt:
        set_prompt(parsed, extra)
    if command.argument == "MODEL":
        set_model(command, parsed)
    for warning in warnings:
        logger.warning(warning)
    return fill_arguments(command.arguments, command.name, parsed)


def parsed_values(namespace: argparse.Namespace) -> dict[str, Any]:
    """The values that argparse has parsed, by field; several values of a flag are a tuple."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in vars(namespace).items()}


def fill_arguments(kind: type[T], name: str, parsed: Mapping[str, Any]) -> T:
    """The arguments of the command of this name, of the parsed values."""
    given = frozenset(parsed) - {"argument", "prompt_words"}
    return fill(kind, {"model": "", **parsed, "command": name}, given)


def refuse_unknown_flags(command: Command, argv: Sequence[str]) -> None:
    """Raise UsageError, with a hint, for the first of the arguments that is a flag."""
    for word in argv:
        if word.startswith("-") and word != "-":
            name = word.partition("=")[0]
            raise UsageError(
                f"unknown flag {name} for weft {command.name}{hints.unknown_flag(command, name)}", code="unknown-flag"
            )


def set_model(command: Command, parsed: dict[str, Any]) -> None:
    """Set the model from the argument or the plan file. Raises UsageError if the command needs one."""
    argument, named = parsed.pop("argument"), parsed.get("model", "")
    if argument is not None:
        _check_argument(argument, named)
        parsed["model"] = named = argument
    if "plan" in parsed and not named:
        from weft.planner.report import plan_file

        parsed["model"] = named = plan_file.load_plan_file(parsed["plan"]).model.name
    # A claim to check names its model itself, and so does a node's configuration.
    named_elsewhere = "check" in parsed or "infernet_config" in parsed
    if command.needs_model and not named_elsewhere and not named:
        raise UsageError(f"which model? For example: {command.example}", code="model-missing")


def _check_argument(argument: str, named: str) -> None:
    """Raise UsageError for a model of blanks; `named` is the one of --model."""
    if not argument.strip():
        raise UsageError(
            f"the model is {argument!r}{f' with --model {named}' * bool(named)}: in a shell, a backslash "
            "before a blank makes such a word; end the line with the backslash, and put comments on lines of their own",
            code="blank-model",
        )


def set_prompt(parsed: dict[str, Any], extra: list[str]) -> None:
    """Set the words of the prompt to the arguments that argparse left over.

    With --model the first word is not a model, and belongs to the prompt too.
    """
    if parsed["argument"] is not None and "model" in parsed:
        extra = [parsed["argument"], *extra]
        parsed["argument"] = None
    parsed["prompt_words"] = tuple(extra)


def without_vllm_flags(argv: list[str], own: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """`argv` without the flags of vLLM that are not in `own`, and a warning for each.

    Raises UsageError for a flag that changes what is served.
    """
    try:
        return vllm.strip_vllm_flags(argv, frozenset(own))
    except vllm.RefusedFlag as error:
        raise UsageError(str(error), code="refused-vllm-argument") from None


def build_parser(command: Command) -> Parser:
    """The argparse parser of one command."""
    parser = Parser(
        prog=f"weft {command.name}",
        usage=f"{command.usage} [flags]",
        description=command.summary,
        epilog=f"example: {command.example}",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("-h", "--help", action=ShortHelp, command=command, help="show the flags that are used first")
    parser.add_argument("--help-all", action="help", help="show this help")
    if command.argument == "MODEL":
        about = "a name on the hub, a directory, a .gguf file, or demo"
        parser.add_argument("argument", metavar="MODEL", nargs="?", default=None, help=about)
    elif command.argument:
        parser.add_argument("argument", metavar=command.argument, nargs="*", default=[], help=command.about)
    content = "the configuration (docs/gateway.md)" if command.own_config else "flags"
    about = f"YAML file with {content}; flags on the command line override it"
    parser.add_argument("--config", metavar="FILE", help=about)
    for title, flags in command.groups:
        group = parser.add_argument_group(title)
        for flag in flags:
            if flag.name != "model" or command.argument == "MODEL" or command.model_flag:
                add_flag(group, flag)
    return parser


def add_flag(group: argparse._ArgumentGroup, flag: Flag) -> None:
    """Add a flag to argparse's group."""
    names = [flag.long, *([flag.short] if flag.short else [])]
    about = (flag.help + default_text(flag)).replace("%", "%%")
    if flag.parse is None:
        group.add_argument(*names, dest=flag.dest, action=argparse.BooleanOptionalAction, help=about)
        return
    details: dict[str, Any] = {"dest": flag.dest, "type": flag.parse, "help": about}
    if flag.choices:
        details["choices"] = flag.choices
    else:
        details["metavar"] = flag.metavar or flag.name.rpartition("-")[2].upper()
    if flag.bare is not None:
        details.update(nargs="?", const=flag.bare)
    if flag.several:
        details.update(nargs="+", action="extend")
    elif flag.repeated:
        details["action"] = "append"
    group.add_argument(*names, **details)


def default_text(flag: Flag) -> str:
    """ " (default: X)", or "" for a flag without a default or with an empty one."""
    value = flag.default if flag.config_default is None else flag.config_default
    if value in (None, "", ()):
        return ""
    if isinstance(value, bool):
        value = "on" if value else "off"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f" (default: {value})"


def option_names(command: Command) -> list[str]:
    """Every spelling of every flag of a command."""
    names = ["--config", "--help", "--help-all", "-h"]
    for flag in command.flags:
        names += [flag.long, *([flag.short] if flag.short else [])]
        if flag.parse is None:
            names.append(f"--no-{flag.name}")
    return names


def full_spelling(word: str) -> str:
    """A flag's full name with dashes: --max_model_len=8 becomes --max-model-len=8, --tp=2 --tensor-parallel-size=2."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    name = name.replace("_", "-")
    return hints.ALIASES.get(name, name) + equals + value


def _flags_by_key(command: Command) -> dict[str, Flag]:
    """The flags of a command by the names that a --config file may give them."""
    return {name: flag for flag in command.flags for name in (flag.name, flag.dest.replace("_", "-"))}


def with_config_file(command: Command, argv: list[str]) -> list[str]:
    """`argv` after the flags of its --config file; a flag that `argv` has itself is left out of the file's."""
    finder = Parser(prog=f"weft {command.name}", add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    path = finder.parse_known_args(argv)[0].config
    if path is None:
        return argv
    flags = _flags_by_key(command)
    given = {word.partition("=")[0] for word in argv if word.startswith("-")}
    from_file: list[str] = []
    keys: dict[Flag, Any] = {}
    for key, value in flags_of_file(command, path).items():
        option = full_spelling(f"--{key}")
        flag = flags.get(option[2:])
        if flag is None:
            warn_of_vllm_key(command, key, value, path)
            continue
        if keys.setdefault(flag, key) != key:
            raise UsageError(
                f"{path} has {keys[flag]!r} and {key!r}, which are the same flag; give one of them",
                code="flag-twice-in-config",
            )
        if value is not None and given.isdisjoint({flag.long, flag.short, f"--no-{flag.name}"}):
            from_file += typed_flags(flag, value, path)
    return from_file + argv


def flags_of_file(command: Command, path: str) -> dict[Any, Any]:
    """The flags in a --config file, by name; if it has several models, the flags of the address."""
    content = read_config_file(path)
    if command.takes_set and is_set(content):
        return front_content(content) if command.name == "serve" else {}
    return content


def is_set(content: Mapping[Any, Any]) -> bool:
    """Return True for the content of a file that holds several models, not flags by name."""
    return any(key in content for key in SET_KEYS)


def front_content(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """The part of a set's file that holds flags of the address, such as its port."""
    if LIST not in content:
        return {}  # the configuration of a node
    engine = flags_of_engine()
    return {key: value for key, value in content.items() if key not in SET_KEYS and spelled_name(key) not in engine}


def spelled_name(key: object) -> str:
    return full_spelling(f"--{key}")[2:]


def warn_of_vllm_key(command: Command, key: object, value: Any, path: str) -> None:
    """Warn of a key of the --config file that is vLLM's flag only. Raises UsageError for any other key."""
    option = full_spelling(f"--{key}")
    text = json.dumps(value) if isinstance(value, dict | list) else value
    unknown, warnings = without_vllm_flags([f"{option}={text}"])
    if unknown:
        raise UsageError(f"unknown flag {key!r} in {path}{hints.unknown_flag(command, option)}", code="unknown-flag")
    for warning in warnings:
        logger.warning(warning)


def typed_flags(flag: Flag, value: Any, path: str) -> list[str]:
    """The arguments that give a flag its value from the YAML file `path`. Raises UsageError for one of another type."""
    if flag.parse is None:
        if not isinstance(value, bool):
            raise UsageError(f"{flag.name} in {path} is {value!r}; it must be true or false", code="flag-needs-boolean")
        return [flag.long if value else f"--no-{flag.name}"]
    if isinstance(value, bool):
        raise UsageError(f"{flag.name} in {path} is {value}; this flag takes a value", code="flag-needs-value")
    items = value if isinstance(value, list) else [value]
    if flag.several or flag.repeated:
        return [f"{flag.long}={item}" for item in items]
    text = json.dumps(value) if isinstance(value, dict) else ",".join(map(str, items))
    return [f"{flag.long}={text}"]


def read_config_file(path: str) -> dict[Any, Any]:
    """The mapping in a YAML file. Raises UsageError if the file cannot be read or holds something else."""
    try:
        text = read_regular_text(path, SETTINGS_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read --config {path}: {error_reason(error)}", code="cannot-read-config") from None
    try:
        content = load_yaml(text) or {}
    except ValueError as error:
        raise UsageError(f"--config {path} is not YAML: {error}", code="config-not-yaml") from None
    if not isinstance(content, dict):
        raise UsageError(
            f"--config {path} must hold flags with values, as in: max-model-len: 4096", code="config-not-mapping"
        )
    return content
