"""scripts/gpu_check without a card: its table of parts, needs, results, targets, report and wheels."""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.programs.gpu_check import __main__ as gpu_check
from scripts.programs.gpu_check import bounds, install_wheels, needs, report, results, traces, wheels
from scripts.programs.gpu_check.card import Card
from scripts.programs.gpu_check.children import ChildError, Children, CutError
from scripts.programs.gpu_check.parts import PARTS
from scripts.programs.gpu_check.results import Results, Row, exit_status, judged
from scripts.programs.gpu_check.shapes import shape_of
from scripts.programs.gpu_check.tasks import GpuTests, Profile, Setup, Task, Together, Work, Worst, sanitizer_errors
from scripts.programs.gpu_check.work import MEASUREMENTS, Figure, profile
from tests.refusals import has_values
from weft.study.bench.workload import nano_vllm

ROOT = Path(__file__).parents[3]
H200 = Card("NVIDIA H200", (9, 0), 140_000_000_000, 150_000_000_000)
ABOUT: dict[str, Any] = {
    "card": "NVIDIA H200", "driver": "580", "torch": "2.11", "triton": "3.6", "commit": "abc", "date": "2026-11-22",
    "rehearsed": False, "copy_GBps": 4269.0,
}  # fmt: skip


def test_parts_and_their_limits() -> None:
    names = "quarter tests sanitize parity speed ranks ablations attention products experts sampling peers"
    assert list(PARTS) == names.split()
    assert all(part.minutes < 9 and part.seconds < 9 * 60 for part in PARTS.values())
    assert PARTS["quarter"].seconds <= 520
    for part in PARTS.values():
        assert len({task.name for task in part.tasks}) == len(part.tasks), part.name
        assert all(task.measurement in MEASUREMENTS for task in flat(part.tasks) if isinstance(task, Work))


def flat(tasks: Iterable[Task]) -> Iterator[Task]:
    for task in tasks:
        yield from flat(task.tasks) if isinstance(task, Together) else (task,)


def test_every_gpu_test_is_in_a_part() -> None:
    tasks = [task for part in PARTS.values() for task in flat(part.tasks) if isinstance(task, GpuTests)]
    files = {Path(name.partition("::")[0]).name for task in tasks for name in task.files}
    assert files == {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}


def test_the_checklist_names_parts_that_exist() -> None:
    text = (ROOT / "docs/gpu-todo.md").read_text()
    named = set(re.findall(r"`scripts/gpu_check (\w+)", text))
    assert set(PARTS) <= named <= {*PARTS, "report", "wheels"}
    items = [line for line in text.splitlines() if line.startswith("- **")]
    assert all("`" in line and ";" in line.split("**")[2] for line in items), "fact, command; target"
    assert len({line.split("**")[1] for line in items}) == len(items)


@pytest.mark.parametrize("words", [["speeed"], ["sampling", "speeed", "--rehearse"]])
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
    assert gpu_check.main(["sampling"]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 5_000_000}))
    assert re.search(r"\b5 MB.*\b200 MB", str(needs.obstacle_of_folder(tmp_path)))


