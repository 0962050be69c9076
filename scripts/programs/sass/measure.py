"""Rows of figures: every case compiled for every architecture, in a process for each core."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from typing import Any

from scripts.programs.sass.cards import CARDS, LIMITS
from scripts.programs.sass.cases import CASES, Case, is_first_variant
from scripts.programs.sass.disassembly import disassemble, passes, registers_of
from weft.machine.hardware.host import usable_cores

Compiled = tuple[bytes, int, int]  # the cubin, warps of a program, bytes of shared memory


def compiled_case(index: int, architecture: int) -> Compiled:
    kernel = CASES[index].launch().compile_for(architecture)
    return kernel.asm["cubin"], kernel.metadata.num_warps, kernel.metadata.shared


def rows(architectures: Sequence[int], *, first_variants: bool = False) -> list[dict[str, Any]]:
    """A row for each case and architecture, cases first; with `first_variants` only those of each kernel's first."""
    chosen = [i for i, case in enumerate(CASES) if is_first_variant(case) or not first_variants]
    tasks = [(i, each) for each in architectures for i in chosen if CASES[i].is_for(each)]
    # Forked: each would otherwise import torch and Triton for itself.
    with multiprocessing.get_context("fork").Pool(len(usable_cores())) as pool:
        compiled = dict(zip(tasks, pool.starmap(compiled_case, tasks, chunksize=1), strict=True))
        groups = {each: [task for task in tasks if task[1] == each] for each in architectures}
        listings = pool.starmap(
            disassemble, [([compiled[task][0] for task in group], each) for each, group in groups.items()]
        )
    instructions = {
        task: listing
        for group, kernels in zip(groups.values(), listings, strict=True)
        for task, listing in zip(group, kernels, strict=True)
    }
    measured = (row(CASES[task[0]], task[1], compiled[task], instructions[task]) for task in sorted(tasks))
    return [figures for figures in measured if figures is not None]


def row(case: Case, architecture: int, compiled: Compiled, instructions: list[str]) -> dict[str, Any] | None:
    """Figures of a case on an architecture; None if its loop does not exist with this Triton, which is reported."""
    cubin, warps, shared = compiled
    registers, work = registers_of(cubin), case.work(case.launch().arguments)
    loops = passes(instructions)
    if case.loop >= len(loops):
        print(
            f"scripts/sass: {case.kernel} ({case.variant}) is left out for sm_{architecture}: this Triton compiles it "
            f"with {len(loops)} inner loops, and loop {case.loop + 1} is measured",
            file=sys.stderr,
        )
        return None
    count = loops[case.loop]
    return {
        "kernel": case.kernel,
        "variant": case.variant,
        "architecture": architecture,
        "instructions": count,
        "warps": warps,
        "registers": registers,
        "shared_bytes": shared,
        "programs_per_sm": LIMITS[architecture].programs_of(warps, registers, shared),
        "bytes_per_loop": work.bytes,
        "flops_per_loop": work.flops,
        "shares": {
            card.name: round(card.share(count, warps, work.bytes, work.flops), 4)
            for card in CARDS
            if card.architecture == architecture
        },
    }
