"""Memory and settings of speculation, as weft plan counts them and an engine carries them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.pure.commands import weft, weft_json
from tests.pure.machines import FOUR, NOTHING, checkpoint, expected, rig
from tests.pure.study.test_export_gaps import exported_gaps
from tests.refusals import has_values, refuses
from weft.config import EngineConfig
from weft.errors import ConfigError, PlanError
from weft.machine.hardware.host import Host
from weft.plan import speculation
from weft.plan.memory import LOGITS_BYTES
from weft.plan.plan import DraftModel, Plan, Speculation
from weft.planner.execution import execution
from weft.planner.execution.execution import plan_to_run
from weft.planner.execution.forecast import SPECULATIVE, forecast_plan, load_report, predicted_json, request_report

NGRAM, DRAFT = '{"method": "ngram"}', '{"model": "Qwen3-0.6B"}'
VOCAB = 151936  # of Qwen3


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft models are those of the catalogue, and nothing was measured."""

    def fetched(model: str, load_format: str) -> DraftModel:
        return DraftModel(model=model, checkpoint="", load_format="dummy", shape=checkpoint(model).shape)

    monkeypatch.setattr(execution, "fetch_draft", fetched)
    monkeypatch.setattr("weft.probes.stored_speeds.load_speeds", lambda _: NOTHING)


def ranks(*words: str) -> list[dict[str, Any]]:
    status, told = weft_json("plan", "Qwen3-8B", "--gpus", "2xRTX4090", "--max-num-batched-tokens", "2048", *words)
    assert status == 0
    return told["best"]["ranks"]


@pytest.mark.parametrize("cut", [["-tp", "2"], ["--pipeline-split", "18,18"]])
def test_a_draft_is_held_whole_by_the_rank_that_samples(cut: list[str]) -> None:
    plain, with_draft = ranks(*cut), ranks(*cut, "-sc", DRAFT)
    samples = 0 if cut[0] == "-tp" else 1
    for number, (before, after) in enumerate(zip(plain, with_draft, strict=True)):
        draft = number == samples
        # 28 layers of 8 KV heads of 128 in 16 bits, keys and values.
        assert after["kv_bytes_per_token"] - before["kv_bytes_per_token"] == draft * 2 * 28 * 8 * 128 * 2
        # 596 million parameters, the head tied, and graphs of its own; 256 rows of logits grow to 5 times as many.
        more = 1192099840 + (192 << 20) + LOGITS_BYTES * 256 * 4 * VOCAB
        assert after["other_bytes"] - before["other_bytes"] == draft * more
        assert after["kv_bytes"] <= before["kv_bytes"]


def test_guesses_from_the_text_take_their_logits() -> None:
    (plain, *_), (guessing, *_) = ranks("-tp", "2"), ranks("-tp", "2", "-sc", NGRAM)
    assert guessing["other_bytes"] - plain["other_bytes"] == LOGITS_BYTES * 256 * 4 * VOCAB
    assert guessing["kv_bytes_per_token"] == plain["kv_bytes_per_token"]


def test_the_gain_of_speculation_is_not_predicted_and_told_so() -> None:
    words = ("plan", "Qwen3-8B", "--gpus", "1xRTX4090", "-sc", DRAFT)
    told = weft_json(*words)[1]
    assert told["speculative_config"] == {"model": "Qwen3-0.6B", "num_speculative_tokens": 4}
    assert told["note_codes"] == ["speculation_not_predicted", "draft_model_memory"]
    first, second = told["notes"]
    assert "1 to 5 tokens" in first
    has_values(second, "Qwen3-0.6B", "rank 0", "1.2 GB", "114,688", "262,144")
    guessing = expected(max_model_len=64)
    guessing.__dict__["plan"] = msgspec.structs.replace(guessing.plan, speculation=Speculation(tokens=4))
    for line in (
        request_report(guessing, input_len=3, output_len=3, ttft_s=9.0, tok_s=0.1),
        load_report(guessing, requests=9, input_len=3, output_len=3, concurrency=2, tok_s=0.1),
    ):
        assert line.endswith(SPECULATIVE)
    assert predicted_json(guessing, 3, 3)["ttft_s"] is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-sc", NGRAM, "--engine", "vllm"], "for Weft's own engine, not for vllm"),
        (["-sc", '{"model": "Llama-3.1-8B"}'], "share its model's tokeniser"),
        (["-sc", '{"model": "nobody"}'], "unknown model 'nobody'"),
        (["-sc", '{"method": "medusa"}'], "none of ngram, draft_model"),
        (["-sc", "4"], "not a JSON object"),
    ],
)
def test_impossible_settings_give_one_clear_line(words: list[str], told: str) -> None:
    status, out, err = weft("plan", "Qwen3-8B", "--gpus", "1xH100", *words)
    assert status in (1, 2) and out == "" and told in err and err.count("\n") == 1


