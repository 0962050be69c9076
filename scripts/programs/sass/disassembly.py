"""Machine code of compiled kernels: registers, instructions and loops, by the programs that come with Triton."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from triton import knobs

INSTRUCTION_BYTES = 16  # since Volta
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
BRANCH = re.compile(r"\bBRA\b.*\b0x([0-9a-f]+)$")
LAST = re.compile(r"EXIT\b")  # without a condition before it: no instruction follows
REGISTERS = re.compile(r"\bREG:(\d+)")
SECTION = struct.Struct("<IIQQQQIIQQ")  # of an ELF file: name, type, flags, address, offset, size, ...


def registers_of(cubin: bytes) -> int:
    """Registers of a thread."""
    (count,) = REGISTERS.findall(output_of(knobs.nvidia.cuobjdump.path, ["-res-usage"], cubin))
    return int(count)


def disassemble(cubins: Sequence[bytes], architecture: int) -> list[list[str]]:
    """The instructions of each cubin, of one kernel each, all for the same architecture.

    All are disassembled as one stretch of code: starting the disassembler takes longer than its work. A branch's target
    is then an address in that stretch; here it is the index of an instruction of the kernel.
    """
    codes = [code_of(cubin) for cubin in cubins]
    suffix = "a" if architecture >= 90 else ""  # Triton compiles with what only that architecture has
    options = ["--no-dataflow", "--binary", f"SM{architecture}{suffix}"]
    listing = output_of(knobs.nvidia.nvdisasm.path, options, b"".join(codes))
    words = {int(address, 16): text for address, text in INSTRUCTION.findall(listing)}
    kernels, begin = [], 0
    for code in codes:
        addresses = range(begin, begin + len(code), INSTRUCTION_BYTES)
        kernels.append([relative(words[address], begin) for address in addresses])
        begin += len(code)
    return kernels


def relative(instruction: str, begin: int) -> str:
    """`instruction` with the target of a branch as the number of instructions from address `begin`, in hexadecimal."""
    if (branch := BRANCH.search(instruction)) is None:
        return instruction
    target = (int(branch[1], 16) - begin) // INSTRUCTION_BYTES
    return f"{instruction[: branch.start(1)]}{target:x}"


def code_of(cubin: bytes) -> bytes:
    """The machine code in a cubin, an ELF file of one kernel."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, named = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [SECTION.unpack_from(cubin, start + i * size) for i in range(count)]
    names = cubin[sections[named][4] :]
    (code,) = (section for section in sections if names[section[0] :].startswith(b".text."))
    return cubin[code[4] : code[4] + code[5]]


def output_of(program: str, options: Sequence[str], content: bytes) -> str:
    """Output of a program for a file with this content."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "code")
        path.write_bytes(content)
        done = subprocess.run([program, *options, str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(program).name} failed: {done.stderr.strip()}")
    return done.stdout


def passes(instructions: Sequence[str]) -> list[int]:
    """Instructions of one pass of each innermost loop, the most first; of the whole body up to its end if there is no
    loop."""
    loops: dict[int, int] = {}  # the last branch back to each instruction
    for index, instruction in enumerate(instructions):
        branch = BRANCH.search(instruction)
        if branch and (target := int(branch[1], 16)) < index:
            loops[target] = index
    innermost = [
        last - first + 1
        for first, last in loops.items()
        if not any(first <= other and end <= last and (other, end) != (first, last) for other, end in loops.items())
    ]
    if innermost:
        return sorted(innermost, reverse=True)
    return [next(index for index, instruction in enumerate(instructions) if LAST.match(instruction)) + 1]
