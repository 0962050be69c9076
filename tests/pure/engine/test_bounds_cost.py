"""Bounds on grammars cost little themselves, whatever a client sends: they are checked in the server's process."""

from __future__ import annotations

import time

import pytest

from tests.refusals import refuses
from weft.engine.structured.bounds import REACHED, check_lark, check_schema
from weft.errors import RequestError


@pytest.mark.parametrize("text", ["a" * 30_000, '"' + '\\"' * 15_000, "/" + "\\/" * 15_000])
def test_reading_lark_takes_linear_time(text: str) -> None:
    """The regular expression lets no other thread run: quadratic time stopped the server for minutes."""
    began = time.process_time()
    check_lark(text, "grammar")
    assert time.process_time() - began < 1.0


def test_chain_of_rules_is_found_beside_texts_and_expressions() -> None:
    rules = [f'r{n}: "\\"a" /[\\/b"]+/ | r{n + 1} // "' for n in range(300)]
    with refuses(RequestError, "grammar-too-large"):
        check_lark("\n".join(["start: r0", *rules, "r300: A", 'A: "a"']), "grammar")


def test_references_to_parts_inside_each_other_are_bounded() -> None:
    """Each of n references leads to all n: the lists of them filled the server's memory before any limit."""
    schema = {"anyOf": [{"$ref": f"#{number}/anyOf"} for number in range(2_000)]}
    began = time.process_time()
    with refuses(RequestError, "grammar-too-large", f"{REACHED:,}"):
        check_schema(schema, "json")
    assert time.process_time() - began < 3.0
