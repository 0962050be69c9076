"""Upper limits for the numbers in a checkpoint: above every real model, and far below what would exhaust a machine.

They refuse a damaged or hostile file in one line, before any memory is allocated by its numbers.
"""

from __future__ import annotations

import json

from weft.errors import ModelError

LAYERS = 10_000  # the deepest published models have fewer than 200
EXPERTS = 100_000  # in a layer; published models have up to 512
POSITIONS = 100_000_000  # tokens of context; published models have up to 10 million
NAMES = 10_000  # of modules in a list that each module is compared with; published ones have up to 1,000
CONFIG_BYTES = 100_000_000  # a config.json or the like, usually some KB; an index of tensors may have 20 MB
TEMPLATE_BYTES = 1_000_000  # a chat template; published ones have up to 30 KB
TOKENS = 1_000_000  # in a vocabulary; XLM-V has 901,629, large language models up to 262,144
MERGES = 2_000_000  # Gemma has 514,906
TOKEN_CHARACTERS = 1_024  # of a token, or bytes; published ones have up to 256
# A vocabulary without merges, whose merges are derived from its ranks in Python: some seconds for the largest.
MERGED_TOKENS = 400_000  # Gemma has 262,144
MERGED_CHARACTERS = 2_500_000  # of all tokens; GPT-4o has 1.5 million, Gemma 1.7 million
TOKENIZER_BYTES = 1_000_000_000  # a vocabulary's file, usually 2 to 35 MB


def check_vocabulary(tokens: int, merges: int = 0) -> None:
    """Raise ValueError for a vocabulary of more tokens or merges than any published one has."""
    if tokens > TOKENS or merges > MERGES:
        raise ValueError(f"{tokens:,} tokens and {merges:,} merges; at most {TOKENS:,} and {MERGES:,} are read")


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
