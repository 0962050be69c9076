"""weft run MODEL --prompt TEXT."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from typing import Any

from weft.cli import engine
from weft.cli.engine import conversation
from weft.cli.flags import sampling
from weft.cli.parser import UsageError
from weft.client.outputs import RequestOutput
from weft.planner.table import layout_json

MAX_TOKENS = 512  # a small model may not find its end; --max-tokens auto lets it go on


def main(arguments: Namespace) -> int:
    """Answer one prompt: streamed as text, or as one JSON object."""
    text, wanted = prompt(arguments), sampling(arguments, max_tokens=MAX_TOKENS)
    started = time.monotonic()
    with engine.start(arguments) as llm:
        loaded = time.monotonic()
        params = llm.sampling_params(**wanted)
        as_is = getattr(arguments, "raw", False)
        asked = text if as_is else conversation(text, getattr(arguments, "system_prompt", None))
        if getattr(arguments, "json", False):
            *_, answer = llm.stream(asked, params)
            print(json.dumps(report(answer, load_s=loaded - started, layout=layout_json(llm.plan, llm.num_blocks))))
        else:
            engine.show(llm.stream(asked, params))
    return 0


def prompt(arguments: Namespace) -> str:
    """The prompt that was typed, or standard input."""
    if hasattr(arguments, "prompt"):
        return str(arguments.prompt)
    if sys.stdin.isatty():
        raise UsageError('what to ask? For example: weft run demo --prompt "Why is the sky blue?"')
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not valid UTF-8: {error.reason} at byte {error.start}") from None


def report(answer: RequestOutput, *, load_s: float, layout: list[dict[str, Any]]) -> dict[str, Any]:
    """What --json prints. Times are seconds; decode_tok_s counts the tokens after the first."""
    choice = answer.outputs[0]
    prompt_tokens, completion_tokens = len(answer.prompt_token_ids), len(choice.token_ids)
    return {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "timing": {"load_s": round(load_s, 4), **engine.speed(answer)},
        "layout": layout,
    }
