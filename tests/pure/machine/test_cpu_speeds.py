"""A CPU that was not calibrated: what a second measures of it, or is known of its instruction set, tells the speed."""

from __future__ import annotations

import json
import signal
import subprocess
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.shapes import SMOLLM2, with_experts
from tests.refusals import has_values
from weft.checkpoint.architectures.shape import Experts, ModelShape
from weft.checkpoint.checkpoint import Checkpoint
from weft.checkpoint.config import config_json
from weft.checkpoint.files import fields
from weft.cli.machine.hardware_view import own_kernels
from weft.config import EngineConfig
from weft.machine.hardware import cpus, hardware_file
from weft.machine.hardware.cluster import Cluster, Node
from weft.machine.hardware.cpu import TOKENS, Cpu, CpuSpeed, KernelSpeed, ProductSpeed
from weft.machine.hardware.gpus import GpuSpec
from weft.machine.hardware.host import Host, probe_host
from weft.machine.native import prebuilt
from weft.plan.layout import build_plan
from weft.planner.execution.forecast import Forecast, forecast_plan
from weft.planner.profiles import MEASURED_ERROR, calibrated, load_profile
from weft.planner.work.roofline import Roofline, interpolate
from weft.planner.work.work import MatrixProduct
from weft.probes import kernel_speed, stored_speeds
from weft.probes.machine import cpu_spec, rank_share
from weft.probes.stored_speeds import Speeds
from weft.study.bench.predicted import predict_batch

TABLE = json.loads((Path(__file__).parents[2] / "data/cpu_speeds.json").read_text())["cases"]
FAR = 0.25
SETS = {
    "haswell": ("avx2", "fma"),
    "alderlake": ("avx2", "fma", "avx_vnni"),
    "skylake-avx512": ("avx2", "fma", "avx512f"),
    "cascadelake": ("avx2", "fma", "avx512f", "avx512_vnni"),
    "zen 5": ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16"),
}
HOST = Host(
    hostname="here",
    cores=(0, 1),
    memory_total_bytes=32 << 30,
    memory_free_bytes=24 << 30,
    cpu=Cpu(model="AMD EPYC", sockets=1, cores=2, threads=2, features=SETS["zen 5"]),
)
MEASURED = KernelSpeed(
    products=(
        ProductSpeed(bits=16, weights_Bps=(48e9, 48e9, 48e9, 30e9), matmul_flops=1e12),
        ProductSpeed(bits=8, weights_Bps=(47e9, 44e9, 36e9, 18e9), matmul_flops=1.1e12),
        ProductSpeed(bits=4, weights_Bps=(46e9, 40e9, 16e9, 8e9), matmul_flops=1.05e12),
    ),
    cache_Bps=38e9,
    attention_flops=0.6e12,
    rows_Bps=20e9,
)
SPEED = CpuSpeed(48e9, 0.48e12)


LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def shape(model: str) -> ModelShape:
    return SMOLLM2 if model == "SmolLM2-135M" else config_json.shape_from_config(fields.Fields(LARGE, "config.json"))


def expected(case: dict[str, Any], speed: CpuSpeed) -> Forecast:
    model = Checkpoint(model="m", path=Path(), format="dummy", shape=shape(case["model"]), generation={})
    config = EngineConfig(model="m", quantization=case["quantization"], max_num_batched_tokens=2048)
    return forecast_plan(build_plan(config, model, HOST), HOST, Speeds(machine="", cpu=speed))


def ratios(case: dict[str, Any], speed: CpuSpeed) -> dict[str, float]:
    """Measured over predicted."""
    there = expected(case, speed)

    def of(*asks: tuple[int, int]) -> dict[str, float]:
        told: list[Any] = [SimpleNamespace(prompt=[0] * length, output_len=output) for length, output in asks]
        return predict_batch(there, told)

    one, long, many = of((128, case["output_len"])), of((1024, 1)), of(*case["many"])
    return {
        "decode": case["decode_tok_s"] / one["decode_tok_s"],
        "first token of 128": case["ttft_128_s"] / one["ttft_s"],
        "first token of 1,024": case["ttft_1024_s"] / long["ttft_s"],
        "32 requests": case["many_tok_s"] / many["output_tok_s"],
    }


