"""What weft plan does with its answer: tell it on a terminal, as JSON, as a page."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from weft.cli.parser import UsageError
from weft.errors import reason
from weft.facts.model import Model
from weft.planner.answer import as_json
from weft.planner.search import Answer

STDOUT = "-"  # for a file's name


def check(arguments: Namespace) -> None:
    """Raises UsageError for outputs that exclude each other."""
    if getattr(arguments, "json", False) and getattr(arguments, "html", None) == STDOUT:
        raise UsageError("--json and --html - both write to standard output; give --html a file")


def tell(arguments: Namespace, answer: Answer, model: Model) -> None:
    """Everything that the flags ask for; standard output gets one thing, by default the picture."""
    told, page = as_json(answer, model), getattr(arguments, "html", None)
    if page is not None:
        from weft.cli.plan_page import page as page_of

        write(page, page_of(told))
    if getattr(arguments, "json", False):
        print(json.dumps(told))
    elif page != STDOUT:
        from weft.cli.plan_view import print_answer

        print_answer(told)


def write(name: str, text: str) -> None:
    """To a file, or with "-" to standard output. Raises UsageError where it cannot be written."""
    if name == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(name).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {name}: {reason(error)}") from None
    print(f"wrote {name}", file=sys.stderr)
