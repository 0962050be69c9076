"""Benchmarks on real engines, however small: a server of their own, and the calibration from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cpu import tiny
from tests.refusals import has_values
from weft.cache import cache_dir
from weft.cli import main
from weft.engine.llm import LLM
from weft.machine.hardware import calibration, host
from weft.probes import stored_speeds
from weft.study.bench.suite import one_thread
from weft.study.measure import engine_speed
from weft.study.measure.engine_speed import CalibrationLoad, Subject
from weft.study.measure.synthetic import TINY, synthetic_of_size

SMALL = "--dtype float32 --max-model-len 512 --kv-cache-memory-bytes 16M"


@pytest.fixture
def one_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that wait for each other are slow on a machine that is busy with other tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_server_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_threaded: None) -> None:
    model = tiny.write(tmp_path / "tiny")
    words = f"bench serve {model} --load-format dummy {SMALL} --num-prompts 5 --input-len 8 --output-len 4 --json"
    assert main.main([*words.split(), "--request-rate", "50", "--max-concurrency", "2"]) == 0
    captured = capsys.readouterr()
    got = json.loads(captured.out)
    assert (got["completed"], got["failed"], got["short_answers"]) == (5, 0, 0)
    assert (got["total_input_tokens"], got["total_output_tokens"]) == (40, 20)
    assert got["model_id"] == str(model) and got["most_at_once"] <= 2
    has_values(captured.err, f"weft serve {model}", " s at http://")


def test_a_server_that_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str], one_threaded: None) -> None:
    model = tiny.write(tmp_path / "tiny")
    assert main.main(["bench", "serve", str(model), "--load-format", "dummy", "--max-model-len", "9000"]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "max_model_len" in told and "9000" in told and "512 tokens" in told


def test_calibrate_then_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_threaded: None
) -> None:
    # A cache of its own, but for the kernels that are compiled already.
    (tmp_path / "weft").mkdir()
    (tmp_path / "weft" / "kernels").symlink_to(cache_dir() / "kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    thin, wide = (
        synthetic_of_size("thin", 1e6, layers=4, vocab=1024),
        synthetic_of_size("wide", 4e6, layers=2, vocab=1024),
    )
    subjects = (Subject(TINY), Subject(thin), Subject(wide), Subject(wide, "int4"))
    loads = [CalibrationLoad("decode", batch, 8, 4) for batch in (1, 4)] + [
        CalibrationLoad("prefill", 1, length, 2) for length in (16, 64)
    ]
    monkeypatch.setattr(engine_speed, "subjects", lambda gpu: subjects)
    monkeypatch.setattr(engine_speed, "LOADS", {"cpu": tuple(loads), "gpu": ()})
    assert main.main(["bench", "calibrate", "--device", "cpu", "--json", "--save"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["points"] == len(told["measurements"]) == 2 + 4 + 4 + 3 and told["precision"] == "bf16"
    assert told["quantised"].keys() == {"q4_1+q8_0"}
    assert {it["kind"] for it in told["measurements"]} == {"decode", "prefill"}
    (kept,) = calibration.load_calibrations(stored_speeds.calibration_fingerprint(host.probe_host()))
    assert kept.device == told["device"] and 0 < kept.runtime_MiB.value < 4096
    assert main.main(["plan", "SmolLM2-135M", "--json"]) == 0
    assert "measured here on" in capsys.readouterr().out
    assert main.main(["plan", "SmolLM2-135M", "--gpus", "1xRTX4090", "--json"]) == 0
    assert "measured here on" not in capsys.readouterr().out


def test_one_thread_is_one_thread_for_a_while() -> None:
    with TINY.folder() as folder, one_thread(), LLM(folder, load_format="dummy", skip_tokenizer_init=True) as llm:
        assert llm.plan.threads(0) == 1
