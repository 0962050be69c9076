"""Outputs of weft plan: text on a terminal, JSON, or an HTML page."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from weft._version import __version__
from weft.checkpoint.architectures.model import Model
from weft.cli.flags.plan_flags import PlanAnswer
from weft.cli.glossary import TermTooltips
from weft.cli.parser import UsageError
from weft.cli.plan import plan_text
from weft.cli.plan.columns import MARK, PlanJson, columns, fullest, shown_and_others
from weft.cli.plan.picture import LINKS, NAMES, parts_of, picture
from weft.errors import error_reason
from weft.formatting import format_bytes
from weft.planner.report.plan_json import plan_json
from weft.planner.search.search import SearchResult

STDOUT = "-"  # as the name of a file
FEW = 8  # rejected layouts that are not folded away


def check_outputs(flags: PlanAnswer) -> None:
    """Raise UsageError if two outputs go to standard output."""
    if flags.json and flags.html == STDOUT:
        raise UsageError(
            "--json and --html - both write to standard output; give --html a file", code="two-outputs-to-stdout"
        )


def write_outputs(flags: PlanAnswer, answer: SearchResult, model: Model, promise: dict[str, Any] | None = None) -> None:
    """Write everything that the flags ask for; standard output gets one thing, by default the text.

    `promise` is the verdict of a simulation, from `cli.plan.promise`.
    """
    plan, page = plan_json(answer, model), flags.html
    if promise:
        add_promise(plan, promise)
    if page is not None:
        from weft.cli.plan.outputs import html_page

        write_page(page, html_page(plan))
    if flags.json:
        print(json.dumps(plan))
    elif page != STDOUT:
        from weft.cli.plan.view import print_plan_text

        print_plan_text(plan)


def add_promise(plan: dict[str, Any], promise: dict[str, Any]) -> None:
    """Add the verdict to the plan's JSON, and the times of its simulation to the predictions."""
    plan["promise"] = promise
    ttft, tpot = promise["run"]["ttft_s"], promise["run"]["tpot_s"]
    times = {
        "ttft_s_at_concurrency": ttft and ttft["mean"],
        "ttft_s_at_concurrency_p95": ttft and ttft["p95"],
        "tpot_s_at_concurrency_p95": tpot and tpot["p95"],
    }
    for row in (plan["best"], plan["candidates"][0]):
        predicted, band = row["predicted"], row["predicted"]["error_band"]
        predicted.update(times)
        predicted["bands"] |= {name: [s * (1 - band), s * (1 + band)] for name, s in times.items() if s is not None}


def write_page(name: str, text: str) -> None:
    """Write a page to a file, or to standard output if `name` is "-". Raises UsageError if that fails."""
    if name == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(name).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {name}: {error_reason(error)}", code="cannot-write-output") from None
    print(f"wrote {name}", file=sys.stderr)


def html_page(plan: PlanJson) -> str:
    """The page; every figure on it has the value from `plan`, the JSON that `planner.report.plan_json.plan_json`
    builds."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {"gb": format_bytes, "comma": comma, "explained": TermTooltips()}
    template = environment.from_string((files("weft.cli") / "data/plan.html").read_text(encoding="utf-8"))
    best = plan["best"]
    racks = picture(plan) if best else []
    shown, others = shown_and_others(plan)
    return template.render(
        plan=plan,
        best=best,
        version=__version__,
        hardware=plan_text.hardware_line(plan),
        remarks=plan_text.remarks(plan),
        verdict=plan_text.verdict(plan),
        racks=racks,
        traffic=plan_text.traffic(plan) if best else [],
        speeds=[plan_text.table_legend(plan), *plan_text.speeds(plan), *plan_text.steps(plan)] if best else [],
        bottleneck=plan_text.bottleneck(plan),
        rejections=plan_text.rejections(plan),
        columns=columns(plan),
        fullest=fullest,
        mark=MARK,
        parts=parts_of(racks),
        names=NAMES,
        links=LINKS,
        shown=shown,
        others=others,
        few=FEW,
    )


def comma(value: float, digits: int = 0) -> str:
    """ "1,234.5"."""
    return f"{value:,.{digits}f}"
