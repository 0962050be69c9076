"""weft bench calibrate: the fit finds what is there, the file keeps it, and the planner reckons with it here only."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import exp, log
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure import machines
from tests.pure.commands import parsed
from tests.pure.shapes import SMOLLM2
from tests.refusals import has_values, refuses
from weft.cache import warn_damaged
from weft.checkpoint.architectures.place import Span
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.config import config_json
from weft.checkpoint.files import fields
from weft.checkpoint.quantised.precision import weight_bytes
from weft.checkpoint.quantised.schemes import ONLINE_QUANTIZATIONS
from weft.cli import main
from weft.cli.bench import calibrate
from weft.cli.parser import UsageError
from weft.config import EngineConfig
from weft.engine.core.token_ids import TokenIds
from weft.engine.frontend.outputs import CompletionOutput, Metrics, RequestOutput
from weft.errors import ConfigError, WeftError
from weft.machine.hardware import calibration, host
from weft.machine.hardware.calibration import Calibration, MeasuredFigure
from weft.machine.hardware.cluster import Cluster, Node, parse_gpus
from weft.machine.hardware.cpu import Cpu, CpuSpeed
from weft.machine.hardware.gpus import GpuSpec, find_gpu
from weft.machine.hardware.host import Host
from weft.plan.plan import named_devices
from weft.planner.profiles import MIN_ERROR, calibrated, engine_profile, load_profile
from weft.planner.question import Question
from weft.planner.search.search import search
from weft.planner.work.roofline import Roofline
from weft.planner.work.work import MatrixProduct
from weft.probes import stored_speeds
from weft.probes.machine import host_cluster
from weft.probes.stored_speeds import Speeds
from weft.study.bench import fit
from weft.study.bench.fit import PER_PRECISION, WIDTHS, PointPredictor
from weft.study.measure import engine_speed
from weft.study.measure.engine_speed import LOADS, CalibrationLoad, CalibrationPoint
from weft.study.measure.synthetic import LONGEST, SyntheticModel, synthetic_of_size
from weft.study.measure.tuning import RaceResult, TunedSizes

HOST = Host(
    hostname="here",
    cores=(0, 1),
    memory_total_bytes=32 << 30,
    memory_free_bytes=24 << 30,
    cpu=Cpu(model="AMD EPYC", sockets=1, cores=2, threads=2, features=("avx512_bf16",)),
)
SPEED = CpuSpeed(40e9, 0.25e12)
TRUE = {
    "weights_Bps": 34e9,
    "cache_Bps": 20e9,
    "matmul_flops": 0.6e12,
    "attention_flops": 0.2e12,
    "layer_us": 45.0,
    "step_us": 250.0,
    "sequence_us": 12.0,
    "overlap": 0.8,
}
HELD = {"weights_Bps": 0.7, "matmul_flops": 0.8}  # of those, what quantised weights reach


def cpu(known: Calibration | None = None) -> GpuSpec:
    (spec,) = host_cluster(HOST, Speeds(machine="", cpu=SPEED, calibrations=(known,) if known else ())).gpus
    return spec


def shape(model: SyntheticModel) -> ModelShape:
    return config_json.shape_from_config(fields.Fields(model.config(), "config.json"))


def points(gpu: GpuSpec, values: dict[str, float], noise: float = 0.0, seed: int = 0) -> list[CalibrationPoint]:
    """Measurements of an engine with these constants."""
    random = Random(seed)
    found = [
        CalibrationPoint(
            model=subject.name,
            shape=shape(subject.model),
            precision=ONLINE_QUANTIZATIONS.get(subject.quantization, "bf16"),
            load=load,
            seconds=1.0,
        )
        for subject in engine_speed.subjects(gpu)
        for load in engine_speed.loads_of(gpu, subject)
    ]
    planned = PointPredictor(gpu, found)
    quantised = {f"{name} {it}": values[name] * HELD[name] for it in planned.quantised for name in PER_PRECISION}
    times = planned.seconds(values | quantised)
    return [
        msgspec.structs.replace(point, seconds=seconds * exp(random.gauss(0, noise)))
        for point, seconds in zip(found, times, strict=True)
    ]


# --- the fit ---


@pytest.mark.parametrize("gpu", ["cpu", "RTX 4090", "H200"])
def test_the_fit_finds_the_constants_that_made_the_points(gpu: str) -> None:
    spec = cpu() if gpu == "cpu" else find_gpu(gpu)
    scale = spec.bandwidth_Bps / SPEED.bandwidth_Bps
    true = {name: value * (scale if name.endswith("Bps") else 1) for name, value in TRUE.items()}
    true |= dict.fromkeys(("matmul_flops", "attention_flops"), 0.6 * spec.flops["bf16"])
    made = points(spec, true)
    planned = PointPredictor(spec, made)
    before = [abs(log(a / point.seconds)) for a, point in zip(planned.seconds(planned.start()), made, strict=True)]
    found = fit.fit_constants(spec, made)
    errors = [abs(error) for error in fit.fit_errors(made, found)]
    assert max(errors) < 0.03 < max(before)
    for name in ("weights_Bps", "matmul_flops", "step_us", "layer_us"):
        assert found.values[name] == pytest.approx(true[name], rel=0.2), name
    assert planned.quantised == (tuple(ONLINE_QUANTIZATIONS[it] for it in engine_speed.QUANTISED))
    for precision in planned.quantised:
        for name in PER_PRECISION:
            assert found.values[f"{name} {precision}"] == pytest.approx(true[name] * HELD[name], rel=0.2)


@settings(max_examples=5)
@given(seed=st.integers(0, 99))
def test_noise_is_not_followed(seed: int) -> None:
    spec = cpu()
    made = points(spec, TRUE, noise=0.05, seed=seed)
    found = fit.fit_constants(spec, made)
    real = [point.seconds for point in points(spec, TRUE)]
    assert max(abs(predicted / there - 1) for predicted, there in zip(found.predicted, real, strict=True)) < 0.2
    assert 0 <= found.values["overlap"] <= 1 and all(
        value > 0 for name, value in found.values.items() if name != "overlap"
    )


def test_one_wild_point_does_not_move_the_others() -> None:
    spec = cpu()
    made = points(spec, TRUE)
    made[2] = msgspec.structs.replace(made[2], seconds=4 * made[2].seconds)
    found = fit.fit_constants(spec, made)
    errors = [abs(error) for error in fit.fit_errors(made, found)]
    assert sorted(errors)[-2] < 0.2 and errors[2] > 0.5


# --- the models and the measuring ---


@given(size=st.floats(5e6, 5e9), layers=st.integers(1, 40), vocab=st.sampled_from([1024, 16_384, 65_536]))
def test_a_synthetic_model_has_its_size(size: float, layers: int, vocab: int) -> None:
    model = synthetic_of_size("m", size, layers=layers, vocab=vocab)
    made = shape(model)
    assert len(made.layers) == layers and made.vocab == vocab and made.q_heads % made.kv_heads == 0
    if model.hidden >= 1024:  # widths come in steps
        assert weight_bytes(made, "bf16") == pytest.approx(size, rel=0.2)


def test_the_models_differ_in_what_a_layer_streams() -> None:
    for spec in (cpu(), find_gpu("H200")):
        whole = [subject for subject in engine_speed.subjects(spec) if subject.quantization == "none"]
        tiny, thin, wide = (shape(subject.model) for subject in whole)
        assert weight_bytes(wide, "bf16") / len(wide.layers) > 4 * weight_bytes(thin, "bf16") / len(thin.layers)
        assert weight_bytes(wide, "bf16") < spec.memory_bytes / 4
        assert weight_bytes(tiny, "bf16") < 1e6


class FakeLLM:
    """One millisecond to the first token for every prompt token, and two for each step after it."""

    num_blocks = 1000

    def __init__(self, **said: Any) -> None:
        from weft.checkpoint.checkpoint import Checkpoint
        from weft.plan.layout import build_plan

        self.asked: list[CalibrationLoad] = []
        model = Checkpoint(model="m", path=Path(), format="dummy", shape=SMOLLM2, generation={})
        self.plan = build_plan(EngineConfig(model="m", **said), model, HOST)
        self.capacities: list[Any] = []

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[RequestOutput]:
        length = len(prompts[0]["prompt_token_ids"])
        first, made = 10 + 0.001 * length, params.max_tokens
        times = Metrics(arrival_s=10.0, first_token_s=first, finished_s=first + 0.002 * (made - 1))
        choice = CompletionOutput(0, "", [7] * made, finish_reason="length")
        return [RequestOutput("0", None, TokenIds.pack([]), [choice], times, finished=True) for _ in prompts]


def test_quantised_models_are_measured_in_short() -> None:
    tiny, thin, _, *quantised = engine_speed.subjects(cpu())
    assert [subject.name for subject in quantised] == ["wide int4", "wide int8", "wide q4_0", "wide q8_0"]
    assert [(it.kind, it.batch, it.length) for it in engine_speed.loads_of(cpu(), quantised[0])] == [
        ("decode", 1, 64),
        ("decode", 32, 64),
        ("prefill", 1, 1024),
    ]
    assert {it.kind for it in engine_speed.loads_of(cpu(), tiny)} == {"decode"}
    assert engine_speed.loads_of(cpu(), thin) == engine_speed.loads_of(cpu(), None) == LOADS["cpu"]
    *_, made = engine_speed.subjects(find_gpu("H200"))
    assert (made.name, len(engine_speed.loads_of(find_gpu("H200"), made))) == ("wide q8_0", 3)


def test_the_measurements() -> None:
    llm: Any = FakeLLM(max_num_batched_tokens=8192)
    told: list[CalibrationPoint] = []
    found = engine_speed.measure_loads(llm, "m", LOADS["cpu"], told.append)
    assert found == told and [point.load for point in found] == list(LOADS["cpu"])
    assert [point.seconds for point in found if point.load.kind == "decode"] == pytest.approx([0.002] * 6)
    assert [point.seconds for point in found if point.load.kind == "prefill"] == pytest.approx(
        [0.064, 0.256, 1.024, 2.048]
    )
    # Where there is no room, or the prompts need several steps, it is left out.
    llm = FakeLLM(max_num_batched_tokens=2048, max_num_seqs=16)
    assert [
        (it.load.batch, it.load.length) for it in engine_speed.measure_loads(llm, "m", LOADS["cpu"], told.append)
    ] == [
        (1, 64),
        (1, 1024),
        (4, 64),
        (16, 64),
        (1, 64),
        (1, 256),
        (1, 1024),
        (1, 2048),
    ]
    llm.num_blocks = 10
    assert {it.load.length for it in engine_speed.measure_loads(llm, "m", LOADS["cpu"], told.append)} == {64}
    assert max(load.length + load.output for loads in LOADS.values() for load in loads) <= LONGEST


def test_a_passing_disturbance_is_in_no_measurement() -> None:
    """All of one load's runs would be in it if they came one after the other."""

    class Disturbed(FakeLLM):
        runs = 0

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[RequestOutput]:
            self.runs += 1
            answers = super().generate(prompts, params, use_tqdm)
            if 3 <= self.runs < 9:
                for answer in answers:
                    assert answer.metrics.finished_s
                    answer.metrics.finished_s += 1.0
            return answers

    llm: Any = Disturbed(max_num_batched_tokens=8192)
    steps = [load for load in LOADS["cpu"] if load.kind == "decode"]
    found = engine_speed.measure_loads(llm, "m", steps, lambda point: None)
    assert [point.seconds for point in found] == pytest.approx([0.002] * len(steps))
    # Where the two fastest differ by then it goes on, but not for ever.
    assert llm.runs == 1 + engine_speed.REPEATS * len(steps)


