"""Tokenizer: text to token ids and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer

from weft.checkpoint.files.gguf import is_gguf
from weft.engine.text import folder, gguf_tokenizer
from weft.engine.text.cache import load_cached
from weft.engine.text.panics import convert_panic, loading
from weft.engine.text.pieces import Detokenizer, Pieces
from weft.engine.text.settings import TokenizerSettings
from weft.errors import ModelError, RequestError

# The library's batch calls release the interpreter's lock, so that a server can call them in a thread next to its event
# loop. Without this setting they also start a thread per core, even for a batch of one text.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Tokens of gpt-oss's harmony format.
HARMONY_ENDS, HARMONY_MESSAGE_END = ("<|return|>", "<|call|>"), "<|end|>"


def load_tokenizer(path: str, *, gguf: bool | None = None) -> Tokenizer:
    """Load the tokenizer in a Hugging Face directory, a GGUF file, or a tokenizer's own file.

    `gguf`: the file is GGUF; None tests its first bytes. Raises ModelError, with the path, for a tokenizer that is
    missing, damaged or of an unknown kind.
    """
    file = Path(path)
    if not file.exists():
        raise ModelError(
            f"there is no tokenizer at {path}; give a folder or a file that exists with --tokenizer",
            code="no-such-tokenizer",
        )
    try:
        with loading(file):
            if file.is_file() and (is_gguf(file) if gguf is None else gguf):
                return Tokenizer(*load_cached(file, gguf_tokenizer.read_gguf_tokenizer))
            return Tokenizer(*folder.read_folder(file))
    except OSError as error:
        raise ModelError(f"cannot read the tokenizer at {path}: {error}", code="cannot-read-tokenizer") from error


class Tokenizer:
    """A vocabulary with its model's settings.

    `vocab_size`: highest id plus one. `base_size`: number of tokens without added ones.

    `special_tokens`: texts by Transformers' names ("bos_token"), for chat templates.
    `special_ids`: ids that `skip_special_tokens` omits. `end_ids`: ids that end a completion, as far as the tokenizer
    knows; generation_config.json may list more.
    """

    def __init__(self, hf_tokenizer: HFTokenizer, settings: TokenizerSettings) -> None:
        self._hf_tokenizer = hf_tokenizer
        self._settings = settings
        self.pieces = Pieces(hf_tokenizer)
        self.vocab_size = folder.vocab_size(hf_tokenizer)
        self.base_size = hf_tokenizer.get_vocab_size(with_added_tokens=False)
        self.special_tokens = settings.tokens
        self.special_ids = self.pieces.special
        self.bos_id = self.id(settings.tokens.get("bos_token", ""))
        self.eos_id = self.id(settings.tokens.get("eos_token", ""))
        self.end_ids = self._end_ids(settings.end_ids)
        self.chat_template = settings.chat_template
        self.tool_template = settings.tool_template
        # Both None: the vocabulary's post-processor adds BOS and EOS.
        self._has_post_processor = settings.add_bos is None and settings.add_eos is None
        self._add_bos = bool(settings.add_bos) and self.bos_id is not None
        self._add_eos = bool(settings.add_eos) and self.eos_id is not None
        self._ending = self._post_processed_ending() if settings.add_bos is not None else []

    def _post_processed_ending(self) -> list[int]:
        """Ids that the vocabulary's post-processor adds behind a text, if the settings leave that to it.

        Settings that speak of BOS alone, as Qwen3-Embedding's do, say nothing of the end.
        """
        if self._settings.add_eos is not None:
            return []
        [encoding] = self._hf_tokenizer.encode_batch_fast([""], add_special_tokens=True)
        return [id for id in encoding.ids if id != self.bos_id]

    def _end_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Ids that end a completion, given the ids that the tokenizer's files name.

        In the harmony format a call of a tool ends a reply too, and the end of a message does not.
        """
        ends = [self.id(token) for token in HARMONY_ENDS]
        if None in ends:
            return tuple(ids)
        ids = [id for id in (*ids, *ends) if id is not None and id != self.id(HARMONY_MESSAGE_END)]
        return tuple(dict.fromkeys(ids))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        `add_special_tokens` adds BOS and EOS if the model wants them, but never a second BOS before a text that begins
        with BOS, as rendered chat templates do. Raises RequestError for a text that is not valid Unicode.
        """
        post_process = add_special_tokens and self._has_post_processor
        try:
            [encoding] = self._hf_tokenizer.encode_batch_fast([text], add_special_tokens=post_process)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(
                f"the text is no valid Unicode: {_lone_surrogate(text)}", code="invalid-unicode"
            ) from error
        except BaseException as error:
            raise convert_panic(error) from None
        ids: list[int] = encoding.ids
        if post_process:
            doubled = self.bos_id is not None and ids[:2] == [self.bos_id] * 2
            return ids[1:] if doubled else ids
        return self._with_special_tokens(ids) if add_special_tokens else ids

    def encode_literally(self, text: str) -> list[int]:
        """Token ids of a text, in which the texts of special tokens are text like any other."""
        named = any(token in text for token in self._special_texts)
        return (self._literal if named else self).encode(text, add_special_tokens=False)

    @cached_property
    def _special_texts(self) -> tuple[str, ...]:
        tokens = self._hf_tokenizer.get_added_tokens_decoder().values()
        return tuple(token.content for token in tokens if token.special)

    @cached_property
    def _literal(self) -> Tokenizer:
        """A copy that knows no special token; this tokenizer may be in use in another thread."""
        hf_tokenizer = HFTokenizer.from_str(self._hf_tokenizer.to_str())
        hf_tokenizer.encode_special_tokens = True
        return Tokenizer(hf_tokenizer, self._settings)

    def _with_special_tokens(self, ids: list[int]) -> list[int]:
        """Add BOS and EOS to `ids`, in place, if the settings ask for them and they are missing."""
        if self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if self._add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        ids += self._ending
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids without a token add nothing. Raises RequestError for values that are not ids."""
        try:
            text: str
            [text] = self._hf_tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(
                f"token ids are whole numbers from 0 to {self.vocab_size - 1}: {error}", code="token-id-out-of-range"
            ) from error
        except BaseException as error:
            raise convert_panic(error) from None
        if not self.pieces.byte_fallback or "\ufffd" not in text:
            return text
        # For one invalid byte token the library replaces the whole run of byte tokens, SentencePiece only that token.
        stream = Detokenizer(self.pieces, skip_special=skip_special_tokens)
        return "".join([stream.push(id) for id in ids]) + stream.flush()

    @cached_property
    def longest_token(self) -> int:
        """Most characters that a token can stand for: no text of n tokens is longer than n times this.

        A normalizer may shorten a text before it is tokenized: Unicode composition makes one of up to four characters.
        """
        longest = max(map(len, self._hf_tokenizer.get_vocab(with_added_tokens=True)), default=1)
        return longest if self._hf_tokenizer.normalizer is None else 4 * longest

    def token_bytes(self, id: int) -> bytes:
        """Bytes that token `id` adds after other tokens; b"" for an id without a token."""
        piece = self.pieces.piece(id)
        return piece.encode() if isinstance(piece, str) else piece or b""

    def token_text(self, id: int) -> str:
        """Text that token `id` adds after other tokens; U+FFFD for a part of a character."""
        return self.token_bytes(id).decode(errors="replace")

    def id(self, token: str) -> int | None:
        """Id of a token, given its text in the vocabulary; None if there is none."""
        token_id: int | None = self._hf_tokenizer.token_to_id(token)
        return token_id

    def word_ids(self, text: str) -> list[tuple[int, ...]]:
        """Ids of a word at the beginning of a text and, if they differ, after a space."""
        word = text.lstrip()
        if not word:
            raise RequestError(
                f"a bad word must have more than spaces, not {text!r}", param="bad_words", code="empty-bad-word"
            )
        forms = (self.encode(form, add_special_tokens=False) for form in (word, " " + word))
        return list(dict.fromkeys(tuple(form) for form in forms))


def _lone_surrogate(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
    return f"it is a {type(text).__name__}"
