"""Memory of a process and its descendants, as proportional set size (PSS), so that shared pages count once."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from weft.errors import WeftError


def process_tree(pid: int, root: Path = Path("/proc")) -> list[int]:
    """Process ids of `pid` and its descendants at this moment."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in root.iterdir():
        if folder.name.isdecimal():
            try:
                # The process name in brackets may hold anything.
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue  # the process has ended in between
            children[parent].append(int(folder.name))
    tree, remaining = [], [pid]
    while remaining:
        process = remaining.pop()
        tree.append(process)
        remaining += children[process]
    return tree


def pss_bytes(pid: int, root: Path = Path("/proc")) -> int:
    """PSS of a process and its descendants, in bytes. Raises WeftError if the kernel does not report it for `pid`."""
    total = 0
    for process in process_tree(pid, root):
        try:
            text = (root / str(process) / "smaps_rollup").read_text()
        except ProcessLookupError:
            continue
        except OSError as error:
            if process == pid:
                raise WeftError(
                    f"cannot read the memory of process {pid}: {error.strerror}", code="cannot-read-process-memory"
                ) from error
            continue
        total += next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0) * 1024
    return total
