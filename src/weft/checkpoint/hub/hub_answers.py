"""Answers of a hub, which anybody's HF_ENDPOINT may be: what becomes a part of a path here is checked first."""

from __future__ import annotations

import functools
import re
from typing import Any

from weft.errors import ModelError

SHA256 = re.compile("[0-9a-f]{64}")
GIT_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # of a commit or a file
FILE_NAME = re.compile(r"(?s)(?!.*(^|/)\.{0,2}(/|$))[^\\\0]{1,1000}")  # no part is empty, "." or ".."
ETAG = re.compile("[0-9A-Za-z][0-9A-Za-z._-]{0,127}")  # a hash on the hub itself; its name in the cache


def checked(value: object, form: re.Pattern[str], what: str) -> str:
    """A text of an answer. Raises ModelError unless it has the form."""
    if isinstance(value, str) and form.fullmatch(value):
        return value
    from huggingface_hub import constants

    raise ModelError(
        f"{constants.ENDPOINT} gives {what} as {value!r:.80}, which is none; check HF_ENDPOINT", code="wrong-hub-answer"
    )


@functools.cache
def guard_library() -> None:
    """Let the library take only ETags and commits that are names: it makes paths of them as they come."""
    from huggingface_hub import file_download

    ask = file_download.get_hf_file_metadata

    @functools.wraps(ask)
    def ask_and_check(*arguments: Any, **options: Any) -> Any:
        about = ask(*arguments, **options)
        if about.etag is not None:
            checked(about.etag, ETAG, "an ETag")
        if about.commit_hash is not None:
            checked(about.commit_hash, ETAG, "a commit")
        return about

    file_download.get_hf_file_metadata = ask_and_check
