"""Rules of writing that no linter knows: `python -m scripts.writing FOLDER...` prints every place that breaks one.

A docstring begins with a noun phrase or an imperative verb, never with a relative or interrogative word. A variable has
a name that says what it holds, so `it` is allowed in comprehensions and lambdas only. A function of the program has a
name that grep finds: a bare verb such as `read` is allowed in tests, and within a function, only.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FORBIDDEN = re.compile(r"\s*(Of|What|Whether|Those|That|Where|Who|How|Which|Is|As)\b")
BARE_NAME = re.compile(r"_?(choose|known|made|read|run|table|write)")
VAGUE_VARIABLES = {"asked", "found", "said", "told"}
STAND_INS = {"JoinedTransport"}  # classes whose methods have the names of another library's
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SENTENCE = re.compile(r"(?:^|(?<=[.!?] ))(Of|Those|What|Whether)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SHORT = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)  # scopes of one line


def violations(source: str) -> Iterator[tuple[int, str]]:
    """Line and complaint of every violation in a Python source."""
    tree = ast.parse(source)
    inside = {id(node) for scope in ast.walk(tree) if isinstance(scope, SHORT) for node in ast.walk(scope)}
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED):
            docstring = ast.get_docstring(node) or ""
            if match := FORBIDDEN.match(docstring):
                line = 1 if isinstance(node, ast.Module) else node.lineno
                yield line, f"a docstring begins with {match[1]!r}: begin with a noun phrase or an imperative verb"
        elif isinstance(node, (ast.Name, ast.arg)) and id(node) not in inside:
            name = node.id if isinstance(node, ast.Name) else node.arg
            if name == "it":
                yield node.lineno, "a variable is called 'it': name what it holds"


def nominal_sentences(source: str) -> Iterator[tuple[int, str]]:
    """Line and complaint of every sentence of a docstring or comment whose subject is a relative clause."""
    texts = [
        (getattr(node, "lineno", 1), " ".join((ast.get_docstring(node) or "").split()))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, DOCUMENTED)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [(token.start[0], token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT]
    for line, text in texts:
        if match := SENTENCE.search(text):
            yield line, f"a sentence begins with {match[1]!r}: name its subject"


def bare_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and complaint of every function or method of a module whose name is a bare verb."""
    tree = ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name not in STAND_INS]
    scopes: list[ast.Module | ast.ClassDef] = [tree, *classes]
    for scope in scopes:
        for node in scope.body:
            is_kernel = isinstance(node, FUNCTIONS) and any("jit" in ast.unparse(mark) for mark in node.decorator_list)
            if isinstance(node, FUNCTIONS) and BARE_NAME.fullmatch(node.name) and not is_kernel:
                yield node.lineno, f"a function is called {node.name!r}: name what is read, run or chosen"


def vague_variables(source: str) -> Iterator[tuple[int, str]]:
    """Line and complaint of every variable whose name says only where its value comes from."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name in VAGUE_VARIABLES:
            yield node.lineno, f"a variable is called {name!r}: name what it holds"


def main() -> int:
    status = 0
    for folder in sys.argv[1:]:
        for path in sorted(Path(folder).rglob("*.py")):
            source = path.read_text()
            complaints = [*violations(source)]
            if path.parts[0] != "tests":
                complaints += [*bare_names(source), *nominal_sentences(source)]
            if path.parts[0] == "src":
                complaints += vague_variables(source)
            for line, complaint in sorted(complaints):
                print(f"{path}:{line}: {complaint}")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
