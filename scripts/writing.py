"""Rules of writing that no linter knows: `python -m scripts.writing FOLDER...` prints every violation.

- A docstring begins with a noun phrase or an imperative verb, never with a relative or interrogative word.
- A variable has a name that says what it holds, so `it` is allowed in comprehensions and lambdas only.
- A function of the program has a name that grep finds: a bare verb such as `read` is allowed only in tests and within
  a function.
- Docstrings and comments of src are plain technical English: the PATTERNS may not become more frequent than
  writing_counts.json says. `--update` lowers the counts in that file, and `--list PATTERN` prints the occurrences. A
  pattern with the count 0 is forbidden, and its occurrences are printed without a flag.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
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
COUNTS = Path(__file__).with_name("writing_counts.json")
LONGEST = 35  # words of a sentence
LONG = "long sentence"
RELATIVE = "that|which|who|whose"
PATTERNS = {
    name: re.compile(rf"\b(?:{pattern})", re.IGNORECASE)
    for name, pattern in {
        "anew": r"anew\b",
        "beside": r"beside\b",
        "for ever": r"for ever\b",
        "heed": r"heed",
        "ill": r"ill\b",
        "meanwhile": r"meanwhile\b",
        "nobody": r"nobody\b",
        "one without a noun": rf"one(?: (?:{RELATIVE}|with|without|for|from|behind|is|has|had|may|can|must)\b|[.,;:)])",
        "so many": r"so many\b",
        "that of": r"that of\b",
        "those": rf"those (?:of|{RELATIVE}|with|without|in|for|at|on|to|from|behind|before)\b",
    }.items()
}


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


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """First line and text of every comment; comments on successive lines of their own are one text."""
    first, last, column, words = 0, 0, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("# ")
        whole = not token.line[: token.start[1]].strip()
        if words and whole and (last + 1, column) == token.start:
            words.append(text)
        else:
            if words:
                yield first, " ".join(words)
            first, words = line, [text]
        last, column = line, token.start[1] if whole else -1
    if words:
        yield first, " ".join(words)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text; paragraphs and entries of a list end a sentence."""
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", text):
        yield from re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()))


def dialect(source: str) -> Iterator[tuple[str, int, str]]:
    """Pattern, line and sentence of every occurrence of the PATTERNS, and of every sentence that is too long."""
    for line, text in [*docstrings(source), *comments(source)]:
        for sentence in sentences(text):
            if len(sentence.split()) > LONGEST:
                yield LONG, line, sentence
            for name, pattern in PATTERNS.items():
                for _ in pattern.finditer(sentence):
                    yield name, line, sentence


def check_dialect(folder: Path, *, listed: str | None, update: bool) -> int:
    """Compare the counts of the patterns in a package with the stored ones. Return 1 if one is higher, else 0."""
    stored: dict[str, int] = json.loads(COUNTS.read_text())
    occurrences: dict[str, list[tuple[str, str]]] = {name: [] for name in (*PATTERNS, LONG)}
    for path in sorted(folder.rglob("*.py")):
        area = path.relative_to(folder).parts[0]
        for name, line, sentence in dialect(path.read_text()):
            occurrences[name].append((area, f"{path}:{line}: {name}: {sentence}"))
    status = 0
    for name, places in occurrences.items():
        most = stored.setdefault(name, len(places))
        if name == listed or most == 0:
            print(*(text for _, text in places), sep="\n", end="\n" if places else "")
        if len(places) > most:
            areas = ", ".join(f"{area} {count}" for area, count in Counter(area for area, _ in places).most_common())
            print(f"{name}: {len(places)} occurrences, at most {most} are allowed; see --list {name!r}; {areas}")
            status = 1
        stored[name] = min(most, len(places))
    if update:
        COUNTS.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
    return status


def nominal_sentences(source: str) -> Iterator[tuple[int, str]]:
    """Line and complaint of every sentence of a docstring or comment whose subject is a relative clause."""
    texts = [(line, " ".join(text.split())) for line, text in docstrings(source)]
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


def complaints(path: Path) -> list[tuple[int, str]]:
    """Line and complaint of every violation of the rules in a file, the PATTERNS apart."""
    source = path.read_text()
    lines = [*violations(source)]
    if path.parts[0] != "tests":
        lines += [*bare_names(source), *nominal_sentences(source)]
    if path.parts[0] == "src":
        lines += vague_variables(source)
    return sorted(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Print every violation of the rules of writing.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--update", action="store_true", help="lower the counts of the patterns to those of src/weft")
    parser.add_argument("--list", choices=[*PATTERNS, LONG], metavar="PATTERN", help="print a pattern's occurrences")
    arguments = parser.parse_args()
    status = 0
    for folder in arguments.folders:
        for path in sorted(folder.rglob("*.py")):
            for line, complaint in complaints(path):
                print(f"{path}:{line}: {complaint}")
                status = 1
        if folder.parts[0] == "src":
            status |= check_dialect(folder / "weft", listed=arguments.list, update=arguments.update)
    return status


if __name__ == "__main__":
    sys.exit(main())
