"""Prompts to send to a server: drawn at random, or read from a file."""

from __future__ import annotations

import json
from random import Random
from typing import Any, TypeGuard

import msgspec

from weft.errors import ConfigError, error_reason
from weft.regular_files import read_regular_text

Message = dict[str, Any]
WORDS = "time year day way part case work life hand place week group water room area story fact month book eye"
DATASET_BYTES = 2_000_000_000  # ShareGPT's has 670 MB
FORMS = (
    'one JSON object per line with "prompt" or "messages", and optionally "output_tokens"; '
    "or ShareGPT's list of conversations"
)


class BenchPrompt(msgspec.Struct, frozen=True):
    """A prompt as token ids, text or messages, and the most tokens of the response."""

    content: list[int] | str | list[Message]
    output_len: int


def length_range(length: int, ratio: float) -> tuple[int, int]:
    """Smallest and largest length within `ratio` of `length`."""
    return max(1, round(length * (1 - ratio))), max(1, round(length * (1 + ratio)))


def random_prompts(
    seed: object,
    *,
    count: int,
    vocab: int | None,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    prefix_len: int = 0,
) -> list[BenchPrompt]:
    """Prompts with the same `prefix_len` tokens at the beginning of all and `input_len` tokens of their own.

    Token ids are below `vocab`. With `vocab` None the prompts are texts of that many short words, which each server
    tokenizes in its own way.
    """
    random, words = Random(f"weft serve {seed}"), WORDS.split()

    def draw(length: int) -> list[int]:
        return [random.randrange(vocab or len(words)) for _ in range(length)]

    prefix = draw(prefix_len)
    prompts = []
    for _ in range(count):
        ids = prefix + draw(random.randint(*input_len))
        content: list[int] | str = " ".join(words[id] for id in ids) if vocab is None else ids
        prompts.append(BenchPrompt(content, random.randint(*output_len)))
    return prompts


def read_prompts(path: str, *, output_len: int) -> list[BenchPrompt]:
    """Read the prompts of a file in order; `output_len` applies to prompts without a length. Raises ConfigError."""
    try:
        text = read_regular_text(path, DATASET_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read --dataset-path {path}: {error_reason(error)}", code="cannot-read-dataset"
        ) from None
    rows = _sharegpt(text)
    if rows is None:
        rows = []
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                rows.append((f"{path}, line {number}", _json(line, f"{path}, line {number}")))
    prompts = [_prompt(row, where, output_len) for where, row in rows]
    if not prompts:
        raise ConfigError(f"--dataset-path {path} holds no prompts; it must be {FORMS}", code="dataset-without-prompts")
    return prompts


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}); the file must be {FORMS}", code="dataset-not-json") from None


def _sharegpt(text: str) -> list[tuple[str, Any]] | None:
    """First turn of each conversation in ShareGPT's format, with its place; None for a file in another format."""
    if not text.lstrip().startswith("["):
        return None
    try:
        listed = json.loads(text)
    except ValueError:
        return None
    prompts = []
    for number, row in enumerate(listed, start=1):
        turns = row.get("conversations") if isinstance(row, dict) else None
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            prompts.append((f"conversation {number}", {"prompt": turns[0].get("value")}))
    return prompts


def _prompt(row: Any, where: str, output_len: int) -> BenchPrompt:
    fields = row if isinstance(row, dict) else {}
    content = fields.get("prompt", fields.get("messages"))
    length = fields.get("output_tokens", fields.get("max_tokens"))
    length = output_len if length is None else length
    if not _is_content(content):
        raise ConfigError(f"{where} holds no prompt: the file must be {FORMS}", code="dataset-line-without-prompt")
    if type(length) is not int or length < 1:
        raise ConfigError(
            f"{where} asks for {length!r} tokens; it must be a whole number of 1 or more", code="bad-output-length"
        )
    return BenchPrompt(content, length)


def _is_content(content: Any) -> TypeGuard[list[int] | str | list[Message]]:
    """Return True for a text, a list of token ids or a list of messages that is not empty."""
    if not content or not isinstance(content, str | list):
        return False
    if isinstance(content, str):
        return True
    is_ids = all(type(part) is int and part >= 0 for part in content)
    return is_ids or all(isinstance(part, dict) for part in content)
