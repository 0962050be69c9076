"""The tests find the faults that those of the first version found, whatever became faster in between."""

from __future__ import annotations

import ast

import pytest

from tests.pure.mutants import Mutant, is_killed, mutants_of, recorded

SOURCE = """
def f(a, b):
    g(a)
    if a < 1 and b:
        return b
"""


def test_every_fault_is_one_change() -> None:
    changed = {}
    for mutant in mutants_of(ast.parse(SOURCE), "p", "m.py"):
        tree = ast.parse(SOURCE)
        mutants_of(tree, "p", "m.py")[mutant]()
        changed[mutant[2:]] = ast.unparse(tree).splitlines()[1:]
    assert changed == {
        ("f", "comparison", 0): ["    g(a)", "    if a <= 1 and b:", "        return b"],
        ("f", "constant", 0): ["    g(a)", "    if a < 2 and b:", "        return b"],
        ("f", "boolean", 0): ["    g(a)", "    if a < 1 or b:", "        return b"],
        ("f", "removal", 0): ["    pass", "    if a < 1 and b:", "        return b"],
        ("f", "removal", 1): ["    g(a)", "    if a < 1 and b:", "        return"],
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "mutant", [mutant for mutant, killed in recorded() if killed], ids=lambda it: "-".join(map(str, it))
)
def test_each_that_was_killed_is_killed(mutant: Mutant) -> None:
    assert is_killed(mutant)
