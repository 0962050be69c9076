"""Start an engine inside a command, and print its answers while they grow."""

from __future__ import annotations

import secrets
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weft.cli.flags.flags import EngineArguments, EngineFlags, engine_config
from weft.cli.terminal import WordWrap
from weft.engine.frontend.outputs import RequestOutput

if TYPE_CHECKING:
    from weft.engine.llm import LLM


def start_engine(arguments: EngineArguments, **ours: Any) -> LLM:
    """Start the engine of the flags; `ours` are the command's own defaults. The engine is a context manager."""
    config = engine_config(arguments, **ours)
    if sys.stderr.isatty():
        print(f"loading {config.model} ...", file=sys.stderr, flush=True)
    from weft.engine.llm import LLM  # slow to import: after the message

    return LLM.from_config(config)


def random_seed(engine: EngineFlags) -> dict[str, int]:
    """The engine's seed for a command whose user gives none: each answer to a question may be another one.

    Dummy weights are drawn from the seed too, and stay the same.
    """
    return {} if engine.checkpoint.load_format == "dummy" else {"seed": secrets.randbelow(2**31)}


def conversation(text: str, system: str | None = None) -> list[dict[str, str]]:
    """One question as chat messages, after a system message if there is one."""
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": text}]


def print_stream(stream: Iterator[RequestOutput], *, stoppable: bool = False) -> RequestOutput | None:
    """Print an answer while it grows, then a newline; return the answer, or None if it has no token yet.

    On a terminal, lines are broken between words; other outputs get the text unchanged. With `stoppable` Ctrl-C ends
    the answer early; without, KeyboardInterrupt passes.
    """
    wrap = WordWrap(shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
    answer, shown = None, 0
    try:
        for answer in stream:
            text = answer.outputs[0].text
            sys.stdout.write(wrap.push(text[shown:]) if wrap else text[shown:])
            sys.stdout.flush()
            shown = len(text)
    except KeyboardInterrupt:
        if not stoppable:
            raise
    finally:
        sys.stdout.write(f"{wrap.flush() if wrap else ''}\n")
        sys.stdout.flush()
    return answer


def print_speed(answer: RequestOutput) -> None:
    """Print the speed of an answer on standard error, if both outputs are terminals."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        print(speed_text(answer), file=sys.stderr, flush=True)


def speed_text(answer: RequestOutput) -> str:
    """Tokens, tokens per second and time to the first token, in one line."""
    timing, tokens = answer_speed(answer), len(answer.outputs[0].token_ids)
    parts = [f"{tokens} token{'' if tokens == 1 else 's'}"]
    if not answer.finished:
        parts.append("stopped")
    elif timing["decode_tok_s"]:
        parts.append(f"{timing['decode_tok_s']:.1f} tokens/s")
    if timing["ttft_s"] is not None:
        parts.append(f"{1000 * timing['ttft_s']:.0f} ms to the first token")
    return ", ".join(parts)


def answer_speed(answer: RequestOutput) -> dict[str, float | None]:
    """`ttft_s`, seconds to the first token, and `decode_tok_s`, tokens per second after it.

    The former is None before the first token, the latter for an answer of one token or an unfinished one.
    """
    metrics, tokens = answer.metrics, len(answer.outputs[0].token_ids)
    if metrics.first_token_s is None:
        return {"ttft_s": None, "decode_tok_s": None}
    decode_s = 0.0 if metrics.finished_s is None else metrics.finished_s - metrics.first_token_s
    return {
        "ttft_s": round(metrics.first_token_s - metrics.arrival_s, 4),
        "decode_tok_s": round((tokens - 1) / decode_s, 2) if tokens > 1 and decode_s > 0 else None,
    }
