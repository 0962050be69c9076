"""What weft plan does with its answer: tell it on a terminal, as JSON, as a page."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from weft.architectures.model import Model
from weft.cli.parser import UsageError
from weft.errors import error_reason
from weft.planner.plan_json import plan_json
from weft.planner.search import SearchResult

STDOUT = "-"  # for a file's name


def check(arguments: Namespace) -> None:
    """Raises UsageError for outputs that exclude each other."""
    if getattr(arguments, "json", False) and getattr(arguments, "html", None) == STDOUT:
        raise UsageError("--json and --html - both write to standard output; give --html a file")


def tell(arguments: Namespace, answer: SearchResult, model: Model, promise: dict[str, Any] | None = None) -> None:
    """Everything that the flags ask for; standard output gets one thing, by default the picture. `promise` is the
    verdict of a simulation, as `cli.plan_promise` has it."""
    told, page = plan_json(answer, model), getattr(arguments, "html", None)
    if promise:
        add_promise(told, promise)
    if page is not None:
        from weft.cli.plan_page import page as page_of

        write(page, page_of(told))
    if getattr(arguments, "json", False):
        print(json.dumps(told))
    elif page != STDOUT:
        from weft.cli.plan_view import print_answer

        print_answer(told)


def add_promise(told: dict[str, Any], promise: dict[str, Any]) -> None:
    """Put the verdict, and the times of its simulation among what is predicted, into the plan's JSON."""
    told["promise"] = promise
    ttft, tpot = promise["run"]["ttft_s"], promise["run"]["tpot_s"]
    times = {
        "ttft_s_at_concurrency": ttft and ttft["mean"],
        "ttft_s_at_concurrency_p95": ttft and ttft["p95"],
        "tpot_s_at_concurrency_p95": tpot and tpot["p95"],
    }
    for row in (told["best"], told["candidates"][0]):
        predicted, band = row["predicted"], row["predicted"]["error_band"]
        predicted.update(times)
        predicted["bands"] |= {name: [s * (1 - band), s * (1 + band)] for name, s in times.items() if s is not None}


def write(name: str, text: str) -> None:
    """To a file, or with "-" to standard output. Raises UsageError where it cannot be written."""
    if name == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(name).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {name}: {error_reason(error)}") from None
    print(f"wrote {name}", file=sys.stderr)