def test_runs_that_differ_are_repeated() -> None:
    assert engine_speed.has_settled([1.0, 9.0, 1.04]) and not engine_speed.has_settled([1.0, 1.06, 9.0])


def test_disturbed_steps_are_found_on_every_machine() -> None:
    spec = cpu()
    there = points(spec, TRUE)
    planned = PointPredictor(spec, there)
    # A machine three times as slow as it was expected to be is one; one point alone is not.
    slow = [msgspec.structs.replace(point, seconds=3 * at) for point, at in zip(there, planned.expected(), strict=True)]
    assert engine_speed.doubtful_points(slow, planned.expected()) == []
    hiccup = next(number for number, point in enumerate(slow) if point.model == "wide q8_0")
    slow[hiccup] = msgspec.structs.replace(slow[hiccup], seconds=2 * slow[hiccup].seconds)
    assert engine_speed.doubtful_points(slow, planned.expected()) == [slow[hiccup]]
    again = [msgspec.structs.replace(slow[hiccup], seconds=0.5), msgspec.structs.replace(slow[0], seconds=99.0)]
    mended = engine_speed.faster_points(slow, again)
    assert mended[hiccup].seconds == min(0.5, slow[hiccup].seconds) and mended[0] == slow[0]


def test_a_hiccup_becomes_no_constant(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec, asked = cpu(), list[tuple[str, int]]()
    there = points(spec, TRUE)
    there = [
        msgspec.structs.replace(point, seconds=seconds)
        for point, seconds in zip(there, PointPredictor(spec, there).expected(), strict=True)
    ]
    true = {(point.model, point.load): point for point in there}

    class Engine(FakeLLM):
        def __enter__(self) -> Engine:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        @classmethod
        def from_config(cls, config: EngineConfig) -> Engine:
            assert (config.skip_tokenizer_init, config.device, config.load_format) == (True, "cpu", "dummy")
            return cls()

    def measure(llm: object, name: str, loads: Any, report: Any, advance: Any) -> list[CalibrationPoint]:
        times = 4 if name == "wide q8_0" and name not in dict(asked) else 1
        asked.append((name, len(loads)))
        found = [true[name, load] for load in loads]
        return [msgspec.structs.replace(it, seconds=times * it.seconds) for it in found]

    monkeypatch.setattr("weft.engine.llm.LLM", Engine)
    monkeypatch.setattr(host, "probe_host", lambda: HOST)
    monkeypatch.setattr(engine_speed, "measure_loads", measure)
    monkeypatch.setattr(engine_speed, "runtime_bytes", lambda *_: 400 << 20)
    found = calibrate.calibrate_device(said(""), calibrate.measured_config(said("")), HOST, spec, None)
    assert asked[-2:] == [("wide q8_0", 3)] * 2
    assert found.points == there and found.fit.values == fit.fit_constants(spec, there).values
    assert re.search(r"\bwide q8_0: 3 ", capsys.readouterr().err)


# --- the file ---


def made(device: str = "AMD EPYC (2 cores)", error: float = 0.05, **changed: float) -> Calibration:
    there = CalibrationPoint(model="m", shape=SMOLLM2, precision="q4_1", load=LOADS["cpu"][0], seconds=1.0)
    planned = PointPredictor(cpu(), [there])
    values = TRUE | {f"{name} q4_1": TRUE[name] * HELD[name] for name in PER_PRECISION} | changed
    found = fit.build_calibration(
        device, planned, values, runtime_MiB=400.0, date="2026-11-20", method="fit", errors=[error, -error]
    )
    assert (found.points, found.error, found.worst) == (2, error, error)
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    warn_damaged.cache_clear()
    return tmp_path / "weft"


def test_stored_calibrations_are_known(cache: Path) -> None:
    machine = stored_speeds.calibration_fingerprint(HOST)
    assert calibration.load_calibrations(machine) == ()
    one, other = made(), made("RTX 4090")
    for entry in (made(layer_us=1.0), other, one):  # the last of a device counts
        path = calibration.store_calibration(machine, entry)
    assert path.parent == cache and calibration.load_calibrations(machine) == (other, one)
    assert stored_speeds.load_speeds(HOST).calibrations == (other, one)
    smaller = msgspec.structs.replace(HOST, cores=(0,))
    assert calibration.load_calibrations(stored_speeds.calibration_fingerprint(smaller)) == ()
    assert list(cache.glob("*.part")) == []
    # Speeds have a file of their own.
    machine_now = stored_speeds.load_speeds(HOST).machine
    stored_speeds.store_speeds(HOST, Speeds(machine=machine_now, cpu=SPEED, calibrations=(one,)))
    assert "weights_Bps" not in stored_speeds.speeds_path(HOST).read_text()
    assert stored_speeds.load_speeds(HOST).cpu == SPEED and stored_speeds.load_speeds(HOST).calibrations == (other, one)


def test_other_versions_are_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = stored_speeds.calibration_fingerprint(HOST)
    calibration.store_calibration(machine, made())
    monkeypatch.setattr("weft._version.__version__", "9.9")
    assert calibration.load_calibrations(machine) == ()
    monkeypatch.undo()
    monkeypatch.setattr(calibration, "version", lambda name: "9.9")
    assert stored_speeds.calibration_fingerprint(HOST) != machine


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{nonsense",
        "[]",
        '{"machine": "m"}',
        lambda good: good.replace("34000000000.0", "-1.0"),
        lambda good: good.replace("0.8", "1.5"),
        lambda good: good.replace('"machine"', '"machin"'),
    ],
)
def test_a_damaged_file_is_ignored_with_one_warning(cache: Path, caplog: pytest.LogCaptureFixture, text: Any) -> None:
    machine = stored_speeds.calibration_fingerprint(HOST)
    path = calibration.store_calibration(machine, made())
    path.write_text(text if isinstance(text, str) else text(path.read_text()))
    assert calibration.load_calibrations(machine) == calibration.load_calibrations(machine) == ()
    assert len(caplog.records) == 1 and "weft bench calibrate" in caplog.text


