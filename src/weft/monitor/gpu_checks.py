"""Checks of the GPUs: driver, libraries, peer-to-peer copies, throttling, PCIe lanes, foreign memory, and kernels of
quantised weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from weft.formatting import extra_hint, format_bytes
from weft.machine.check import Check, skipped
from weft.machine.hardware.gpu_figures import GpuFigures
from weft.machine.hardware.host import Host
from weft.monitor.topology import peer_verdict
from weft.plan.backends import KernelDevice, Version
from weft.plan.products import CAPABILITY, EXTRA, PACKAGE, VERSION, against_device
from weft.probes.stored_speeds import Speeds

GPU_CHECKS = ("driver", "cuda", "nccl", "peer-to-peer", "throttling", "pcie-lanes", "gpu-memory", "product-kernels")
NO_GPU = "no GPU is visible"
HOT_C = 87  # from here on NVIDIA's cards lower their clocks, 83 to 91 degrees by model
FOREIGN_SHARE = 0.1  # of a GPU's memory


def check_gpus(host: Host, speeds: Speeds, figures: Sequence[GpuFigures], cuda: str | None) -> Iterator[Check]:
    """The checks of GPU_CHECKS, all skipped without a GPU. `cuda` is the highest version that the driver supports."""
    if not host.gpus:
        yield from (skipped(name, NO_GPU) for name in GPU_CHECKS)
        return
    yield Check("driver", "ok", host.driver or "unknown version")
    yield check_cuda(torch_cuda(), cuda)
    yield check_nccl(len(host.gpus))
    yield check_peers(host, speeds)
    yield check_throttling(figures)
    yield check_lanes(host)
    yield check_foreign_memory(host)
    yield check_products(host)


def torch_cuda() -> str | None:
    """CUDA version that the installed torch was built for; "" if it was built without CUDA, None without torch.

    It is read from torch's version file: torch itself is not imported.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and name.partition(":")[0].strip() == "cuda":
            return "" if value.strip() == "None" else value.strip().strip("'\"")
    return None


