"""The card and the versions that a run measures, and the card's copy bandwidth."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
COPIES, COPY_BYTES, REHEARSED_BYTES = 10, 1 << 30, 1 << 12


@dataclass(frozen=True)
class Card:
    """The first CUDA device, as torch and the driver tell of it."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


def first_card() -> Card | None:
    """None if torch sees no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(0)
    return Card(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0), free, total)


def copy_Bps(*, rehearse: bool) -> float:
    """Bytes per second that a copy on the card reads and writes."""
    import torch

    size = REHEARSED_BYTES if rehearse else COPY_BYTES
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    target.copy_(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(COPIES):
        target.copy_(source)
    end.record()
    end.synchronize()
    return float(COPIES * 2 * size / (begin.elapsed_time(end) / 1e3))


def about(card: Card, *, rehearse: bool) -> dict[str, Any]:
    """Facts in a result file beside its rows."""
    return {
        "card": card.name,
        "driver": driver(),
        "torch": version_of("torch"),
        "triton": version_of("triton"),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "rehearsed": rehearse,
        "copy_GBps": round(copy_Bps(rehearse=rehearse) / 1e9, 3),
    }


def driver() -> str:
    """Version of the NVIDIA driver, "none" without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return "none"


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def commit() -> str:
    """The sources' commit, with a plus sign if files differ from it; "unknown" for a copy without git."""
    try:
        head = git("rev-parse", "--short=9", "HEAD").strip()
        return head + "+" * bool(git("status", "--porcelain", "--untracked-files=no").strip())
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout
