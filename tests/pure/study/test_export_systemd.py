"""weft plan --emit systemd: units that systemd itself accepts, and words that it reads unchanged."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pure.commands import parsed
from tests.pure.exports import parts, plans
from weft.study.export import systemd

PAGE = Path(__file__).parents[3] / "docs/systemd.md"


def verify(units: dict[str, str], folder: Path) -> str:
    """The complaints of systemd-analyze about the units; their programs need not exist here."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is missing")
    for name, text in units.items():
        (folder / name).write_text(text.replace(systemd.PROGRAM, sys.executable))
    ran = subprocess.run(
        [program, "verify", "--man=no", *(f"./{name}" for name in units)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ran.stdout + ran.stderr + (f"status {ran.returncode}" if ran.returncode else "")


@pytest.mark.parametrize("plan", plans("systemd"))
def test_systemd_accepts_the_units(plan: str, tmp_path: Path) -> None:
    assert verify(parts("systemd", plan), tmp_path) == ""


def test_systemd_accepts_the_page_s_units(tmp_path: Path) -> None:
    service, listener = re.findall(r"```ini\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert verify({"weft-gateway.service": service, "weft-gateway.socket": listener}, tmp_path) == ""


def test_a_wrong_unit_is_noticed(tmp_path: Path) -> None:
    units = {name: text.replace("=on-failure", "=sometimes") for name, text in parts("systemd", "one-gpu").items()}
    assert "sometimes" in verify(units, tmp_path)


def test_each_replica_has_its_gpus_and_its_port() -> None:
    units = parts("systemd", "replicas-int4")
    assert sorted(units) == [f"weft-{number}.{kind}" for number in (0, 1) for kind in ("service", "socket")]
    assert "CUDA_VISIBLE_DEVICES=2,3" in units["weft-1.service"] and "127.0.0.1:8001" in units["weft-1.socket"]
    assert "serve ${MODEL} " in units["weft-0.service"], "a checkpoint that only the user knows"


def test_the_command_is_one_of_ours() -> None:
    (line,) = parts("systemd", "tensor")["weft.service"].replace("\\\n", "").split("ExecStart=")[1].splitlines()[:1]
    arguments = parsed(line.split()[1:])
    assert arguments.engine.layout.tensor_parallel_size == 4
    assert arguments.server.served_model_name == ("llama", "llama-70b")


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("a/b:c", "a/b:c"),
        ("100%", '"100%%"'),
        ("$HOME", '"$$HOME"'),
        ('{"a": "b\\c"}', '"{\\"a\\": \\"b\\\\c\\"}"'),
        ("two words", '"two words"'),
    ],
)
def test_words_that_systemd_would_change(word: str, read: str) -> None:
    assert systemd.quote(word) == read
