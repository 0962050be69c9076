"""Workloads of benchmarks: the same tokens for the same seed on every machine."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from weft.errors import ConfigError

NANO_REQUESTS = 256
NANO_LENGTHS = (100, 1024)  # tokens of prompts and of outputs, both ends included
NANO_IDS = 10_000  # highest token id
NANO_TEMPERATURE = 0.6


@dataclass(frozen=True)
class BenchRequest:
    """One request: the prompt's token ids, and the exact number of tokens to generate."""

    prompt: list[int]
    output_len: int
    temperature: float = 0.0


def random_requests(
    seed: int, *, vocab: int, count: int, input_len: tuple[int, int], output_len: int
) -> list[BenchRequest]:
    """Requests with prompts of random ids, of lengths drawn uniformly from `input_len` (both ends included)."""
    random = Random(f"weft {seed}")
    lengths = [random.randint(*input_len) for _ in range(count)]
    return [BenchRequest([random.randrange(vocab) for _ in range(length)], output_len) for length in lengths]


def shared_prefix(seed: int, *, vocab: int, count: int, prefix: int, own: int, output_len: int) -> list[BenchRequest]:
    """Requests with prompts of random ids: the same `prefix` tokens in all, then `own` tokens of each request."""
    random = Random(f"weft prefix {seed}")
    shared = [random.randrange(vocab) for _ in range(prefix)]
    return [BenchRequest(shared + [random.randrange(vocab) for _ in range(own)], output_len) for _ in range(count)]


def nano_vllm(vocab: int, seed: int = 0) -> list[BenchRequest]:
    """The workload of nano-vllm's benchmark, by default with its seed: all prompts are drawn first, then all output
    lengths.

    Raises ConfigError if the vocabulary is too small.
    """
    if vocab <= NANO_IDS:
        raise ConfigError(
            f"the nano-vllm workload draws token ids up to {NANO_IDS}; this model's vocabulary has {vocab}",
            code="vocabulary-too-small",
        )
    random = Random(seed)
    prompts = [
        [random.randint(0, NANO_IDS) for _ in range(random.randint(*NANO_LENGTHS))] for _ in range(NANO_REQUESTS)
    ]
    return [BenchRequest(prompt, random.randint(*NANO_LENGTHS), NANO_TEMPERATURE) for prompt in prompts]
