"""GPUs with the processes that hold their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.machine.hardware.gpu_figures import GpuFigures, GpuSampler
from weft.monitor.history import GpuMoment
from weft.monitor.processes import own_pids


def sample_moments(sampler: GpuSampler, figures: Iterable[GpuFigures]) -> Iterator[GpuMoment]:
    """The GPUs of these figures; processes of this one's family are its own.

    In a container the driver may count processes as the host does, so that none of ours is recognised: then nothing is
    said about other processes.
    """
    family = own_pids()
    sampled = [(gpu, sampler.holders(gpu.index)) for gpu in figures]
    recognised = any(holder.pid in family for _, holders in sampled for holder in holders)
    for gpu, holders in sampled:
        yield GpuMoment(
            figures=gpu,
            holders=holders,
            own=family if recognised else frozenset(holder.pid for holder in holders),
            most_clock_mhz=sampler.highest_clock_mhz(gpu.index),
        )
