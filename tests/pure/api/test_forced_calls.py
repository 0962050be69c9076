"""Tool calls that a grammar enforces, in every family: whatever a model samples, the parser reads valid calls of it."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import NamedTuple

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

from tests.pure.api.test_parsers import CASES, said
from tests.pure.api.test_parsers import TOOLS as GOLDEN_TOOLS
from weft.api.conversation.answer_grammar import answer_grammar
from weft.api.conversation.tools import ToolUse
from weft.api.parsers.choose import FORMATS, REASONING_FORMATS, AnswerFormat, ToolFormat
from weft.engine.core.grammar import Matcher
from weft.engine.sandbox.isolated import run_blocking
from weft.engine.structured.compiler import GrammarCompiler
from weft.engine.structured.examiner import GrammarExaminer
from weft.engine.text.byte_level import ALPHABET, build_byte_level
from weft.engine.text.pretokenizers import GPT2
from weft.engine.text.settings import TokenizerSettings
from weft.engine.text.tokenizer import Tokenizer
from weft.errors import RequestError

# One of each grammar: some families have two forms.
FAMILIES = {f"{item.name} {number}": item for number, item in enumerate({id(f.calls): f for f in FORMATS}.values())}
BOUNDED = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["a b", 'say "x"', "5"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
        "short": {"type": "string", "minLength": 2, "maxLength": 6},
        "level": {"enum": [1, 2, "max", None]},
        "place": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
        "near": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        "share": {"type": "number", "minimum": 0, "maximum": 1},
        "exact": {"type": "boolean"},
        "unit": {"const": "m"},
        "form": {"enum": [{"a": [1, "x"], "b": {}}, ["y", None]]},
    },
    "required": ["kind", "code", "short", "level", "place", "tags", "near", "unit", "form"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 5}, "at": {"type": "integer", "maximum": 99}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [*GOLDEN_TOOLS, {"type": "function", "function": {"name": "bounded", "parameters": BOUNDED}}]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
END = "<end of the answer>"
# Ends of texts, values and calls.
CLOSINGS = ["\n</parameter>\n", "</arg_value>", "<escape>", '<|"|>', "<|end|>", *"\"'}])"]
MAX_ANSWER_TOKENS = 3000  # tokens of an answer
WALKS = 2


class Vocabulary(NamedTuple):
    """Bytes as tokens, and the marks of a format as special ones if `special`."""

    tokenizer: Tokenizer
    compiler: GrammarCompiler
    examiner: GrammarExaminer
    size: int


@cache
def vocabulary(marks: tuple[str, ...], special: bool) -> Vocabulary:
    hf_tokenizer = build_byte_level(
        {char: byte for byte, char in enumerate(ALPHABET)}, [], GPT2.create_pre_tokenizer(), whole_words=False
    )
    texts = (*marks, END) if special else (END,)
    hf_tokenizer.add_special_tokens([AddedToken(text, special=True) for text in dict.fromkeys(texts)])
    tokenizer = Tokenizer(hf_tokenizer, TokenizerSettings(tokens={"eos_token": END}))
    size, end = tokenizer.vocab_size, tokenizer.id(END)
    assert end is not None
    compiler, examiner = (kind(lambda: tokenizer, size, (end,)) for kind in (GrammarCompiler, GrammarExaminer))
    return Vocabulary(tokenizer, compiler, examiner, size)


def begin(chosen: AnswerFormat, use: ToolUse, words: Vocabulary, prompt: str = "", several: bool = True) -> Matcher:
    def make() -> str:
        return answer_grammar(chosen, use, None, words.tokenizer, prompt, several=several)

    grammar = run_blocking(words.examiner.build(make))
    run_blocking(words.examiner.check(grammar))
    return words.compiler.compile(grammar, []).result()


def allowed(matcher: Matcher, words: Vocabulary) -> list[int]:
    (mask,) = words.compiler.masks([(matcher, [])])
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: words.size]
    return [int(id) for id in np.flatnonzero(bits)]


def walk(matcher: Matcher, words: Vocabulary, draw: random.Random) -> str:
    """The text of an answer that a model without sense would give, which begins to close what is open after a while."""
    tokenizer, ids = words.tokenizer, list[int]()
    closings = [tokenizer.encode(text, add_special_tokens=False) for text in CLOSINGS]
    while not matcher.ended and len(ids) < MAX_ANSWER_TOKENS and tokenizer.eos_id not in ids:
        closing = [run for run in closings if matcher.count_valid(run) == len(run)]
        if closing and draw.random() < 0.15 + len(ids) / MAX_ANSWER_TOKENS:
            run = draw.choice(closing)
        else:
            free = allowed(matcher, words)
            ends = tokenizer.eos_id in free and draw.random() < 0.5
            run = [tokenizer.eos_id if ends and tokenizer.eos_id is not None else draw.choice(free)]
        for id in run:
            matcher.accept(id)
            assert matcher.error is None
        ids += run
    assert len(ids) < MAX_ANSWER_TOKENS, tokenizer.decode(ids)[-300:]
    return tokenizer.decode([id for id in ids if id != tokenizer.eos_id], skip_special_tokens=False)


def check_calls(chosen: AnswerFormat, text: str, names: set[str], most: int) -> None:
    """Check that there are 1 to `most` calls in a text, all of them valid, and nothing beside them."""
    parser = chosen.parser("", TOOLS)
    assert parser is not None
    content, _, calls = said(parser.push(text) + parser.finish())
    assert not content.strip() and 1 <= len(calls) <= most, text
    for _, name, arguments in calls:
        assert name in names, text
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("special", [True, False], ids=["marks are tokens", "marks are text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_model_calls_tools(family: str, special: bool) -> None:
    item = FAMILIES[family]
    chosen, words = AnswerFormat(item), vocabulary(tuple(item.marks), special)
    draw = random.Random(family)
    for number in range(WALKS):
        matcher = begin(chosen, ToolUse(TOOLS, "required"), words)
        check_calls(chosen, walk(matcher, words, draw), set(SCHEMAS), MAX_ANSWER_TOKENS)
        matcher = begin(chosen, ToolUse(TOOLS, "required"), words, several=False)
        check_calls(chosen, walk(matcher, words, draw), set(SCHEMAS), 1)
        named = list(SCHEMAS)[number % len(SCHEMAS)]
        matcher = begin(chosen, ToolUse(TOOLS, "required", named), words, several=False)
        check_calls(chosen, walk(matcher, words, draw), {named}, 1)


# With strings as these models write them, which are no JSON.
PYTHONIC = [("[get_weather(city='Köln', days=3)]", 1), ("[now(), get_weather(city='Köln \\'Süd\\'', days=3)]", 2)]


def golden_calls(item: ToolFormat) -> list[tuple[str, int]]:
    """Golden answers of a family, without the text before their calls, and the number of these."""
    cases = [case.values[1] for case in CASES if case.values[0] == item.name]
    plain = [case for case in cases if "reasoning_parser" not in case and case["calls"]]
    texts = [(case["text"].removeprefix(case["content"]).lstrip(), len(case["calls"])) for case in plain]
    return [*texts, *(PYTHONIC if item.name == "pythonic" else ())]


@pytest.mark.parametrize("special", [True, False], ids=["marks are tokens", "marks are text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_that_a_model_has_learnt_is_in_the_grammar(family: str, special: bool) -> None:
    """A model that is forced to call tools can do so as it would by itself."""
    item = FAMILIES[family]
    words, followed = vocabulary(tuple(item.marks), special), set()
    for text, calls in golden_calls(item):
        matcher = begin(AnswerFormat(item), ToolUse(TOOLS, "required"), words)
        ids = words.tokenizer.encode(text, add_special_tokens=False)
        ends = ids[-1] in words.tokenizer.end_ids  # as gpt-oss's calls do: nothing follows one
        if matcher.count_valid(ids) == len(ids) - ends:
            followed.add(calls)
    assert 1 in followed and (max(followed) > 1 or item.name == "openai"), followed


@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
def test_reasoning_comes_before_a_forced_call(reasoning: str) -> None:
    format_ = REASONING_FORMATS[reasoning]
    item = next(f for f in FORMATS if f.name == ("openai" if reasoning == "openai_gptoss" else "hermes"))
    chosen = AnswerFormat(item, format_)
    words = vocabulary(tuple(chosen.marks), True)
    golden = {
        "openai_gptoss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
        "mistral": '[THINK]Hm <b>.[/THINK]<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    }.get(reasoning, '<think>Hm <b>.</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    matcher = begin(chosen, ToolUse(TOOLS, "required"), words)
    ids = words.tokenizer.encode(golden, add_special_tokens=False)
    assert matcher.count_valid(ids) == len(ids) - (ids[-1] in words.tokenizer.end_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_schema_that_cannot_be_compiled_is_refused(family: str) -> None:
    item = FAMILIES[family]
    bad = {"type": "object", "properties": {"x": {"type": "objekt"}}, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "bad", "parameters": bad}}]
    words = vocabulary(tuple(item.marks), True)
    with pytest.raises(RequestError) as caught:
        begin(AnswerFormat(item), ToolUse(tools, "required"), words)
    assert caught.value.code == "invalid-grammar"
