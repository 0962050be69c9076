"""CUDA's numbers of the GPUs: along the PCI bus, as the driver's library has them, unless the user wants others."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping

logger = logging.getLogger("weft")

# Of CUDA_DEVICE_ORDER. CUDA's own, where that is not set, is FASTEST_FIRST, by a rule that only CUDA knows.
ORDER_VARIABLE, BUS_ORDER = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
SUCCESS = 0  # CUresult


def device_order_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process that names GPUs as the plan does. The user's own order stays:
    `shown` tells it."""
    return {} if ORDER_VARIABLE in environment else {ORDER_VARIABLE: BUS_ORDER}


def has_other_order(environment: Mapping[str, str]) -> bool:
    """Whether CUDA does not count along the PCI bus, because the user wants it so."""
    return environment.get(ORDER_VARIABLE, BUS_ORDER) != BUS_ORDER


def visible_uuids() -> list[str] | None:
    """The UUIDs of the GPUs that CUDA shows this process, in its order, as hexadecimal digits; None where it cannot be
    asked. No context is made, so no memory is taken."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        uuid_of = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
        count, found = ctypes.c_int(), []
        if cuda.cuInit(0) != SUCCESS or cuda.cuDeviceGetCount(ctypes.byref(count)) != SUCCESS:
            return None
        for number in range(count.value):
            device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            if cuda.cuDeviceGet(ctypes.byref(device), number) != SUCCESS:
                return None
            if uuid_of(ctypes.byref(uuid), device) != SUCCESS:
                return None
            found.append(bytes(uuid).hex())
    except (OSError, AttributeError):
        return None
    return found


def uuid_digits(uuid: str) -> str:
    """Those of a UUID, however it is written: GPU-8f1c5d6e-..., MIG-..., or without a kind."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").replace("-", "").lower()
