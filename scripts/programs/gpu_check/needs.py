"""Checks before a part starts. Each gives one line: what is missing, and the way out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from scripts.programs.gpu_check.card import ROOT, Card

OLDEST = (7, 5)  # compute capability
DISK_BYTES = 200_000_000  # of results and logs
# Modules by the name of the package that brings them.
COMMON = {
    "torch": "torch", "triton": "triton", "numpy": "numpy", "msgspec": "msgspec",
    "jinja2": "jinja2", "tokenizers": "tokenizers", "pyyaml": "yaml", "nvidia-ml-py": "pynvml",
}  # fmt: skip
TESTS = {"pytest": "pytest", "transformers": "transformers", "safetensors": "safetensors"}
SERVER = {
    "starlette": "starlette", "uvicorn": "uvicorn", "httptools": "httptools", "prometheus-client": "prometheus_client",
}  # fmt: skip


@dataclass(frozen=True)
class Needs:
    """Requirements of a part beside a GPU: packages (as COMMON), programs, files of the repository, free memory of the
    GPU, and the folder of vLLM's packages.
    """

    packages: dict[str, str] = field(default_factory=dict)
    programs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    memory_GB: float = 4
    vllm: bool = False

    def described(self) -> str:
        words = [f"{self.memory_GB:g} GB free", *self.packages, *self.programs]
        return ", ".join([*words, "vLLM 0.24.0 (--vllm FOLDER)"] if self.vllm else words)


def obstacle_of_folder(folder: Path) -> str | None:
    """Why results cannot be kept in `folder`; makes it if it is absent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        with probe.open("wb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"results cannot be written into {folder}: {error.strerror}; set RESULTS to a folder with room"
    if free < DISK_BYTES:
        return (
            f"{folder} has {free / 1e6:.0f} MB free, and results and logs may take {DISK_BYTES / 1e6:.0f} MB; "
            "set RESULTS to a folder with room"
        )
    return None


def obstacle_of_packages(
    part: str, needs: Needs, python: str, present: Callable[[str], bool] = lambda module: find_spec(module) is not None
) -> str | None:
    """Packages that the interpreter lacks, all in one line."""
    missing = [package for package, module in {**COMMON, **needs.packages}.items() if not present(module)]
    if not missing:
        return None
    return (
        f"part {part} needs {' '.join(missing)}, which {python} lacks; "
        "scripts/gpu_check wheels FOLDER brings them, or pip install --target FOLDER and PYTHONPATH=FOLDER"
    )


def obstacle_of_files(part: str, needs: Needs, vllm: Path | None, root: Path = ROOT) -> str | None:
    """Programs that are not on PATH, files of the repository and packages of vLLM that are absent."""
    absent = [name for name in needs.programs if shutil.which(name) is None]
    if absent:
        return f"part {part} needs {' '.join(absent)} on PATH: CUDA's toolkit has it"
    gone = [name for name in needs.files if not (root / name).exists()]
    if gone:
        return f"part {part} needs {' '.join(gone)} of the repository, and {root} has no such file"
    if needs.vllm and vllm is None:
        return f"part {part} needs --vllm FOLDER with vLLM's packages; scripts/gpu_check wheels DIR --vllm brings them"
    if needs.vllm and vllm is not None and not (vllm / "vllm" / "__init__.py").exists():
        return f"part {part}: --vllm {vllm} holds no vllm/__init__.py; scripts/gpu_check wheels DIR --vllm brings it"
    return None


def obstacle_of_card(part: str, needs: Needs, card: Card | None, torch_version: str) -> str | None:
    """A card that is absent, too old, or has too little free memory."""
    if card is None:
        return f"torch {torch_version} sees no CUDA device; scripts/gpu_check PART --rehearse runs on a stand-in"
    if card.capability < OLDEST:
        capability, oldest = (".".join(map(str, each)) for each in (card.capability, OLDEST))
        return f"{card.name} has compute capability {capability}, and the kernels need {oldest} or newer"
    if card.free_bytes < needs.memory_GB * 1e9:
        return (
            f"part {part} needs {needs.memory_GB:g} GB of free memory, and {card.name} has "
            f"{card.free_bytes / 1e9:.1f} of {card.total_bytes / 1e9:.1f} GB free"
        )
    return None


def first_obstacle(obstacles: Iterable[Callable[[], str | None]]) -> str | None:
    """The first that there is; later ones are not looked for."""
    return next((words for words in (look() for look in obstacles) if words), None)
