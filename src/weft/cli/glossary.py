"""Terms of the field from data/glossary.toml: the page docs/glossary.md, and tooltips on a plan's HTML page."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from markupsafe import Markup

PAGE = Path(__file__).parents[3] / "docs" / "glossary.md"
HEAD = """# Glossary

<!-- Written by `python -m weft.cli.docs`. Change src/weft/cli/data/glossary.toml, not this page. -->

Terms that `weft plan`, `weft simulate` and `weft bench` use. The page that `weft plan --html` writes shows each of
these explanations as a tooltip.
"""


class Term(msgspec.Struct, frozen=True):
    """A term, its meaning, and the other spellings that a page explains."""

    name: str
    meaning: str
    forms: tuple[str, ...] = ()


@cache
def terms() -> tuple[Term, ...]:
    """All terms, in the order of the file."""
    text = (files("weft.cli") / "data/glossary.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["term"], tuple[Term, ...])


def page() -> str:
    """The text of docs/glossary.md."""
    lines = [f"**{term.name}**: {term.meaning}\n" for term in sorted(terms(), key=lambda term: term.name.lower())]
    return "\n".join([HEAD, *lines])


class TermTooltips:
    """A Jinja filter for one page: text as HTML, with an `<abbr>` around the first occurrence of each term."""

    def __init__(self) -> None:
        self._left = {form: term for term in terms() for form in (term.name, *term.forms)}
        longest_first = sorted(self._left, key=len, reverse=True)
        self._pattern = re.compile(rf"(?<![\w./+-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w/+]|-\w)")

    def __call__(self, text: object) -> Markup:
        from markupsafe import Markup, escape

        return Markup(self._pattern.sub(self._abbreviation, str(escape(text))))

    def _abbreviation(self, match: re.Match[str]) -> str:
        from markupsafe import escape

        term = self._left.get(match[0])
        if term is None:
            return match[0]
        for form in (term.name, *term.forms):
            del self._left[form]
        return f'<abbr title="{escape(term.meaning)}">{match[0]}</abbr>'
