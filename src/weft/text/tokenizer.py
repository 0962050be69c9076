"""Tokenizer: text to token ids and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as RustTokenizer

from weft.errors import ModelError, RequestError
from weft.formats.gguf import is_gguf
from weft.text import folder, gguf_tokenizer
from weft.text.cache import load_cached
from weft.text.pieces import Detokenizer, Pieces
from weft.text.settings import TokenizerSettings

# The library's batch calls work without the interpreter's lock, so that a server can make them in a thread beside its
# event loop. Without this they start a thread per core as well, for a batch of one.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def load_tokenizer(path: str, *, gguf: bool | None = None) -> Tokenizer:
    """The tokenizer in a Hugging Face directory, a GGUF file, or a tokenizer's own file.

    `gguf` says whether a file is GGUF; None looks at how it begins. Raises ModelError, naming the path, for a
    tokenizer that is missing, damaged or of a kind that Weft does not know.
    """
    place = Path(path)
    if not place.exists():
        raise ModelError(f"there is no tokenizer at {path}; give a folder or a file that exists with --tokenizer")
    try:
        if place.is_file() and (is_gguf(place) if gguf is None else gguf):
            return Tokenizer(*load_cached(place, gguf_tokenizer.read_gguf_tokenizer))
        return Tokenizer(*folder.read_folder(place))
    except OSError as error:
        raise ModelError(f"cannot read the tokenizer at {path}: {error}") from error


class Tokenizer:
    """A vocabulary and what its model says of it.

    `vocab_size` is one more than the highest id. `special_tokens` are texts by Transformers' names ("bos_token"),
    for chat templates; `special_ids` are all ids that `skip_special_tokens` leaves out; `end_ids` are those that
    end an answer as far as the tokeniser knows (generation_config.json may know more).
    """

    def __init__(self, rust: RustTokenizer, settings: TokenizerSettings) -> None:
        self._rust = rust
        self._settings = settings
        self.pieces = Pieces(rust)
        self.vocab_size = folder.vocab_size(rust)
        self.special_tokens = settings.tokens
        self.special_ids = self.pieces.special
        self.bos_id = self.id(settings.tokens.get("bos_token", ""))
        self.eos_id = self.id(settings.tokens.get("eos_token", ""))
        self.end_ids = settings.end_ids
        self.chat_template = settings.chat_template
        # None and None: the vocabulary has its own rule, a post-processor.
        self._own_rule = settings.add_bos is None and settings.add_eos is None
        self._add_bos = bool(settings.add_bos) and self.bos_id is not None
        self._add_eos = bool(settings.add_eos) and self.eos_id is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. `add_special_tokens` puts BOS (and whatever else the model asks for) around a text, but never a
        second BOS before one that already begins with it, as what a chat template renders does.

        Raises RequestError for a text that is no valid Unicode.
        """
        rule = add_special_tokens and self._own_rule
        try:
            [encoding] = self._rust.encode_batch_fast([text], add_special_tokens=rule)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(f"the text is no valid Unicode: {_lone_surrogate(text)}") from error
        except BaseException as error:
            raise _panic(error) from None
        ids: list[int] = encoding.ids
        if not add_special_tokens:
            return ids
        if rule:
            return ids[1:] if self.bos_id is not None and ids[:2] == [self.bos_id] * 2 else ids
        if self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if self._add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; those that no token has add nothing. RequestError for ids that are no ids."""
        try:
            text: str
            [text] = self._rust.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"token ids are whole numbers from 0 to {self.vocab_size - 1}: {error}") from error
        except BaseException as error:
            raise _panic(error) from None
        if not self.pieces.byte_fallback or "\ufffd" not in text:
            return text
        # tokenizers gives up a whole run of byte tokens for one that is wrong; SentencePiece only that one.
        stream = Detokenizer(self.pieces, skip_special=skip_special_tokens)
        return "".join([stream.push(id) for id in ids]) + stream.flush()

    @cached_property
    def longest_token(self) -> int:
        """Characters that a token can stand for: no text of n tokens is longer than n times this. A normalizer may
        shorten a text before it is cut into tokens: four characters to one, as Unicode's composition does."""
        longest = max(map(len, self._rust.get_vocab(with_added_tokens=True)), default=1)
        return longest if self._rust.normalizer is None else 4 * longest

    def token_bytes(self, id: int) -> bytes:
        """What token `id` adds to a text that has begun; b"" for an id without a token."""
        piece = self.pieces.piece(id)
        return piece.encode() if isinstance(piece, str) else piece or b""

    def token_text(self, id: int) -> str:
        """The same as text, where a part of a character is U+FFFD."""
        return self.token_bytes(id).decode(errors="replace")

    def id(self, token: str) -> int | None:
        """The id of a token by its text in the vocabulary."""
        found: int | None = self._rust.token_to_id(token)
        return found

    def word_ids(self, text: str) -> list[tuple[int, ...]]:
        """The ids of a word at the beginning of a text, and where they differ, after a space."""
        word = text.lstrip()
        if not word:
            raise RequestError(f"a bad word must have more than spaces, not {text!r}", param="bad_words")
        forms = (self.encode(form, add_special_tokens=False) for form in (word, " " + word))
        return list(dict.fromkeys(tuple(form) for form in forms))


def _panic(error: BaseException) -> BaseException:
    """What to raise for an error of the tokenizers library: a ModelError for a panic in its Rust, which no
    `except Exception` catches; `error` itself for Ctrl-C and the like."""
    if type(error).__name__ != "PanicException":
        return error
    return ModelError(
        f"the tokenizer fails on this text, most likely in its regular expression: {error!s:.200}; "
        "give another with --tokenizer"
    )


def _lone_surrogate(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
    return f"it is a {type(text).__name__}"