GEMMA2 = "gemma-2-2b-it"


def test_a_model_that_weft_does_not_run_is_no_draft_yet() -> None:
    told = weft_json("plan", GEMMA2, "--gpus", "1xH100", "-sc", json.dumps({"model": GEMMA2}))[1]
    assert "architecture_not_run" in told["model"]["missing_codes"]
    assert told["model"]["missing_codes"].count("architecture_not_run") == 2, "as the model, and as its draft"


def test_a_draft_that_leaves_no_room_is_named() -> None:
    status, found = weft_json("plan", "Qwen3-8B", "--gpus", "1xRTX3090", "-sc", '{"model": "Qwen3-4B"}')
    assert (status, found["rejected"][0]["code"]) == (3, "weights_too_large")
    changes = dict(zip(found["advice_codes"], found["advice"], strict=True))
    has_values(changes["without_limit"], "--speculative-config", "one GPU, bf16")


def test_other_systems_get_what_they_can_do() -> None:
    words = ("plan", "Qwen3-8B", "--gpus", "1xRTX4090", "-sc", DRAFT, "--emit")
    assert """--speculative-config '{"model": "Qwen3-0.6B", "num_speculative_tokens": 4}'""" in weft(*words, "weft")[1]
    assert "--speculative-config" not in weft(*words, "vllm")[1]
    (gap,) = exported_gaps(f"vllm Qwen3-8B --gpus 1xRTX4090 -sc {DRAFT.replace(' ', '')}")
    assert (gap.code, gap.values) == ("speculation_left_out", {"engine": "vllm"})


def test_written_and_read_it_is_the_same() -> None:
    for how in (Speculation(tokens=3, lookup_min=1, lookup_max=7), Speculation(tokens=16)):
        assert speculation.parse_speculative_config(speculation.to_speculative_config(how)) == (how, None)
    how = Speculation(tokens=2, draft=DraftModel(model="m", checkpoint="", load_format="dummy", shape=rigged().shape))
    assert speculation.parse_speculative_config(speculation.to_speculative_config(how)) == (Speculation(tokens=2), "m")


# --- engines ---


def rigged(**flags: Any) -> Plan:
    return run(rig(FOUR), **flags)


def run(where: Host, **flags: Any) -> Plan:
    there = checkpoint("Qwen3-8B")
    return plan_to_run(EngineConfig(model=there.model, **flags), there, where)


def test_an_engine_holds_what_was_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where = rig(FOUR)
    monkeypatch.setattr("weft.machine.hardware.host.probe_host", lambda *_: where)
    told = weft_json("plan", "Qwen3-8B", "-sc", DRAFT)[1]
    plan = run(where, speculative_config=json.loads(DRAFT))
    assert plan.max_num_batched_tokens == told["best"]["max_num_batched_tokens"] and not plan.lookahead
    assert forecast_plan(plan, where, NOTHING).kv_tokens == told["best"]["kv_tokens"]
    # From the file it is the same, whoever says it again in whatever words.
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(told))
    for said in (None, json.loads(DRAFT), {"method": "draft_model", "model": "Qwen3-0.6B"}):
        found = run(where, plan=str(file), speculative_config=said)
        assert found.speculation == plan.speculation
    with refuses(ConfigError, "flag-contradicts-plan", "speculative_config", "ngram", "plan.json", "Qwen3-0.6B"):
        run(where, plan=str(file), speculative_config={"method": "ngram"})
    del told["speculative_config"]  # as older files are
    file.write_text(json.dumps(told))
    assert run(where, plan=str(file)).speculation is None
    with refuses(ConfigError, "flag-contradicts-plan"):
        run(where, plan=str(file), speculative_config={"method": "ngram"})


def test_a_file_says_how_many_requests_run_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where = rig(FOUR)
    monkeypatch.setattr("weft.machine.hardware.host.probe_host", lambda *_: where)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(weft_json("plan", "Qwen3-8B", "--max-num-seqs", "8")[1]))
    for said in ({}, {"max_num_seqs": 8}):
        assert run(where, plan=str(file), **said).max_num_seqs == 8
    with refuses(ConfigError, "flag-contradicts-plan", "max_num_seqs", "9", "8"):
        run(where, plan=str(file), max_num_seqs=9)


def test_a_draft_that_has_no_room_is_refused_before_anything_is_read() -> None:
    """16.4 GB of the model are there, and 16.4 of the draft, on a card of 25.8."""
    said = {"speculative_config": {"model": "Qwen3-8B"}}
    with refuses(PlanError, "nothing-fits"):
        rigged(**said)
    with refuses(PlanError, "weights-exceed-free-memory", "32.8", "cuda:0"):
        rigged(**said, tensor_parallel_size=1)
    spread = run(rig(FOUR, FOUR, FOUR), **said)
    assert spread.tensor_parallel * spread.stages > 1
