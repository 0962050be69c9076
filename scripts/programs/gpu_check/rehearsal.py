"""Rehearsal: all parts on a stand-in for a card, in this process, with stand-ins for the toolkit's programs."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from scripts.programs.gpu_check.card import ROOT
from scripts.programs.gpu_check.children import PYTEST, ChildError, Children
from scripts.programs.gpu_check.work import Figure, Options, measurement
from scripts.programs.gpu_check.work.ranks import last_line

if TYPE_CHECKING:
    import pytest

PROGRAMS = ROOT / "tests/cpu/stand_ins"  # compute-sanitizer and ncu, which check their arguments
STAND_IN_TESTS = "tests/pure/project/test_gpu_imports.py"
RUN_THERE = "tests/gpu/test_quick_cuda.py"
NO_TESTS = 5  # pytest's exit status
CARD_BYTES = 144_000_000_000


def programs_first() -> None:
    """Put the stand-ins for programs first on PATH, and have Triton's kernels run in its interpreter."""
    os.environ["PATH"] = f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}"
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported


@contextmanager
def stand_in() -> Iterator[None]:
    """A card in this process, and humming-kernels: tests/cpu/fake_cuda.py and fake_humming.py."""
    import pytest

    from tests.cpu import fake_cuda, fake_humming

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_cuda, "TOTAL_BYTES", CARD_BYTES)
        for name, module in fake_humming.modules().items():
            patch.setitem(sys.modules, name, module)
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

    def tests(self, files: Sequence[str], selection: str, log: str, limit_s: float) -> tuple[int, list[str]]:
        """Output of STAND_IN_TESTS, in the place of tests that would take minutes on a stand-in for a card; RUN_THERE
        are small enough to run themselves. Fails if tests/gpu cannot be collected, or has no such test."""
        status, output = self._collected
        if status == 0 and not self._gpu_tests.selected(files, selection):
            status, output = NO_TESTS, [f"ERROR no test of {' '.join(files)} is selected by {selection!r}"]
        if status == 0 and set(files) == {RUN_THERE}:
            status, output = run_pytest(["-v", RUN_THERE, "-k", selection, "--tb=native"], [])
        elif status == 0:
            status, output = self._stand_in_tests
        (self.folder / f"{log}.log").write_text("\n".join(output) + "\n", encoding="utf-8")
        return status, output

    @cached_property
    def _gpu_tests(self) -> Collection:
        return Collection()

    @cached_property
    def _collected(self) -> tuple[int, list[str]]:
        return run_pytest(["tests/gpu", "--collect-only", "-q"], [self._gpu_tests])

    @cached_property
    def _stand_in_tests(self) -> tuple[int, list[str]]:
        return run_pytest(["-v", STAND_IN_TESTS], [])


class Collection:
    """A plugin of pytest that keeps the collected tests, for selections from them afterwards."""

    session: pytest.Session

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.session = session

    def selected(self, files: Sequence[str], selection: str) -> list[pytest.Item]:
        """Tests of `files` (paths or node ids) that -k `selection` leaves."""
        items = [item for item in self.session.items if any(lies_in(item.nodeid, file) for file in files)]
        config = self.session.config
        config.option.keyword = selection
        config.hook.pytest_collection_modifyitems(session=self.session, config=config, items=items)
        return items


def lies_in(node: str, file: str) -> bool:
    return node == file or node.startswith((f"{file}::", f"{file}["))


def run_pytest(arguments: Sequence[str], plugins: Sequence[object]) -> tuple[int, list[str]]:
    """Exit status and output of pytest in this process."""
    import pytest

    output = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(output):
        status = pytest.main([*PYTEST, *arguments], plugins)
    return int(status), output.getvalue().splitlines()