@pytest.mark.parametrize("case", TABLE, ids=lambda case: f"{case['model']}-{case['quantization']}")
def test_a_measurement_of_one_second_predicts_the_speed_of_a_model(case: dict[str, Any]) -> None:
    speed = msgspec.convert(case["cpu"], CpuSpeed)
    for what, ratio in ratios(case, speed).items():
        assert 1 - FAR < ratio < 1 + FAR, what
    # And, half as well, the instruction set alone: nothing was built yet.
    for what, ratio in ratios(case, msgspec.structs.replace(speed, kernels=None)).items():
        assert 1 - 2 * FAR < ratio < 1 + 2 * FAR, what


def spec(speed: CpuSpeed, features: tuple[str, ...] = SETS["zen 5"]) -> GpuSpec:
    assert HOST.cpu
    there = msgspec.structs.replace(HOST, cpu=msgspec.structs.replace(HOST.cpu, features=features))
    return cpu_spec(there, speed)


def test_measured_figures_and_priors_are_told_apart() -> None:
    def told(speed: CpuSpeed, bits: int = 4) -> tuple[float, str]:
        found = calibrated(load_profile("weft", on_cpu=True), [spec(speed)])
        return found.error.value, found.provenance().get(f"products of {bits} bits on AMD EPYC (2 cores)", "")

    error, source = told(msgspec.structs.replace(SPEED, kernels=MEASURED, library="x.so"))
    assert error == MEASURED_ERROR.value
    has_values(source, "0.96 of the bandwidth", "1.09 of the FLOPS", "measured here")
    assert "a prior" in told(msgspec.structs.replace(SPEED, kernels=MEASURED, library="x.so"), 32)[1]
    error, source = told(SPEED)
    assert error > MEASURED_ERROR.value and "a prior, until it is measured here: -march=native" in source
    error, source = told(msgspec.structs.replace(SPEED, kernels=MEASURED, library="x.so", busy=True))
    assert error > MEASURED_ERROR.value and "measured here while others computed" in source
    # Without a compiler other kernels run, of which only the shares of kernels.toml are known.
    assert told(msgspec.structs.replace(SPEED, library=None)) == (error, "")
    without = calibrated(load_profile("weft", on_cpu=True), [spec(msgspec.structs.replace(SPEED, library=None))])
    assert without == load_profile("weft", on_cpu=True)
    # Other engines have kernels of their own.
    assert calibrated(load_profile("vllm", on_cpu=True), [spec(SPEED)]) == load_profile("vllm", on_cpu=True)


def test_a_dtype_without_compiled_kernels_is_planned_without_them() -> None:
    gpu = spec(msgspec.structs.replace(SPEED, kernels=MEASURED, library="x.so"))
    found, unmeasured = calibrated(load_profile("weft", on_cpu=True), [gpu]), load_profile("weft", on_cpu=True)
    product = MatrixProduct(1 << 24, 2 << 24, False)
    for precision, band in (("bf16", MEASURED_ERROR.value), ("fp16", unmeasured.error.value)):
        assert found.error_for(SMOLLM2, precision).value == band
    plain, half = Roofline(gpu, found, "bf16"), Roofline(gpu, found, "fp16")
    assert (
        half.product_s(product, 1)
        == Roofline(gpu, unmeasured, "fp16").product_s(product, 1)
        > plain.product_s(product, 1)
    )
    # Nor does it tell what experts take.
    experts = with_experts(SMOLLM2, Experts(count=8, top_k=2, width=512))
    assert found.error_for(experts, "bf16").value == unmeasured.error.value
    assert unmeasured.error_for(experts, "bf16").value == unmeasured.error.value