def test_a_cache_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.joinpath("weft").write_text("a file in the folder's place")
    with refuses(WeftError, "cannot-write-cache"):
        calibration.store_calibration("m", made())


# --- the planner ---


def ask(cluster: Cluster, engine: str = "weft") -> Question:
    return Question(model="m", shape=SMOLLM2, cluster=cluster, engine=engine, precisions=("bf16",))


def machine(known: Calibration | None) -> Cluster:
    return host_cluster(HOST, Speeds(machine="", cpu=SPEED, calibrations=(known,) if known else ()))


def test_the_planner_reckons_with_what_was_measured_here() -> None:
    plain, slow = search(ask(machine(None))).best, search(ask(machine(made(weights_Bps=3.4e9)))).best
    assert plain and slow
    assert slow.predicted.single_tok_s < plain.predicted.single_tok_s / 5
    told = engine_profile(ask(machine(made()))).provenance()
    has_values(told["layer_us"], "45: ", "2026-11-20", "weft bench calibrate")
    has_values(told["kernels on AMD EPYC (2 cores)"], "2026-11-20", "weft bench calibrate")
    # The error that is told is the fit's, with something for other models.
    assert engine_profile(ask(machine(made(error=0.1)))).error.value == pytest.approx(0.2)
    assert engine_profile(ask(machine(made(error=0.01)))).error.value == MIN_ERROR


