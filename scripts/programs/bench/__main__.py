"""`scripts/bench [NAME] [WORD...]`: Weft on this machine, by a benchmark or, without a name, by the suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def main(words: Sequence[str]) -> int:
    if words and words[0] in ("-h", "--help"):
        print("usage: scripts/bench [NAME] [WORD...]\n\nWithout a NAME the suite runs. NAME --help: its flags.\n")
        print("\n".join(listed()))
        return 0
    if words and not words[0].startswith("-"):
        print(f"scripts/bench: error: {words[0]!r} is no benchmark; scripts/bench --help lists them", file=sys.stderr)
        return 2
    # Only now: the list needs no package.
    from weft.study.bench.__main__ import main as run_suite

    return run_suite(words)


def listed() -> Iterator[str]:
    """Name of each benchmark, and the summary in its module's first line."""
    for path in sorted(Path(__file__).parent.glob("*/__main__.py")):
        with path.open() as file:
            summary = file.readline().partition(": ")[2].strip().removesuffix('"""')
        yield f"  {path.parent.name.replace('_', '-'):18}{summary}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
