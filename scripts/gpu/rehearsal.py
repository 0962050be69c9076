"""Rehearsal: all parts on a stand-in for a card, in this process, with stand-ins for the toolkit's programs."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.gpu.card import ROOT
from scripts.gpu.children import PYTEST, ChildError, Children
from scripts.gpu.work import Figure, Options, measurement
from scripts.gpu.work.ranks import last_line

PROGRAMS = ROOT / "tests/cpu/stand_ins"  # compute-sanitizer and ncu, which check their arguments
CARD_BYTES = 144_000_000_000


def programs_first() -> None:
    """Put the stand-ins for programs first on PATH, and have Triton's kernels run in its interpreter."""
    os.environ["PATH"] = f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}"
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported


@contextmanager
def stand_in() -> Iterator[None]:
    """A card in this process: tests/cpu/fake_cuda.py."""
    import pytest

    from tests.cpu import fake_cuda

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_cuda, "TOTAL_BYTES", CARD_BYTES)
        with fake_cuda.installed(patch):
            yield


class RehearsedChildren(Children):
    """Measurements and pytest run in this process; other programs are the stand-ins."""

    def figures(self, name: str, options: Options, log: str, limit_s: float) -> Iterator[Figure]:
        try:
            yield from measurement(name)(options)
        except Exception as error:
            with (self.folder / f"{log}.log").open("a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
            raise ChildError(f"{type(error).__name__}: {last_line(str(error))}") from error

    def pytest(self, arguments: Sequence[str], log: str, limit_s: float) -> tuple[int, list[str]]:
        import pytest

        output = io.StringIO()
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(output):
            status = pytest.main([*PYTEST, *arguments])
        text = output.getvalue()
        Path(self.folder / f"{log}.log").write_text(text, encoding="utf-8")
        sys.stdout.flush()
        return int(status), text.splitlines()
