"""The CPU kernels in C++: compiled once for this machine where there is a compiler, called through ctypes."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from weft.errors import ConfigError
from weft.facts.cache import cache_path
from weft.kernels.base import HeadNorm, KVCache
from weft.kernels.batch import Batch

logger = logging.getLogger("weft")

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
WIDEST_HEAD = 256  # as in native.cpp: WIDEST
WIDEST_GROUP = 96  # as in native.cpp: QUERIES


class NativeKernels:
    """See `Kernels`. Tensors must be contiguous, on the CPU, bf16 or fp32."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        library, suffix = ctypes.CDLL(str(build())), NAMES[dtype]
        pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

        def entry(name: str, *arguments: type[ctypes._SimpleCData]) -> ctypes._NamedFuncPointer:  # type: ignore[type-arg]
            function = getattr(library, f"weft_{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
            return function

        self._norm = entry("norm", *[pointer] * 4, size, size, real)
        self._silu_mul = entry("silu_mul", *[pointer] * 2, size, size)
        self._rotate_and_store = entry("rotate_and_store", *[pointer] * 9, real, *[size] * 4)
        self._attend = entry("attend", *[pointer] * 7, *[size] * 7, real)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._norm(x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps)
        return out

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        self._norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, width)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), tokens, width)
        return out

    def rotate_and_store(
        self, qkv: torch.Tensor, q_heads: int, rope: torch.Tensor, cache: KVCache, batch: Batch, norm: HeadNorm | None
    ) -> torch.Tensor:
        tokens, (kv_heads, head_dim) = qkv.shape[0], cache.keys.shape[2:]
        q = qkv.new_empty(tokens, q_heads, head_dim)
        self._rotate_and_store(
            qkv.data_ptr(),
            q.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            rope.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            norm.query.data_ptr() if norm else None,
            norm.key.data_ptr() if norm else None,
            norm.eps if norm else 0.0,
            tokens,
            q_heads,
            kv_heads,
            head_dim,
        )
        return q

    def attend(self, q: torch.Tensor, cache: KVCache, batch: Batch, scale: float, window: int | None) -> torch.Tensor:
        tokens, q_heads, head_dim = q.shape
        out = q.new_empty(tokens, q_heads * head_dim)
        self._attend(
            q.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            out.data_ptr(),
            batch.row_starts.data_ptr(),
            batch.context.data_ptr(),
            batch.tables.data_ptr(),
            batch.tables.shape[1],
            batch.rows,
            cache.block_size,
            q_heads,
            cache.keys.shape[2],
            head_dim,
            window or 0,
            scale,
        )
        return out


def available(dtype: torch.dtype, head_dim: int, group: int, *, required: bool = False) -> bool:
    """Whether these kernels can serve a model of this dtype, head_dim and query heads per KV head, and a
    compiler was found; with `required` the reason that they cannot is a ConfigError."""
    reason = None
    if dtype not in NAMES:
        reason = f"they know bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    elif head_dim > WIDEST_HEAD or group > WIDEST_GROUP:
        reason = f"head_dim {head_dim} with {group} query heads per KV head is beyond {WIDEST_HEAD} and {WIDEST_GROUP}"
    else:
        try:
            build()
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error)
    if reason is None:
        return True
    if required:
        raise ConfigError(f"the compiled CPU kernels cannot be used: {reason}; --attention-backend torch always works")
    logger.warning("The compiled CPU kernels cannot be used: %s. The slower torch kernels take their place.", reason)
    return False


@functools.cache
def build() -> Path:
    """The compiled library, from the cache or made now (about a second); one process builds, others wait.

    Raises FileNotFoundError without a compiler, OSError where the cache cannot be written and
    subprocess.SubprocessError where the compiler fails.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler was found; install g++")
    # torch brings its own OpenMP; a second one would mean a second pool of threads on the same cores.
    openmp = sorted(str(p) for p in Path(torch.__file__).parent.glob("lib/lib*omp*.so*"))
    facts = (SOURCE.read_text(), compiler, *FLAGS, *openmp, torch.__version__, platform.machine(), _cpu())
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]
    folder = cache_path() / "kernels"
    library = folder / f"native-{key}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{key}.lock").open("w")
    except OSError as error:
        raise OSError(f"{folder} cannot be written ({error.strerror}); let XDG_CACHE_HOME be one that can") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / "native.so"
                command = [compiler, *FLAGS, str(SOURCE), *openmp, "-o", str(made)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
                    raise subprocess.SubprocessError(f"{compiler} could not build them: {lines[0]}")
                made.replace(library)
    return library


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
