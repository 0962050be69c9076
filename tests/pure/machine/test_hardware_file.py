"""Hardware files: what they describe, that they can be written and read again, and one clear line for what is wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refusals, refuses
from weft.errors import ConfigError
from weft.machine.hardware.cluster import Cluster, Link, Node, parse_gpus, parse_nodes
from weft.machine.hardware.gpus import PCIE_BPS, GpuSpec, find_gpu, known_gpus
from weft.machine.hardware.hardware_file import hardware_yaml, is_hardware_file, read_hardware_file

Told = Callable[[str], Cluster]
EXAMPLE = Path(__file__).parents[3] / "docs/hardware.md"


@pytest.fixture
def told(tmp_path: Path) -> Told:
    """The cluster of a file with this text."""

    def make(text: str) -> Cluster:
        path = tmp_path / "rig.yaml"
        path.write_text(text)
        return read_hardware_file(str(path))

    return make


def test_names_are_the_catalogue_s(told: Told) -> None:
    cluster = told("nodes:\n- count: 2\n  gpus: [{count: 8, name: H100}]\nnetwork: 400Gb\n")
    assert cluster == parse_nodes("2x8xH100", "400Gb")
    assert told("nodes: [{gpus: [{name: RTX 4090 24GB}, {name: rtx 3090}]}]") == parse_gpus("1xRTX4090+1xRTX3090")
    assert told("nodes: [{gpus: [{count: 8, name: H100}], link: pcie}]") == parse_gpus("8xH100@pcie")


def test_figures_of_a_known_card_can_be_changed(told: Told) -> None:
    (gpu,) = told(
        "nodes: [{gpus: [{name: RTX 4090, memory: 48GiB, held: 2GB, pcie: 64Gb/s, tflops: {fp8: 400}, "
        "peer_to_peer: true}]}]"
    ).gpus
    known = find_gpu("RTX 4090")
    assert gpu == msgspec.structs.replace(
        known,
        memory_bytes=48 << 30,
        held_bytes=2 * 10**9,
        pcie_Bps=8e9,
        flops={**known.flops, "fp8": 400e12},
        peer=True,
    )


def test_a_card_of_one_s_own(told: Told) -> None:
    (gpu, _) = told(
        "nodes: [{gpus: [{count: 2, name: Prototype X, memory: 24GB, bandwidth: 1TB/s, tflops: {bf16: 100}, "
        "capability: 8.9}]}]"
    ).gpus
    assert gpu == GpuSpec(
        name="Prototype X",
        memory_bytes=24 * 10**9,
        bandwidth_Bps=1e12,
        flops={"bf16": 1e14, "fp16": 1e14},
        nvlink_Bps=0.0,
        pcie_Bps=PCIE_BPS,
        capability=(8, 9),
        source="the user",
    )
    old = told("nodes: [{gpus: [{name: Old, memory: 8GB, bandwidth: 300GB/s, tflops: {fp16: 20}, nvlink: 25GB/s}]}]")
    assert (old.gpus[0].capability, old.gpus[0].flops, old.gpus[0].nvlink_Bps) == ((7, 0), {"fp16": 2e13}, 25e9)


def test_a_cpu(told: Told) -> None:
    cluster = told("nodes: [{cpu: {name: Big, memory: 200GB, bandwidth: 400GB/s, tflops: {fp32: 4, bf16: 60}}}]")
    assert cluster.on_cpu and cluster.nodes[0].link == "memory"
    assert cluster.gpus[0].flops == {"fp32": 4e12, "bf16": 6e13, "fp16": 4e12}


def test_bridges_and_a_price(told: Told) -> None:
    cluster = told("nodes: [{gpus: [{count: 4, name: RTX 3090}], bridged: [[2, 0], [1, 3]]}]\nprice: 0.25\n")
    assert (cluster.nodes[0].bridged, cluster.price) == (((0, 2), (1, 3)), 0.25)


def test_a_machine_may_be_a_rack(told: Told) -> None:
    assert len(told("nodes: [{gpus: [{count: 72, name: GB200}]}]").gpus) == 72


def test_the_page_s_examples_are_right(tmp_path: Path) -> None:
    blocks = EXAMPLE.read_text().split("```yaml\n")[1:]
    assert len(blocks) >= 2
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block.partition("```")[0])
        cluster = read_hardware_file(str(path))
        assert hardware_yaml(cluster)


@pytest.mark.parametrize(
    ("name", "file"),
    [("rig.yaml", True), ("a/b.YML", True), ("4xRTX4090", False), ("yaml", False), ("8xH100@nvlink", False)],
)
def test_files_are_told_from_names(name: str, file: bool) -> None:
    assert is_hardware_file(name) is file


# --- there and back ---

FIGURES = st.integers(1, 10**6).map(lambda it: it * 1e7)


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    if draw(st.booleans()):
        flops = {"fp32": draw(FIGURES) * 1e3, "bf16": draw(FIGURES) * 1e3, "fp16": draw(FIGURES) * 1e3}
        cpu = GpuSpec(
            kind="cpu",
            name="CPU (4 cores)",
            memory_bytes=draw(st.integers(1, 10**13)),
            bandwidth_Bps=draw(FIGURES),
            flops=flops,
            nvlink_Bps=0.0,
            pcie_Bps=0.0,
            capability=(0, 0),
            per_node=1,
            source="the user",
        )
        return Node((cpu,), "memory")
    cards: list[GpuSpec] = []
    for known in draw(st.lists(st.sampled_from(known_gpus()), min_size=1, max_size=3)):
        changed = draw(
            st.fixed_dictionaries({}, optional={"memory_bytes": st.integers(10**9, 10**12), "pcie_Bps": FIGURES})
        )
        peer = draw(st.sampled_from([None, True, False]))
        held = draw(st.integers(0, 10**9 - 1))
        cards += [msgspec.structs.replace(known, peer=peer, held_bytes=held, **changed)] * draw(st.integers(1, 5))
    may = (
        len({it.name for it in cards}) == 1
        and cards[0].nvlink_Bps
        and len(cards) > 1
        and not (cards[0].bridge and len(cards) > 2)
    )
    link: Link = draw(st.sampled_from(["nvlink", "pcie"])) if may else "pcie"
    bridged = ((0, 1),) if link == "pcie" and len(cards) > 1 and all(it.nvlink_Bps for it in cards[:2]) else ()
    return Node(tuple(cards), link, bridged)


@given(st.lists(nodes(), min_size=1, max_size=3), FIGURES, st.sampled_from([None, 2.5]), st.sampled_from([None, 2e-4]))
def test_a_written_file_is_read_again(
    found: list[Node], network: float, price: float | None, latency_s: float | None
) -> None:
    if len(found) > 1 and any(node.link == "memory" for node in found):
        found = found[:1]
    cluster = Cluster(tuple(found), network if len(found) > 1 else 12.5e9, price, network_s=latency_s)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(hardware_yaml(cluster))
        file.flush()
        again = read_hardware_file(file.name)
    # Figures may differ in the last of their binary digits.
    assert hardware_yaml(again) == hardware_yaml(cluster)
    assert again.network_s == (None if latency_s is None else pytest.approx(latency_s))
    assert [(node.link, node.bridged, len(node.gpus)) for node in again.nodes] == [
        (node.link, node.bridged, len(node.gpus)) for node in found
    ]
    for one, other in zip(again.gpus, cluster.gpus, strict=True):
        assert (one.name, one.kind, one.memory_bytes, one.held_bytes, one.capability, one.peer) == (
            (other.name, other.kind, other.memory_bytes, other.held_bytes, other.capability, other.peer)
        )
        assert one.flops == pytest.approx(other.flops, rel=1e-5)
        assert one.nvlink_Bps == pytest.approx(other.nvlink_Bps) and one.pcie_Bps == pytest.approx(other.pcie_Bps)


def test_a_bridge_that_is_larger_than_usual_is_written_as_a_group(tmp_path: Path) -> None:
    (card,) = parse_gpus("1xH200-NVL").gpus
    path = tmp_path / "rig.yaml"
    path.write_text(hardware_yaml(Cluster((Node((card,) * 4, "nvlink"),), 12.5e9)))
    assert [(node.link, node.bridged) for node in read_hardware_file(str(path)).nodes] == [("pcie", ((0, 1, 2, 3),))]


def test_merged_fields_are_no_double_ones(told: Told) -> None:
    (node,) = told("nodes:\n- gpus:\n  - &card {name: L4, memory: 20GB}\n  - {<<: *card, memory: 10GB}").nodes
    assert [gpu.memory_bytes for gpu in node.gpus] == [20 * 10**9, 10**10]


def test_a_long_figure_keeps_six_digits(tmp_path: Path) -> None:
    cluster = parse_gpus("2xH100")
    odd = msgspec.structs.replace(cluster.gpus[0], bandwidth_Bps=3.123456789e12)
    path = tmp_path / "rig.yml"
    path.write_text(hardware_yaml(Cluster((Node((odd,), "pcie"),), 12.5e9)))
    assert read_hardware_file(str(path)).gpus[0].bandwidth_Bps == 3.12346e12


# --- what is wrong ---


KERNELS = (
    "nodes: [{{cpu: {{memory: 9GB, bandwidth: 9GB/s, tflops: {{fp32: 1}}, kernels: {{products: "
    "[{{bits: {bits}, weights: [{weights}], tflops: 1}}], cache: 1GB/s, attention_tflops: 1, rows: 1GB/s}}}}}}]"
)


# A file, the code of what is wrong with it, and the place or the value that the message must name.
WRONG = [
    ("", "bad-hardware-file", "nothing"),
    ("[]", "bad-hardware-file", "a list"),
    ("nodes: []", "bad-hardware-file", "nodes"),
    ("nodes: 3", "bad-hardware-file", "nodes"),
    ("gpus: [{name: H100}]", "bad-hardware-file", "'gpus'"),
    ("nodes: [{}]", "node-needs-gpus-or-cpu", "nodes[0]"),
    ("nodes: [{gpus: []}]", "node-needs-gpus-or-cpu", "nodes[0]"),
    (KERNELS.format(bits=8, weights="1GB/s, 1GB/s, 1GB/s, 1GB/s"), "bad-hardware-file", "nodes[0].cpu.kernels"),
    (KERNELS.format(bits=16, weights="1GB/s"), "bad-hardware-file", "nodes[0].cpu.kernels.products[0].weights"),
    ("nodes: [{gpus: [{}]}]", "bad-hardware-file", "nodes[0].gpus[0]"),
    ("nodes: [{gpus: [{name: H100, cout: 3}]}]", "bad-hardware-file", "'cout'"),
    ("nodes: [{gpus: [{name: H100, xyz: 3}]}]", "bad-hardware-file", "'xyz'"),
    ("nodes: [{gpus: [{name: H100}, {name: H100, count: 0}]}]", "bad-hardware-file", "nodes[0].gpus[1].count"),
    ("nodes: [{gpus: [{name: H100, count: -2}]}]", "bad-hardware-file", "nodes[0].gpus[0].count"),
    ("nodes: [{gpus: [{name: H100, count: two}]}]", "bad-hardware-file", "nodes[0].gpus[0].count"),
    ("nodes: [{count: 0, gpus: [{name: H100}]}]", "bad-hardware-file", "nodes[0].count"),
    ("nodes: [{gpus: [{name: H1000}]}]", "incomplete-device", "'H1000'"),
    ("nodes: [{gpus: [{name: H1000}]}]", "incomplete-device", "nodes[0].gpus[0]"),
    ("nodes: [{gpus: [{name: X, memory: 3GB, bandwidth: 3GB/s}]}]", "device-without-tflops", "nodes[0].gpus[0]"),
    ("nodes: [{gpus: [{name: H100, memory: -3GB}]}]", "bad-hardware-file", "nodes[0].gpus[0].memory: '-3GB'"),
    ("nodes: [{gpus: [{name: H100, memory: 0GB}]}]", "bad-hardware-file", "nodes[0].gpus[0].memory: '0GB'"),
    ("nodes: [{gpus: [{name: H100, memory: 80}]}]", "bad-hardware-file", "nodes[0].gpus[0].memory"),
    ("nodes: [{gpus: [{name: H100, memory: 80GB/s}]}]", "bad-hardware-file", "nodes[0].gpus[0].memory: '80GB/s'"),
    ("nodes: [{gpus: [{name: H100, bandwidth: 0GB/s}]}]", "bad-hardware-file", "nodes[0].gpus[0].bandwidth: '0GB/s'"),
    (
        "nodes: [{gpus: [{name: H100, bandwidth: 3 parsecs}]}]",
        "bad-hardware-file",
        "nodes[0].gpus[0].bandwidth: '3 parsecs'",
    ),
    ("nodes: [{gpus: [{name: H100, pcie: 16}]}]", "bad-hardware-file", "nodes[0].gpus[0].pcie"),
    ("nodes: [{gpus: [{name: H100, tflops: {bf17: 3}}]}]", "bad-hardware-file", "'bf17'"),
    ("nodes: [{gpus: [{name: H100, tflops: {bf16: -3}}]}]", "bad-hardware-file", "nodes[0].gpus[0].tflops[...]"),
    ("nodes: [{gpus: [{name: H100, tflops: {bf16: .nan}}]}]", "bad-hardware-file", "nodes[0].gpus[0].tflops[...]"),
    ("nodes: [{gpus: [{name: H100, tflops: {bf16: .inf}}]}]", "bad-hardware-file", "nodes[0].gpus[0].tflops[...]"),
    ("nodes: [{gpus: [{name: H100, capability: ada}]}]", "bad-hardware-file", "nodes[0].gpus[0].capability: 'ada'"),
    (f"nodes: [{{gpus: [{{name: H100, capability: {'9' * 99}}}]}}]", "bad-hardware-file", f"{'9' * 60} is not a comp"),
    ("nodes: [{gpus: [{name: L4, held: 30GB}]}]", "held-exceeds-memory", "nodes[0].gpus[0]"),
    ("nodes: [{gpus: [{name: L4, count: 17}]}]", "too-many-gpus-in-machine", "nodes[0]"),
    ("nodes: [{gpus: [{name: L4, count: 2}], link: nvlink}]", "gpu-without-nvlink", "nodes[0]"),
    ("nodes: [{gpus: [{name: L4, count: 2}], link: infini}]", "bad-hardware-file", "'infini'"),
    ("nodes: [{gpus: [{name: H100, count: 2}], bridged: [[0, 1]]}]", "bridged-beside-nvlink", "nodes[0]"),
    ("nodes: [{gpus: [{name: RTX 3090, count: 4}], bridged: [[0, 1], [1, 3]]}]", "bad-bridge-numbers", "nodes[0]"),
    ("nodes: [{gpus: [{name: RTX 3090, count: 4}], bridged: [[0, 4]]}]", "bad-bridge-numbers", "nodes[0]"),
    ("nodes: [{gpus: [{name: L4, count: 4}], bridged: [[0, 1]]}]", "bad-bridge-group", "nodes[0]"),
    ("nodes: [{gpus: [{name: RTX 3090, count: 4}], bridged: [[2]]}]", "bad-bridge-group", "nodes[0]"),
    ("nodes: [{cpu: {memory: 3GB, bandwidth: 30GB/s, tflops: {}}}]", "bad-hardware-file", "nodes[0].cpu.tflops"),
    (
        "nodes: [{count: 2, cpu: {memory: 3GB, bandwidth: 30GB/s, tflops: {bf16: 1}}}]",
        "cpu-node-among-others",
        "without GPUs",
    ),
    ("nodes: [{count: 100000, gpus: [{name: L4, count: 2}]}]", "too-many-gpus", "100,000"),
    ("nodes: [{gpus: [{name: L4}]}]\nnetwork: fast", "bad-hardware-file", "'fast'"),
    ("nodes: [{gpus: [{name: L4}]}]\nnetwork: -1Gb", "bad-hardware-file", "'-1Gb'"),
    ("nodes: [{gpus: [{name: L4}]}]\nprice: 0", "bad-hardware-file", "price"),
    ("nodes: [{gpus: [{name: L4}]}]\nprise: 1", "bad-hardware-file", "'prise'"),
    ("nodes: [", "hardware-file-not-yaml", "line 1"),
    ("nodes: {a: b\n", "hardware-file-not-yaml", "line 1"),
    ("nodes: !!python/object/apply:os.system [ls]", "hardware-file-not-yaml", "python/object"),
    ("\ttabs: no", "hardware-file-not-yaml", "line 1"),
    # YAML takes the last of two without a word.
    ("nodes: [{gpus: [{name: H100, name: A100}]}]", "hardware-file-not-yaml", "'name'"),
    ("nodes: [{gpus: [{name: H100}]}]\nnodes: []", "hardware-file-not-yaml", "'nodes'"),
    ("nodes: " + "[" * 3000 + "]" * 3000, "hardware-file-not-yaml", "nested"),
    (f"nodes: [{{gpus: [{{name: H100, memory: 1{'0' * 400}GB}}]}}]", "bad-hardware-file", "nodes[0].gpus[0].memory"),
    ("nodes: [{gpus: [{name: H100, memory: 1001TB}]}]", "bad-hardware-file", "nodes[0].gpus[0].memory"),
    ("nodes: [{gpus: [{name: H100, memory: 0.1B}]}]", "bad-hardware-file", "nodes[0].gpus[0].memory: '0.1B'"),
    (
        f"nodes: [{{gpus: [{{name: H100, bandwidth: 1{'0' * 400}GB/s}}]}}]",
        "bad-hardware-file",
        "nodes[0].gpus[0].bandwidth",
    ),
    ("nodes: [{gpus: [{name: H100}]}]\nnetwork: 8001Tb", "bad-hardware-file", "network"),
    ("nodes: [{gpus: [{name: '  '}]}]", "bad-device-name", "nodes[0].gpus[0]: '  '"),
    ('nodes: [{gpus: [{name: "a\\nb\\e[31m"}]}]', "bad-device-name", "nodes[0].gpus[0]: 'a\\nb\\x1b[31m'"),
    ('nodes: [{cpu: {name: "\\b", memory: 3GB, bandwidth: 30GB/s, tflops: {fp32: 1}}}]', "bad-device-name", "nodes[0]"),
    ("nodes: [{gpus: [{name: L4, gpus: []}]}]", "bad-hardware-file", "'gpus'"),
    ("nodes: [{gpus: [{name: L4, peer_to_peer: maybe}]}]", "bad-hardware-file", "nodes[0].gpus[0].peer_to_peer"),
    ("nodes: [{gpus: [{name: L4}]}]\nprice: cheap", "bad-hardware-file", "price"),
]


@pytest.mark.parametrize(("text", "code", "named"), WRONG)
def test_wrong_values_give_one_clear_line(told: Told, text: str, code: str, named: str) -> None:
    with refuses(ConfigError, code, "rig.yaml", named):
        told(text)


def test_the_wording_of_what_is_wrong(told: Told, tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    golden("hardware_file.txt", refusals(told, [text for text, *_ in WRONG], tmp_path))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with refuses(ConfigError, "cannot-read-hardware-file", "missing.yaml", "No such file"):
        read_hardware_file(str(tmp_path / "missing.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with refuses(ConfigError, "cannot-read-hardware-file", "binary.yaml", "codec can't decode"):
        read_hardware_file(str(tmp_path / "binary.yaml"))
    with refuses(ConfigError, "cannot-read-hardware-file", "Is a directory"):
        read_hardware_file(str(tmp_path))
    (tmp_path / "book.yaml").write_text("nodes:\n- gpus:\n" + "  - {name: H100}\n" * 20_000)
    with refuses(ConfigError, "hardware-file-too-large", "book.yaml", "256 KiB"):
        read_hardware_file(str(tmp_path / "book.yaml"))
