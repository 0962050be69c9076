"""Instructions of the compiled kernels beside their baseline, and what `scripts/sass` makes of a disassembly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

pytest.importorskip("triton", reason="needs triton")

from scripts.programs.sass import report
from scripts.programs.sass.cards import CARDS, LIMITS, Card
from scripts.programs.sass.cases import CASES, is_first_variant
from scripts.programs.sass.disassembly import passes, relative
from tests.cpu.compiling import ROOT, environment


# All variants take a minute of a core, the first of each kernel less than half. 120 compiles nearly as 90: the same
# products of matrices, and 89 the same conversions from 8 bits.
@pytest.mark.parametrize(
    ("architecture", "first_variants"),
    [(90, True), pytest.param(90, False, marks=pytest.mark.long), pytest.param(120, False, marks=pytest.mark.long)],
)
def test_no_kernel_takes_more_of_the_issue_slots(architecture: int, first_variants: bool) -> None:
    baseline = report.loaded()
    if version("triton") != baseline["triton"]:
        pytest.skip(f"needs Triton {baseline['triton']}, of which the baseline is; this is {version('triton')}")
    command = [sys.executable, "-m", "scripts.programs.sass", "--architectures", str(architecture)]
    command += ["--first-variants"] * first_variants
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(done.stdout)["kernels"]
    assert {row["kernel"] for row in measured} == {case.kernel for case in CASES}
    chosen = {(case.kernel, case.variant) for case in CASES if is_first_variant(case) or not first_variants}
    expected = [row for row in baseline["kernels"] if (row["kernel"], row["variant"]) in chosen]
    assert report.complaints(expected, measured) == []


def test_the_baseline_holds_every_case_and_the_page_shows_it() -> None:
    baseline = report.loaded()
    expected = {(c.kernel, c.variant, each) for c in CASES for each in LIMITS if c.is_for(each)}
    assert {report.name_of(row) for row in baseline["kernels"]} == expected
    assert report.page_table(baseline) in report.PAGE.read_text()


def test_every_kernel_that_is_launched_has_a_case() -> None:
    sources = (path.read_text() for path in (ROOT / "src/weft/ranks/kernels/triton").glob("*.py"))
    launched = {name for source in sources for name in re.findall(r"\b(_\w+)\[.*\]\(", source)}
    assert launched == {case.kernel for case in CASES}


def made_row(share: float, kernel: str = "_decode", architecture: int = 90) -> report.Row:
    return {"kernel": kernel, "variant": "bf16", "architecture": architecture, "shares": {"H200-SXM": share}}


def test_a_share_that_grows_by_more_than_a_tenth_is_told_with_both_figures() -> None:
    (line,) = report.complaints([made_row(0.3)], [made_row(0.331)])
    assert "_decode (bf16) for sm_90" in line and "0.331" in line and "0.300" in line
    assert report.complaints([made_row(0.3)], [made_row(0.329)]) == []
    assert report.complaints([made_row(0.3)], [made_row(0.1)]) == []


def test_a_kernel_without_a_baseline_and_one_that_is_gone_name_the_way_out() -> None:
    lines = report.complaints([made_row(0.3), made_row(0.3, "_old")], [made_row(0.3), made_row(0.3, "_new")])
    assert [line.partition(" ")[0] for line in lines] == ["_new", "_old"]
    assert all("scripts/sass --update" in line for line in lines)
    # The baseline has architectures that were not measured.
    assert report.complaints([made_row(0.3), made_row(0.3, architecture=80)], [made_row(0.3)]) == []


def card(name: str) -> Card:
    return next(card for card in CARDS if card.name == name)


@pytest.mark.parametrize(
    ("name", "instructions", "warps", "work", "share"),
    [
        ("H200-SXM", 680, 4, (32 << 10, 0), 0.38),  # decode attention as Triton 3.6 compiled it
        ("RTX 4090", 680, 4, (32 << 10, 0), 0.06),
        ("H200-SXM", 456, 2, (2560, 0), 1.64),  # a 4-bit product
        ("RTX 4090", 456, 2, (2560, 0), 0.26),
        ("H200-SXM", 749, 8, (0, 4 * 128 * 64 * 128), 1 / 0.68),  # prefill attention
    ],
)
def test_shares(name: str, instructions: int, warps: int, work: tuple[int, int], share: float) -> None:
    assert card(name).share(instructions, warps, *work) == pytest.approx(share, rel=0.1)


@pytest.mark.parametrize("name", [card.name for card in CARDS])
def test_cards_agree_with_the_catalogue(name: str) -> None:
    """Multiprocessors and clock give the FLOPS of its data sheet; an H200's were stated at 1.83 GHz."""
    each = card(name)
    flops = each.processors * each.clock_Hz * each.flops_per_cycle
    stated = each.spec.flops
    assert flops == pytest.approx(stated.get("bf16", stated["fp16"]), rel=0.09)
    assert each.architecture in LIMITS


@pytest.mark.parametrize(
    ("architecture", "warps", "registers", "shared", "programs"),
    [
        (90, 4, 156, 39424, 3),  # by registers
        (100, 4, 156, 39424, 3),
        (75, 4, 16, 0, 8),  # by warps
        (75, 4, 16, 65536, 0),  # which Turing's programs cannot have
        (90, 8, 32, 98816, 2),  # by shared memory
        (86, 8, 32, 98816, 1),
        (86, 1, 16, 0, 16),  # by the number of programs
        (120, 4, 16, 0, 12),  # by warps
    ],
)
def test_programs_of_a_multiprocessor(
    architecture: int, warps: int, registers: int, shared: int, programs: int
) -> None:
    assert LIMITS[architecture].programs_of(warps, registers, shared) == programs


def test_passes_are_those_of_innermost_loops() -> None:
    code = ["MOV", "MOV", "FADD", "@P0 BRA 0x2", "FADD", "FADD", "@!P1 BRA 0x4", "@P2 BRA 0x1", "EXIT", "BRA 0x9"]
    assert passes(code) == [3, 2]
    assert passes(["MOV", "@P0 EXIT", "@P1 BRA 0x4", "FADD", "EXIT", "BRA 0x5"]) == [5]


def test_a_branch_is_counted_from_its_kernel() -> None:
    assert relative("@!P0 BRA 0x1040", 0x1000) == "@!P0 BRA 0x4"
    assert relative("FADD R1, R1, 0x1040", 0x1000) == "FADD R1, R1, 0x1040"