def test_twice_of_what_a_cpu_has_is_worth_what_it_was_measured_to_wait_for() -> None:
    gpu = spec(msgspec.structs.replace(SPEED, kernels=MEASURED, library="x.so"))
    rank = Roofline(gpu, calibrated(load_profile("weft", on_cpu=True), [gpu]), "bf16")
    one, many = (MatrixProduct(1 << 24, 2 << 24, False), 1), (MatrixProduct(1 << 24, 10 << 20, False), 32)

    def gain(product: MatrixProduct, tokens: int, **more: float) -> float:
        richer = gpu.scaled(**more)
        there = Roofline(richer, calibrated(load_profile("weft", on_cpu=True), [richer]), "bf16")
        return rank.product_s(product, tokens) / there.product_s(product, tokens)

    assert gain(*one, memory=2) == pytest.approx(2) and gain(*one, compute=2) == pytest.approx(1)
    assert gain(*many, compute=2) > 1.5 > gain(*many, memory=2) > 1
    for point in (one, many):
        assert gain(*point, memory=2, compute=2) == pytest.approx(2)


@pytest.mark.parametrize("kernels", [MEASURED, None])
@pytest.mark.parametrize("busy", [False, True])
def test_a_file_of_a_machine_plans_like_it(tmp_path: Path, kernels: KernelSpeed | None, busy: bool) -> None:
    gpu = spec(msgspec.structs.replace(SPEED, kernels=kernels, busy=busy))
    file = tmp_path / "here.yaml"
    file.write_text(hardware_file.hardware_yaml(Cluster((Node((gpu,), "memory"),), 1.0)))
    (again,) = hardware_file.read_hardware_file(str(file)).gpus
    found = [calibrated(load_profile("weft", on_cpu=True), [it]) for it in (gpu, again)]
    here, there = (Roofline(it, own, "bf16") for it, own in zip((gpu, again), found, strict=True))
    product = MatrixProduct(1 << 24, 2 << 24, False)
    assert there.product_s(product, 40) == pytest.approx(here.product_s(product, 40), rel=1e-5)
    assert found[0].error == found[1].error and "file says" in found[1].measured[0].source


def test_figures_without_a_measurement_are_as_elsewhere() -> None:
    found = cpus.cpu_kernel_speed(SETS["zen 5"], msgspec.structs.replace(SPEED, kernels=MEASURED))
    assert found and [it.bits for it in found.products] == [16, 8, 4, 32]
    assert (
        found.products[:3] == MEASURED.products
        and found.source == ""
        and found.products[3].matmul_flops == pytest.approx(0.48e12)
    )


def test_a_larger_instruction_set_is_never_slower() -> None:
    def flops(name: str) -> dict[int, float]:
        # Of AVX512 numpy makes twice as much.
        fp32 = 0.5e12 if "avx512f" in SETS[name] else 0.25e12
        return {
            it.bits: it.matmul_flops for it in cpus.expected_kernel_speed(SETS[name], CpuSpeed(1e15, fp32)).products
        }

    for less, more in (("haswell", "alderlake"), ("skylake-avx512", "cascadelake"), ("cascadelake", "zen 5")):
        assert all(flops(more)[bits] >= 0.95 * flops(less)[bits] for bits in (4, 8, 16, 32)), (less, more)
    assert flops("cascadelake")[8] > 5 * flops("skylake-avx512")[8]  # VNNI
    assert flops("zen 5")[16] > 4 * flops("cascadelake")[16]  # AVX512-BF16


@given(
    features=st.sampled_from([*SETS.values(), (), ("asimd", "bf16")]),
    bandwidth=st.floats(1e9, 1e12),
    flops=st.floats(1e9, 1e14),
)
def test_priors_keep_to_the_memory(features: tuple[str, ...], bandwidth: float, flops: float) -> None:
    found = cpus.expected_kernel_speed(features, CpuSpeed(bandwidth, flops))
    assert sorted(it.bits for it in found.products) == [4, 8, 16, 32]
    assert 0 < found.cache_Bps < bandwidth and found.rows_Bps > 0 and found.attention_flops > 0
    for rates in found.products:
        assert (
            len(rates.weights_Bps) == len(TOKENS) and min(rates.weights_Bps) > 0 and max(rates.weights_Bps) <= bandwidth
        )
        assert all(fewer >= more for fewer, more in pairwise(rates.weights_Bps))


# --- the law ---