def test_quantised_weights_have_rates_of_their_own() -> None:
    found = engine_profile(ask(machine(made())))
    gpu = machine(made()).gpus[0]
    whole, quantised, other = (Roofline(gpu, found, precision) for precision in ("bf16", "q4_1", "q8_0"))
    assert quantised.byte_s == pytest.approx(whole.byte_s / 0.7)
    assert quantised.flop_s == pytest.approx(whole.flop_s / 0.8)
    assert other.byte_s == whole.byte_s  # never measured
    told = found.provenance()["weights q2_k q4_1 q4_1+q8_0 q4_k_s q4_k_m"]
    has_values(told, "0.7: ", "2026-11-20", "weft bench calibrate")
    # Of a model in 16 bits nothing changes.
    assert quantised.wide_byte_s == whole.byte_s


def test_other_hardware_and_other_engines_are_not_touched() -> None:
    assert engine_profile(ask(parse_gpus("1xRTX4090"))) == load_profile("weft")
    assert engine_profile(ask(machine(made()), "vllm")) == load_profile("vllm", on_cpu=True)
    assert engine_profile(ask(machine(made("another")))) == engine_profile(ask(machine(None)))
    # Of two kinds of cards, one of which was not measured, none counts.
    card = find_gpu("RTX 4090")
    known = msgspec.structs.replace(card, calibration=made("RTX4090"))
    mixed = Cluster((Node((known, find_gpu("RTX 3090")), "pcie"),), 1.0)
    assert engine_profile(ask(mixed)) == load_profile("weft")
    both = engine_profile(ask(Cluster((Node((known, known), "pcie"),), 1.0)))
    assert both.kernels(known, "bf16").weights == pytest.approx(34e9 / card.bandwidth_Bps)


