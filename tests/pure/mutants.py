"""Mutants: copies of the source with one small fault each, to see whether the tests notice it.

`python -m tests.pure.mutants` draws them, runs each against the tests of its module, and writes which were killed to
tests/data/mutants.json; a run that was broken off goes on where it ended. A mutant is named by its package, file,
function, kind and ordinal among the faults of this kind in the function, so that it is found again wherever the line
lies.
"""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TESTS = Path(__file__).parent
RECORDED = ROOT / "tests/data/mutants.json"
# By the name that it had in 0.1.0, each package's folders.
PACKAGES = {
    "core": ("engine/core",),
    "plan": ("plan",),
    "gateway": ("fleet/gateway", "fleet/upstreams", "fleet/accounts"),
    "structured": ("engine/structured",),
}
SEED, OF_EACH_PACKAGE = 1, 15
LIMIT_S = 900.0  # a mutant that runs for longer than this does not end, and is killed

SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


class Mutant(NamedTuple):
    """One fault of the source."""

    package: str
    file: str
    function: str
    kind: str
    ordinal: int


Fault = tuple[str, str, Callable[[], None]]  # function, kind, and what puts it into the tree


def package_files(package: str) -> list[Path]:
    """The files of a package, by their names."""
    folders = (ROOT / "src/weft" / folder for folder in PACKAGES[package])
    return sorted((path for folder in folders for path in folder.glob("*.py")), key=lambda path: path.name)


def file_of(mutant: Mutant) -> Path:
    return next(path for path in package_files(mutant.package) if path.name == mutant.file)


def add_one(node: ast.Constant) -> None:
    assert isinstance(node.value, int)
    node.value += 1


def swap_comparison(node: ast.Compare) -> None:
    node.ops[0] = SWAPPED[type(node.ops[0])]()


def swap_boolean(node: ast.BoolOp) -> None:
    node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()


def remove(node: ast.stmt, statements: list[ast.stmt]) -> None:
    """Leave out a statement; a function returns nothing instead of its value."""
    replaced = ast.Return() if isinstance(node, ast.Return) else ast.Pass()
    statements[statements.index(node)] = ast.copy_location(replaced, node)


def faults_of(node: ast.AST, function: str) -> Iterator[Fault]:
    """Faults of one node itself."""
    if isinstance(node, ast.Compare):
        yield function, "comparison", lambda: swap_comparison(node)
    elif isinstance(node, ast.BoolOp):
        yield function, "boolean", lambda: swap_boolean(node)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield function, "constant", lambda: add_one(node)


def removals(node: ast.AST, function: str) -> Iterator[Fault]:
    """Faults by which one of a node's statements is missing: a call, an assignment in place, a value returned."""
    for statements in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
        for statement in statements if isinstance(statements, list) else ():
            is_call = isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant)
            is_return = isinstance(statement, ast.Return) and statement.value is not None
            if is_call or is_return or isinstance(statement, ast.AugAssign):
                yield function, "removal", partial(remove, statement, statements)


def faults(node: ast.AST, function: str = "") -> Iterator[Fault]:
    """All faults within functions, from the first line to the last."""
    if function:
        yield from faults_of(node, function)
        yield from removals(node, function)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from faults(child, f"{function}.{child.name}".lstrip("."))
        else:
            yield from faults(child, function)


def mutants_of(tree: ast.Module, package: str, file: str) -> dict[Mutant, Callable[[], None]]:
    """Every mutant of a file, and what puts it into the tree."""
    made: dict[Mutant, Callable[[], None]] = {}
    numbers: dict[tuple[str, str], int] = defaultdict(int)
    for function, kind, change in faults(tree):
        made[Mutant(package, file, function, kind, numbers[function, kind])] = change
        numbers[function, kind] += 1
    return made


def draw() -> list[Mutant]:
    """Draw as many mutants of each package, the same ones for the same source."""
    drawn: list[Mutant] = []
    for package in PACKAGES:
        every: list[Mutant] = []
        for path in package_files(package):
            every += mutants_of(ast.parse(path.read_text(encoding="utf-8")), package, path.name)
        drawn += random.Random(f"{SEED} {package}").sample(every, OF_EACH_PACKAGE)
    return drawn


@cache
def imported_names(path: Path) -> frozenset[str]:
    """Dotted names that a file imports: modules, and what is imported from them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def dotted(path: Path) -> str:
    base = ROOT / "src" if path.is_relative_to(ROOT / "src") else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts)


def covering_tests(module: Path) -> list[Path]:
    """Test files that import a module, themselves or by a helper; where none does, those that import its users."""
    files = [*TESTS.rglob("*.py"), *(ROOT / "src/weft").rglob("*.py")]
    reached, new = {module}, {module}
    while new:
        tests = sorted(path for path in reached if path.name.startswith("test_"))
        helpers = {path for path in new if path.is_relative_to(TESTS)}
        sources = set() if tests or helpers else new
        names = {dotted(path) for path in helpers | sources | ({module} & new)}
        new = {path for path in files if path not in reached and imported_names(path) & names}
        if tests or any(path.is_relative_to(TESTS) for path in new):
            new = {path for path in new if path.is_relative_to(TESTS)}
        reached |= new
    return sorted(path for path in reached if path.name.startswith("test_"))


def is_killed(mutant: Mutant) -> bool:
    """Run the tests of a mutant's module with a copy of the source that holds it."""
    module = file_of(mutant)
    tree = ast.parse(module.read_text(encoding="utf-8"))
    change = mutants_of(tree, mutant.package, mutant.file).get(mutant)
    if change is None:
        raise LookupError(f"{mutant} is no longer there: draw another one of its file in its place")
    change()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        (copy / module.relative_to(ROOT / "src")).write_text(ast.unparse(tree), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-qx", "--tb=no", "-p", "no:cacheprovider"]
        command += map(str, covering_tests(module))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(copy), str(ROOT)])}
        try:
            ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return True
        if ended.returncode not in (0, 1, 2):
            raise RuntimeError(f"pytest ended with {ended.returncode}: {ended.stdout.decode()[-2000:]}")
        return ended.returncode != 0


def recorded() -> list[tuple[Mutant, bool]]:
    """Mutants of the first version with whether they were killed."""
    if not RECORDED.exists():
        return []
    return [(Mutant(*row[:-1]), row[-1]) for row in json.loads(RECORDED.read_text(encoding="utf-8"))]


def main() -> None:
    done = recorded()
    # Those with few tests first: what a broken run has cost is small.
    for mutant in sorted(draw(), key=lambda it: len(covering_tests(file_of(it)))):
        if mutant not in dict(done):
            done.append((mutant, is_killed(mutant)))
            print(*done[-1], flush=True)
            rows = ",\n".join(json.dumps([*it, killed]) for it, killed in done)
            RECORDED.write_text(f"[\n{rows}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
