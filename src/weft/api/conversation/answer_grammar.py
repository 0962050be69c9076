"""The grammar of a chat answer: the caller's constraint, the tools that it must call, and its reasoning before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.api.conversation.tools import ToolUse
from weft.api.parsers import harmony
from weft.api.parsers.choose import AnswerFormat
from weft.api.parsers.reasoning import Begin
from weft.api.parsers.rules import Mark, Rules, is_token
from weft.engine.core.params import StructuredOutputsParams
from weft.engine.structured.grammar import BODY, body_of, grammar_text, quoted
from weft.engine.text.tokenizer import Tokenizer


def answer_grammar(
    answer_format: AnswerFormat,
    use: ToolUse,
    wanted: StructuredOutputsParams | None,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    several: bool,
) -> str:
    """The text of the grammar of an answer to a rendered `prompt`; "" if the answer is free.

    `several`: the answer may have more than one tool call. Raises RequestError.
    """
    if not use.forced and wanted is None:
        return ""
    rules = Rules(mark_of(tokenizer))
    calls_free = bool(use.callable) and not use.forced  # the answer is a call, or follows the constraint
    ways = []
    if use.forced or calls_free:
        ways.append(answer_format.tools.calls.rule(rules, use.forced or use.callable, several=several))
    body: Mapping[str, Any] = {"lark_grammar": 'start: ""'}
    if wanted is not None and not use.forced:
        body = body_of(wanted)
        ways.append(_final(rules, answer_format))
    before = _before(rules, answer_format, answer_format.begin(prompt))
    start = f"start: {before} ({' | '.join(ways)})"
    return grammar_text(body, "\n".join([start, *rules.lines])) if wanted and not use.forced else _only(start, rules)


def _only(start: str, rules: Rules) -> str:
    return grammar_text({"lark_grammar": "\n".join([start, *rules.lines])})


def mark_of(tokenizer: Tokenizer) -> Mark:
    """Lark of a mark: its token if it is a special token, else its text."""

    def mark(text: str) -> str:
        id = tokenizer.id(text)
        return f"<[{id}]>" if id is not None and id in tokenizer.special_ids else quoted(text)

    return mark


def _final(rules: Rules, answer_format: AnswerFormat) -> str:
    """The answer itself, with the header that it has in the harmony format."""
    if not answer_format.harmony:
        return f"@{BODY}"
    channel, constrain, message = map(rules.mark, (harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE))
    return rules.add(f'{channel} "final" (" " {constrain} "json")? {message} @{BODY}')


def _before(rules: Rules, answer_format: AnswerFormat, begin: Begin) -> str:
    """The reasoning before the answer, if the model may reason."""
    mark = rules.mark
    if answer_format.harmony:
        channel, message, start = map(mark, (harmony.CHANNEL, harmony.MESSAGE, harmony.START))
        return f'({channel} "analysis" {message} {rules.text_until(harmony.END)} {start} "assistant")?'
    reasoning = answer_format.reasoning
    if reasoning is None or begin is Begin.NONE:
        return ""
    opening, inside = mark(reasoning.start), rules.text_until(reasoning.end)
    if begin is Begin.INSIDE and is_token(opening):  # a model that always reasons may say so
        inside = f"({opening})? {inside}"
    rest = f"{inside} /\\n{{0,2}}/"
    return rest if begin is Begin.INSIDE else f"({opening} {rest})?"