def test_ranks_that_share_a_cpu_share_its_rates() -> None:
    half = made().scaled(0.5, 0.5)
    assert half.weights_Bps.value == 17e9 and half.matmul_flops.value == 0.3e12
    assert half.layer_us == made().layer_us and half.overlap == made().overlap
    assert half.quantised["q4_1"].weights_Bps.value == pytest.approx(0.7 * 17e9)


@given(overlap=st.floats(0, 1), share=st.floats(0.1, 1))
def test_less_overlap_is_never_faster(overlap: float, share: float) -> None:
    def seconds(value: float) -> list[float]:
        gpu = cpu(made(overlap=value))
        made_of = calibrated(load_profile("weft", on_cpu=True), [gpu])
        rank = Roofline(gpu, made_of, "bf16")
        return [rank.product_s(MatrixProduct(10**6, 2 * 10**6, False), tokens) for tokens in (1, 8, 64, 1024)]

    assert all(a >= b for a, b in zip(seconds(overlap * share), seconds(overlap), strict=True))


# --- the command ---


def said(words: str) -> Any:
    return parsed(f"bench calibrate {words}")


def test_the_command_measures_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calibrate.measured_config(said("")).model == "synthetic"
    assert calibrate.measured_config(said("m --dtype half")).dtype == "half"
    for words in ("-tp 2", "-pp 2", "--tensor-split 2,1"):
        with refuses(UsageError, "several-ranks-to-calibrate"):
            calibrate.measured_config(said(words))


