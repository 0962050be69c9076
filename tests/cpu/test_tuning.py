"""The attention kernels' sizes: raced against each other by a clock that is given, kept, and taken up by engines."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from tests.cpu.attention import shaped
from tests.cpu.fake_worker import make_plan
from tests.refusals import refuses
from weft.errors import ConfigError
from weft.ranks import kernels
from weft.ranks.kernels.attention import AttentionShape
from weft.ranks.probes import tuner
from weft.study.measure.tuning import RaceResult, TunedSizes, TuneRequest, tune_attention

pytest.importorskip("triton", reason="needs triton")

from weft.ranks.kernels.triton import saved_tunings
from weft.ranks.kernels.triton.tuning import (
    DECODE,
    DECODE_CANDIDATES,
    DEFAULT,
    PREFILL,
    PREFILL_CANDIDATES,
    Tuning,
    Tunings,
)
from weft.ranks.probes import trials

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

CPU = torch.device("cpu")
SHAPE = shaped(torch.float16, 16, 4, 2, rows=5, length=40)
FEW, MANY = DECODE_CANDIDATES[1], DECODE_CANDIDATES[4]
FOUND = Tunings({1: FEW, 4: MANY}, PREFILL_CANDIDATES[1])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trials, "ROWS", (1, 4, 64))
    monkeypatch.setattr(trials, "COLD_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def sizes_of(given: tuple[object, ...]) -> Tuning:
    """The sizes among the arguments of a launch."""
    (tuning,) = (argument for argument in given if isinstance(argument, Tuning))
    return tuning


class Clock:
    """Everything takes 10 us, but for the decode sizes `fast` by their rows, and the prompts' PREFILL_CANDIDATES[1]."""

    def __init__(self, fast: dict[int, Tuning], monkeypatch: pytest.MonkeyPatch) -> None:
        self.fast, self.last = fast, (0, DECODE)
        decode, prefill = trials.decode, trials.prefill

        def decoded(*given: object) -> None:
            self.last = (given[3], sizes_of(given))  # type: ignore[assignment]
            decode(*given)  # type: ignore[arg-type]

        def prefilled(*given: object) -> None:
            self.last = (0, sizes_of(given))
            prefill(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(trials, "decode", decoded)
        monkeypatch.setattr(trials, "prefill", prefilled)

    def __call__(self, run: Callable[[], object]) -> float:
        rows, tuning = self.last
        return 8e-6 if self.fast.get(rows) == tuning or tuning == PREFILL_CANDIDATES[1] else 1e-5


def test_the_fastest_of_each_number_of_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def report(what: str, times: trials.Times, obstacles: trials.Obstacles) -> None:
        told.append(what)
        assert not obstacles and len(times) == len(DECODE_CANDIDATES if "decode" in what else PREFILL_CANDIDATES)

    found = trials.measure_tunings(SHAPE, CPU, Clock({1: FEW, 4: MANY}, monkeypatch), report)
    assert found == FOUND
    assert told == ["decode of 1 row over 40 tokens", "decode of 4 rows over 40 tokens", *trials.PROMPTS]


def test_contexts_are_mixed() -> None:
    assert trials.mixed_lengths(1, 4096) == [1074] and trials.mixed_lengths(4, 20) == [20] * 4
    many = trials.mixed_lengths(256, 4096)
    assert min(many) < 110 and max(many) > 2040 and sum(many) == pytest.approx(256 * 1074, rel=0.01)
    assert many not in (sorted(many), sorted(many, reverse=True)) and many == trials.mixed_lengths(256, 4096)


def test_sizes_that_are_too_large_or_wrong_are_passed_over() -> None:
    race = trials.decode_race(SHAPE, CPU, [9, 30])
    names = list(race.entries)

    def hungry(*given: object) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 101376.\nReduce")

    def wrong(*given: torch.Tensor) -> torch.Tensor:
        return race.entries[names[1]](*given) + torch.eye(2, 64)  # type: ignore[arg-type]

    def empty(*given: object) -> torch.Tensor:
        return torch.full((2, 64), torch.nan)

    race.entries |= {names[0]: hungry, names[2]: wrong, names[3]: empty}
    times, obstacles = race.run_entries(lambda run: 1.0)
    assert obstacles == {
        names[0]: "out of resource: shared memory, Required: 262144, Hardware limit: 101376.",
        names[2]: trials.OTHER_NUMBERS,
        names[3]: trials.OTHER_NUMBERS,
    }
    assert [*times] == [name for name in names if name not in obstacles]


def test_calls_take_turns_over_places_that_no_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "COLD_BYTES", 3 * 2 * 48 * 2 * 16 * 2)  # of 48 tokens in whole blocks
    race = trials.decode_race(SHAPE, CPU, [40])
    assert len({it.keys.data_ptr() for _, it, _ in race.samples}) == 4
    race.entries = {DECODE: race.entries[DECODE]}
    assert race.run_entries(lambda run: 8.0)[0] == {DECODE: 2.0}


