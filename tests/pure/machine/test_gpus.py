"""GPUs: the table's figures, and the names that people and drivers use."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import msgspec
import pytest

from tests.refusals import refuses
from weft.errors import ConfigError
from weft.machine.hardware.gpus import GpuSpec, find_gpu, gpu_spec, known_gpus
from weft.machine.hardware.kernel_shares import KernelShares, find_kernel_shares
from weft.machine.hardware.topology import Clocks, Gpu
from weft.planner.profiles import WeightsRule, load_profile
from weft.planner.work.roofline import weights_rule

TABLE = Path(__file__).parents[2] / "data/gpus.csv"


def rows() -> list[dict[str, str]]:
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def number(text: str) -> float:
    """Number at the beginning of a cell: "56(bridge pair)" is 56."""
    match = re.match(r"[\d.]+", text)
    return float(match[0]) if match else 0.0


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["gpu"])
def test_the_table_is_reproduced(row: dict[str, str]) -> None:
    gpu = find_gpu(row["gpu"])
    assert gpu.name == row["gpu"]
    assert gpu.memory_bytes == int(row["mem_mib"]) << 20
    assert gpu.bandwidth_Bps == float(row["bw_gbs"]) * 1e9
    columns = {"fp8": "fp8_tflops_dense", "int8": "int8_tops_dense", "fp4": "fp4_tflops_dense"}
    for precision, column in columns.items():
        assert gpu.flops.get(precision, 0.0) == number(row[column]) * 1e12
    assert gpu.flops["fp16"] == number(row["bf16_tflops_dense"]) * 1e12
    assert ("bf16" in gpu.flops) == ("no bf16" not in row["bf16_tflops_dense"])
    assert gpu.nvlink_Bps == number(row["nvlink_gbs_per_dir"]) * 1e9
    assert gpu.bridge == ("bridge" in row["nvlink_gbs_per_dir"])
    assert gpu.pcie_Bps == float(row["pcie_gbs_per_dir"]) * 1e9
    assert row["sm"] in (f"{gpu.capability[0]}.{gpu.capability[1]}", gpu.gfx)
    assert gpu.source


@pytest.mark.parametrize("gpu", known_gpus(), ids=lambda gpu: gpu.name)
def test_every_gpu_is_found_by_its_name_however_it_is_written(gpu: object) -> None:
    name = gpu.name  # type: ignore[attr-defined]
    for written in (name, name.upper(), name.lower(), name.replace(" ", ""), name.replace("-", " "), f"NVIDIA {name}"):
        assert find_gpu(written) is gpu


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("H100", "H100-SXM"),
        ("A100", "A100-80GB-SXM"),
        ("H200", "H200-SXM"),
        ("B200", "B200-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB-SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("A100 40 GB", "A100-40GB-SXM"),
        ("A100-PCIe-80GB", "A100-80GB-PCIe"),
        ("A100-SXM-80GB", "A100-80GB-SXM"),
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server"),
        ("RTX PRO 6000 Server", "RTX PRO 6000 Blackwell Server"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_of_people_and_drivers(name: str, expected: str) -> None:
    assert find_gpu(name).name == expected


@pytest.mark.parametrize(
    ("name", "hint"),
    [("RTX4095", "RTX 4090"), ("H1000", "H100"), ("banana", "RTX 4090"), ("", "RTX 4090")],
)
def test_unknown_names_get_the_nearest(name: str, hint: str) -> None:
    with refuses(ConfigError, "unknown-gpu", repr(name), hint):
        find_gpu(name)


def test_specs_can_be_keys() -> None:
    assert len({*known_gpus(), find_gpu("H100"), find_gpu("h100 sxm")}) == len(known_gpus())


def here(name: str, capability: tuple[int, int], clocks: Clocks | None) -> Gpu:
    """A GPU as the driver reports it."""
    return Gpu(
        index=0, name=name, uuid="GPU-0", total_bytes=8 << 30, free_bytes=1, capability=capability, clocks=clocks
    )


@pytest.mark.parametrize(
    ("name", "bus_bits", "memory_mhz", "cores", "boost_mhz"),
    [
        ("RTX 4090", 384, 10501, 16384, 2520),
        ("RTX 3090", 384, 9751, 10496, 1695),
        ("RTX A6000", 384, 8001, 10752, 1800),
        ("L40S", 384, 9001, 18176, 2520),
        ("A100-80GB-SXM", 5120, 1593, 6912, 1410),
        ("H100-SXM", 5120, 2619, 16896, 1830),
    ],
)
def test_a_gpu_from_its_clocks_is_near_its_data_sheet(
    name: str, bus_bits: int, memory_mhz: int, cores: int, boost_mhz: int
) -> None:
    known = find_gpu(name)
    clocks = Clocks(bus_bits=bus_bits, memory_hz=memory_mhz * 1e6, cores=cores, cores_hz=boost_mhz * 1e6)
    maker = "NVIDIA GeForce" if name in ("RTX 4090", "RTX 3090") else "NVIDIA"
    made = gpu_spec(here(f"{maker} Unheard-of {cores}", known.capability, clocks))
    assert made.bandwidth_Bps == pytest.approx(known.bandwidth_Bps, rel=0.02)
    for precision in ("bf16", "fp16"):
        assert made.flops[precision] == pytest.approx(known.flops[precision], rel=0.03)
    assert made.memory_bytes == 8 << 30 and "clocks" in made.source


def test_a_known_gpu_that_is_here_has_the_memory_that_its_driver_reports() -> None:
    spec = gpu_spec(here("NVIDIA H100 80GB HBM3", (9, 0), None))
    assert (spec.name, spec.memory_bytes) == ("H100-SXM", 8 << 30)
    with refuses(ConfigError, "unknown-gpu"):
        gpu_spec(here("NVIDIA Unheard-of", (9, 0), None))


def has_hbm(gpu: GpuSpec) -> bool:
    """Return True for the catalogue's cards with HBM; all others have GDDR."""
    return bool(re.match(r"A100|A30\b|G?[HB]\d|V100|MI\d", gpu.name))


def test_no_gpu_with_hbm_is_predicted_as_one_with_gddr() -> None:
    """Without an entry of its own a GPU gets that of the nearest capability, not the general one for GDDR."""
    entries: dict[bool, set[KernelShares]] = {True: set(), False: set()}
    rules: dict[bool, set[WeightsRule | None]] = {True: set(), False: set()}
    for gpu in known_gpus():
        entries[has_hbm(gpu)].add(find_kernel_shares(gpu))
        rules[has_hbm(gpu)].add(weights_rule(load_profile("llama.cpp"), gpu, "bf16"))
    assert not entries[True] & entries[False]
    assert not rules[True] & rules[False]


@pytest.mark.parametrize(("minor", "like"), [((10, 3), "B200"), ((12, 1), "RTX 5090"), ((8, 7), "RTX 3090")])
def test_a_new_minor_capability_gets_the_entry_of_the_nearest_one(minor: tuple[int, int], like: str) -> None:
    known = find_gpu(like)
    new = msgspec.structs.replace(known, name="Unheard-of", capability=minor)
    assert find_kernel_shares(new) is find_kernel_shares(known)
    for engine in ("llama.cpp", "weft"):
        profile = load_profile(engine)
        assert weights_rule(profile, new, "int4") is weights_rule(profile, known, "int4")
