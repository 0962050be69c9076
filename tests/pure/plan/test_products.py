"""Products with quantised weights: which schemes the library humming-kernels takes, and where it can be had."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.pure.machines import gpu, host, plan
from tests.refusals import refuses
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.published import ROW
from weft.checkpoint.quantised.schemes import ALL_SCHEMES, FP8_SCHEMES, PUBLISHED_SCHEMES, WIDE_SCHEMES
from weft.errors import ConfigError, PlanError
from weft.machine.hardware.cpu import Cpu
from weft.plan import products
from weft.plan.backends import KernelDevice, kernel_device
from weft.plan.products import LOCKS, VERSION, ProductSpec, against_scheme, repacking_bytes, supports

CPU = Cpu(model="AMD EPYC", sockets=1, cores=4, threads=4, features=("avx2", "fma"))
HERE = {"triton": "3.6.0", "humming-kernels": VERSION}
H200 = KernelDevice(cards=[("H200", (9, 0))], packages=HERE)
# Of each scheme, with bfloat16 and float16: None if the library multiplies it, else a word of the reason.
NARROWER, GROW, COARSE, ROWS_OF_FP8, TABLES = "float16, whose range", "6 bits", "too coarse", "FP8 units", "tables"
SUPPORT: dict[str, tuple[str | None, str | None]] = {
    "INT8": (None, None),
    "Q8_0": (None, None),
    "Q8_MIN": (COARSE, COARSE),
    "Q4_1": (None, None),
    "Q4_K": (GROW, GROW),
    "Q4_0": (None, None),
    "Q4_16": (None, None),
    "Q4_16_MIN": (None, None),
    "MXFP4": (None, NARROWER),
    "SIGNED8_ROW": (None, NARROWER),
}
SUPPORT |= dict.fromkeys(PUBLISHED_SCHEMES, (None, None))
SUPPORT |= {name: (ROWS_OF_FP8 if it.group == ROW else None, NARROWER) for name, it in FP8_SCHEMES.items()}
SUPPORT |= {name: (TABLES, TABLES) for name, it in WIDE_SCHEMES.items() if it.lowest != "signed"}


@pytest.mark.parametrize("name", ALL_SCHEMES)
def test_each_scheme(name: str) -> None:
    for dtype, want in zip(("bfloat16", "float16"), SUPPORT[name], strict=True):
        spec = ProductSpec(scheme=ALL_SCHEMES[name], dtype=dtype, rows=4096, cols=4096)
        reason = supports(spec, H200)
        assert (reason is None) == (want is None) and (want or "") in (reason or ""), reason
    assert "float32" in (against_scheme(ALL_SCHEMES[name], "float32") or "")


@pytest.mark.parametrize(
    ("rows", "cols", "lacking", "word"),
    [(4096, 4096, 0, ""), (4092, 4096, 0, "multiples of 8"), (4096, 4032, 0, "cut"), (4096, 4096, 64, "cut")],
)
def test_a_rank_s_part_of_a_matrix(rows: int, cols: int, lacking: int, word: str) -> None:
    spec = ProductSpec(scheme=ALL_SCHEMES["INT4_128"], dtype="bfloat16", rows=rows, cols=cols, lacking=lacking)
    assert word in (supports(spec, H200) or "") and bool(word) == bool(supports(spec, H200))
    by_rows = replace_scheme(spec, "INT4_ROW")
    assert supports(by_rows, H200) is None or rows % 8


def replace_scheme(spec: ProductSpec, name: str) -> ProductSpec:
    return ProductSpec(scheme=ALL_SCHEMES[name], dtype=spec.dtype, rows=spec.rows, cols=spec.cols, lacking=spec.lacking)


def planned(backend: str = "humming", where: Any = None, **flags: Any) -> Any:
    return plan(where or host(1, packages=HERE), product_backend=backend, **({"quantization": "int4"} | flags))


@pytest.mark.parametrize(
    ("where", "flags", "words"),
    [
        (host(1), {}, ("not installed", "weft-llm[humming]")),
        (host(1, packages=HERE | {"humming-kernels": "0.2.0"}), {}, ("0.2.0", VERSION)),
        (host(packages=HERE), {"device": "cpu"}, ("on GPUs, not on a CPU",)),
        (None, {"dtype": "float32"}, ("float32", "bfloat16")),
        (host((gpu(0, capability=(7, 0)),), packages=HERE), {"dtype": "float16"}, ("7.0", "7.5")),
        (None, {"quantization": "none"}, ("no weights of this model are quantised",)),
        (None, {"quantization": "fp8"}, ("FP8_ROW", "FP8 units")),
    ],
    ids=["not installed", "another version", "cpu", "dtype", "card", "not quantised", "scheme"],
)
def test_what_cannot_be_had_is_one_line(where: Any, flags: dict[str, Any], words: tuple[str, ...]) -> None:
    """With the value, the limit and a way out, before any weight is read."""
    with refuses(ConfigError, "product-backend-not-usable") as caught:
        planned(where=where, **flags)
    message = str(caught.value)
    for word in ("--product-backend humming", "leave --product-backend out", *words):
        assert word in message, message
    assert "\n" not in message
    assert planned("auto", where=where, **flags).product_backend == "own", "auto takes Weft's own"


def test_products_stand_beside_triton_s_kernels() -> None:
    device = kernel_device(host(1, packages=HERE), ["cuda:0"])
    with refuses(ConfigError, "product-backend-not-usable", "--attention-backend torch"):
        products.choose_product_backend("humming", "torch", "bfloat16", {"Q4_1"}, device)


def test_auto_is_own_until_a_card_has_measured_both(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.AUTO == "own", "docs/benchmarks.md has figures of a card?"
    assert planned().product_backend == "humming"
    assert planned("own").product_backend == planned("auto").product_backend == "own"
    monkeypatch.setattr(products, "AUTO", "race")
    assert planned("auto").product_backend == "auto"
    assert planned("auto", host(1)).product_backend == planned("own").product_backend == "own"


def test_deterministic_engines_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "AUTO", "race")
    cpu = host(packages=HERE, environment={"TRITON_INTERPRET": "1"}, cpu=CPU)
    flags: dict[str, Any] = {"deterministic": True, "device": "cpu"}
    with refuses(ConfigError, "not-deterministic", "--product-backend humming"):
        planned(where=cpu, **flags)
    assert planned("auto", where=cpu, **flags).product_backend == "own"


def test_memory_of_repacking_is_in_the_plan() -> None:
    """SmolLM2 has 576 columns, which are padded to 640, and widths of 1536."""
    got = planned()
    own = planned("own")
    assert repacking_bytes(own, 0) == 0
    here = repacking_bytes(got, 0)
    scheme = ALL_SCHEMES["Q4_1"]
    largest = scheme.nbytes(3072, Span(0, 640))  # gate and up
    assert here > 4 * largest + 4 * LOCKS
    raced = repacking_bytes(replace(got, product_backend="auto"), 0)
    assert raced > here
    tight = host((gpu(0, free=got.weight_bytes(0) + here // 2),), packages=HERE)
    planned("own", where=tight)
    with refuses(PlanError, "weights-exceed-free-memory"):
        planned(where=tight)
