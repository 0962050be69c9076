"""Transformers' report on a model's class, made in this process, which has imported it already."""

from __future__ import annotations

from weft.checkpoint.config.library import LibraryReport
from weft.ranks.models.library.build import ClassError
from weft.ranks.models.library.describe import describe


def ask_here(config: str) -> LibraryReport:
    """The child's report, without its five seconds of imports."""
    try:
        return describe(config)
    except ClassError as error:
        return LibraryReport(refusal=str(error))
