"""Memory of a process and all that it started: proportional set size, so that shared pages count once."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from weft.errors import WeftError


def process_tree(pid: int, root: Path = Path("/proc")) -> list[int]:
    """The process and its descendants, as far as they are there at this moment."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in root.iterdir():
        if folder.name.isdecimal():
            try:
                # The name in brackets may hold anything.
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue  # it has ended meanwhile
            children[parent].append(int(folder.name))
    found, rest = [], [pid]
    while rest:
        one = rest.pop()
        found.append(one)
        rest += children[one]
    return found


def pss_bytes(pid: int, root: Path = Path("/proc")) -> int:
    """Of the whole tree. Raises WeftError where the kernel does not tell."""
    total = 0
    for one in process_tree(pid, root):
        try:
            text = (root / str(one) / "smaps_rollup").read_text()
        except ProcessLookupError:
            continue
        except OSError as error:
            if one == pid:
                raise WeftError(f"cannot read the memory of process {pid}: {error.strerror}") from error
            continue
        total += next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0) * 1024
    return total
