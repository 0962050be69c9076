"""The Triton kernels as a GPU gets them: compiled here, though nothing here can run them. The interpreter takes what a
compiler refuses: a product that is too small, tiles that no GPU has the memory for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton")

SHARED_BYTES = 99 << 10  # of a program, on the smallest GPU since Ampere

# In a process without TRITON_INTERPRET, which is read on import. What the launches say is written down and compiled.
PROGRAM = """
import sys, types
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weft.kernels.base import KVCache
from weft.kernels.triton import attention, pointwise

KINDS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv",
         torch.int32: "*i32", torch.int64: "*i64", int: "i32", float: "fp32"}

class Launched:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return self
    def __call__(self, *given, num_warps=4, **constants):
        names = self.kernel.arg_names
        kinds = {n: KINDS[x.dtype if isinstance(x, torch.Tensor) else type(x)] for n, x in zip(names, given)}
        kinds |= {n: "constexpr" for n in constants}
        fixed = {(names.index(n),): x for n, x in constants.items()}
        source = ASTSource(self.kernel, {n: kinds[n] for n in names}, constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
        print(self.kernel.__name__, made.metadata.shared)

for module in (attention, pointwise):
    for name, kernel in list(vars(module).items()):
        if isinstance(kernel, triton.JITFunction) and name in ("_decode", "_join", "_prefill", "_rotate_and_store"):
            setattr(module, name, Launched(kernel))

capability, head_dim, dtype, kept = int(sys.argv[1]), int(sys.argv[2]), *(getattr(torch, it) for it in sys.argv[3:])
ints = torch.zeros(4, 4, dtype=torch.int32)
batch = types.SimpleNamespace(tables=ints, context=ints[0], row_starts=ints[0], rows=2, positions=ints[0],
                              slots=ints[0].long())
cache = KVCache(*(torch.zeros(1, 16, 2, head_dim, dtype=kept) for _ in range(2)))
q = torch.zeros(2, 6, head_dim, dtype=dtype)
attention.decode(q, cache, batch, 2, 1.0, None, 132, torch.empty(2, 6 * head_dim, dtype=dtype))
attention.prefill(q, cache, batch, 0, 1.0, 9, torch.empty(2, 6 * head_dim, dtype=dtype))
pointwise.rotate_and_store(torch.zeros(2, 10 * head_dim, dtype=dtype), 6, torch.zeros(9, head_dim), cache, batch, None)
"""


@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype", "kept"),
    [
        (90, 128, "bfloat16", "bfloat16"),
        (90, 128, "bfloat16", "float8_e4m3fn"),
        (86, 256, "bfloat16", "bfloat16"),
        (86, 8, "bfloat16", "bfloat16"),
        (86, 128, "float32", "float32"),
    ],
    ids=str,
)
def test_they_compile_and_fit(capability: int, head_dim: int, dtype: str, kept: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(capability), str(head_dim), dtype, kept]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    shared = {name: int(size) for name, size in map(str.split, done.stdout.splitlines())}
    assert shared.keys() == {"_decode", "_join", "_prefill", "_rotate_and_store"}
    assert max(shared.values()) <= SHARED_BYTES, shared
