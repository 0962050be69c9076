"""A plan as one page of HTML, with nothing to fetch and nothing to run."""

from __future__ import annotations

from importlib.resources import files

from weft import __version__
from weft.cli import plan_text
from weft.cli.glossary import Explained
from weft.cli.plan_columns import MARK, Told, columns, fullest, rows
from weft.cli.plan_picture import LINKS, NAMES, parts_of, picture
from weft.formatting import format_bytes

FEW = 8  # rejected layouts that are not folded away


def page(told: Told) -> str:
    """The page; `told` is what `planner.plan_json.plan_json` tells, and every figure on it has the value from there."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {"gb": format_bytes, "comma": comma, "explained": Explained()}
    template = environment.from_string((files("weft.cli") / "data/plan.html").read_text(encoding="utf-8"))
    best = told["best"]
    racks = picture(told) if best else []
    shown, others = rows(told)
    return template.render(
        told=told,
        best=best,
        version=__version__,
        hardware=plan_text.hardware_line(told),
        remarks=plan_text.remarks(told),
        verdict=plan_text.verdict(told),
        racks=racks,
        traffic=plan_text.traffic(told) if best else [],
        speeds=[plan_text.legend(told), *plan_text.speeds(told), *plan_text.steps(told)] if best else [],
        binds=plan_text.binds(told),
        rejections=plan_text.rejections(told),
        columns=columns(told),
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
    return f"{value:,.{digits}f}"
