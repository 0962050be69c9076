"""Libraries of the CPU kernels for common CPUs, built ahead for machines that shall compile nothing, as in a container.

`python -m weft.native.prebuilt FOLDER [KIND ...]` builds them (`machine.native.build`). If WEFT_KERNELS names that
folder, the library that suits the CPU is loaded, and nothing is compiled.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from weft.machine.native import library
from weft.machine.native.library import CPP_TYPES, DEFAULT_DTYPE, FLAGS, SOURCES

VARIABLE = "WEFT_KERNELS"

logger = logging.getLogger("weft")


@dataclass(frozen=True)
class CpuTarget:
    """A kind of CPU: the compiler's flags for it, and the features that /proc/cpuinfo lists of each CPU of the kind.

    Levels are the x86-64 psABI's: https://gitlab.com/x86-psABIs/x86-64-ABI.
    """

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
WIDE_VECTORS = "avx512f"
V4 = V3 | frozenset([WIDE_VECTORS, "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
BF16 = V4 | {"avx512_vnni", "avx512_bf16"}
TILES = "amx_bf16"
BF16_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
# The best first.
TARGETS = (
    CpuTarget(
        "amx",  # Sapphire Rapids and later
        (*BF16_FLAGS, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        BF16 | {"amx_tile", "amx_int8", TILES},
    ),
    CpuTarget("avx512-bf16", BF16_FLAGS, BF16),  # Zen 4, Cooper Lake
    CpuTarget("avx512-vnni", ("-march=x86-64-v4", "-mavx512vnni"), V4 | {"avx512_vnni"}),  # Cascade Lake, Ice Lake
    CpuTarget("avx512", ("-march=x86-64-v4",), V4),  # Skylake-SP
    CpuTarget("avx2-vnni", ("-march=x86-64-v3", "-mavxvnni"), V3 | {"avx_vnni"}),  # Alder Lake and later
    CpuTarget("avx2", ("-march=x86-64-v3",), V3),  # Haswell, Zen 1 to 3
)


def find_prebuilt(dtype: str, *, narrow: bool = False) -> Path | None:
    """Path of the library for this machine in the folder of WEFT_KERNELS; None if there is none that may be loaded. A
    `narrow` one is for CPUs without 512-bit vectors."""
    folder = os.environ.get(VARIABLE, "")
    if not folder or platform.machine() != "x86_64":
        return None
    features = cpu_features()
    for target in TARGETS:
        path = library_path(Path(folder), dtype, target)
        if narrow and WIDE_VECTORS in target.features:
            continue
        if target.features <= features and path.exists():
            if reason := library.objection(path):
                logger.warning("the prebuilt CPU kernels are not loaded: %s", reason)
                return None
            if library.is_intact(path):
                return path
            logger.warning("the prebuilt CPU kernels are not loaded: the digest of %s does not hold", path)
    return None


def library_path(folder: Path, dtype: str, target: CpuTarget) -> Path:
    """Path of a library. Its name has a digest of sources and flags: other sources do not load it."""
    parts = (*(path.read_text() for path in sorted(SOURCES.iterdir())), *target_flags(dtype, target))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    return folder / f"{dtype}-{target.name}-{digest}.so"


def target_flags(dtype: str, target: CpuTarget) -> tuple[str, ...]:
    """Flags of the compiler for a dtype of CPP_TYPES and a kind of CPU."""
    general = (flag for flag in FLAGS if not flag.startswith("-march="))
    return (*general, *target.flags, f"-DWEFT_TYPE={CPP_TYPES[dtype]}", f"-DWEFT_NAME={dtype}")


def cpu_features() -> frozenset[str]:
    """Features of this machine's CPU, in the words of /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def built_library() -> str | None:
    """Path of the library for DEFAULT_DTYPE; "" if it is not built yet or must not be loaded, None without a
    compiler."""
    if prebuilt := find_prebuilt(DEFAULT_DTYPE):
        return str(prebuilt)
    try:
        path = library.build_recipe(DEFAULT_DTYPE).path
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError):  # RuntimeError: there is no home, and so no cache
        return ""
    if not path.exists():
        return ""
    if reason := library.objection(path):
        library.warn_once(reason)
        return ""
    return str(path) if library.is_intact(path) else ""
