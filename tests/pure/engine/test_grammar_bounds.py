"""Grammars that crash or never leave the library: refused by bounds or by a child process, within its limits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest

from tests.pure.letters import frontend
from tests.refusals import refuses
from weft.engine.core.params import SamplingParams
from weft.engine.sandbox.isolated import run_blocking
from weft.engine.sandbox.limits import Limits
from weft.engine.structured import examiner
from weft.engine.structured.bounds import CHAIN, check_lark, check_schema, longest_chain
from weft.errors import RequestError


def chained(count: int, wrap: str = "object") -> dict[str, Any]:
    """A schema of definitions that refer to one another, one after the other."""
    links: dict[str, Any] = {}
    for number in range(count):
        link: Any = {"$ref": f"#/$defs/a{number + 1}"}
        if wrap == "object":
            link = {"type": "object", "properties": {"x": link}}
        elif wrap != "plain":
            link = {wrap: [link]} if wrap.endswith("Of") else {"type": "array", wrap: link}
        links[f"a{number}"] = link
    return {"$defs": {**links, f"a{count}": {"type": "integer"}}, "$ref": "#/$defs/a0"}


def rules(count: int, form: str = "r{0}: r{1} r{1}", last: str = 'r{0}: "a"') -> str:
    body = "\n".join(form.format(number, number + 1) for number in range(count))
    return f"start: {form[0]}0\n{body}\n{last.format(count)}"


def check(**wanted: Any) -> str:
    return run_blocking(frontend().answer_grammar(SamplingParams(structured_outputs=wanted)))


@pytest.mark.parametrize("wrap", ["object", "plain", "allOf", "anyOf", "items", "additionalProperties"])
def test_chains_of_references(wrap: str) -> None:
    with refuses(RequestError, "grammar-too-large"):
        check_schema(chained(3000, wrap), "p")
    check_schema(chained(CHAIN - 2, wrap), "p")


def test_chains_that_go_through_other_places_of_a_schema() -> None:
    """References may name any part, also one without a definition."""
    parts = {f"p{n}": {"type": "array", "items": {"$ref": f"#/properties/p{n + 1}"}} for n in range(1000)}
    with refuses(RequestError, "grammar-too-large"):
        check_schema({"type": "object", "properties": {**parts, "p1000": {}}}, "p")


@pytest.mark.parametrize(
    ("form", "last"),
    [("r{0}: r{1} r{1}", 'r{0}: "a"'), ("T{0}: T{1} T{1}", 'T{0}: "a"'), ("r{0} : (r{1} | /x/)*", 'r{0}: "a"')],
    ids=["rules", "terminals", "groups"],
)
def test_chains_of_rules(form: str, last: str) -> None:
    with refuses(RequestError, "grammar-too-large"):
        check(grammar=rules(3000, form, last))
    check_lark(rules(CHAIN - 2, form, last), "p")


def test_names_in_texts_and_comments_are_no_references() -> None:
    lines = [f'r{n}: "r{n + 1}" /r{n + 1}/ // r{n + 1}' for n in range(1000)]
    check_lark("\n".join(["start: r0", *lines]), "p")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 99_999_989},
        {"type": "integer", "multipleOf": 99_990_000},
        {"type": "number", "multipleOf": 9999.9999},
        {"type": "object", "properties": {f"p{n}": {} for n in range(10_000)}},
        {"enum": list(range(60_000))},
        {"$defs": {f"d{n}": {} for n in range(3000)}},
        # Those are objects, and so are those of their own parts.
        {"anyOf": [{"type": "object", "properties": {f"p{n}": {} for n in range(1500)}}] * 2},
    ],
    ids=["prime", "tens", "decimal", "properties", "enum", "definitions", "parts"],
)
def test_schemas_that_are_too_large(schema: dict[str, Any]) -> None:
    with refuses(RequestError, "grammar-too-large"):
        check_schema(schema, "p")


def test_a_schema_that_is_nested_too_deeply() -> None:
    schema: Any = {}
    for _ in range(5000):
        schema = {"items": schema}
    with refuses(RequestError, "grammar-too-large"):
        check_schema(schema, "p")
    while schema:  # Python would free it by recursion
        schema = schema["items"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 86_400},
        {"type": "integer", "multipleOf": 1_000_000},
        {"type": "number", "multipleOf": 0.01},
        {"type": "string", "maxLength": 2**31 - 1},
        {"type": "array", "maxItems": 10**9},
        {
            "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
            "$ref": "#/$defs/node",
        },
        {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(300)}},
        chained(100),
    ],
    ids=["seconds of a day", "million", "cents", "length", "items", "recursive", "properties", "chain"],
)
def test_schemas_of_real_clients_pass(schema: dict[str, Any]) -> None:
    assert "json_schema" in check(json=schema)


def test_many_choices_are_one_terminal() -> None:
    """Alternatives of a rule are states of the parse, of which the library allows few."""
    assert "CHOICE" in check(choice=[f"choice number {number}" for number in range(20_000)])


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "a{1000000000}"},
        {"grammar": "start: " + " | ".join(f'"number {n}"' for n in range(20_000))},
        {"json": {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1900)}}},
    ],
    ids=["repetition", "alternatives", "optional properties"],
)
def test_grammars_that_fail_at_their_first_tokens_are_refused_before(wanted: dict[str, Any]) -> None:
    with refuses(RequestError, "invalid-grammar"):
        check(**wanted)


def test_a_grammar_that_does_not_end_costs_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examiner, "LIMITS", Limits(cpu_s=1, wall_s=20.0, memory=512 << 20, stack=4 << 20))
    steps = {"allOf": [{"type": "integer", "multipleOf": number} for number in (9973, 9967)]}
    front = frontend()
    for _ in range(2):  # the verdict is not kept: the machine may have been busy
        with refuses(RequestError, "grammar-too-complex"):
            run_blocking(front.answer_grammar(SamplingParams(structured_outputs={"json": steps})))
    assert run_blocking(front.answer_grammar(SamplingParams(structured_outputs={"json": {"type": "integer"}})))


def test_verdicts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    front = frontend()
    good, bad = ({"json": {"type": kind}} for kind in ("integer", "intege"))
    for _ in range(2):
        run_blocking(front.answer_grammar(SamplingParams(structured_outputs=good)))
        with refuses(RequestError, "invalid-grammar") as caught:
            run_blocking(front.answer_grammar(SamplingParams(structured_outputs=bad)))
        assert caught.value.param == "structured_outputs"
        monkeypatch.setattr(front.examiner._isolated, "call", None)  # asked no more


def longest_path(graph: Mapping[str, list[str]]) -> int:
    """Nodes on the longest way through a graph without circles, by trying all."""

    def length(node: str) -> int:
        return 1 + max((length(target) for target in graph[node]), default=0)

    return max(map(length, graph), default=0)


def test_the_longest_chain_is_that_of_all_ways() -> None:
    draw = random.Random(5)
    for _ in range(200):
        names = [str(number) for number in range(draw.randrange(1, 9))]
        pairs = [pair for pair in itertools.combinations(names, 2) if draw.random() < 0.3]
        graph = {name: [target for source, target in pairs if source == name] for name in names}
        assert longest_chain(graph) == longest_path(graph)
        circle = {**graph, names[-1]: [names[0]]}
        assert longest_chain(graph) <= longest_chain(circle) <= len(names)
    assert longest_chain({str(n): [str((n + 1) % 500)] for n in range(500)}) == 500