def test_without_a_card_that_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the packages of a part, whatever is missing."""
    monkeypatch.setenv("RESULTS", str(tmp_path))
    monkeypatch.setattr(gpu_check, "first_card", lambda: None)
    monkeypatch.setattr(needs, "obstacle_of_packages", lambda *_: "something is missing")
    assert gpu_check.main(["quarter"]) == 2
    has_values(capsys.readouterr().err, "torch", "--rehearse")


def test_a_bare_python_is_told_what_it_lacks() -> None:
    """Before anything of Weft is imported, which needs packages itself."""
    module = "scripts.programs.gpu_check"
    program = f"import runpy, sys; sys.argv[1:] = ['sampling']; runpy.run_module('{module}', run_name='__main__')"
    paths = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'src')!r}]; "
    done = subprocess.run([sys.executable, "-I", "-S", "-c", paths + program], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"gpu_check: .*\bsampling .*\btorch .*\bmsgspec .*\n", done.stderr)


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
    first = PARTS["ablations"].needs
    assert needs.obstacle_of_card("ablations", first, H200, "2.11") is None
    none = needs.obstacle_of_card("ablations", first, None, "2.11")
    old = needs.obstacle_of_card("ablations", first, replace(H200, name="V100", capability=(7, 0)), "2.11")
    full = needs.obstacle_of_card("ablations", first, replace(H200, free_bytes=3_000_000_000), "2.11")
    assert none and "2.11" in none
    assert old and re.search(r"\bV100 .*\b7\.0\b.*\b7\.5\b", old)
    assert full and re.search(r"\b20 GB.*\bH200 .*\b3\.0 of 150\.0 GB", full)
    vllm = needs.obstacle_of_files("peers", PARTS["peers"].needs, None)
    packages = needs.obstacle_of_packages("sanitize", PARTS["sanitize"].needs, "python3", lambda module: False)
    golden("errors/gpu_check.txt", "".join(f"{obstacle}\n" for obstacle in (none, old, full, vllm, packages)))


def test_finished_tasks_are_kept_and_others_measured_again(tmp_path: Path) -> None:
    made = Results(tmp_path, "speed", ABOUT)
    made.add(Row("a", "speed", 3.0, "tok/s"))
    made.finish("a")
    made.add(Row("b", "half", 1.0, "tok/s"))
    again = Results(tmp_path, "speed", ABOUT)
    assert again.done == ["a"] and [row.name for row in again.rows] == ["speed"]
    assert Results(tmp_path, "speed", {**ABOUT, "commit": "def"}).rows == []
    assert results.load_results(tmp_path / "speed.abc.jsonl") is not None, "moved aside, not lost"
    made = Results(tmp_path, "speed", ABOUT)
    made.add(Row("a", "speed", 3.0, "tok/s"))
    made.finish("a")
    assert Results(tmp_path, "speed", ABOUT, again=True).done == []


def test_a_run_that_is_cut_off_leaves_what_it_had(tmp_path: Path) -> None:
    made = Results(tmp_path, "quarter", ABOUT)
    for task in ("a", "b"):
        made.begin(task)
        made.add(Row(task, "speed", 3.0, "tok/s"))
    made.finish("a")
    with made.path.open("a") as file:
        file.write('{"row": {"task": "b", "na')
    left = results.load_results(made.path)
    assert left is not None and [row.task for row in left.rows] == ["a", "b"] and left.done == ["a"]
    again = Results(tmp_path, "quarter", ABOUT)
    again.begin("b")
    again.add(Row("b", "speed", 4.0, "tok/s"))
    left = results.load_results(made.path)
    assert left is not None and [(row.task, row.value) for row in left.rows] == [("a", 3.0), ("b", 4.0)]


def test_traces_of_less_value_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, archive = tmp_path / "trace.json", tmp_path / "traces.tar"

    def kept(name: str, value: int, size: int) -> str:
        trace.write_bytes(random.Random(name).randbytes(size))
        return traces.keep_trace({"traces": str(archive), "trace_value": value}, name, trace)

    def names() -> list[str]:
        with tarfile.open(archive) as members:
            return sorted(members.getnames())

    monkeypatch.setattr(traces, "ARCHIVE_BYTES", 100_000)
    assert "1-a.json.gz" in kept("a", 1, 40_000) and "5-b.json.gz" in kept("b", 5, 40_000)
    assert "9-c.json.gz" in kept("c", 9, 40_000)
    assert names() == ["5-b.json.gz", "9-c.json.gz"]
    assert "dropped" in kept("d", 1, 40_000)
    assert names() == ["5-b.json.gz", "9-c.json.gz"] and archive.stat().st_size < 110_000
    with tarfile.open(archive) as members:
        content = members.extractfile("9-c.json.gz")
        assert content is not None and gzip.decompress(content.read()) == random.Random("c").randbytes(40_000)


def test_tasks_side_by_side_fail_alone(tmp_path: Path) -> None:
    class Some(Children):
        def figures(self, name: str, *_: Any) -> Any:
            if name == "bad":
                raise ChildError("ended with 1: an illegal address")
            yield Figure(name, 1.0, "us")

    setup = Setup("quarter", Some(tmp_path), Results(tmp_path, "quarter", ABOUT), "NVIDIA H200", 4e12, rehearse=False)
    rows = list(Together("both", 60, (Work("w1", 10, "bad"), Work("w2", 10, "good"))).rows(setup, 60))
    assert {(row.task, row.name, row.ok) for row in rows} == {("both", "w1", False), ("both", "good", None)}


def test_the_worst_kernels_are_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, only = list[str](), list[str]()

    class Some(Children):
        def finished(self, command: Sequence[str], *_: Any) -> tuple[int, list[str]]:
            assert command[command.index("--clock-control") + 1] == "none"
            asked.append(command[command.index("--kernel-name") + 1])
            only.append(json.loads(command[-1])["only"])
            Path(command[command.index("--export") + 1] + ".ncu-rep").write_bytes(b"report")
            return 0, []

    made = Results(tmp_path, "quarter", ABOUT)
    for task, ratio in (("a", 0.7), ("b", 0.2), ("c", 0.9), ("d", 0.5)):
        made.add(Row(task, task, 1.0, "GB/s", roofline=1.0, ratio=ratio))
    setup = Setup("quarter", Some(tmp_path), made, "NVIDIA H200", 4e12, rehearse=False)
    monkeypatch.setattr("scripts.programs.gpu_check.tasks.shutil.which", lambda name: name)
    profiles = tuple(Profile(f"_{task}", task, "products", {}) for task in "abcd")
    rows = list(Worst("worst", 60, profiles).rows(setup, 60))
    assert asked == ["regex:^_b$", "regex:^_d$"] and only == ["b", "d"], "the slowest case of each"
    assert all("quarter-traces.tar" in row.note for row in rows)


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
    shape = shape_of("Qwen3-0.6B")
    asks = nano_vllm(shape.vocab, 0)
    assert sum(ask.output_len for ask in asks) == 133_966
    read = sum(bounds.context_tokens(len(ask.prompt), ask.output_len) for ask in asks) * shape.kv_bytes()
    assert read == pytest.approx(13.88e12, rel=0.01)
    assert bounds.batch_roofline(shape, asks, 4.269e12) == pytest.approx(37_900, rel=0.02)
    assert shape_of("Llama-3.1-8B").weight_bytes() == pytest.approx(2 * (8.03e9 - 128256 * 4096), rel=0.001)
    mixture = shape_of("Qwen3-30B-A3B")  # 8 layers: attention, router, experts of which 8 of 128 are chosen, head
    attention = 2 * 2048 * (32 + 4 + 4 + 32) * 128
    expert = 2 * 3 * 2048 * 768
    one = 8 * (attention + 2 * 2048 * 128 + 8 * expert) + 2 * 151_936 * 2048
    assert mixture.weight_bytes(1) == pytest.approx(one, rel=0.001)
    assert mixture.weight_bytes(10_000) == pytest.approx(one + 8 * 120 * expert, rel=0.001)
    gpt_oss = shape_of("gpt-oss-20b")
    assert gpt_oss.kv_bytes(1024) == 2 * 8 * 64 * 2 * (4 * 128 + 4 * 1024), "half of the layers have a window"
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

    made = Results(tmp_path, "speed", ABOUT)
    setup = Setup("speed", Failing(tmp_path), made, "NVIDIA H200", 4e12, rehearse=False)
    assert gpu_check.run_task(Work("w", 10, "bench"), setup, deadline=float("inf"))
    assert [(row.name, row.ok) for row in made.rows] == [("one", None), ("w", False)]
    assert made.done == [] and exit_status(made.rows) == 1
    assert "FAILED [ended with 1: out of memory]" in capsys.readouterr().out
    assert not gpu_check.run_task(Work("w", 10, "bench"), setup, deadline=0.0)


def test_a_part_without_time_is_unfinished(tmp_path: Path) -> None:
    arguments = gpu_check.parsed(["sampling"])
    status = gpu_check.measure(PARTS["sampling"], Children(tmp_path), ABOUT, arguments, time.monotonic())
    assert status == gpu_check.UNFINISHED == 3


def test_report_writes_measured_parts_between_its_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    assert report.main([], tmp_path) == 2 and str(tmp_path) in capsys.readouterr().err
    made = Results(tmp_path, "quarter", ABOUT)
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
    def pip(words: Any) -> str:
        if words[-1] == "absent":
            raise wheels.DownloadError("no such wheel")
        assert "--no-deps" in words and "--only-binary=:all:" in words and "3.12" in words
        Path(words[words.index("--dest") + 1], f"{words[-1]}-1.0-py3-none-any.whl").write_bytes(b"0123456789" * 25)
        return ""

    tags = wheels.pip_tags("3.12")
    wheels.fetch(tmp_path, ["msgspec"], tags, 100, pip)
    (row,) = json.loads((tmp_path / "manifest.json").read_text())
    assert [(tmp_path / piece["file"]).stat().st_size for piece in row["pieces"]] == [100, 100, 50]
    assert Path(install_wheels.join(row, tmp_path, tmp_path)).read_bytes() == b"0123456789" * 25
    (tmp_path / row["pieces"][1]["file"]).write_bytes(b"damaged")
    done = subprocess.run([sys.executable, tmp_path / "install.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and row["pieces"][1]["file"] in done.stderr and "Traceback" not in done.stderr
    with pytest.raises(wheels.DownloadError):
        wheels.fetch(tmp_path, ["absent"], tags, 100, pip)


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
