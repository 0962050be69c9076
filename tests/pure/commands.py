"""Commands as the shell would see them, run in this process."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from weft import logs
from weft.cli import dispatch, main
from weft.cli.parser import find_command, parse_command

# For a process that shall find this package, installed or not.
HERE = {**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2])}


def weft(*words: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of weft WORDS."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), logging_as_it_was():
        status = main.main(words)
    return status, out.getvalue(), err.getvalue()


def refused_line(words: str | Sequence[str], status: int, code: str, values: str = "") -> str:
    """Assert that weft WORDS ends with this status and one line, the error of this code, that has all of the values.

    A text is split at its blanks. Returns the entry of a golden file.
    """
    words = words.split() if isinstance(words, str) else words
    with patch.object(dispatch, "report", wraps=dispatch.report) as report:
        found, out, err = weft(*words)
    (error,) = report.call_args.args
    assert (found, out, error.code) == (status, "", code), f"weft {' '.join(words)}: {found}, {error.code}, {err}"
    assert err.startswith("weft: error: ") and err.count("\n") == 1, err
    assert all(value in err for value in values.split()), (values, err)
    return f"$ weft {' '.join(words)}\n  {code} ({status}): {err.removeprefix('weft: error: ')}"


def weft_json(*words: str) -> tuple[int, dict[str, Any]]:
    """Exit status and object of weft WORDS --json, which says nothing else."""
    status, out, err = weft(*words, "--json")
    assert err == "" and out.count("\n") == 1, err
    return status, json.loads(out)


def parsed(words: str | Sequence[str]) -> Any:
    """Arguments of weft WORDS; a single text is split at its blanks."""
    command, rest = find_command(words.split() if isinstance(words, str) else words)
    return parse_command(command, rest)


@contextmanager
def logging_as_it_was() -> Iterator[None]:
    """Restore the level and the handlers of our logger, which the block may configure."""
    logger, wanted = logging.getLogger("weft"), os.environ.pop(logs.VARIABLE, None)
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
        os.environ.pop(logs.VARIABLE, None)
        if wanted is not None:
            os.environ[logs.VARIABLE] = wanted
