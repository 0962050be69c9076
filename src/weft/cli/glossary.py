"""The words of the field, from data/glossary.toml: docs/glossary.md, and their explanations on a page."""

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

The words that `weft plan`, `weft simulate` and `weft bench` use. The page that `weft plan --html` writes explains them
in place.
"""


class Term(msgspec.Struct, frozen=True):
    """A word, what it means, and the other forms in which it is met."""

    name: str
    meaning: str
    forms: tuple[str, ...] = ()


@cache
def terms() -> tuple[Term, ...]:
    """Every word, in the order of the file."""
    text = (files("weft.cli") / "data/glossary.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["term"], tuple[Term, ...])


def page() -> str:
    """docs/glossary.md."""
    lines = [f"**{term.name}**: {term.meaning}\n" for term in sorted(terms(), key=lambda term: term.name.lower())]
    return "\n".join([HEAD, *lines])


class Explained:
    """A filter for Jinja, of one page: text as HTML, in which each word of the glossary is an `<abbr>` the first time
    that the page has it."""

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
