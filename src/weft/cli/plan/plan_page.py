"""A plan as one HTML page without external files or scripts."""

from __future__ import annotations

from importlib.resources import files

from weft._version import __version__
from weft.cli.glossary import TermTooltips
from weft.cli.plan import plan_text
from weft.cli.plan.plan_columns import MARK, PlanJson, columns, fullest, shown_and_others
from weft.cli.plan.plan_picture import LINKS, NAMES, parts_of, picture
from weft.formatting import format_bytes

FEW = 8  # rejected layouts that are not folded away


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
