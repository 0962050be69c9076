"""The README and the architecture page say what is on the disk."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.pure.commands import weft

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src/weft"
INSIDE = sorted(SOURCE.rglob("README.md"))  # the pages beside the code
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *INSIDE]
ABOUT_CODE = [ROOT / "docs/architecture.md", ROOT / "docs/extending.md", *INSIDE]


def rooms_on_disk() -> set[str]:
    packages = {f"{path.parent.name}/" for path in SOURCE.glob("*/__init__.py")}
    return packages | {path.name for path in SOURCE.glob("*.py") if not path.name.startswith("__")}


def test_the_readme_tree_matches_the_disk() -> None:
    tree = re.search(r"^src/weft/\n((?: {2}.*\n)+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert tree, "README.md has no tree that starts with src/weft/"
    lines = tree[1].splitlines()
    described = [match[1] for line in lines if (match := re.fullmatch(r"  (\S+) {2,}\S.*", line))]
    assert len(described) == len(lines), "one line per room: its name, two spaces or more, what it holds"
    assert sorted(described) == sorted(rooms_on_disk())


def named_in(page: Path) -> set[str]:
    """Files and packages of src/weft that a page names."""
    text = page.read_text()
    return set(re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|toml|json))?|[a-z_]+\.py)`", text))


@pytest.mark.parametrize("page", ABOUT_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_files_that_exist(page: Path) -> None:
    named = named_in(page)
    assert named, "the page names no package"
    assert {name for name in named if not any((base / name).exists() for base in (SOURCE, ROOT))} == set()


def section_files(section: str) -> set[Path]:
    """Files and folders that the tables and lists of a section of docs/extending.md name."""
    names = re.findall(r"`([\w./]+[/.][\w/]*)`", section)
    return {base / name for name in names for base in (SOURCE, ROOT) if (base / name).exists()}


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


@pytest.mark.parametrize("task", ["A model", "A weight format", "An attention backend", "An endpoint"])
def test_examples_of_extensions_are_commits_that_change_the_named_files(task: str) -> None:
    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("needs the repository's history")
    section = re.split(r"^## ", (ROOT / "docs/extending.md").read_text(), flags=re.MULTILINE)
    text = next(part for part in section if part.startswith(f"{task}\n"))
    commits = re.findall(r"\bcommit ([0-9a-f]{7,40})\b", text)
    assert commits
    for commit in commits:
        changed = {Path(name) for name in git("show", "--format=", "--name-only", commit).split()}
        named = {path.name for path in section_files(text)}  # by their names alone: folders have moved since
        assert len({path for path in changed if named & set(path.parts)}) >= 2, commit


def test_the_architecture_page_names_every_package() -> None:
    assert rooms_on_disk() - named_in(ROOT / "docs/architecture.md") == set()


def test_the_architecture_page_is_short() -> None:
    assert len((ROOT / "docs/architecture.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_scripts_exist(page: Path) -> None:
    text = page.read_text()
    links = {page.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)}
    scripts = {ROOT / script for script in re.findall(r"\bscripts/\w+", text)}
    assert {str(path) for path in links | scripts if not path.exists()} == set()


SHOWN = [
    pytest.param(words, answer, id=f"{page.name}: {words}")
    for page in PAGES
    for words, answer in re.findall(r"```text\n\$ weft (plan .*)\n((?:.*\n)+?)```", page.read_text())
]


@pytest.mark.parametrize(("words", "answer"), SHOWN)
def test_plans_are_what_the_command_prints(words: str, answer: str) -> None:
    assert weft(*shlex.split(words))[1:] == (answer, "")


def test_plans_are_shown() -> None:
    assert len(SHOWN) >= 3


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
