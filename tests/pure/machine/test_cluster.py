"""Clusters: what users write, and one clear line for what cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refuses
from weft.errors import ConfigError
from weft.machine.hardware.cluster import parse_cluster, parse_gpus, parse_nodes
from weft.machine.hardware.gpus import GpuSpec, known_gpus


def names(spec: str) -> list[str]:
    return [gpu.name for gpu in parse_gpus(spec).gpus]


@pytest.mark.parametrize(
    ("spec", "count", "name", "link"),
    [
        ("4xRTX4090", 4, "RTX 4090", "pcie"),
        ("8xH100", 8, "H100-SXM", "nvlink"),
        ("8xH100@nvlink", 8, "H100-SXM", "nvlink"),
        ("8xH100@PCIe", 8, "H100-SXM", "pcie"),
        ("H100", 1, "H100-SXM", "pcie"),
        ("1xH100@nvlink", 1, "H100-SXM", "nvlink"),
        (" 2 x A100 40GB ", 2, "A100-40GB-SXM", "nvlink"),
        ("2×RTX 3090", 2, "RTX 3090", "pcie"),
        ("2*rtx3090@nvlink", 2, "RTX 3090", "nvlink"),
        ("4xH100-PCIe", 4, "H100-PCIe", "pcie"),
        ("8xMI300X", 8, "MI300X", "nvlink"),
        ("2X L40S", 2, "L40S", "pcie"),
        ("4090", 1, "RTX 4090", "pcie"),
        ("4090x2", 2, "RTX 4090", "pcie"),
        ("8 RTX 6000 Ada", 8, "RTX 6000 Ada", "pcie"),
        ("2 H100", 2, "H100-SXM", "nvlink"),
        ("RTX 4090 x 2", 2, "RTX 4090", "pcie"),
        ("H100x8@pcie", 8, "H100-SXM", "pcie"),
        ("MI300Xx4", 4, "MI300X", "nvlink"),
        ("2x5090 32GB", 2, "RTX 5090", "pcie"),
    ],
)
def test_one_node(spec: str, count: int, name: str, link: str) -> None:
    (node,) = parse_gpus(spec).nodes
    assert ([gpu.name for gpu in node.gpus], node.link) == ([name] * count, link)


def test_a_comma_is_a_plus() -> None:
    assert names("RTX4090,RTX3090") == names("1xRTX4090, 1xRTX3090") == ["RTX 4090", "RTX 3090"]


def test_mixed_gpus_meet_over_pcie() -> None:
    assert names("1xRTX4090+1xRTX3090") == ["RTX 4090", "RTX 3090"]
    assert names("4090+3090") == ["RTX 4090", "RTX 3090"]
    assert parse_gpus("2xH100+2xA100").nodes[0].link == "pcie"


@given(st.sampled_from(known_gpus()), st.integers(1, 100))
def test_every_gpu_can_be_asked_for(gpu: GpuSpec, count: int) -> None:
    if count <= gpu.per_node:
        assert names(f"{count}x{gpu.name}") == [gpu.name] * count
    else:
        with refuses(ConfigError, "too-many-gpus-in-machine", gpu.per_node, count):
            names(f"{count}x{gpu.name}")


def test_a_rack_that_is_one_machine() -> None:
    (node,) = parse_gpus("72xGB200").nodes
    assert (len(node.gpus), node.link) == (72, "nvlink")


@pytest.mark.parametrize(
    ("spec", "code", "values"),
    [
        ("", "bad-gpu-spec", ("''", "4xRTX4090")),
        ("4x", "bad-gpu-spec", ("'4x'",)),
        ("2xH100+", "bad-gpu-spec", ("''",)),
        ("0xH100", "count-out-of-range", ("0",)),
        ("-2xH100", "count-out-of-range", ("-2",)),
        ("999999999xH100", "count-out-of-range", ("999999999",)),
        ("60000xH100+60000xA100", "too-many-gpus-in-machine", ("16", "60,000", "--nodes")),
        ("10xH100+9xA100", "too-many-gpus-in-machine", ("16", "19", "--nodes")),
        ("73xGB200", "too-many-gpus-in-machine", ("72", "73")),
        ("2xH1000", "unknown-gpu", ("'H1000'",)),
        ("8xH100@infiniband", "unknown-link", ("'infiniband'",)),
        ("8xH100@", "unknown-link", ("''",)),
        ("8xL40S@nvlink", "gpu-without-nvlink", ("L40S",)),
        ("1xRTX3090@nvlink+1xH100@nvlink", "nvlink-of-mixed-gpus", ()),
        ("4xRTX3090@nvlink", "nvlink-bridge-of-two", ("3090", "4")),
        ("2xH100@nvlink+2xH100@pcie", "two-kinds-of-link", ()),
        ("H100@nvlink@pcie", "unknown-link", ("'nvlink@pcie'",)),
        ("2x8xH100", "several-machines-in-gpus", ("--nodes",)),
        ("4", "count-without-gpu", ("4",)),
        ("1x7900XTX", "gpu-of-other-maker", ("'7900XTX'", "AMD")),
        ("7900XT", "gpu-of-other-maker", ("'7900XT'",)),
        ("2xRX 9070 XT", "gpu-of-other-maker", ("AMD",)),
        ("M4Max", "gpu-of-other-maker", ("Apple",)),
        ("Apple M2 Ultra", "gpu-of-other-maker", ("Apple",)),
        ("Arc B580", "gpu-of-other-maker", ("Intel",)),
        ("24GB", "memory-without-gpu", ("RTX 3090", "RTX 4090")),
        ("2x80GB", "memory-without-gpu", ("A100-80GB-SXM", "H100-SXM")),
        ("4xRTX 6000 Pro 48GB", "gpu-of-other-size", ("96 GB", "48GB", "RTX 6000 Ada")),
        ("MI300X2Y", "unknown-gpu", ("'MI300X2Y'",)),
    ],
)
def test_bad_gpus(spec: str, code: str, values: tuple[str, ...]) -> None:
    with refuses(ConfigError, code, *values):
        parse_gpus(spec)


@pytest.mark.parametrize(
    ("spec", "network", "nodes", "bytes_per_second"),
    [
        ("2x8xH100", "400Gb", [8, 8], 50e9),
        ("2x8xH100", "400Gbps", [8, 8], 50e9),
        ("2x8xH100", "400 gb/s", [8, 8], 50e9),
        ("2x8xH100", "50GB", [8, 8], 50e9),
        ("2x8xH100", "50GB/s", [8, 8], 50e9),
        ("4x1xRTX4090", "10GbE", [1, 1, 1, 1], 1.25e9),
        ("3x2xL40S", "25Gbit", [2, 2, 2], 3.125e9),
        ("1x8xH100+2x4xA100", "1.6Tb", [8, 4, 4], 200e9),
        ("2 x 8 x H100", None, [8, 8], 12.5e9),
    ],
)
def test_several_nodes(spec: str, network: str | None, nodes: list[int], bytes_per_second: float) -> None:
    cluster = parse_nodes(spec, network)
    assert [len(node.gpus) for node in cluster.nodes] == nodes
    assert cluster.network_Bps == bytes_per_second
    assert len(cluster.gpus) == sum(nodes)


@pytest.mark.parametrize(
    ("spec", "network", "code", "values"),
    [
        ("2xH100", None, "bad-node-spec", ("'2xH100'", "2x8xH100")),
        ("H100", None, "bad-node-spec", ()),
        ("0x8xH100", None, "count-out-of-range", ("0",)),
        ("-1x8xH100", None, "count-out-of-range", ("-1",)),
        ("2x0xH100", None, "count-out-of-range", ("0",)),
        ("50000x8xH100", None, "too-many-gpus", ("100,000",)),
        ("2x8xH100", "fast", "bad-network-speed", ("'fast'",)),
        ("2x8xH100", "0Gb", "bad-network-speed", ("'0Gb'",)),
        ("2x8xH100", "-4Gb", "bad-network-speed", ()),
        ("2x8xH100", "400", "unknown-network-unit", ("''",)),
        ("2x8xH100", "400Gx", "unknown-network-unit", ("'Gx'",)),
        ("2x8xH100", "", "bad-network-speed", ()),
        ("2x8xH100", "10Gb-wifi", "bad-network-speed", ()),
        ("2x8xH100", "-rdma", "bad-network-speed", ()),
        ("2x8xH100", f"1{'0' * 400}Gb", "network-too-fast", ("1000TB",)),
    ],
)
def test_bad_nodes(spec: str, network: str | None, code: str, values: tuple[str, ...]) -> None:
    with refuses(ConfigError, code, *values):
        parse_nodes(spec, network)


@pytest.mark.parametrize(
    ("network", "tcp"),
    [
        ("1Gb", True),
        ("10Gb", True),
        ("25GbE", True),
        ("100Gb", False),
        ("400Gb", False),
        ("100Gb-ethernet", True),
        ("50GB-tcp", True),
        ("10Gb-RDMA", False),
        ("25Gb-roce", False),
        (None, False),
    ],
)
def test_slow_networks_are_ethernet(network: str | None, tcp: bool) -> None:
    seconds = parse_nodes("2x8xH100", network).network_s
    assert (seconds is None) != tcp
    assert seconds is None or 20e-6 <= seconds < 100e-6


def test_one_node_or_several() -> None:
    assert parse_cluster("2 x 8 x H100") == parse_nodes("2x8xH100")
    assert parse_cluster("8xH100@pcie") == parse_gpus("8xH100@pcie")
