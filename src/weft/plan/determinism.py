"""Deterministic engines (--deterministic): what they need of a model, a machine and a config.

Their kernels sum in one order, whatever other tokens are in a step. That is shown for the compiled CPU kernels with
vectors of 256 bits, and of 512 bits where the CPU multiplies bf16, for layers that these compute whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from weft.checkpoint.architectures.fused import is_fused
from weft.checkpoint.architectures.library import PREFIX
from weft.checkpoint.architectures.shape import Attention, ModelShape
from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.machine.hardware.host import Host
from weft.plan.backends import ATTENTION_BACKENDS, AttentionSpec, KernelDevice, weft_backend
from weft.plan.decision import Decision

VARIABLE = "VLLM_BATCH_INVARIANT"
FEATURES = ("avx2", "fma")  # features of the CPU
HEAD_UNIT = 8  # dims: what is left over of a head is summed in another order for other numbers of keys
BACKEND = "cpu"
ON_GPUS = "kernels for GPUs choose the order of sums by the batch; run on the CPU (weft serve --device cpu)"

logger = logging.getLogger("weft")


def fixed_order_backend(
    config: EngineConfig, shape: ModelShape, spec: AttentionSpec, host: Host, devices: Sequence[str]
) -> Decision[str] | None:
    """The attention backend of a deterministic engine, if the config asks for one, or if VLLM_BATCH_INVARIANT=1 does
    and it is possible; None for an engine that is not deterministic.

    Raises ConfigError if the config asks for it and it is not possible.
    """
    if not config.deterministic and host.environment.get(VARIABLE) != "1":
        return None
    obstacle = next(obstacles(config, shape, spec, host, devices), None)
    if obstacle is None:
        return Decision(BACKEND, "--deterministic" if config.deterministic else VARIABLE)
    if config.deterministic:
        raise not_deterministic(obstacle)
    # The variable is set for vLLM, which may well run on the same machine: no reason to stop.
    logger.warning("%s is 1, but answers depend on what else runs: %s", VARIABLE, obstacle)
    return None


def obstacles(
    config: EngineConfig, shape: ModelShape, spec: AttentionSpec, host: Host, devices: Sequence[str]
) -> Iterator[str]:
    """Reasons that an engine cannot be deterministic here, each with a way out if there is one."""
    yield from _against_devices(host, devices)
    if weft_backend(config.attention_backend) not in ("auto", BACKEND):
        yield f"only the compiled CPU kernels are; leave --attention-backend {config.attention_backend} out"
    if config.product_backend == "humming":
        yield "humming's kernels choose the order of sums by the batch; leave --product-backend humming out"
    if against := ATTENTION_BACKENDS[BACKEND].supports(spec, KernelDevice(cards=(), packages=None)):
        yield f"only the compiled CPU kernels are, and {against}"
    yield from against_model(shape)
    yield from _against_ranks(config)


def _against_devices(host: Host, devices: Sequence[str]) -> Iterator[str]:
    if any(name != "cpu" for name in devices):
        yield ON_GPUS
    if host.cpu is None or not set(FEATURES) <= set(host.cpu.features):
        yield f"the order of sums is shown for CPUs with {' and '.join(FEATURES)} only"


def _against_ranks(config: EngineConfig) -> Iterator[str]:
    if config.enable_expert_parallel and (config.data_parallel_size or 1) > 1:
        yield "attention groups that share experts are not; leave --data-parallel-size or --enable-expert-parallel out"
    if config.executor == "ray" or (config.nnodes or 1) > 1:
        yield "sums over ranks of several machines are not; run on one, without Ray"


def against_model(shape: ModelShape) -> Iterator[str]:
    """Reasons that lie in the model."""
    if shape.library is not None:
        yield f"{shape.architecture.removeprefix(PREFIX)} runs through Transformers' class, which is not"
    elif not is_fused(shape):
        yield f"layers of {shape.architecture} are computed with torch in part, which is not"
    for mixer in shape.mixers:
        if isinstance(mixer, Attention) and mixer.head_dim % HEAD_UNIT:
            yield f"heads have {mixer.head_dim} dims, which is no multiple of {HEAD_UNIT}"


def not_deterministic(reason: str) -> ConfigError:
    """The error of an engine that cannot be deterministic."""
    return ConfigError(f"--deterministic is not possible here: {reason}", code="not-deterministic")
