"""Attacks by schemas, grammars and expressions, over every API that takes some: stacks, states and time without end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from typing import Any

from scripts.programs.abuse.apis import ASKING, MESSAGES, OLLAMA, RESPONSES, tool
from scripts.programs.abuse.bodies import CHAT, COMPLETIONS
from scripts.programs.abuse.case import Attack
from scripts.programs.abuse.stops import SHUT, life
from scripts.programs.abuse.target import CLOSED, RESET, Target

Fields = dict[str, Any]
LINKS = 4000  # of a chain; 900 to 3,000 were enough to overflow the stack of the process
CHOICES = 20_000
LEFT = 60  # clients that leave
STAY_S = 0.2  # of a client that leaves
AT_ONCE = 16
ROUNDS = 4  # of AT_ONCE requests each
PRIME = 99_999_989
GENERATE = "/api/generate"
# A place for large work may be taken by the others.
BUSY = "503 overloaded"


def forced(parameters: Any) -> Fields:
    return {"messages": ASKING, "max_tokens": 2, "tools": [tool(parameters)], "tool_choice": "required"}


def any_tool(parameters: Any) -> Fields:
    tools = [{"name": "f", "input_schema": parameters}]
    return {"messages": ASKING, "max_tokens": 2, "tools": tools, "tool_choice": {"type": "any"}}


def response_format(schema: Any) -> Fields:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"messages": ASKING, "max_tokens": 2, "response_format": form}


def text_format(schema: Any) -> Fields:
    form = {"type": "json_schema", "name": "a", "schema": schema}
    return {"input": "a", "max_output_tokens": 2, "text": {"format": form}}


def output_config(schema: Any) -> Fields:
    return {"messages": ASKING, "max_tokens": 2, "output_config": {"format": {"type": "json_schema", "schema": schema}}}


def ollama(schema: Any) -> Fields:
    return {"stream": False, "format": schema, "options": {"num_predict": 2}}


# Where each API takes a schema.
APIS: dict[str, tuple[str, Callable[[Any], Fields]]] = {
    "completions": (COMPLETIONS, lambda it: {"prompt": "a", "max_tokens": 2, "structured_outputs": {"json": it}}),
    "chat": (CHAT, response_format),
    "chat, tools": (CHAT, forced),
    "responses": (RESPONSES, text_format),
    "messages": (MESSAGES, output_config),
    "messages, tools": (MESSAGES, any_tool),
    "Ollama, chat": (OLLAMA, lambda it: ollama(it) | {"messages": ASKING}),
    "Ollama, generate": (GENERATE, lambda it: ollama(it) | {"prompt": "a"}),
}
# Where a grammar, an expression or choices are taken.
OTHERS: dict[str, tuple[str, Callable[[Fields], Fields]]] = {
    "completions": (COMPLETIONS, lambda it: {"prompt": "a", "max_tokens": 2, "structured_outputs": it}),
    "chat": (CHAT, lambda it: {"messages": ASKING, "max_tokens": 2, "structured_outputs": it}),
}


def linked(link: Callable[[Fields], Any], links: int = LINKS) -> Fields:
    """An object whose field is the first of a chain of definitions, each of which is made of the next."""
    rules = {f"a{n}": link({"$ref": f"#/$defs/a{n + 1}"}) for n in range(links)} | {f"a{links}": {"type": "string"}}
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/a0"}}, "required": ["a"], "$defs": rules}


def chained(rule: Callable[[int], str], last: str, links: int = LINKS) -> Fields:
    """A Lark grammar whose rules lead from one to the next."""
    first = last.format(0).partition(":")[0]
    return {"grammar": "\n".join([f"start: {first}", *map(rule, range(links)), last.format(links)])}


def field(schema: Any) -> Fields:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


CHAINS = {
    "$ref": linked(lambda it: it),
    "allOf": linked(lambda it: {"allOf": [it]}),
    "anyOf": linked(lambda it: {"anyOf": [it, {"type": "integer"}]}),
    "items": linked(lambda it: {"type": "array", "items": it}),
    "objects": linked(lambda it: {"properties": {"a": it}}, 1200),
}
RULES = {
    "two": chained(lambda n: f"r{n}: r{n + 1} r{n + 1}", 'r{0}: "a"'),
    "one": chained(lambda n: f"r{n}: r{n + 1}", 'r{0}: "a"'),
    "texts": chained(lambda n: f'r{n}: "x" r{n + 1} "y"', 'r{0}: "a"'),
    "terminals": chained(lambda n: f'R{n}: "x" R{n + 1}', 'R{0}: "a"', 2 * LINKS),
    "parentheses": {"grammar": "start: " + "(" * LINKS + '"a"' + ' "b")?' * LINKS},
}
MULTIPLES = {"integer": field({"type": "integer", "multipleOf": PRIME})} | {
    "three": field({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949)]})
}
PROPERTIES = {"10,000": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(10_000)}}}
PATTERN = {"pattern": field({"type": "string", "pattern": "^a{1000000000}$"})}
REPETITIONS = {
    "a{1e9}": {"regex": "a{1000000000}"},
    "Lark": {"grammar": 'start: "a"{1,1000000}'},
    "rules": {"grammar": 'start: a{1,1000}\na: b{1,1000}\nb: c{1,1000}\nc: "x"'},
    "nested": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
}
ENTRIES = [f"choice number {n}" for n in range(CHOICES)]
EARLEY = {"grammar": 'start: s\ns: s s s | s s | "a" |'}
WORST = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "structured_outputs": EARLEY}


async def everywhere(
    apis: Mapping[str, tuple[str, Callable[[Any], Fields]]],
    hostile: Mapping[str, Any],
    expected: tuple[str, ...],
    target: Target,
) -> None:
    """Each hostile value over each API, one after the other, and a request that is harmless."""
    model = await model_of(target)
    for kind, value in hostile.items():
        for api, (path, fields) in apis.items():
            body = await asyncio.to_thread(make, model, fields(value))
            target.record(f"{kind} over {api}", await target.post(path, body), expected)
    await harmless(target)


async def model_of(target: Target) -> str:
    """Name of the model, which Anthropic's and Ollama's APIs want."""
    return str(json.loads((await target.get("/v1/models")).body)["data"][0]["id"])


def make(model: str, fields: Fields) -> bytes:
    return json.dumps({"model": model, **fields}).encode()


async def harmless(target: Target) -> None:
    """A grammar that nobody has asked for yet is compiled, and kept to."""
    body = {"prompt": "a", "max_tokens": 8, "structured_outputs": {"regex": f"b{{3}}{next(_FRESH)}"}}
    target.record("a harmless one", await target.post(COMPLETIONS, body), ("200",), says='"text":"bbb')


_FRESH = count(10)


def bombs(number: int) -> Iterable[tuple[str, Fields]]:
    """Small and large ones in turn, none like the one before it: nothing is known of any."""
    for n in range(number):
        path, fields = list(APIS.values())[n % len(APIS)]
        small = field({"type": "integer", "multipleOf": PRIME - 2 * n})
        yield path, fields(small if n % 2 else linked(lambda it: {"allOf": [it]}, LINKS - n))


async def many_times(target: Target) -> None:
    """Many at once, again and again, while others ask for the server's health."""

    async def ask(path: str, body: Fields) -> None:
        target.record(path, await target.post(path, make(model, body)), ("400", BUSY))

    model = await model_of(target)
    asked = list(bombs(AT_ONCE * ROUNDS))
    for start in range(0, len(asked), AT_ONCE):
        asking = asyncio.gather(*(ask(*one) for one in asked[start : start + AT_ONCE]))
        while not asking.done():
            target.record("meanwhile", await target.get("/health/live"), ("200",))
            await asyncio.sleep(0.2)
        await asking
    await harmless(target)


