"""scripts/bench peers: what is asked, the engines' processes, and the ratios of its report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts.programs.bench.peers import engine as engines
from scripts.programs.bench.peers import report, work

ECHO = """
import sys
sys.path.insert(0, {folder!r})
from protocol import Answer, serve
def generate(prompts, new):
    if new == 13:
        raise SystemExit("thirteen is too many")
    import time
    answers = []
    for prompt in prompts:
        answer = Answer()
        for token in range(new - (new == 7)):
            answer.add([token], time.perf_counter())
        answers.append(answer)
    print("chatter of a library")
    return answers
serve(generate, 3)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "echo.py"
    path.write_text(ECHO.format(folder=str(engines.ENGINES)))
    return str(path)


def test_an_engine_answers(script: str) -> None:
    engine = engines.Engine("echo", [sys.executable, script])
    try:
        found = engine.answer([[1, 2], [3]], 4)
        assert engine.threads == 3 and 0 < engine.start_s < 60
        assert found.prompt_tokens == 3 and len(found.first_s) == 2
        assert all(0 <= first <= last <= found.seconds for first, last in zip(found.first_s, found.last_s, strict=True))
        assert engine.memory_bytes() > 1_000_000
        with pytest.raises(engines.Ended, match=r"\b7\b.*\b6\b"):
            engine.answer([[1]], 7)
    finally:
        engine.close()


def test_an_engine_s_last_words_are_told(script: str) -> None:
    engine = engines.Engine("echo", [sys.executable, script])
    with pytest.raises(engines.Ended, match="thirteen is too many"):
        engine.answer([[1]], 13)
    engine.close()
    with pytest.raises(engines.Ended, match=r"no-such\.py"):
        engines.Engine("none", [sys.executable, "no-such.py"])


def test_figures_by_hand() -> None:
    found = engines.Round(first_s=[1.0, 3.0], last_s=[2.0, 5.0], seconds=5.0, new=11, prompt_tokens=50)
    assert found.figure("first") == 2000
    assert found.figure("decode") == (10 + 5) / 2
    assert found.figure("output") == 22 / 5
    assert found.figure("prompt") == 10


def test_everybody_gets_the_same_and_every_round_another() -> None:
    text = list(range(5000))
    for kind in work.WORKS:
        prompts, new = work.ask(kind, text, 1, large=False)
        assert (prompts, new) == work.ask(kind, text, 1, large=False) != work.ask(kind, text, 2, large=False)
    prompts, new = work.ask(work.THROUGHPUT, text, 1, large=False)
    others, _ = work.ask(work.THROUGHPUT, text, 2, large=False)
    assert len(prompts) == 32 and new == 128 and list(map(len, prompts)) == list(map(len, others))
    prompts, _ = work.ask(work.PREFIX, text, 1, large=False)
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1 and len(prompts) == 128
    assert {len(prompt) for prompt in prompts} == {528}


def test_ratios_are_to_the_best_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def figure(engine: str, *values: float, told: str = "speed", higher: bool = True) -> report.Figure:
        return report.Figure("m", 16, told, engine, list(values), higher)

    figures = [
        figure("weft", 90, 110, 100),
        figure("weft tp2", 300),
        figure("slow", 10),
        figure("fast", 80),
        figure("weft", 2, told="start", higher=False),
        figure("fast", 4, told="start", higher=False),
    ]
    speed, start = report.rows(figures)["m", 16]
    assert speed.best.engine == "fast" and speed.ratio == 100 / 80
    assert start.ratio == 2
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    report.write_report(tmp_path, figures, {"gone on m": "no wheel"}, {"rounds": 3})
    whole = json.loads((tmp_path / "peers.json").read_text())
    assert [it["ratio"] for it in whole["ratios"]] == [1.25, 2]
    assert "gone on m: no wheel" in (tmp_path / "peers.md").read_text()
    assert "1.25 (fast)" in capsys.readouterr().out
    assert (tmp_path / "peers.png").stat().st_size > 1000