def test_a_lead_within_the_noise_is_none() -> None:
    other = DECODE_CANDIDATES[3]
    assert trials.fastest_tuning([{DECODE: 1.0, other: 0.98}], DECODE) == DECODE
    assert trials.fastest_tuning([{DECODE: 1.0, other: 0.96}], DECODE) == other
    assert trials.fastest_tuning([{other: 1.0}], DECODE) == other
    assert trials.fastest_tuning([{}], DECODE) == DECODE
    # Over several races each counts the same, and what did not run in all of them is out.
    assert trials.fastest_tuning([{DECODE: 1.0, other: 0.5}, {DECODE: 10.0, other: 16.0}], DECODE) == other
    assert trials.fastest_tuning([{DECODE: 1.0, other: 0.5}, {DECODE: 1.0}], DECODE) == DECODE


def test_memory_that_is_not_there_leaves_a_size_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_inputs = trials.decode_inputs

    def short(shape: object, device: object, contexts: list[int]) -> object:
        if len(contexts) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")
        return decode_inputs(shape, device, contexts)  # type: ignore[arg-type]

    monkeypatch.setattr(trials, "decode_inputs", short)
    told = {}
    clock = Clock({1: FEW, 4: MANY}, monkeypatch)
    found = trials.measure_tunings(SHAPE, CPU, clock, lambda what, times, obstacles: told.update({what: obstacles}))
    assert found.decode == {1: FEW, 4: DECODE}
    assert told["decode of 4 rows"] == {"all": "CUDA out of memory. Tried"}


def test_the_nearest_number_of_rows_counts() -> None:
    table = Tunings(dict(zip((1, 8, 64, 256), DECODE_CANDIDATES, strict=False)), PREFILL)
    nearest = [
        min(n for n, it in table.decode.items() if it == table.for_rows(rows)) for rows in (1, 2, 3, 22, 23, 128, 500)
    ]
    assert nearest == [1, 1, 8, 8, 64, 64, 256]


# --- what is kept ---


def test_engines_that_start_there_take_what_was_kept(caplog: pytest.LogCaptureFixture) -> None:
    assert saved_tunings.load_tunings(CPU, SHAPE) == DEFAULT
    path = saved_tunings.save_tunings(CPU, SHAPE, FOUND)
    with caplog.at_level(logging.INFO, "weft"):
        attention = kernels.create_kernels("triton", CPU, SHAPE).attention
    assert attention.tunings == FOUND and str(path) in caplog.text  # type: ignore[attr-defined]
    # Of the most that may come they are independent, of heads and dtypes not.
    assert saved_tunings.load_tunings(CPU, replace(SHAPE, rows=99, length=9)) == FOUND
    for other in ({"kv_heads": 4}, {"head_dim": 32}, {"dtype": torch.float32}, {"cache_dtype": torch.float8_e4m3fn}):
        assert saved_tunings.load_tunings(CPU, replace(SHAPE, **other)) == DEFAULT


