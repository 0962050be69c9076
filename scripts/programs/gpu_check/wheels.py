"""`scripts/gpu_check wheels DIR`: packages for a machine that has torch, Triton, Transformers and no network.

Wheels are cut into files of bounded size, with their hashes in manifest.json, and an install.py beside them that joins,
verifies and installs them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

PIECE = "60MB"
PYTHON = "3.12"
GLIBCS = range(35, 4, -1)  # Ubuntu 22.04 and newer
PLATFORMS = (*(f"manylinux_2_{glibc}_x86_64" for glibc in GLIBCS), "manylinux2014_x86_64", "any")
# Packages that the parts need beside torch, Triton, Transformers and safetensors, and what those packages need in turn.
NEEDED = (
    "msgspec", "nvidia-ml-py", "pytest", "iniconfig", "pluggy", "pygments", "packaging",
    "starlette", "uvicorn", "httptools", "prometheus-client", "anyio", "idna", "sniffio", "click", "h11",
    "humming-kernels==0.1.20", "tabulate",
)  # fmt: skip
# Libraries that Weft measures its own kernels against where they are installed, with their needs: asked for by name.
OPTIONAL = {"flashinfer": ("flashinfer-python", "apache-tvm-ffi", "einops", "ninja", "tabulate", "requests")}
VLLM = "vllm==0.24.0"
GIVEN = {"torch": "2.11.0", "triton": "3.6.0"}
# Left out of vLLM's folder: what the machine has, and CUDA's libraries, which torch brought.
HAD = re.compile(r"(torch|triton|nvidia-(?!ml-py|cudnn-frontend|cutlass-dsl).*|cuda-(bindings|pathfinder|toolkit))$")

Run = Callable[[Sequence[str]], str]


class DownloadError(RuntimeError):
    """A download that failed, with pip's last line."""


def main(words: Sequence[str]) -> int:
    arguments = parsed(words)
    try:
        piece = piece_bytes(arguments.piece)
        tags = pip_tags(arguments.python)
        packages = [*NEEDED, *(package for name in arguments.optional for package in OPTIONAL[name])]
        fetch(arguments.folder, packages, tags, piece)
        if arguments.vllm:
            fetch_vllm(arguments.folder / "vllm", tags, piece)
    except (ValueError, DownloadError, OSError) as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    return 0


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check wheels",
        description="Download what a machine with torch 2.11, Triton 3.6, Transformers and safetensors lacks, for "
        "Linux on x86-64. There: python3 DIR/install.py TARGET, then PYTHONPATH=TARGET scripts/gpu_check PART.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--piece", default=PIECE, help=f"largest file, as in 60MB or 512KB (default: {PIECE})")
    parser.add_argument("--python", default=PYTHON, help=f"that machine's Python (default: {PYTHON})")
    parser.add_argument(
        "--optional",
        action="append",
        default=[],
        choices=OPTIONAL,
        metavar="NAME",
        help=f"also {' or '.join(OPTIONAL)}",
    )
    parser.add_argument("--vllm", action="store_true", help=f"{VLLM} and what it needs too, into DIR/vllm")
    return parser.parse_args(words)


def piece_bytes(words: str) -> int:
    """Bytes of "60MB". Raises ValueError."""
    match = re.fullmatch(r"(\d+)(KB|MB|GB)", words.strip(), re.IGNORECASE)
    size = int(match[1]) * {"KB": 10**3, "MB": 10**6, "GB": 10**9}[match[2].upper()] if match else 0
    if not size:
        raise ValueError(f"--piece {words!r} is no size; give one as in 60MB, 512KB or 1GB")
    return size


def pip_tags(python: str) -> list[str]:
    """pip's options for wheels of another machine. Raises ValueError."""
    if not re.fullmatch(r"3\.\d+", python):
        raise ValueError(f"--python {python!r} is no version; give one as in 3.12")
    return [
        "--only-binary=:all:", "--implementation", "cp", "--python-version", python,
        *(word for platform in PLATFORMS for word in ("--platform", platform)),
    ]  # fmt: skip


def pip(words: Sequence[str]) -> str:
    """Output of pip. Raises DownloadError."""
    command = [sys.executable, "-m", "pip", *words, "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if "ERROR" in line] or ["no word"]
        raise DownloadError(f"pip {' '.join(words[:1])} ended with {done.returncode}: {lines[-1][:300]}")
    return done.stdout


def fetch(folder: Path, packages: Iterable[str], tags: Sequence[str], piece: int, run: Run = pip) -> None:
    """Download packages into `folder` as pieces with a manifest. Raises DownloadError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as raw:
        for package in packages:
            run(["download", "--quiet", "--no-deps", *tags, "--dest", raw, package])
        keep_pieces(Path(raw).glob("*.whl"), folder, piece)


def keep_pieces(wheels: Iterable[Path], folder: Path, piece: int) -> None:
    """Cut wheels into pieces in `folder`, with their manifest and install.py."""
    manifest = [cut(wheel, folder, piece) for wheel in sorted(wheels)]
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    shutil.copy(Path(__file__).with_name("install_wheels.py"), folder / "install.py")
    total = sum(int(str(each["bytes"])) for each in manifest)
    print(f"{len(manifest)} wheels, {total / 1e6:.1f} MB, in {folder}: there python3 install.py TARGET")


def cut(wheel: Path, folder: Path, piece: int) -> dict[str, object]:
    """Cut a wheel into pieces in `folder`, and return its row of the manifest."""
    whole = hashlib.sha256()
    pieces: list[dict[str, str]] = []
    with wheel.open("rb") as source:
        while data := source.read(piece):
            whole.update(data)
            name = f"{wheel.name}.{len(pieces):03d}"
            (folder / name).write_bytes(data)
            pieces.append({"file": name, "sha256": hashlib.sha256(data).hexdigest()})
    return {"wheel": wheel.name, "bytes": wheel.stat().st_size, "sha256": whole.hexdigest(), "pieces": pieces}


def fetch_vllm(folder: Path, tags: Sequence[str], piece: int, run: Run = pip) -> None:
    """Download vLLM and what it needs into `folder`, except what HAD names. Empty wheels stand for torch and Triton:
    pip takes neither these nor CUDA's libraries, and refuses packages that need another version."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as raw, tempfile.TemporaryDirectory(dir=folder) as stubs:
        for name, version in GIVEN.items():
            write_stub(Path(stubs), name, version)
        run(["download", "--quiet", *tags, "--find-links", stubs, "--dest", raw, VLLM])
        wheels = [wheel for wheel in Path(raw).glob("*.whl") if not HAD.match(package_of(wheel))]
        keep_pieces(wheels, folder, piece)


def write_stub(folder: Path, name: str, version: str) -> None:
    """A wheel without files, of a version that comes before the index's own of the same number."""
    version += "+had"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: weft\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def package_of(wheel: Path) -> str:
    return wheel.name.partition("-")[0].lower().replace("_", "-")
