"""Upper limits for the numbers in a checkpoint: above every real model, and far below what would exhaust a machine.

They refuse a damaged or hostile file in one line, before any memory is allocated by its numbers.
"""

from __future__ import annotations

import json

from weft.errors import ModelError

LAYERS = 10_000  # the deepest published models have fewer than 200
EXPERTS = 100_000  # in a layer; published models have up to 512
POSITIONS = 100_000_000  # tokens of context; published models have up to 10 million
INTEGER = 1 << 40  # any other number in a config; the largest real ones are in the millions
TENSORS = 300_000  # of a checkpoint; Kimi-K2 in GPTQ has 281,000
TENSOR_NAME = 512  # characters; published ones have up to 120
DIMS = 8  # of a tensor
GGUF_FIELDS = 100_000  # of metadata; published files have up to 60
GGUF_TEXT_BYTES = 100_000_000  # of all names and texts in a header, without arrays
GGUF_TEXTS = 10_000_000  # in arrays of a header; a vocabulary and its merges
TEXT = 1_000  # characters of a text in a config, usually a word
NAMES = 10_000  # of modules in a list that each module is compared with; published ones have up to 1,000
CONFIG_BYTES = 100_000_000  # a config.json or the like, usually some KB; an index of tensors may have 20 MB
TEMPLATE_BYTES = 1_000_000  # a chat template; published ones have up to 30 KB
TOKENS = 1_000_000  # in a vocabulary; XLM-V has 901,629, large language models up to 262,144
MERGES = 2_000_000  # Gemma has 514,906
TOKEN_CHARACTERS = 1_024  # of a token, or bytes; published ones have up to 256
# A vocabulary that Weft itself converts, and derives the merges of, in Python: some seconds for the largest.
CONVERTED_TOKENS = 400_000  # Gemma has 262,144
CONVERTED_CHARACTERS = 2_500_000  # of all tokens; GPT-4o has 1.5 million, Gemma 1.7 million
CONVERTED_SQUARES = 400_000_000  # of the tokens' characters: a long one takes longer; GPT-4o has 20 million
TOKENIZER_BYTES = 1_000_000_000  # a vocabulary's file, usually 2 to 35 MB


def check_tensor_count(count: int, where: str) -> None:
    """Raise ModelError for more tensors than any published checkpoint has."""
    if count > TENSORS:
        raise ModelError(
            f"{where} has {count:,} tensors; at most {TENSORS:,} are read; fetch it again", code="too-many-tensors"
        )


def check_tensor(where: str, name: str, dims: int) -> None:
    """Raise ModelError for a tensor with a longer or a stranger name, or more dims, than any published one has."""
    if len(name) > TENSOR_NAME or dims > DIMS or not name.isprintable():
        raise ModelError(
            f"{where} is damaged: tensor {name!r:.80} has a name of {len(name):,} characters and {dims:,} dims; at "
            f"most {TENSOR_NAME} and {DIMS} are read; fetch it again",
            code="impossible-tensor",
        )


def check_template(source: str, where: str) -> None:
    """Raise ModelError for a chat template that is longer than any published one."""
    if len(source) > TEMPLATE_BYTES:
        raise ModelError(
            f"{where} has a chat template of {len(source):,} characters; at most {TEMPLATE_BYTES:,} are read",
            code="chat-template-too-long",
        )


def check_vocabulary(tokens: int, merges: int = 0, *, most: int = TOKENS) -> None:
    """Raise ValueError for a vocabulary of more tokens or merges than any published one has."""
    if tokens > most or merges > MERGES:
        raise ValueError(f"{tokens:,} tokens and {merges:,} merges; at most {most:,} and {MERGES:,} are read")


def check_unique(text: bytes, where: str) -> None:
    """Raise ModelError if an object in a JSON text has a key twice: readers differ in the value that they take."""

    def pairs(members: list[tuple[str, object]]) -> None:
        seen: set[str] = set()
        for key, _ in members:
            if key in seen:
                raise ModelError(
                    f"{where} has {key!r:.80} twice, and only one can be meant; fetch it again",
                    code="key-twice-in-json",
                )
            seen.add(key)

    try:
        json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ModelError(
            f"{where} is damaged: its JSON is nested too deeply; fetch it again", code="json-nested-too-deeply"
        ) from error
