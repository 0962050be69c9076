"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from scripts import writing

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/weft"
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]


def test_every_room_is_on_one_side_of_torch() -> None:
    contract = next(c for c in TOOLS["importlinter"]["contracts"] if c["name"] == "Torch stays with the ranks")
    free = {name.removeprefix("weft.") for name in contract["source_modules"]}
    torch = {name.removeprefix("weft.") for name in contract["forbidden_modules"] if name.startswith("weft.")}
    rooms = {path.stem for path in SOURCE.glob("*.py")} | {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert free | torch == rooms - {"__init__"}
    assert not free & torch


def test_no_pickle_and_no_remote_code() -> None:
    """No object crosses a process border but as plain data, and no checkpoint brings code along."""
    modules = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    # torch.distributed's object collectives pickle too.
    calls = re.compile(r"\w+_object(_list)?$")
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    bad = any(alias.name.partition(".")[0] in modules for alias in names)
                case ast.ImportFrom(module=module):
                    bad = (module or "").partition(".")[0] in modules
                case ast.keyword(arg=arg):
                    bad = arg == "trust_remote_code"
                case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                    bad = True
                case ast.Attribute(value=ast.Name(id="dist"), attr=attr):
                    bad = calls.match(attr) is not None
                case _:
                    continue
            if bad:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_rules_of_writing_find_what_they_forbid() -> None:
    source = '"""What this is."""\n\ndef f(it):\n    """As before."""\n    return [it for it in ()]\n'
    source += "it = f(lambda it: it)\n"
    assert [line for line, _ in sorted(writing.violations(source))] == [1, 3, 3, 6]
    assert not list(writing.violations('"""Blocks."""\n\nsizes = [len(it) for it in ()]\n'))


def test_the_simulator_uses_the_core_s_public_names() -> None:
    """It runs the scheduler that serves: a private name of the core, or a subclass, would be a second one."""
    named_tuples = {"_replace", "_asdict", "_fields", "_make"}
    found = []
    for path in sorted((SOURCE / "simulate").glob("*.py")):
        tree = ast.parse(path.read_text())
        core = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft.core")
            for alias in node.names
        }
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id="self" | "cls")):
                    bad = False
                case ast.Attribute(attr=attr):
                    bad = attr.startswith("_") and attr not in named_tuples
                case ast.ClassDef(bases=bases):
                    bad = any(isinstance(base, ast.Name) and base.id in core for base in bases)
                case _:
                    continue
            if bad:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