async def leave(target: Target) -> None:
    """Clients that ask and leave after a moment: their work ends, and others are answered."""

    async def ask(path: str, body: Fields) -> None:
        content = make(model, body)
        async with target.connection() as client:
            await client.pour(target.head(path, len(content)) + content, 5)
            await asyncio.sleep(STAY_S)

    model = await model_of(target)
    asked = list(bombs(LEFT))
    for start in range(0, len(asked), AT_ONCE):
        await asyncio.gather(*(ask(*one) for one in asked[start : start + AT_ONCE]))
        target.record("meanwhile", await target.get("/health/live"), ("200",))
    await harmless(target)


async def ambiguous(target: Target) -> None:
    """Answers whose parse has more states with every token, at once."""

    async def ask() -> None:
        target.record("the worst of parses", await target.post(COMPLETIONS, WORST), ("200", "400"))

    await asyncio.gather(*(ask() for _ in range(4)))
    await harmless(target)


async def load(target: Target) -> None:
    """Grammars of every kind for as long as the server lives."""

    async def ask(path: str, body: Fields) -> None:
        target.record(path, await target.post(path, make(model, body)), ("400", SHUT, BUSY, CLOSED, RESET))

    model = await model_of(target)
    try:
        await asyncio.gather(*(ask(*one) for one in bombs(AT_ONCE * ROUNDS)))
    except OSError:
        return  # nobody is there any more


def over(name: str, apis: Any, hostile: Mapping[str, Any], *expected: str) -> Attack:
    return Attack(f"grammar-{name}", "grammars", partial(everywhere, apis, hostile, expected))


ATTACKS = (
    over("chains", APIS, CHAINS, "400"),
    over("rules", OTHERS, RULES, "400"),
    over("multiples", APIS, MULTIPLES, "400"),
    over("properties", APIS, PROPERTIES, "400"),
    over("pattern", APIS, PATTERN, "400", "200"),  # a tool's pattern of that size is left out of account
    over("repetitions", OTHERS, REPETITIONS, "400", "200"),
    over("choices", OTHERS, {"texts": {"choice": ENTRIES}}, "400", "200"),
    over("enum", APIS, {"texts": field({"enum": ENTRIES})}, "400", "200"),
    Attack("grammar-earley", "grammars", ambiguous),
    Attack("grammar-many-times", "grammars", many_times),
    Attack("grammar-clients-leave", "grammars", leave),
)
LIVES = (life("grammars", "grammars", load),)
