"""Find a command, parse its arguments, run it, and turn every failure into one line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TypeVar

from weft import logs
from weft._version import __version__
from weft.checkpoint.hub import model_names
from weft.cli import short_help, streams
from weft.cli.commands import COMMANDS, Command
from weft.cli.flags.declared import Arguments
from weft.cli.parser import UsageError, find_command, parse_command
from weft.errors import WeftError, printable

A = TypeVar("A", bound=Arguments)

logger = logging.getLogger("weft.cli")

CLOSED_PIPE = 141  # a shell's status for a program that SIGPIPE ended


def dispatch(argv: Sequence[str]) -> int:
    """Run `weft WORDS`; return 0, 1 for an error, 2 for wrong usage, or 141 if the reader of our output has left.

    KeyboardInterrupt passes.
    """
    streams.settle()
    try:
        status = run_command(list(argv))
        sys.stdout.flush()
        return status
    except WeftError as error:
        return report(error)
    except BrokenPipeError:
        # Whoever read our output has had enough.
        streams.end_output()
        return CLOSED_PIPE
    except OSError as error:
        # An error of the machine that no command expects: a full disk, no file descriptors left.
        streams.end_output()
        logger.debug("the system's error", exc_info=True)
        return fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)
    except Exception as error:
        # A mistake of ours. Still one line; the traceback is in the debug log.
        logger.debug("internal error", exc_info=True)
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return fail(f"internal error, {what}; please report it with {logs.VARIABLE}=DEBUG", 1)


def _family_asked_about(argv: list[str]) -> list[Command]:
    """The commands below a first word, such as `cluster`, whose help is asked for; [] for other arguments."""
    if argv[1:] not in (["-h"], ["--help"], ["--help-all"]):
        return []
    return [command for command in COMMANDS.values() if command.name.startswith(f"{argv[0]} ")]


def run_command(argv: list[str]) -> int:
    """Run `weft WORDS`; return the exit status."""
    if not argv or argv[0] in ("-h", "--help") or argv == ["help"]:
        print(short_help.overview())
        return 0 if argv else 2
    if argv[0] == "--help-all":
        print(short_help.everything())
        return 0
    if argv[0] == "help":
        argv = [*argv[1:], "--help"]
    if argv[0] in ("-v", "-V", "--version", "version"):
        print(f"weft {__version__}")
        return 0
    family = _family_asked_about(argv)
    if family:
        print(short_help.overview(family))
        return 0
    command, flags = find_command(argv)
    logs.configure(command.log_level)
    arguments = expand_model_name(command, parse_command(command, flags))
    status: int = import_module(command.module).main(arguments)
    return status


def expand_model_name(command: Command, arguments: A) -> A:
    """The arguments with the hub's name in place of a short one such as `qwen3:8b`, with a notice on standard error."""
    typed = arguments.model
    if command.argument != "MODEL" or not typed:
        return arguments
    if not arguments.given.isdisjoint(("base_url", "host", "port")) and "base-url" in {
        flag.name for flag in command.flags
    }:
        return arguments  # a running server knows its model by the name that was typed
    name = model_names.full_name(typed, folder=arguments.values().get("download_dir"))
    if line := model_names.notice(typed, name):
        print(f"weft: {line}", file=sys.stderr)
    return arguments.with_model(name)


def report(error: WeftError) -> int:
    """Print the error as one line; return the status: 2 for wrong usage, 1 for any other error."""
    return fail(str(error), 2 if isinstance(error, UsageError) else 1)


def fail(message: str, status: int) -> int:
    """Print the error as one line; return `status`."""
    print(f"weft: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return status
