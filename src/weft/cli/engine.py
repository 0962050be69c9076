"""An engine for a command that answers by itself, and its answers as they come."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from weft.cli.flags import engine_config
from weft.client.outputs import RequestOutput

if TYPE_CHECKING:
    from weft.llm import LLM


def start(arguments: Namespace, **ours: Any) -> LLM:
    """The engine that the flags describe, ready to answer; a context manager."""
    from weft.llm import LLM

    return LLM(**asdict(engine_config(arguments, **ours)))


def conversation(text: str, system: str | None = None) -> list[dict[str, str]]:
    """One question as messages."""
    told = [{"role": "system", "content": system}] if system else []
    return [*told, {"role": "user", "content": text}]


def show(stream: Iterator[RequestOutput], *, stoppable: bool = False) -> RequestOutput | None:
    """Print an answer as it grows, and a new line after it; what there is of it at the end.

    With `stoppable` Ctrl-C ends the answer, which is None before its first token; else it is raised.
    """
    answer, shown = None, 0
    try:
        for answer in stream:
            text = answer.outputs[0].text
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)
    except KeyboardInterrupt:
        if not stoppable:
            raise
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return answer


def speed(answer: RequestOutput) -> dict[str, float | None]:
    """Seconds to the first token, and tokens per second after it (None for an answer of one token)."""
    metrics, tokens = answer.metrics, len(answer.outputs[0].token_ids)
    if metrics.first_token_s is None or metrics.finished_s is None:
        return {"ttft_s": None, "decode_tok_s": None}
    decode_s = metrics.finished_s - metrics.first_token_s
    return {
        "ttft_s": round(metrics.first_token_s - metrics.arrival_s, 4),
        "decode_tok_s": round((tokens - 1) / decode_s, 2) if tokens > 1 and decode_s > 0 else None,
    }
