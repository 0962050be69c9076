"""Every command on the pages: the planner's are run, of the others the flags are checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pure.commands import parsed, weft
from tests.pure.fake_nvml import eight_h100
from tests.pure.machines_with_gpus import Run
from tests.pure.page_commands import COMMANDS, DOCS, PAGES, PageCommand
from weft.cli.commands import COMMANDS as OURS
from weft.cli.flags.flags import engine_config, serve_options
from weft.cli.parser import build_parser

SHORT_FORMS = ("--tp", "--pp", "--dp", "--ep")  # of flags for layouts, by the dispatcher
ERRORS = (DOCS.parent / "src").rglob("*.py")


def ids(commands: list[PageCommand]) -> list[Any]:
    """The commands as parameters, each line once."""
    named = {f"{command.page}: {command.line}": command for command in commands}
    return [pytest.param(command, id=name) for name, command in named.items()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_are_ours(page: Path) -> None:
    for command in COMMANDS:
        if command.page != page.name or command.name in ("", "curl"):
            continue
        arguments = parsed(command.arguments)
        if command.name == "serve":
            engine_config(arguments)
            serve_options(arguments, {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_within_sentences_are_ours(page: Path) -> None:
    """`weft NAME … --flag …` between backquotes: each flag is one of the command's."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for words in re.findall(r"`weft ([^`]+)`", text):
        line = " ".join(words.split())  # a line of the page may end within
        # `weft bench` alone stands for all that begins so.
        named = [command for name, command in OURS.items() if f"{line} ".startswith(f"{name} ")]
        meant = named or [command for name, command in OURS.items() if name.startswith(f"{line} ")]
        assert meant, f"weft {line}"
        known = {word for command in meant for word in build_parser(command)._option_string_actions}
        given = {word for word in re.findall(r"(?<=\s)--?[a-z][\w-]*", line) if word not in SHORT_FORMS}
        assert given <= known, f"weft {line}"


@pytest.mark.parametrize("command", ids([command for command in COMMANDS if command.is_predicted]))
def test_predictions(command: PageCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = weft(*command.briefly)
    assert status in (0, 3), err
    refused = any(line.startswith(("No: ", "impossible")) for line in command.printed)
    if command.name == "simulate":  # a short run need not keep what the page's keeps
        refused = "--slo" in command.arguments and out.startswith(("promise not kept", "overloaded"))
    assert (status == 3) == refused, out + err
    assert_printed(command, out)


@pytest.mark.parametrize("command", ids([command for command in COMMANDS if command.is_look]))
def test_looks(command: PageCommand) -> None:
    status, out, err = weft(*command.arguments)
    assert status == (0 if "FAILED" not in out else 1), err
    assert_printed(command, out)


@pytest.mark.parametrize(
    "command", ids([one for one in COMMANDS if one.page == "watching.md" and one.name in ("top", "topo", "hardware")])
)
def test_steps_of_the_guides_on_gpus(command: PageCommand, on: Callable[..., Run]) -> None:
    status, out, err = on(eight_h100())(*command.arguments)
    assert status == 0 and "H100" in out, err


def assert_printed(command: PageCommand, out: str) -> None:
    """Assert that the lines of the page are there, in their order; an ellipsis stands for anything."""
    pattern = "".join(
        r"(?:.*\n)*?" + r".*?".join(map(re.escape, line.rstrip().split("…"))) + r".*\n" for line in command.printed
    )
    assert re.match(pattern, out), f"{command.printed} is not in\n{out}"


def test_the_table_has_every_page() -> None:
    linked = set(re.findall(r"\]\(([^)#]+\.md)\)", (DOCS / "README.md").read_text()))
    assert {page.name for page in PAGES} - linked == {"README.md"}


def test_pages_of_tasks_are_short() -> None:
    """A page for a task is read while something else is to be done."""
    tasks = [page for page in PAGES if any(command.printed for command in COMMANDS if command.page == page.name)]
    assert tasks and max(len(page.read_text().splitlines()) for page in tasks) <= 80


def test_codes_of_the_troubleshooting_page_exist() -> None:
    source = "".join(path.read_text() for path in ERRORS)
    named = re.findall(r"`([a-z]+(?:[-_][a-z0-9]+)+)`", (DOCS / "troubleshooting.md").read_text())
    assert len(named) > 15 and {code for code in named if f'"{code}"' not in source and code not in OURS} == set()
