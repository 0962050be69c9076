"""CUDA's device numbers: by PCI bus, as NVML counts, unless the user sets another order."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping

logger = logging.getLogger("weft")

# If CUDA_DEVICE_ORDER is not set, CUDA takes FASTEST_FIRST, by a rule that only CUDA knows.
ORDER_VARIABLE, BUS_ORDER = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
SUCCESS = 0  # CUresult


def device_order_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to the environment of a process, so that CUDA numbers GPUs as the plan does.

    Empty if the user has set an order of their own; `visible_uuids` reports it.
    """
    return {} if ORDER_VARIABLE in environment else {ORDER_VARIABLE: BUS_ORDER}


def has_other_order(environment: Mapping[str, str]) -> bool:
    """Return True if the user has set a device order other than the PCI bus's."""
    return environment.get(ORDER_VARIABLE, BUS_ORDER) != BUS_ORDER


def visible_uuids() -> list[str] | None:
    """UUIDs of the GPUs visible to this process, in CUDA's order, as hexadecimal digits; None if CUDA does not answer.

    No context is created, so no GPU memory is taken.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        uuid_of = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
        count, uuids = ctypes.c_int(), []
        if cuda.cuInit(0) != SUCCESS or cuda.cuDeviceGetCount(ctypes.byref(count)) != SUCCESS:
            return None
        for number in range(count.value):
            device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            if cuda.cuDeviceGet(ctypes.byref(device), number) != SUCCESS:
                return None
            if uuid_of(ctypes.byref(uuid), device) != SUCCESS:
                return None
            uuids.append(bytes(uuid).hex())
    except (OSError, AttributeError):
        return None
    return uuids


def uuid_digits(uuid: str) -> str:
    """Hexadecimal digits of a UUID in any form: GPU-8f1c5d6e-..., MIG-..., or without a prefix."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").replace("-", "").lower()
