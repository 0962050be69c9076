"""weft chat MODEL."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from weft.cli import engine
from weft.cli.flags import sampling
from weft.core.params import SamplingParams
from weft.errors import RequestError

if TYPE_CHECKING:
    from weft.llm import LLM

HELP = "Ask; /reset forgets what was said, /exit or Ctrl-D ends, Ctrl-C stops an answer."
Messages = list[dict[str, str]]


def main(arguments: Namespace) -> int:
    """Read, answer, remember, until /exit."""
    system = getattr(arguments, "system_prompt", None)
    opening = [{"role": "system", "content": system}] if system else []
    wanted = sampling(arguments, max_tokens=None)
    interactive = sys.stdin.isatty()
    with engine.start(arguments) as llm:
        params = llm.sampling_params(**wanted)
        history = list(opening)
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (arrow keys and history for input())
            print(HELP, file=sys.stderr)
        while (line := read("> " if interactive else "")) not in (None, "/exit", "/quit"):
            if line == "/reset":
                history = list(opening)
                print("forgotten", file=sys.stderr)
            elif line == "/help":
                print(HELP, file=sys.stderr)
            elif line:
                history = answered(llm, history, line, params)
    return 0


def read(prompt: str) -> str | None:
    """The next line, None at the end of input."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None


def answered(llm: LLM, history: Messages, question: str, params: SamplingParams) -> Messages:
    """The conversation with one more question and its answer, printed as it comes; unchanged where there is
    none, because it was stopped before it began or the conversation cannot be served any more."""
    asked = [*history, {"role": "user", "content": question}]
    try:
        answer = engine.show(llm.stream(asked, params), stoppable=True)
    except RequestError as error:
        print(f"weft: error: {error}; /reset starts anew", file=sys.stderr)
        return history
    if answer is None:
        return history
    return [*asked, {"role": "assistant", "content": answer.outputs[0].text}]