def test_the_command_prints_keeps_and_doubts(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: Callable[[str, str], None],
) -> None:
    monkeypatch.setattr(host, "probe_host", lambda: HOST)
    monkeypatch.setattr(stored_speeds, "cpu_speed_of", lambda *_: SPEED)
    there = points(cpu(), TRUE)
    worst = 0.02

    def one(*_: object) -> Any:
        found = fit.fit_constants(cpu(), there)
        return calibrate.DeviceResult(made(error=worst), there, found)

    monkeypatch.setattr(calibrate, "calibrate_device", one)
    assert main.main(["bench", "calibrate"]) == 0
    captured = capsys.readouterr()
    has_values(captured.out, "AMD EPYC (2 cores), bf16, ", "2026-11-20")
    assert re.search(r"\b34 GB/s\b", captured.out) and re.search(r"\b2\.0 %", captured.out)
    assert "weft plan" in captured.err
    figures = captured.out.index("mean error")  # below the table of measurements
    golden("bench_calibrate.txt", captured.out[figures:])
    assert calibration.load_calibrations(stored_speeds.calibration_fingerprint(HOST)) == (made(error=0.02),)
    worst = 0.6
    assert main.main(["bench", "calibrate", "--json"]) == 1
    captured = capsys.readouterr()
    (told,) = json.loads(captured.out)
    assert told["task"] == "calibrate" and len(told["measurements"]) == len(there)
    has_values(captured.err, "60 %", "--save")
    assert calibration.load_calibrations(stored_speeds.calibration_fingerprint(HOST)) == (made(error=0.02),)
    assert main.main(["bench", "calibrate", "--save"]) == 0
    assert calibration.load_calibrations(stored_speeds.calibration_fingerprint(HOST)) == (made(error=0.6),)


@pytest.mark.parametrize(
    ("error", "words", "kept"),
    [(0.02, "", True), (0.6, "", False), (0.6, "--save", True), (0.02, "--no-save", False)],
)
def test_sizes_of_attention_are_kept_if_the_figures_are(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: float, words: str, kept: bool
) -> None:
    there = machines.host(gpus=(msgspec.structs.replace(machines.gpu(0), name="NVIDIA L4"),))
    plan = msgspec.structs.replace(FakeLLM().plan, devices=named_devices("cuda:0"))
    asked: list[tuple[tuple[int, ...], bool]] = []

    def tune(plan: object, ranks: tuple[int, ...], *, keep: bool, report: object) -> list[TunedSizes]:
        asked.append((ranks, keep))
        return []

    def measured(*_: object) -> calibrate.DeviceResult:
        measurements = points(cpu(), TRUE)
        return calibrate.DeviceResult(
            made(error=error), measurements, fit.fit_constants(cpu(), measurements), tunable=plan
        )

    monkeypatch.setattr(host, "probe_host", lambda: there)
    monkeypatch.setattr(calibrate, "calibrate_device", measured)
    monkeypatch.setattr(calibrate, "tune_attention", tune)
    assert main.main(["bench", "calibrate", "m", *words.split()]) == (1 if error > 0.5 and not kept else 0)
    assert asked == [((1,), kept)]


