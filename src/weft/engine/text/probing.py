"""The probe of a tokenizer's own steps: a child process tokenizes some texts before this process does.

Normalizers and patterns come with a model's file, and a chain of them may make a text grow without end. Bounds on the
file alone do not tell.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from weft.cache import cache_path, distrust_reason, write_cache_file
from weft.errors import ModelError, RequestError

VERSION = 1  # raise it when the texts change
REPEATED = 2048  # characters of one kind in a row
KINDS = "a A1 .\n\té中あ한अ\u0301\u200d\ufb03\U0001f600_-/\\'\"<"
SENTENCE = "Can't you tokenize 12,345.67 naïve “words”? نعم, はい: x += f(y);  \n\n\tif (a[0] != '\\n') { return; }\n"
TEXTS = ("", SENTENCE, *(kind * REPEATED for kind in KINDS), (KINDS + SENTENCE) * (REPEATED // 16))
GROWTH = 64  # tokens for each character, at most
TOO_EXPENSIVE = "tokenizer-too-expensive"  # code of a tokenizer that breaks a limit


class Steps(msgspec.Struct):
    """The parts of a tokenizer.json that are not its vocabulary."""

    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


def probe_mark(file: Path) -> Path | None:
    """Return the file of the cache that says that a tokenizer.json with these steps has passed; None without a cache.

    The steps are told apart, not the vocabulary, which has bounds of its own.
    """
    try:
        steps = msgspec.json.decode(file.read_bytes(), type=Steps)
        key = blake2b(b"\0".join(map(bytes, (str(VERSION).encode(), *msgspec.structs.astuple(steps)))), digest_size=16)
        return cache_path() / "tokenizers" / f"{key.hexdigest()}.probed"
    except (OSError, RuntimeError, msgspec.MsgspecError):
        return None  # the reader of the tokenizer says what is wrong


def has_passed(mark: Path) -> bool:
    """Return True if a mark is there that no other user can have left."""
    return mark.exists() and distrust_reason(mark) is None


def note_passed(mark: Path) -> None:
    """Leave a mark. A cache that cannot be written is no error."""
    with suppress(OSError, ModelError):
        write_cache_file(mark, b"")


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the handler of probes; a job is the path of a tokenizer."""

    def probe(job: bytes) -> bytes:
        from weft.engine.text.tokenizer import load_tokenizer

        path = job.decode()
        try:
            tokenizer = load_tokenizer(path)
            for text in TEXTS:
                count = len(ids := tokenizer.encode(text))
                if count > GROWTH * (len(text) + 1):
                    raise RequestError(
                        f"{path} makes {count:,} tokens of {len(text):,} characters; the limit is {GROWTH} for each",
                        code=TOO_EXPENSIVE,
                    )
                tokenizer.decode(ids)
        except ModelError as error:
            raise RequestError(str(error), code=error.code) from None
        return b""

    return probe