def check_cuda(built: str | None, supported: str | None) -> Check:
    """torch's CUDA version compared with the driver's."""
    if built is None:
        return Check("cuda", "fail", "torch is not installed", remedy='pip install "torch>=2.11,<2.14"')
    if not built:
        remedy = (
            "install a build of torch with CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu128"
        )
        return Check("cuda", "fail", "torch was built without CUDA", limit=supported or "", remedy=remedy)
    if supported is None:
        return Check("cuda", "warn", f"torch for CUDA {built}", remedy="the driver does not report its CUDA version")
    # Within one major version a newer runtime runs on an older driver (CUDA's minor version compatibility).
    too_new = _major(built) > _major(supported)
    remedy = f"update the driver, or install torch for CUDA {supported}" if too_new else ""
    return Check("cuda", "fail" if too_new else "ok", built, limit=f"driver: up to {supported}", remedy=remedy)


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def check_nccl(gpus: int) -> Check:
    """The NCCL package that torch uses for more than one GPU."""
    if gpus == 1:
        return skipped("nccl", "one GPU needs none")
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            return Check("nccl", "ok", f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return Check(
        "nccl", "warn", "no package of NCCL", remedy="torch's wheel for CUDA brings it; a system library may do"
    )


def check_peers(host: Host, speeds: Speeds) -> Check:
    """The measured copies between every two GPUs."""
    if not host.pairs:
        return skipped("peer-to-peer", "one GPU")
    verdicts: dict[str, list[str]] = {}
    for pair in host.pairs:
        measured = speeds.pair(host.gpus[pair.first].uuid, host.gpus[pair.second].uuid)
        verdicts.setdefault(peer_verdict(pair, measured), []).append(f"{pair.first}-{pair.second}")
    value = "; ".join(f"{', '.join(pairs)}: {verdict}" for verdict, pairs in verdicts.items())
    if "broken" in verdicts or "hung" in verdicts:
        remedy = "Weft copies through the host; switch the IOMMU or ACS off, or set NCCL_P2P_DISABLE=1 for others"
        return Check("peer-to-peer", "fail", value, limit="all bytes arrive", remedy=remedy)
    if verdicts.keys() & {"reported", "unsupported", "unknown"}:
        return Check("peer-to-peer", "warn", value, remedy="run weft hardware, which measures the copies")
    return Check("peer-to-peer", "ok", value)


def check_throttling(figures: Sequence[GpuFigures]) -> Check:
    """GPUs whose clock is lowered now, and their temperatures."""
    slow = [f"GPU {gpu.index}: {', '.join(gpu.throttle)}" for gpu in figures if gpu.throttle]
    hottest = _highest_temperature(figures)
    temperature = "" if hottest is None else f", hottest GPU {hottest} °C"
    value = "; ".join(slow) or f"none{temperature}"
    limit = f"{HOT_C} °C"
    if not slow and (hottest is None or hottest < HOT_C):
        return Check("throttling", "ok", value, limit=limit, remedy="")
    remedy = "better airflow, or a higher limit: nvidia-smi --power-limit"
    return Check("throttling", "warn", value, limit=limit, remedy=remedy)


def _highest_temperature(figures: Sequence[GpuFigures]) -> int | None:
    """The temperature of the hottest GPU in degrees Celsius, None if no GPU reports it."""
    return max((gpu.temperature_c for gpu in figures if gpu.temperature_c is not None), default=None)


def check_lanes(host: Host) -> Check:
    """PCIe lanes in use of each GPU, of the lanes that card and slot have. An idle card keeps its lanes."""
    known = [(gpu.index, gpu.pcie) for gpu in host.gpus if gpu.pcie]
    if not known:
        return skipped("pcie-lanes", "the driver does not report them")
    narrow = [
        f"GPU {index}: {link.lanes} of {link.most_lanes}" for index, link in known if link.lanes < link.most_lanes
    ]
    if narrow:
        return Check("pcie-lanes", "warn", "; ".join(narrow), remedy="check the slot and the riser")
    return Check("pcie-lanes", "ok", "; ".join(f"GPU {index}: {link.lanes}" for index, link in known))


def check_foreign_memory(host: Host) -> Check:
    """Memory of each GPU that other processes hold."""
    held = [
        f"GPU {gpu.index}: {format_bytes(gpu.held_bytes)} by {', '.join(map(str, gpu.holders)) or 'an unnamed process'}"
        for gpu in host.gpus
        if gpu.held_bytes > FOREIGN_SHARE * gpu.total_bytes
    ]
    if held:
        return Check(
            "gpu-memory", "warn", "; ".join(held), limit="10 %", remedy="stop these processes, or plan around them"
        )
    return Check("gpu-memory", "ok", "free")


def check_products(host: Host) -> Check:
    """The kernels that multiply quantised weights: Weft's own, and humming-kernels."""
    installed = host.packages.get(PACKAGE)
    kinds = sorted({gpu.capability for gpu in host.gpus})
    cards = [capability for capability in kinds if product_dtype(capability) is not None]
    value = f"Weft's own; {PACKAGE}: {installed or 'not installed'}"
    if not cards:
        return Check("product-kernels", "ok", value)
    if installed == VERSION:
        device = KernelDevice(cards=[(gpu.name, gpu.capability) for gpu in host.gpus], packages=host.packages)
        reason = against_device(device, product_dtype(cards[0]) or "")
        remedy = f"not on all of these: {reason}" if reason else "--product-backend humming takes it"
        return Check("product-kernels", "ok", value, remedy=remedy)
    names = ", ".join(f"sm_{major}{minor}" for major, minor in cards)
    remedy = (
        f"products with weights of 4 bits, MXFP4 or FP8 on {names} may gain, which Weft has not measured: "
        f"{extra_hint(EXTRA)}, then --product-backend humming"
    )
    return Check("product-kernels", "ok", value, limit=VERSION, remedy=remedy)


def product_dtype(capability: Version) -> str | None:
    """The dtype of activations in which the library computes on a card; None if in none."""
    return next((dtype for dtype in ("bfloat16", "float16") if capability >= CAPABILITY[dtype]), None)
