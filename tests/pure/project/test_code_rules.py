"""Rules of the code that no linter knows."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from scripts import writing

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src/weft"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOLS = PYPROJECT["tool"]


Nodes = dict[Path, list[ast.AST]]


@pytest.fixture(scope="module")
def source_nodes() -> Nodes:
    """Nodes of every file of the source, in breadth-first order."""
    return {path: list(ast.walk(ast.parse(path.read_text()))) for path in sorted(SOURCE.rglob("*.py"))}


def test_every_package_is_on_one_side_of_torch() -> None:
    contract = next(c for c in TOOLS["importlinter"]["contracts"] if c["name"] == "Torch stays with the ranks")
    free = {name.removeprefix("weft.") for name in contract["source_modules"]}
    torch = {name.removeprefix("weft.") for name in contract["forbidden_modules"] if name.startswith("weft.")}
    packages = {path.stem for path in SOURCE.glob("*.py")} | {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert free | torch == packages - {"__init__"}
    assert not free & torch


def test_nothing_names_the_distribution_that_another_project_has() -> None:
    """PyPI's `weft` is somebody else's package."""
    extras = "|".join(map(re.escape, PYPROJECT["project"]["optional-dependencies"]))
    installed = r"pip install\b[^\n|]*[\s'\"]weft(?=[\['\"\s]|$)"
    stranger = re.compile(rf"(?<![\w-])weft\[(?:{extras})\b|{installed}", re.MULTILINE)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    texts = [ROOT / name for name in listed.split("\0") if name.endswith((".py", ".md", ".toml", ".txt", ".sh"))]
    found = {f"{path.relative_to(ROOT)}: {match[0]}" for path in texts for match in stranger.finditer(path.read_text())}
    assert PYPROJECT["project"]["name"] == "weft-llm"
    assert not found


def test_no_pickle_and_no_remote_code(source_nodes: Nodes) -> None:
    """No object crosses a process border but as plain data, and no checkpoint brings code along."""
    modules = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    # torch.distributed's object collectives pickle too.
    calls = re.compile(r"\w+_object(_list)?$")
    found = []
    for path, nodes in source_nodes.items():
        for node in nodes:
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


def test_a_noun_is_unique_inside_what_a_file_imports(source_nodes: Nodes) -> None:
    """A reader of a file meets one class of a name, whichever of the imported modules are looked up."""
    modules = {".".join(path.relative_to(ROOT / "src").with_suffix("").parts): path for path in source_nodes}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    classes = {
        name: {node.name for node in ast.iter_child_nodes(source_nodes[path][0]) if isinstance(node, ast.ClassDef)}
        for name, path in modules.items()
    }
    found = []
    for module, path in modules.items():
        imported = {module}
        for node in source_nodes[path]:
            if isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        owners: dict[str, list[str]] = {}
        for other in sorted(imported & classes.keys()):
            for name in classes[other]:
                if not name.startswith("_"):
                    owners.setdefault(name, []).append(other)
        found += [f"{module}: {name} of {' and '.join(all_)}" for name, all_ in owners.items() if len(all_) > 1]
    assert found == []


def test_a_function_has_a_name_that_grep_finds() -> None:
    source = (
        "def run():\n    def read(): ...\nclass A:\n    async def _write(self): ...\n    def write_row(self): ...\n"
    )
    source += "class JoinedTransport:\n    def write(self): ...\n@triton.jit\ndef _choose(): ...\n"
    assert [line for line, _ in writing.bare_names(source)] == [1, 4]


def test_a_sentence_names_its_subject() -> None:
    source = '"""Blocks. What is free is taken. Of two, one."""\n# Of the user.\nx = 1  # as said. Those of others\n'
    source += "# of one\n"
    assert sorted(line for line, _ in writing.nominal_sentences(source)) == [1, 2, 3]


def test_patterns_of_unclear_sentences_are_counted() -> None:
    source = '"""Blocks.\n\nNobody is beside one. It is\none that waits.\n"""\n# a comment for\n# ever\nx = 1  # anew\n'
    occurrences = [(name, line) for name, line, _ in writing.dialect(source)]
    one = "one without a noun"
    assert occurrences == [("beside", 1), ("nobody", 1), (one, 1), (one, 1), ("for ever", 6), ("anew", 8)]
    source = f'"""{"word " * 35}end.\n\n- {"word " * 20}\n- {"word " * 20}\n"""\n'
    assert [name for name, _, _ in writing.dialect(source)] == ["long sentence"]


def test_a_pattern_may_not_become_more_frequent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = tmp_path / "counts.json"
    monkeypatch.setattr(writing, "COUNTS", counts)
    area = tmp_path / "weft/core"
    area.mkdir(parents=True)
    (area / "a.py").write_text('"""Begin anew."""\n')
    counts.write_text('{"anew": 2, "heed": 0}')
    assert writing.check_dialect(tmp_path / "weft", listed=None, update=True) == 0
    stored = json.loads(counts.read_text())
    assert (stored["anew"], stored["heed"], stored["beside"]) == (1, 0, 0)
    (area / "b.py").write_text('"""Begin anew, heeded."""\n')
    assert writing.check_dialect(tmp_path / "weft", listed=None, update=True) == 1
    assert json.loads(counts.read_text()) == stored
    out = capsys.readouterr().out
    assert "anew: 2 occurrences, at most 1 are allowed; see --list 'anew'; core 2" in out
    assert "b.py:1: heed: Begin anew, heeded." in out


def test_a_variable_says_what_it_holds() -> None:
    source = "def f(said, names):\n    found = said\n    for asked in names: print(found)\n    kept = found\n"
    assert [line for line, _ in writing.vague_variables(source)] == [1, 2, 3]


def test_the_simulator_uses_the_core_s_public_names(source_nodes: Nodes) -> None:
    """It runs the scheduler that serves: a private name of the core, or a subclass, would be a second one."""
    named_tuples = {"_replace", "_asdict", "_fields", "_make"}
    found = []
    for path, nodes in source_nodes.items():
        if path.parent != SOURCE / "simulate":
            continue
        core = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft.engine.core")
            for alias in node.names
        }
        for node in nodes:
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


def test_every_error_carries_a_code(source_nodes: Nodes) -> None:
    """A code is a literal of its own, or comes from the caller or from the error beneath."""
    names = error_classes(node for nodes in source_nodes.values() for node in nodes)
    bad = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, nodes in source_nodes.items()
        for node in nodes
        if isinstance(node, ast.Call) and not carries_code(node, names)
    ]
    assert bad == []


def test_rule_of_codes_finds_what_it_forbids() -> None:
    good = ['ConfigError("x", code="too-many-ranks")', 'ConfigError("x", code=error.code)', 'wrong("x", code="a")']
    bad = ['ConfigError("x")', 'ConfigError("x", code="")', 'errors.PlanError("x")', 'wrong("x", code="Too Many")']
    found = [source for source in good + bad if not carries_code(call_of(source), {"ConfigError", "PlanError"})]
    assert found == bad
    classes = ["class B(A): ...", "class A(WeftError): ...", "class C(list): ..."]
    classes.append("class D(A):\n    def __init__(self, cause): super().__init__(str(cause), code=cause.code)")
    classes.append("class E(D): ...")
    assert error_classes(node for source in classes for node in ast.walk(ast.parse(source))) == {"WeftError", "A", "B"}


def call_of(source: str) -> ast.Call:
    call = ast.parse(source, mode="eval").body
    assert isinstance(call, ast.Call)
    return call


def carries_code(call: ast.Call, names: set[str]) -> bool:
    """Return False for a call of one of the errors without a code, and for any code that is a literal of wrong form."""
    code = next((keyword.value for keyword in call.keywords if keyword.arg == "code"), None)
    if isinstance(code, ast.Constant):
        return isinstance(code.value, str) and re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", code.value) is not None
    return code is not None or called_name(call) not in names


def called_name(call: ast.Call) -> str | None:
    """Return the last part of the dotted name that is called."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return None


def error_classes(nodes: Iterable[ast.AST]) -> set[str]:
    """Names of WeftError and of the classes derived from it, without those that set their code themselves."""
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    own = {node.name for node in classes if sets_its_code(node)}
    names: set[str] = set()
    more = {"WeftError"}
    while more - names:
        names |= more - own
        more = {node.name for node in classes if names & {base.id for base in node.bases if isinstance(base, ast.Name)}}
        more -= own
    return names


def sets_its_code(node: ast.ClassDef) -> bool:
    """Return True for a class whose constructor takes no code."""
    return any(
        isinstance(part, ast.FunctionDef)
        and part.name == "__init__"
        and not any(argument.arg == "code" for argument in (*part.args.args, *part.args.kwonlyargs))
        for part in node.body
    )