def test_attention_is_tuned_for_a_model_s_heads_and_their_even_cuts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    golden: Callable[[str, str], None],
) -> None:
    plan: Any = FakeLLM().plan  # 9 query and 3 KV heads
    wide = msgspec.structs.replace(plan, places=(msgspec.structs.replace(plan.places[0], kv_heads=Span(0, 4)),))
    asked: list[tuple[tuple[int, ...], bool]] = []

    def tune(plan: object, ranks: tuple[int, ...], *, keep: bool, report: Any) -> list[TunedSizes]:
        asked.append((ranks, keep))
        report(
            RaceResult("decode of 8 rows", {"slow": 2e-5, "fast": 1e-5}, {"large": "out of resource: shared memory"})
        )
        return [
            TunedSizes(q_heads=9, kv_heads=3, decode={1: "tile 64", 8: "fast"}, prefill="tile 128", path="/c/t.json")
        ]

    monkeypatch.setattr(calibrate, "tune_attention", tune)
    # By which the measured models are so large that no cache holds them.
    monkeypatch.setattr(engine_speed, "last_cache_bytes", lambda: 32 << 20)
    found = calibrate.tune_on_gpu(plan, 2, keep=False)
    for gpus in (1, 2, 5, 8):
        calibrate.tune_on_gpu(wide, gpus, keep=True)
    ways = [((1,), False), ((1,), True), ((1, 2), True), ((1, 2, 4), True), ((1, 2, 4), True)]
    assert asked == ways
    told = capsys.readouterr().err.splitlines()[:4]
    assert [line.split() for line in told[1:3]] == [["10.0", "us", "fast"], ["20.0", "us", "slow"]]
    has_values(told[3], "large", "out of resource: shared memory")
    fitted = fit.fit_constants(cpu(), points(cpu(), TRUE))
    whole = calibrate.DeviceResult(made(), points(cpu(), TRUE), fitted, tuned=found)
    lines = calibrate.device_lines(whole)
    has_values(lines[-5], "9 query and 3 KV heads")
    assert lines[-4] == "1 row     tile 64" and lines[-2] == "prompts  tile 128"
    has_values(lines[-1], "/c/t.json")
    golden("bench_calibrate_gpu.txt", "\n".join(lines) + "\n")
    told_json = json.loads(json.dumps(calibrate.device_json(whole)))
    assert told_json["attention"][0]["decode"] == {"1": "tile 64", "8": "fast"}

    def broken(*_: object, **__: object) -> list[TunedSizes]:
        raise ConfigError("it is hot", code="cannot-measure-attention")

    monkeypatch.setattr(calibrate, "tune_attention", broken)
    assert calibrate.tune_on_gpu(plan, 1, keep=True) == []
    assert "it is hot" in caplog.text


def test_one_of_each_kind_of_device(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.pure.machines import gpu
    from tests.pure.machines import host as with_gpus

    monkeypatch.setattr(stored_speeds, "cpu_speed_of", lambda *_: SPEED)
    config = calibrate.measured_config(said(""))
    ((index, spec),) = calibrate.devices(HOST, config)
    assert index is None and spec.kind == "cpu"
    there = with_gpus(tuple(msgspec.structs.replace(gpu(number), name="NVIDIA L4") for number in range(3)))
    found = calibrate.devices(there, config)
    assert [index for index, _ in found] == [0] and found[0][1].kind == "gpu"
    assert calibrate.devices(there, calibrate.measured_config(said("--device-ids 2")))[0][0] == 2
    with refuses(ConfigError, "device-ids-beyond-gpus", "7", "0 to 2"):
        calibrate.devices(there, calibrate.measured_config(said("--device-ids 7")))


def test_all_constants_have_a_name_for_people() -> None:
    assert {*WIDTHS, "runtime_MiB"} == calibrate.UNITS.keys()
    assert {*WIDTHS, "runtime_MiB", "weights_Bps q4_1", "matmul_flops q4_1"} == made().figures().keys()
    assert made().figures()["overlap"] == MeasuredFigure(0.8, "fit")
