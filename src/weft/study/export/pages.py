"""Rendering of the templates in templates/."""

from __future__ import annotations

from importlib.resources import files


def render_template(template: str, **values: object) -> str:
    """Fill in a template; a missing value is an error."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    text = (files("weft.study.export") / "templates" / template).read_text(encoding="utf-8")
    return environment.from_string(text).render(values)
