"""`scripts/sass`; see `scripts/sass --help`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import NoReturn

from scripts.programs.sass.cards import LIMITS
from scripts.programs.sass.report import share_table, update, written
from weft.cache import cache_dir

DESCRIPTION = """Compile every Triton kernel at its default sizes without a GPU, and count the machine instructions of a
pass of its inner loop. A share of issue slots above 1 means that the instructions take longer than the card's memory
(of _prefill: than its tensor cores). A table goes to standard error, one JSON object to standard output."""


def main(words: Sequence[str]) -> int:
    arguments = parsed(words)
    if arguments.triton:
        start_with(arguments.triton, arguments.architectures, first_variants=arguments.first_variants)
    # Only now: Triton is the one that PYTHONPATH has, and it reads the variable when it is imported.
    os.environ.pop("TRITON_INTERPRET", None)
    import triton

    from scripts.programs.sass.measure import rows

    kernels = rows(arguments.architectures, first_variants=arguments.first_variants)
    content = {"triton": triton.__version__, "date": date.today().isoformat(), "kernels": kernels}
    print(*share_table(kernels), sep="\n", file=sys.stderr)
    print(written(content), end="")
    if arguments.update:
        update(content)
    return 0


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/sass", description=DESCRIPTION)
    parser.add_argument(
        "--architectures",
        type=architectures,
        default=tuple(LIMITS),
        metavar="80,90,...",
        help=f"some of {','.join(map(str, LIMITS))}; all of them by default",
    )
    parser.add_argument("--first-variants", action="store_true", help="only the first variant of each kernel")
    parser.add_argument("--triton", metavar="VERSION", help="with this version of Triton, in a folder of its own")
    parser.add_argument("--update", action="store_true", help="make it the baseline, tests/data/sass.json")
    arguments = parser.parse_args(words)
    partial = arguments.first_variants or arguments.architectures != tuple(LIMITS)
    if arguments.update and (arguments.triton or partial):
        parser.error("the baseline is that of the installed Triton and of all architectures; leave out the other flags")
    return arguments


def architectures(text: str) -> tuple[int, ...]:
    known = {str(each): each for each in LIMITS}
    if unknown := [word for word in text.split(",") if word not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no limits are known but of {', '.join(known)}")
    return tuple(known[word] for word in text.split(","))


def start_with(version: str, chosen: Sequence[int], *, first_variants: bool) -> NoReturn:
    """Replace this process by one that has this Triton first on its path; raises SystemExit if pip has none."""
    folder = cache_dir() / f"triton-{version}"
    if not folder.is_dir():
        install(version, folder)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    words = ["-m", "scripts.programs.sass", "--architectures", ",".join(map(str, chosen))]
    words += ["--first-variants"] * first_variants
    os.execve(sys.executable, [sys.executable, *words], os.environ | {"PYTHONPATH": path})


def install(version: str, folder: Path) -> None:
    # Complete or not there: a download that was cut off leaves only the second name.
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(partial)]
    done = subprocess.run([*command, f"triton=={version}"], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"]
        raise SystemExit(f"sass: Triton {version} cannot be installed: {lines[-1]}")
    partial.rename(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