def test_other_versions_have_notes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    saved_tunings.save_tunings(CPU, SHAPE, FOUND)
    for module in (saved_tunings, saved_tunings.triton, torch):
        with monkeypatch.context() as other:
            other.setattr(module, "__version__", "9.9")
            assert saved_tunings.load_tunings(CPU, SHAPE) == DEFAULT
    assert saved_tunings.load_tunings(CPU, SHAPE) == FOUND


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: b"", "damaged"),
        (lambda text: b"\xff\xfe", "damaged"),
        (lambda text: text.replace(b'"warps":2', b'"warps":"2"'), "damaged"),
        (lambda text: text.replace(b'"cpu"', b'"NVIDIA L4 (8, 9)"'), "not about this device"),
        (lambda text: text.replace(b'"1":', b'"0":'), "not about this device"),
        (lambda text: text.replace(b'"warps":2', b'"warps":16'), "no longer among the candidates"),
    ],
)
def test_a_note_that_is_broken_or_foreign_is_ignored(
    spoil: Callable[[bytes], bytes], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved_tunings.save_tunings(CPU, SHAPE, FOUND)
    before = path.read_bytes()
    path.write_bytes(spoil(before))
    assert path.read_bytes() != before
    with caplog.at_level(logging.DEBUG, "weft"):
        assert saved_tunings.load_tunings(CPU, SHAPE) == DEFAULT
    assert said in caplog.text and [record.levelname for record in caplog.records] == ["DEBUG"]


def test_found_sizes_are_kept_for_every_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[msgspec.Struct] = []

    def measured(shape: AttentionShape, device: torch.device, report: Callable[..., object]) -> Tunings:
        report("decode of 1 row", {DECODE: 2e-6, FEW: 1e-6}, {MANY: "no room"})
        return FOUND

    monkeypatch.setattr(trials, "measure_tunings", measured)
    plan = msgspec.structs.replace(make_plan(), attention_backend="triton")
    whole = AttentionShape.from_plan(plan, 0)
    ranks = (1, whole.kv_heads)
    tuner.measure_sizes(TuneRequest(plan, ranks, keep=True), SimpleNamespace(send=said.append))  # type: ignore[arg-type]
    races, tuned = said[::2], said[1::2]
    seconds = {str(DECODE): 2e-6, str(FEW): 1e-6}
    assert races[1] == RaceResult("1 query and 1 KV heads, decode of 1 row", seconds, {str(MANY): "no room"})
    assert [(it.q_heads, it.kv_heads) for it in tuned] == [  # type: ignore[attr-defined]
        (whole.q_heads // n, whole.kv_heads // n) for n in ranks
    ]
    for n, sizes in zip(ranks, tuned, strict=True):
        shape = replace(whole, q_heads=whole.q_heads // n, kv_heads=whole.kv_heads // n)
        assert isinstance(sizes, TunedSizes) and Path(sizes.path).is_file() and not sizes.lost
        assert sizes.decode == {1: str(FEW), 4: str(MANY)} and saved_tunings.load_tunings(CPU, shape) == FOUND


def test_a_cache_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "weft").write_text("a file in the folder's place")
    monkeypatch.setattr(trials, "measure_tunings", lambda *given, **named: FOUND)
    plan = msgspec.structs.replace(make_plan(), attention_backend="triton")
    said: list[TunedSizes] = []
    tuner.measure_sizes(TuneRequest(plan, (1,), keep=True), SimpleNamespace(send=said.append))  # type: ignore[arg-type]
    assert not said[0].path and "XDG_CACHE_HOME" in said[0].lost
    tuner.measure_sizes(TuneRequest(plan, (1,), keep=False), SimpleNamespace(send=said.append))  # type: ignore[arg-type]
    assert not said[1].path and not said[1].lost


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card, and a clock")
@pytest.mark.long
def test_without_a_measurement_nothing_is_kept(tmp_path: Path) -> None:
    """The process as it is, without the clock of a card."""
    short = msgspec.structs.replace(make_plan(), max_num_seqs=1, max_model_len=4, attention_backend="triton")
    races: list[RaceResult] = []
    with refuses(ConfigError, "cannot-measure-attention") as error:
        tune_attention(short, (1,), keep=True, report=races.append)
    assert "CUDA" in str(error.value) or "NVIDIA" in str(error.value)
    assert [it.title.partition(", ")[2] for it in races] == ["decode of 1 row over 4 tokens", *trials.PROMPTS]
    assert not any(it.seconds for it in races) and not list(tmp_path.rglob("*.json"))
