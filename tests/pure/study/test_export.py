"""weft plan --emit: the golden files, and what every file has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import GOLDEN
from tests.pure.exports import CASES, MORE, PLANS, golden_name, known, parts, plans, text
from weft.cli.flags import plan_flags
from weft.study.export.targets import TARGETS


def every(*targets: str) -> list[Any]:
    return [pytest.param(target, plan, id=f"{target}-{plan}") for target in targets for plan in plans(target)]


@pytest.mark.parametrize(("target", "plan"), CASES)
def test_golden(target: str, plan: str, golden: Callable[[str, str], None]) -> None:
    golden(golden_name(target, plan), text(target, plan))


def test_no_golden_file_is_left_behind() -> None:
    left = {str(file.relative_to(GOLDEN)) for file in (GOLDEN / "emit").rglob("*.txt")}
    assert left == {golden_name(*case) for case in CASES}


def test_targets_are_those_of_the_flag() -> None:
    assert list(plan_flags.TARGETS) == list(TARGETS)


@pytest.mark.parametrize(("target", "plan"), every(*TARGETS))
def test_every_file_begins_with_the_plan_or_is_json(target: str, plan: str) -> None:
    for name, written in parts(target, plan).items():
        if name.endswith(".json"):
            assert json.loads(written)
            continue
        head = written.removeprefix("#!/usr/bin/env bash\n").removeprefix("#!/usr/bin/env python3\n")
        comment = " ".join(line.removeprefix("# ") for line in head.partition("\n\n")[0].splitlines())
        model = (PLANS | MORE)[plan].split()[0]
        assert model in comment and " weft plan " in comment
        assert re.search(r"(port \d+|replica \d)[^:]*: GPUs? [\d,]+", comment)


@pytest.mark.parametrize(("target", "plan"), every(*TARGETS))
def test_nothing_written_is_an_address_or_a_secret(target: str, plan: str) -> None:
    written = known(target, plan)[1]
    addresses = set(re.findall(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", written))
    assert addresses <= {"127.0.0.1", "0.0.0.0"}
    assert not re.search(r"hf_[A-Za-z0-9]{8}|sk-[A-Za-z0-9]{8}|/root/(?!\.cache/(huggingface|weft)\b)|/home/", written)
