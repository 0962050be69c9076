"""Prompts for a server: drawn at random, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from weft.errors import ConfigError, error_reason

Message = dict[str, Any]
WORDS = "time year day way part case work life hand place week group water room area story fact month book eye"
FORMS = (
    'one JSON object per line with "prompt" or "messages", and if you like "output_tokens"; '
    "or ShareGPT's list of conversations"
)


class Prompt(msgspec.Struct, frozen=True):
    """What is asked, as token ids, text or messages, and how many tokens the answer has at most."""

    content: list[int] | str | list[Message]
    output_len: int


def spread(length: int, ratio: float) -> tuple[int, int]:
    """The lengths that are within `ratio` of `length`, both ends included."""
    return max(1, round(length * (1 - ratio))), max(1, round(length * (1 + ratio)))


def random_prompts(
    seed: object,
    *,
    count: int,
    vocab: int | None,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    prefix_len: int = 0,
) -> list[Prompt]:
    """`count` prompts of `prefix_len` tokens that are the same in all, and so many of their own. Token ids below
    `vocab`; None makes texts of so many short words, which servers count in their own way."""
    random, words = Random(f"weft serve {seed}"), WORDS.split()

    def draw(length: int) -> list[int]:
        return [random.randrange(vocab or len(words)) for _ in range(length)]

    prefix = draw(prefix_len)
    made = []
    for _ in range(count):
        ids = prefix + draw(random.randint(*input_len))
        content: list[int] | str = " ".join(words[id] for id in ids) if vocab is None else ids
        made.append(Prompt(content, random.randint(*output_len)))
    return made


def read(path: str, *, output_len: int) -> list[Prompt]:
    """The prompts of a file, in its order; `output_len` for those that do not say. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --dataset-path {path}: {error_reason(error)}") from None
    rows = _sharegpt(text)
    if rows is None:
        rows = []
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                rows.append((f"{path}, line {number}", _json(line, f"{path}, line {number}")))
    found = [_prompt(row, where, output_len) for where, row in rows]
    if not found:
        raise ConfigError(f"--dataset-path {path} holds no prompts; it must be {FORMS}")
    return found


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}); the file must be {FORMS}") from None


def _sharegpt(text: str) -> list[tuple[str, Any]] | None:
    """The first turn of each conversation, where that is what the file holds."""
    if not text.lstrip().startswith("["):
        return None
    try:
        listed = json.loads(text)
    except ValueError:
        return None
    turns = (row.get("conversations") if isinstance(row, dict) else None for row in listed)
    return [
        (f"conversation {number}", {"prompt": turn[0].get("value")})
        for number, turn in enumerate(turns, start=1)
        if isinstance(turn, list) and turn and isinstance(turn[0], dict)
    ]


def _prompt(row: Any, where: str, output_len: int) -> Prompt:
    row = row if isinstance(row, dict) else {}
    content = row.get("prompt", row.get("messages"))
    length = row.get("output_tokens", row.get("max_tokens"))
    length = output_len if length is None else length
    listed = isinstance(content, list) and content
    ids = listed and all(type(part) is int and part >= 0 for part in content)
    messages = listed and all(isinstance(part, dict) for part in content)
    if not ((isinstance(content, str) and content) or ids or messages):
        raise ConfigError(f"{where} holds no prompt: the file must be {FORMS}")
    if type(length) is not int or length < 1:
        raise ConfigError(f"{where} asks for {length!r} tokens; it must be a whole number of 1 or more")
    return Prompt(content, length)
