"""weft run MODEL PROMPT: answer one prompt."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weft.cli import engine
from weft.cli.engine import conversation
from weft.cli.flags.command_flags import RunArguments
from weft.cli.flags.flags import sampling_options
from weft.cli.parser import UsageError
from weft.engine.frontend.outputs import RequestOutput
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.engine.llm import LLM
    from weft.planner.execution.forecast import Forecast

logger = logging.getLogger("weft.cli")

EXAMPLE = 'for example: weft run demo "Why is the sky blue?"'
MAX_TOKENS = 512  # a small model may never end its answer; --max-tokens auto removes the limit


def main(arguments: RunArguments) -> int:
    """Print the answer as it grows, or as one JSON object."""
    text, options = read_prompt(arguments), sampling_options(arguments, max_tokens=MAX_TOKENS)
    started = time.monotonic()
    with engine.start_engine(arguments, objective="latency", **engine.random_seed(arguments.engine)) as llm:
        loaded = time.monotonic()
        params = llm.sampling_params(**options)
        prompt = text if arguments.raw else conversation(text, arguments.system_prompt)
        if arguments.show_layout:
            show_layout(llm)
        answer: RequestOutput | None
        if arguments.json:
            *_, answer = llm.stream(prompt, params)
        else:
            answer = print_answer(llm.stream(prompt, params))
        if answer is None or not (arguments.verbose or arguments.json):
            return 0
        expected = predict_engine(llm)
        if arguments.json:
            layout = llm.layout()
            print(json.dumps(report(answer, load_s=loaded - started, layout=layout, expected=expected)))
        if arguments.verbose and expected is not None:
            print("\n".join(compared_lines(llm, expected, answer)), file=sys.stderr)
    return 0


def show_layout(llm: LLM) -> None:
    """Print the rows of `LLM.layout` as a table on standard error."""
    from weft.cli.plan.layout_table import layout_table
    from weft.cli.tables import console

    console(sys.stderr).print(layout_table(llm.layout()))


def print_answer(stream: Iterator[RequestOutput]) -> RequestOutput | None:
    """Print an answer while it grows, then its speed; return it, or None if it has no token."""
    answer = engine.print_stream(stream)
    if answer is not None:
        engine.print_speed(answer)
    return answer


def predict_engine(llm: LLM) -> Forecast | None:
    """The planner's predictions for this engine; None and a warning for hardware that it does not know."""
    try:
        return llm.forecast()
    except ConfigError as error:
        logger.warning("no predictions: %s", error)
        return None


def compared_lines(llm: LLM, expected: Forecast, answer: RequestOutput) -> list[str]:
    """Predicted and real memory, and the speed of the answer if it has several tokens."""
    from weft.planner.execution.forecast import request_report, start_report

    lines, timing = [start_report(expected, llm.capacities, llm.num_blocks)], engine.answer_speed(answer)
    if timing["ttft_s"] and timing["decode_tok_s"]:
        lengths = len(answer.prompt_token_ids), len(answer.outputs[0].token_ids)
        lines.append(
            request_report(
                expected,
                input_len=lengths[0],
                output_len=lengths[1],
                ttft_s=timing["ttft_s"],
                tok_s=timing["decode_tok_s"],
            )
        )
    return lines


def read_prompt(arguments: RunArguments) -> str:
    """The prompt of the typed words, the flag or standard input.

    Raises UsageError for an empty one, unless --raw is given.
    """
    words = " ".join(arguments.prompt_words)
    if words and arguments.prompt is not None:
        raise UsageError(
            f"two prompts: {words!r} and --prompt {arguments.prompt!r}; give one of them", code="two-prompts"
        )
    text = words or (_standard_input() if arguments.prompt is None else arguments.prompt)
    if not text.strip() and not arguments.raw:
        raise UsageError(f"the prompt is empty; {EXAMPLE}", code="empty-prompt")
    return text


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise UsageError(f"no prompt; {EXAMPLE}", code="prompt-missing")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is not valid UTF-8: {error.reason} at byte {error.start}", code="input-not-utf8"
        ) from None


def report(
    answer: RequestOutput, *, load_s: float, layout: list[dict[str, Any]], expected: Forecast | None
) -> dict[str, Any]:
    """The object that --json prints. Times are seconds; decode_tok_s counts the tokens after the first."""
    from weft.planner.execution.forecast import predicted_json

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
        "timing": {"load_s": round(load_s, 4), **engine.answer_speed(answer)},
        "layout": layout,
        "predicted": predicted_json(expected, prompt_tokens, completion_tokens) if expected else None,
    }
