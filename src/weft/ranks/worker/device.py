"""A rank's device: threads, and the memory it leaves for the KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.checkpoint.architectures.kv import mixer_spec
from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import LatentAttention, Mixer
from weft.errors import ConfigError
from weft.machine.hardware import host
from weft.machine.hardware.cuda import BUS_ORDER, ORDER_VARIABLE, uuid_digits
from weft.machine.native.pages import map_pages
from weft.plan.plan import Plan
from weft.ranks.kernels.attention import KVCache
from weft.ranks.kernels.capture import release_cached_memory


def prepare_device(plan: Plan, rank: int) -> torch.device:
    """Make the rank's device current and give torch the rank's share of the cores.

    Raises ConfigError if CUDA counts the GPUs in another order than the plan.
    """
    torch.set_num_threads(plan.threads(rank))
    device = torch.device(plan.devices[rank].name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if plan.uuids:
            shown = [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]
            check_gpu_number(device.index, plan.uuids[rank], shown)
    return device


def check_gpu_number(number: int, uuid: str, shown: Sequence[str]) -> None:
    """Raise ConfigError if CUDA shows the GPU `uuid` at another place of `shown` than `number`.

    This happens if CUDA was in use in this process before the order of GPUs was set.
    """
    names = [uuid_digits(name) for name in shown]
    if uuid_digits(uuid) in names and names[number] != uuid_digits(uuid):
        raise ConfigError(
            f"GPU {number} is cuda:{names.index(uuid_digits(uuid))} in this process, which used CUDA before it was "
            f"told to count along the PCI bus; set {ORDER_VARIABLE}={BUS_ORDER} from the beginning, or take "
            "executor='processes'",
            code="wrong-device-order",
        )


def free_bytes(plan: Plan, rank: int, device: torch.device, activation_bytes: int) -> int:
    """Bytes left for the KV cache.

    On a CPU that is the host's free memory. On a GPU it is the rank's share of the card, less everything on the card
    already (of other processes and of this one: weights, context, NCCL) and less the peak of activations.
    """
    if device.type == "cpu":
        return host.memory_bytes(Path("/"))[1]
    release_cached_memory()
    free, total = torch.cuda.mem_get_info(device)
    spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    used = total - free - spare
    return min(int(total * plan.gpu_memory_utilization[rank]) - used, free + spare) - activation_bytes


def memory_in_use(device: torch.device) -> tuple[int, int | None, int | None]:
    """`allocated_bytes`, `reserved_bytes` and `driver_bytes` of a RankReport."""
    if device.type == "cpu":
        return host.resident_bytes(), None, None
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total - free


def allocate_caches(plan: Plan, rank: int, dtype: torch.dtype, device: torch.device, num_blocks: int) -> list[KVCache]:
    """Allocate a KV cache of `num_blocks` blocks for each layer of a rank.

    The i-th layers of all KV groups have the same memory, since a block belongs to one group at a time. Layers of
    different kinds or sizes are counted apart, as `KVLayout.block_bytes` does.
    """
    place, layout, blocks = plan.places[rank], plan.kv_layout, (num_blocks, plan.block_size)
    memory: dict[tuple[str, int, int], KVCache] = {}
    counts: Counter[tuple[str, int, int]] = Counter()  # of the layers of a kind and size in a group
    caches = []
    for layer in range(place.layers.start, place.layers.stop):
        mixer, group = plan.shape.layers[layer].mixer, layout.group_of(layer)
        spec = mixer_spec(mixer, place)
        size = spec.kind, spec.bytes_per_token
        key = (*size, counts[*size, group])
        if key not in memory:
            memory[key] = allocate_cache(mixer, place, dtype, device, blocks)
        dims = (*blocks, *cache_dims(mixer, place))
        shared = memory[key]
        if spec.kind == "heads":  # heads of another length may take as many bytes
            shared = KVCache(shared.keys.view(dims), shared.values.view(dims))
        caches.append(replace(shared, group=group))
        counts[*size, group] += 1
    return caches


CacheDims = tuple[int, int]  # heads of a token, and their length


def cache_dims(mixer: Mixer, place: Place) -> CacheDims:
    """Dims of a token in the keys that a rank caches of a layer."""
    if isinstance(mixer, LatentAttention):
        return 1, mixer.latent_dim
    return len(place.heads_of(mixer.head_counts).kv), mixer.head_dim


def allocate_cache(
    mixer: Mixer, place: Place, dtype: torch.dtype, device: torch.device, blocks: tuple[int, int]
) -> KVCache:
    """Allocate the KV cache of one layer; `blocks` are the number of blocks and the tokens of a block."""
    dims = (*blocks, *cache_dims(mixer, place))
    keys = allocate_zeros(dims, dtype, device)
    if isinstance(mixer, LatentAttention):
        return KVCache.of_latents(keys, mixer.kv_lora_rank)
    return KVCache(keys, allocate_zeros(dims, dtype, device))


def allocate_zeros(dims: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate the memory of keys or values.

    Zeros, so that what is masked out of a product is never NaN. On a CPU they are the system's untouched pages, which
    take no memory before they are written (torch.zeros would write them).
    """
    if device.type != "cpu":
        return torch.zeros(dims, dtype=dtype, device=device)
    return torch.frombuffer(map_pages(prod(dims) * dtype.itemsize), dtype=dtype).view(dims)


class ToHost:
    """A tensor on its way to the host. The copy begins at once; only `values` waits for it, from any thread."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device, self._values, self._arrived = tensor.device, tensor, None
        if tensor.device.type == "cuda":
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def values(self) -> list[Any]:
        """Wait for the copy; return the tensor as a list."""
        return self._wait().tolist()

    def array(self) -> np.ndarray:
        """Wait for the copy; return the tensor as an array."""
        array: np.ndarray = self._wait().numpy()
        return array

    def _wait(self) -> torch.Tensor:
        if self._arrived:
            # A thread that has set no device would create a context on GPU 0 by waiting: 0.5 GB of its memory.
            torch.cuda.set_device(self._device)
            self._arrived.synchronize()
        return self._values
