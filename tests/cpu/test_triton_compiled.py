"""The Triton kernels as a GPU gets them: compiled here, though nothing here can run them. The interpreter takes what a
compiler refuses: a product that is too small, tiles that no GPU has the memory for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.cpu.compiling import environment

pytest.importorskip("triton", reason="needs triton")

Compile = Callable[..., dict[str, int]]

# In a process without TRITON_INTERPRET, which is read on import. Launches are recorded, and compiled afterwards.
LAUNCHES = """
import sys, types
import torch
from scripts.programs.sass.launches import recorded
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.triton import attention, pointwise, products, rounding, sampling
from weft.ranks.kernels.triton.staged import fill_batch

capability = int(sys.argv[1])
limit = 64 << 10 if capability < 80 else 99 << 10
"""
COMPILED = """
with recorded() as launches:
    launch_all()
for launch in launches:
    print(launch.name, launch.compile_for(capability).metadata.shared)
"""
PROGRAM = (
    LAUNCHES
    + """
head_dims, dtype, kept = sys.argv[2].split(","), *(getattr(torch, name) for name in sys.argv[3:])
ints = torch.zeros(4, 4, dtype=torch.int32)
batch = types.SimpleNamespace(tables=ints, context=ints[0], row_starts=ints[0], rows=2, positions=ints[0],
                              angle_rows=ints[0], slots=ints[0].long(), order=ints[0])

