"""Advice for a model that is too large for the GPUs of one machine: layers on its CPU."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import msgspec

from weft.checkpoint.quantised.precision import weight_bytes
from weft.formatting import weft_command
from weft.machine.hardware.cpus import typical_cpu
from weft.planner.note import Note, create_note
from weft.planner.question import LayoutConstraints, Question
from weft.planner.search.objections import unsupported_reasons
from weft.planner.search.search import search

FLAG = "--max-memory"
CPU_GB = (32, 64, 128, 256)  # of a host's memory, as machines have it; GB of 10^9 bytes, so that each leaves some


def layers_on_cpu(question: Question) -> Iterator[Note]:
    """The least of CPU_GB with which the model fits, with the command that plans it."""
    cluster = question.cluster
    one_host = len(cluster.nodes) == 1 and not cluster.on_cpu and cluster.cpu is None
    if question.engine != "weft" or not one_host or question.constraints != LayoutConstraints():
        return
    if all(unsupported_reasons(question.shape, precision) for precision in question.precisions):
        return
    room = sum(gpu.memory_bytes if gpu.limit_bytes is None else gpu.limit_bytes for gpu in cluster.gpus)
    least = min(weight_bytes(question.shape, precision) for precision in question.precisions) - room
    for size in CPU_GB:
        if size * 10**9 <= least:
            continue
        cpu = msgspec.structs.replace(typical_cpu(), limit_bytes=size * 10**9)
        best = search(msgspec.structs.replace(question, cluster=cluster.with_cpu(cpu))).best
        if best:
            yield create_note(
                "try_layers_on_cpu",
                command=_command(question, size),
                cut=str(best.cut),
                kv_tokens=best.memory.kv_tokens,
                tok_s=best.predicted.single_tok_s,
            )
            return


def _command(question: Question, size: int) -> str:
    """The command that plans the same with the CPU. A GPU without a limit would not be used, so that all have one."""
    flags = question.flags or (("", question.model),)
    given = next((flag[1] for flag in flags if flag[0] == FLAG), "")
    gpus = ",".join(f"{number}={ceil(gpu.memory_bytes / 1e9)}GB" for number, gpu in enumerate(question.cluster.gpus))
    return weft_command("plan", flags, FLAG, f"{given or gpus},cpu={size}GB", without=(FLAG,))