@given(x=st.floats(0, 100))
def test_a_line_goes_through_its_points(x: float) -> None:
    xs, ys = (1, 4, 8, 32), (5.0, 6.0, 6.0, 20.0)
    assert [interpolate(xs, ys, at) for at in xs] == list(ys) and interpolate(xs, ys, 2.5) == 5.5
    assert min(ys) <= interpolate(xs, ys, x) <= max(ys)
    assert interpolate(xs, ys, 0) == 5.0 and interpolate(xs, ys, 99) == 20.0


def test_products_take_what_was_measured() -> None:
    gpu = spec(msgspec.structs.replace(SPEED, kernels=MEASURED))
    rank = Roofline(gpu, calibrated(load_profile("weft", on_cpu=True), [gpu]), "q4_1+q8_0")
    numbers = 1 << 24
    for rates, size in zip(MEASURED.products, (2.0, 1.0625, 0.625), strict=True):
        product = MatrixProduct(numbers, int(numbers * size), rates.bits == 16)
        for tokens, rate in zip(TOKENS, rates.weights_Bps, strict=True):
            assert rank.product_s(product, tokens) == pytest.approx(product.nbytes / rate)
        more = rank.product_s(product, 132) - rank.product_s(product, 32)
        assert more == pytest.approx(2 * numbers * 100 / rates.matmul_flops)
    half = rank_share(gpu, 2)
    assert half.kernels and half.kernels.cache_Bps == 19e9
    slower = Roofline(half, calibrated(load_profile("weft", on_cpu=True), [half]), "bf16")
    whole = MatrixProduct(numbers, 2 * numbers, False)
    assert slower.product_s(whole, 50) == pytest.approx(2 * rank.product_s(whole, 50))


@given(tokens=st.floats(1, 500), more=st.floats(0, 100))
def test_more_tokens_never_take_less(tokens: float, more: float) -> None:
    gpu = spec(SPEED)
    rank = Roofline(gpu, calibrated(load_profile("weft", on_cpu=True), [gpu]), "int8")
    for size in (4.0, 2.0, 1.06, 0.6):
        product = MatrixProduct(1000, int(1000 * size), False)
        assert rank.product_s(product, tokens) <= rank.product_s(product, tokens + more) * (1 + 1e-9)


# --- the measurement ---


def test_the_best_of_spread_out_runs_counts() -> None:
    calls = {"a": 0, "b": 0}
    order: list[str] = []

    def run(name: str) -> Any:
        def one() -> None:
            calls[name] += 1
            order.append(name)

        return one

    found = kernel_speed.best([run("a"), run("b")])
    assert calls["a"] == calls["b"] >= 2 and order[:4] == ["a", "b"] * 2
    assert all(0 <= it < 1 for it in found)


def test_kernels_that_do_not_run_are_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.so").write_text("no library")
    monkeypatch.setattr(prebuilt, "built_library", lambda: str(tmp_path / "broken.so"))
    monkeypatch.setattr(stored_speeds, "MIN_READ_BYTES", 1 << 20)
    found = stored_speeds.measure_cpu(msgspec.structs.replace(probe_host(), memory_free_bytes=4 << 20))
    assert found.kernels is None and found.bandwidth_Bps > 0 and found.library == "broken.so"
    assert f"{tmp_path}/broken.so" in caplog.text
    # And so others run, of which nothing is known but the usual.
    assert cpus.cpu_kernel_speed(SETS["zen 5"], found) is None
    assert "broken.so" in own_kernels(found)


def test_an_instruction_that_a_cpu_lacks_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[bool] = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command[-1].endswith(".so"))
        if asked[-1]:
            raise subprocess.CalledProcessError(-signal.SIGILL, command, stderr=b"")
        return SimpleNamespace(stdout=msgspec.json.encode(SPEED))

    monkeypatch.setattr(prebuilt, "built_library", lambda: "/cache/other.so")
    monkeypatch.setattr(subprocess, "run", run)
    assert stored_speeds.measure_cpu(HOST) == msgspec.structs.replace(SPEED, library="other.so")
    assert asked == [True, False] and str(signal.strsignal(signal.SIGILL)) in caplog.text
