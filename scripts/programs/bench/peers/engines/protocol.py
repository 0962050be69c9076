"""Protocol of the engine scripts: one JSON object per line on standard input and output.

    python ENGINE.py MODEL [OPTION ...]
    out: {"ready": first token's time, "threads": n}
    in:  {"prompts": [[ids], ...], "new": n or [n, ...]}
    out: {"first_s": [...], "last_s": [...], "seconds": s, "head": [first ids of the first answer]}

Prompts are submitted at once, decoded greedily, and every answer has exactly `new` tokens, or its own number of a list.
Times are seconds, those of `ready` of the system's monotonic clock, the others since the submission.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HEAD = 16


@dataclass
class Answer:
    """One request's tokens, and when the first and the last of them were there (time.perf_counter)."""

    first: float = 0.0
    last: float = 0.0
    tokens: list[int] = field(default_factory=list)

    def add(self, tokens: list[int], now: float) -> None:
        if tokens:
            self.first = self.first or now
            self.last = now
            self.tokens += tokens


# Takes prompts and their number of new tokens. Not every engine takes a list of numbers.
Generate = Callable[[list[list[int]], Any], list[Answer]]


def serve(generate: Generate, threads: int) -> None:
    """Answer until the input ends. `generate(prompts, new)` gives an Answer for each prompt."""
    begin = time.perf_counter()
    answer = generate([[1] * 16], 2)[0]
    ready = time.monotonic() - (time.perf_counter() - (answer.first or begin))
    say({"ready": ready, "threads": threads})
    for line in sys.stdin:
        asked = json.loads(line)
        begin = time.perf_counter()
        answers = generate(asked["prompts"], asked["new"])
        seconds = time.perf_counter() - begin
        for answer, count in zip(answers, lengths(asked["new"], len(answers)), strict=True):
            if len(answer.tokens) != count:
                raise SystemExit(f"asked for {count} tokens, got {len(answer.tokens)}")
        say(
            {
                "first_s": [answer.first - begin for answer in answers],
                "last_s": [answer.last - begin for answer in answers],
                "seconds": seconds,
                "head": answers[0].tokens[:HEAD],
            }
        )


def lengths(new: int | list[int], count: int) -> list[int]:
    """Number of tokens of each of `count` answers: `new` is one for all, or a list."""
    return new if isinstance(new, list) else [new] * count


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)