def launch_all():
    for head_dim in map(int, head_dims):
        cache = KVCache(*(torch.zeros(1, 16, 2, head_dim, dtype=kept) for _ in range(2)))
        q, out = torch.zeros(2, 6, head_dim, dtype=dtype), torch.empty(2, 6 * head_dim, dtype=dtype)
        attention.decode(q, cache, batch, 2, 1.0, None, 132, out, shared=limit)
        attention.prefill(q, cache, batch, 0, 1.0, 9, out, shared=limit)
        if capability >= 80:
            pointwise.rotate_and_store(torch.zeros(2, 10 * head_dim, dtype=dtype), 6, torch.zeros(9, head_dim), cache,
                                       batch, None)
    wide = torch.zeros(2, 8192, dtype=dtype)
    pointwise.norm(wide, wide, wide[0], 1e-6)
    pointwise.silu_mul(wide)
    if capability < 80 or kept.itemsize == 1:
        return  # the others take little memory anywhere, and know of no FP8
    staged = types.SimpleNamespace(tokens=ints[0], positions=ints[0], places=batch.slots[None], context=ints[0],
                                   order=ints[0], slots=ints[0], growth=ints, blocks=ints[:1], last=batch.slots,
                                   tables=ints[None], rows=2, decodes=2, width=4)
    batch.tokens, batch.decodes, batch.groups = ints[0], 2, (batch,)
    fill_batch(staged, batch)
    pointwise.sum_add_norm(torch.zeros(8, dtype=torch.int64), wide, wide[0], 1e-6)
    longs = torch.zeros(2, dtype=torch.int64)
    settings = torch.zeros(2, 4, dtype=torch.float64)
    logits = torch.zeros(2, 151936, dtype=dtype)
    sampling.sample_tokens(logits, longs, longs, settings, longs, filtered=True)
    sampling.apply_masks(logits, longs, torch.zeros(2, 151936 // 32, dtype=torch.int32))
"""
    + COMPILED
)
PRODUCTS = (
    LAUNCHES
    + """
from weft.checkpoint.architectures.place import Span
from weft.ranks.quant.quantised import QuantisedWeight

dtype = getattr(torch, sys.argv[2])
wide, cut = Span(0, 4096), Span(64, 640)
kinds = {"Q4_1": wide, "Q4_16_MIN": cut, "Q8_MIN": wide, "INT8": cut, "INT4_128": wide, "INT8_ROW_SYM": cut}
if capability < 90:
    kinds = {"Q4_1": wide, "INT8": cut}  # one of each width: others take no more memory

def launch_all():
    for kind, cols in kinds.items():
        weight = QuantisedWeight.empty(kind, 96, cols, dtype, torch.device("cpu"))
        if "ROW" not in kind:
            rounding.round_on_gpu(torch.zeros(96, cols.stop - cols.start + weight.lacking, dtype=dtype), weight)
        product = products.create_quantised_matrix(weight, torch.zeros(96, dtype=dtype), 132)
        for tokens in (1, 64, 200):
            product(torch.zeros(tokens, len(cols), dtype=dtype))
        product.rows(torch.zeros(3, dtype=torch.int64))
        product(torch.zeros(products.MANY, len(cols), dtype=dtype))
"""
    + COMPILED
)
EXPERTS = (
    LAUNCHES
    + """
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.shape import Experts
from weft.ranks.kernels.matrices import ExpertStack
from weft.ranks.kernels.triton.experts import TritonExperts, TritonMixture, TritonStack, pack_stack
from weft.ranks.kernels.triton.router import create_router
from weft.ranks.kernels.triton.routing import MOST_ALONE, choose_experts, sort_rows
from weft.ranks.quant.quantised import QuantisedWeight

dtype = getattr(torch, sys.argv[2])
spec = Experts(count=32, top_k=4, width=2880, limit=7.0, gain=1.702, up_offset=1.0, bias=True)

def stack(kind, rows, cols):
    if kind is None:
        weight = torch.zeros(1, dtype=dtype).expand(2, rows, cols)
    else:
        weight = QuantisedWeight.empty(kind, rows, Span(0, cols), dtype, torch.device("cpu"), (2,))
    return pack_stack(ExpertStack("", weight, torch.zeros(2, rows, dtype=dtype)))

def launch_all():
    choose_experts(torch.zeros(2, 32), spec, torch.zeros(2, dtype=torch.int64))
    for score, groups in ("max", 8), ("top2", 8), ("max", 1):
        grouped = Experts(count=256, top_k=8, width=2048, scoring="sigmoid", correction=True, scaling=2.5,
                          groups=groups, top_groups=groups // 2 or 1, group_score=score)
        choose_experts(torch.zeros(2, 256), grouped, torch.zeros(2, dtype=torch.int64), torch.zeros(256))
    router = create_router(torch.zeros(1, dtype=dtype).expand(256, 7168), torch.zeros(256, dtype=dtype))
    for tokens in (1, 4, 64):
        router.choose_experts(torch.zeros(tokens, 7168, dtype=dtype), grouped, torch.zeros(tokens, dtype=torch.int64),
                      torch.zeros(256))
    for launch in router.launches(2048, []):
        launch()
    sort_rows(torch.zeros(MOST_ALONE + 1, 1, dtype=torch.int64), 0, torch.zeros(256, dtype=torch.int64), 128)
    for kind in sys.argv[3].split(","):
        kind = None if kind == "None" else kind
        experts = TritonExperts(spec=spec, gate_up=stack(kind, 2 * 2880, 2880), down=stack(kind, 2880, 2880), first=0,
                                processors=132)
        for launch in experts.launches(2048):
            launch()
    if "None" in sys.argv[3]:
        plain = Experts(count=32, top_k=4, width=2880, shared=1, shared_width=2880, shared_gate=True)
        weights = stack(None, 2 * 2880, 2880).weight, stack(None, 2880, 2880).weight
        routed = (TritonStack(weight, rows, None) for weight, rows in zip(weights, (2 * 2880, 2880)))
        routed = TritonExperts(spec=plain, gate_up=next(routed), down=next(routed), first=0, processors=132)
        for launch in TritonMixture(experts=routed, shared=weights).launches(16):
            launch()
"""
    + COMPILED
)

LATENTS = (
    LAUNCHES
    + """
from weft.ranks.kernels.latents import AbsorbedQueries, ExpandedContext, LatentNorm
from weft.ranks.kernels.triton.latents import TritonLatents

dtype, ints = getattr(torch, sys.argv[2]), torch.zeros(4, 4, dtype=torch.int32)
batch = types.SimpleNamespace(tables=ints, context=ints[0], row_starts=ints[0], rows=2, decodes=1, angle_rows=ints[0],
                              slots=ints[0].long(), order=ints[0])

def launch_all():
    hopper = capability == 90
    kernels = TritonLatents(132, 227 << 10 if hopper else limit, warp_groups=hopper)
    cache = KVCache.of_latents(torch.zeros(1, 16, 1, 576, dtype=dtype), 512)

    def attend(rows, heads, batch):
        latent, whole = (torch.zeros(rows, heads, width, dtype=dtype) for width in (512, 192))
        kernels.attend(AbsorbedQueries(latent, whole[..., 128:]), cache, batch, 1.0)

    attend(2, 16, batch)
    # Many heads in many rows, in whole contexts and in parts.
    wide = types.SimpleNamespace(**vars(batch) | {"rows": 132, "decodes": 132})
    attend(132, 128, wide)
    wide.rows = wide.decodes = 50
    attend(50, 128, wide)
    for nope_dim, value_dim in (128, 128), (192, 256):
        both = torch.zeros(2, 16, nope_dim + value_dim, dtype=dtype)
        context = ExpandedContext(both[..., :nope_dim], both[..., nope_dim:], torch.zeros(2, 576, dtype=dtype)[:, 512:])
        out = torch.zeros(2, 16, value_dim, dtype=dtype)
        kernels.attend_expanded(torch.zeros(2, 16, nope_dim + 64, dtype=dtype), context, 1.0, out)
    norm = LatentNorm(torch.zeros(512, dtype=dtype), 1e-6)
    kernels.rotate_and_store(torch.zeros(2, 16, 192, dtype=dtype), torch.zeros(2, 576, dtype=dtype),
                             torch.zeros(9, 64), cache, batch, norm, interleaved=True)
"""
    + COMPILED
)


@pytest.mark.parametrize(
    ("capability", "head_dims", "dtype", "kept"),
    [
        # test_sass compiles these, and heads of 256 take more memory
        pytest.param(90, "128", "bfloat16", "bfloat16", marks=pytest.mark.long),
        (90, "128", "bfloat16", "float8_e4m3fn"),
        (86, "256,8", "bfloat16", "bfloat16"),
        (86, "128", "float32", "float32"),
        pytest.param(75, "256", "float32", "float32", marks=pytest.mark.long),
        pytest.param(
            75, "64,128,256", "float16", "float16", marks=pytest.mark.long
        ),  # heads of 96 take what those of 128 take
    ],
    ids=str,
)
def test_they_compile_and_fit(compiled: Compile, capability: int, head_dims: str, dtype: str, kept: str) -> None:
    shared = compiled(PROGRAM, str(capability), head_dims, dtype, kept)
    expected = {"_decode", "_prefill", "_rms_norm", "_silu_mul"}
    if capability >= 80:
        expected |= {"_rotate_and_store"}
    if capability >= 80 and kept == dtype:
        expected |= {"_lay", "_sum_add_norm", "_survey", "_filter", "_draw", "_mask"}
    assert shared.keys() == expected
    assert max(shared.values()) <= most_shared(capability), shared


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (90, "bfloat16"),
        pytest.param(86, "float16", marks=pytest.mark.long),
        pytest.param(86, "float32", marks=pytest.mark.long),
        pytest.param(75, "float16", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_products_compile_and_fit(compiled: Compile, capability: int, dtype: str) -> None:
    shared = compiled(PRODUCTS, str(capability), dtype)
    assert shared.keys() == {"_multiply", "_dequantise", "_round"}
    assert max(shared.values()) <= most_shared(capability), shared


@pytest.mark.parametrize(
    ("capability", "dtype", "kinds"),
    [
        (90, "bfloat16", "None,MXFP4"),
        pytest.param(86, "bfloat16", "None,MXFP4", marks=pytest.mark.long),
        (86, "float32", "None"),
        pytest.param(75, "float16", "Q4_1", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_experts_compile_and_fit(compiled: Compile, capability: int, dtype: str, kinds: str) -> None:
    shared = compiled(EXPERTS, str(capability), dtype, kinds)
    routing = {"_route", "_score", "_choose", "_sort", "_count_pairs", "_add_counts", "_place_pairs"}
    assert shared.keys() == routing | {"_multiply_experts", "_sum"}
    assert max(shared.values()) <= most_shared(capability), shared


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (90, "bfloat16"),
        pytest.param(86, "bfloat16", marks=pytest.mark.long),
        pytest.param(86, "float32", marks=pytest.mark.long),
        pytest.param(75, "float16", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_latent_attention_compiles_and_fits(compiled: Compile, capability: int, dtype: str) -> None:
    shared = compiled(LATENTS, str(capability), dtype)
    assert shared.keys() == {"_decode_latents", "_prefill_latents", "_attend_expanded", "_store_latents"}
    assert max(shared.values()) <= (227 << 10 if capability == 90 else most_shared(capability)), shared


def most_shared(capability: int) -> int:
    """Bytes of shared memory that a program may ask for: on Turing, and on the smallest GPU since Ampere."""
    return 64 << 10 if capability < 80 else 99 << 10


# Imports what all programs need, half of the time of most, and runs each one that it is told of in a fork.
SERVER = """
import json, os, sys, traceback
import scripts.programs.sass.launches, weft.ranks.kernels.latents, weft.ranks.quant.quantised

for line in sys.stdin:
    program, arguments, results = json.loads(line)
    child = os.fork()
    if not child:
        status = 1
        sys.argv = ["-c", *arguments]
        with open(results, "w") as sys.stdout:
            try:
                exec(program, {"__name__": "__main__"})
                status = 0
            except BaseException:
                print(traceback.format_exc())
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Function of a program and its arguments: the most bytes of shared memory that one of each kernel takes."""
    results = tmp_path_factory.mktemp("compiled") / "results"
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    with subprocess.Popen(
        command, env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        requests, statuses = server.stdin, server.stdout

        def compile_program(program: str, *arguments: str) -> dict[str, int]:
            requests.write(json.dumps([program, arguments, str(results)]) + "\n")
            requests.flush()
            status, printed = statuses.readline().strip(), results.read_text()
            assert status == "0", (status, printed[-2000:])
            shared: dict[str, int] = {}
            for name, size in map(str.split, printed.splitlines()):
                shared[name] = max(shared.get(name, 0), int(size))
            return shared

        yield compile_program
