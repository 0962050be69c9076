"""Errors of the tokenizers library: plain Exceptions, and panics of its Rust code, which are none.

A panic also writes lines to standard error. They say nothing to a user, who reads the error instead.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from weft.errors import ModelError, WeftError

PANIC = "PanicException"  # the name of the class; the library does not offer the class itself
_redirecting = threading.Lock()


def convert_panic(error: BaseException) -> BaseException:
    """ModelError for a panic; any other error, such as Ctrl-C, unchanged."""
    if type(error).__name__ != PANIC:
        return error
    return ModelError(
        f"the tokenizer fails on this text, most likely in its regular expression: {error!s:.200}; "
        "give another with --tokenizer",
        code="tokenizer-failed",
    )


@contextlib.contextmanager
def loading(file: Path | str) -> Iterator[None]:
    """Turn every error of the library into ModelError, in one line. WeftError, OSError and assertions stay."""
    try:
        with _without_panics():
            yield
    except (WeftError, OSError, AssertionError, MemoryError):
        raise
    except Exception as error:
        raise damaged_tokenizer(file, error) from error
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        raise damaged_tokenizer(file, error) from None


def damaged_tokenizer(file: Path | str, error: BaseException) -> ModelError:
    """The error for a tokenizer's file that cannot be used."""
    return ModelError(
        f"{file} is no tokenizer, or a damaged one: {error!s:.200}; fetch it again, or give another with --tokenizer",
        code="damaged-tokenizer",
    )


def _scratch_file() -> IO[bytes]:
    """A file in memory, or where the system has none, on the disk, which may be full."""
    return os.fdopen(os.memfd_create("stderr"), "w+b") if sys.platform == "linux" else tempfile.TemporaryFile()


@contextlib.contextmanager
def _without_panics() -> Iterator[None]:
    """Keep what Rust writes to standard error about a panic from it; all else is written there at the end.

    The descriptor of the whole process is redirected until then, so this is for the start.
    """
    with _redirecting, _scratch_file() as kept:
        sys.stderr.flush()
        stderr, has_failed = os.dup(2), True
        os.dup2(kept.fileno(), 2)
        try:
            yield
            has_failed = False
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            kept.seek(0)
            text = kept.read()
            if not has_failed or b"panicked at" not in text:
                os.write(2, text)
