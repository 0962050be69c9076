"""Workloads of the comparison: token ids of real English, other text in every round, so that no prefix cache helps."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Work:
    """`figure` is what counts: decode (tokens/s of one request after its first), output or prompt (tokens/s of all)."""

    name: str
    figure: str
    told: str


LATENCY = Work("latency", "decode", "one request, 128 + {new} tokens: decode, tokens/s")
FIRST = Work("first", "first", "one request, 128 tokens: time to first token, ms")
THROUGHPUT = Work("throughput", "output", "{count} requests of 32-256 + {new} tokens: output, tokens/s")
PREFILL = Work("prefill", "prompt", "one prompt of 1,024 tokens: prompt, tokens/s")
PREFIX = Work(
    "prefix", "output", "{count} requests with a shared prefix of 512 tokens, 16 + {new} tokens each: output, tokens/s"
)

WORKS = (LATENCY, THROUGHPUT, PREFILL, PREFIX)


def ask(work: Work, text: list[int], number: int, *, large: bool) -> tuple[list[list[int]], int]:
    """The prompts and the length of the answers of round `number`; the large model gets fewer and shorter ones."""
    random = Random(f"{work.name} {number}")
    new = 64 if large else 128
    if work is LATENCY:
        return [cut(text, random, 128)], new
    if work is PREFILL:
        return [cut(text, random, 1024)], 1
    if work is THROUGHPUT:
        lengths = Random("lengths")  # the same in every round
        return [cut(text, random, lengths.randint(32, 256)) for _ in range(16 if large else 32)], new
    shared = cut(text, random, 512)
    return [shared + cut(text, random, 16) for _ in range(32 if large else 128)], 32


def cut(text: list[int], random: Random, length: int) -> list[int]:
    begin = random.randrange(len(text) - length)
    return text[begin : begin + length]
