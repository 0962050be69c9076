"""Live figures of GPUs from NVML: utilisation, memory, power, clocks, temperature and traffic."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from weft.machine.hardware.nvml import ask_driver, memory_holders
from weft.machine.hardware.topology import Gpu, Holder

T = TypeVar("T")

# Bits of nvmlClocksEventReasons that mean a clock below the clock that the load asks for.
THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature",
    0x80: "power brake",
    0x400: "reliability",
}
# nvmlNvLinkErrorCounter_t
NVLINK_ERRORS = {0: "replay", 1: "recovery", 2: "crc_flit", 3: "crc_data"}
EVERY_LINK = 0xFFFFFFFF  # scope of a field value that is the sum of all links (nvml.h)
PCIE_UNIT = 1000  # nvmlDeviceGetPcieThroughput reports KB/s
NVLINK_UNIT = 1024  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX counts KiB


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one GPU at one moment; None if the driver does not report one.

    Utilisation is in percent, of the last period that the driver averages over (a sixth of a second to one). Traffic is
    in bytes per second: over PCIe of the last 20 ms, over NVLink since the sample before. `throttle` names the reasons
    for which the clock is lower than the load asks for.
    """

    index: int
    name: str
    utilization: int | None = None
    memory_utilization: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    pcie_tx_Bps: float | None = None
    pcie_rx_Bps: float | None = None
    nvlink_tx_Bps: float | None = None
    nvlink_rx_Bps: float | None = None
    throttle: tuple[str, ...] = ()


class NvLinkState(msgspec.Struct, frozen=True, kw_only=True):
    """State of one NVLink of a GPU. `errors` are counts since the driver was loaded, by kind."""

    gpu: int
    link: int
    active: bool
    errors: dict[str, int] = {}


class GpuSampler:
    """Samples the figures of `gpus` with an open session of NVML.

    Each sample takes some 50 ms per GPU: the driver measures PCIe traffic for 20 ms in each direction.
    """

    def __init__(self, nvml: Any, gpus: Iterable[Gpu], clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._clock = clock
        self._handles = {gpu.index: nvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus}
        self._gpus = {gpu.index: gpu for gpu in gpus}
        self._counted: dict[tuple[int, int], tuple[float, int]] = {}  # (GPU, field): time and KiB of the last sample

    def sample(self) -> tuple[GpuFigures, ...]:
        """Figures of every GPU now."""
        return tuple(self._figures(gpu, self._handles[index]) for index, gpu in self._gpus.items())

    def holders(self, index: int) -> tuple[Holder, ...]:
        """Processes that hold memory of a GPU."""
        return tuple(memory_holders(self._nvml, self._handles[index]))

    def highest_clock_mhz(self, index: int) -> int | None:
        """Highest clock of a GPU's multiprocessors."""
        nvml = self._nvml
        clock: int | None = self._ask(
            nvml.nvmlDeviceGetMaxClockInfo, self._handles[index], nvml.NVML_CLOCK_SM, default=None
        )
        return clock

    def nvlinks(self) -> tuple[NvLinkState, ...]:
        """State of every NVLink; empty without NVLinks."""
        states = []
        for index, handle in self._handles.items():
            for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
                active = self._ask(self._nvml.nvmlDeviceGetNvLinkState, handle, link, default=None)
                if active is None:
                    break
                states.append(
                    NvLinkState(gpu=index, link=link, active=bool(active), errors=self._link_errors(handle, link))
                )
        return tuple(states)

    def _figures(self, gpu: Gpu, handle: Any) -> GpuFigures:
        nvml = self._nvml
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle, default=None)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle, default=None)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, handle, default=None)
        limit = self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle, default=None)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle, default=0)
        return GpuFigures(
            index=gpu.index,
            name=gpu.name,
            utilization=None if rates is None else int(rates.gpu),
            memory_utilization=None if rates is None else int(rates.memory),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=gpu.total_bytes,
            power_w=None if power is None else power / 1000,
            power_limit_w=None if limit is None else limit / 1000,
            sm_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM, default=None),
            memory_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM, default=None),
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU, default=None),
            pcie_tx_Bps=self._pcie(handle, nvml.NVML_PCIE_UTIL_TX_BYTES),
            pcie_rx_Bps=self._pcie(handle, nvml.NVML_PCIE_UTIL_RX_BYTES),
            nvlink_tx_Bps=self._nvlink(gpu, handle, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
            nvlink_rx_Bps=self._nvlink(gpu, handle, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
            throttle=throttle_reasons(reasons),
        )

    def _pcie(self, handle: Any, direction: int) -> float | None:
        """Bytes per second over PCIe."""
        rate = self._ask(self._nvml.nvmlDeviceGetPcieThroughput, handle, direction, default=None)
        return None if rate is None else float(rate * PCIE_UNIT)

    def _nvlink(self, gpu: Gpu, handle: Any, field: int) -> float | None:
        """Bytes per second over all NVLinks since the last sample; None at the first one and without a counter."""
        if gpu.nvlinks is None:
            return None
        none: list[Any] = []
        values = self._ask(self._nvml.nvmlDeviceGetFieldValues, handle, [(field, EVERY_LINK)], default=none)
        if not values or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        now, count = self._clock(), int(values[0].value.ullVal)
        last = self._counted.get((gpu.index, field))
        self._counted[gpu.index, field] = now, count
        if last is None or now <= last[0]:
            return None
        return (count - last[1]) * NVLINK_UNIT / (now - last[0])

    def _link_errors(self, handle: Any, link: int) -> dict[str, int]:
        """Error counters of one NVLink, without counters that the driver does not report."""
        counters: Mapping[str, int | None] = {
            name: self._ask(self._nvml.nvmlDeviceGetNvLinkErrorCounter, handle, link, counter, default=None)
            for counter, name in NVLINK_ERRORS.items()
        }
        return {name: int(count) for name, count in counters.items() if count is not None}

    def _ask(self, question: Callable[..., T], *arguments: Any, default: T) -> T:
        return ask_driver(self._nvml, question, *arguments, default=default)


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Names of the reasons in NVML's bit mask for which a GPU's clock is lowered, without duplicates."""
    return tuple(dict.fromkeys(name for bit, name in THROTTLE_REASONS.items() if bits & bit))
