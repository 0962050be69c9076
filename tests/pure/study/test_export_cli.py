"""weft plan --emit at the command line: where it writes, what it refuses, and an Infernet node's configuration."""

from __future__ import annotations

import json
import re
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.commands import parsed, refused_line, weft, weft_json
from tests.pure.exports import emit, flags, run
from tests.pure.fake_nvml import sliced, two_consumer_cards
from tests.refusals import has_values
from weft.checkpoint.names.catalogue import entries
from weft.cli.serve import set_file
from weft.machine.hardware import cuda
from weft.machine.hardware.cluster import Cluster, Node, parse_gpus
from weft.machine.hardware.gpus import GpuSpec
from weft.machine.hardware.host import probe_host
from weft.probes.machine import host_cluster
from weft.probes.stored_speeds import Speeds
from weft.study.export.infernet_config import comparable_name, model_of_tag, read_node_config, vram_tier
from weft.study.export.targets import TARGETS

SMALL = "Qwen3-8B --gpus 1xRTX4090"
BOOK = {
    "backend": "vllm",
    "vllm_host": "http://localhost:8123",
    "vllm_model": "Qwen/Qwen2.5-72B-Instruct",
    "vram_tier": ">=48gb",
}
TWO = {
    "backend": "vllm",
    "vllm_instances": [
        {"host": "http://localhost:8000", "model": "qwen2.5:14b"},
        {"host": "http://localhost:8001", "model": "llama3.1:8b"},
    ],
    "served_models": ["qwen2.5:14b", "llama3.1:8b"],
}


# --- files ---


def test_files_instead_of_standard_output(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    status, out, err = emit("compose", "Qwen2.5-7B-Instruct --gpus 2xRTX4090 -tp 1 -dp 2", "--emit-to", str(folder))
    assert (status, out) == (0, "")
    assert sorted(it.name for it in folder.iterdir()) == ["compose.yaml", "nginx.conf"]
    assert err.splitlines() == [f"wrote {folder / name}" for name in ("compose.yaml", "nginx.conf")]


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    assert emit("infernet", SMALL, "--emit-to", str(tmp_path))[0] == 0
    (tmp_path / "infernet.env").unlink()
    mine = tmp_path / "weft.sh"
    mine.write_text("mine")
    refused_line(f"plan {SMALL} --emit infernet --emit-to {tmp_path}", 1, "export-file-exists", "weft.sh --force")
    # Not even what was not there.
    assert mine.read_text() == "mine" and not (tmp_path / "infernet.env").exists()
    assert emit("infernet", SMALL, "--emit-to", str(tmp_path), "--force")[0] == 0
    assert mine.read_text().startswith("#!")


def test_modes(tmp_path: Path) -> None:
    emit("infernet", SMALL, "--emit-to", str(tmp_path))
    modes = {it.name: stat.S_IMODE(it.stat().st_mode) for it in tmp_path.iterdir()}
    assert modes["weft.sh"] == 0o755 and modes["infernet.env"] == 0o600


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused_line(f"plan {SMALL} --emit weft --emit-to {tmp_path}/file", 1, "cannot-write-export", f"{tmp_path}/file")


# --- what it refuses ---

# The target, the words, the code of the error, and the values that its message names.
REFUSED = [
    ("vlm", SMALL, "invalid-flag-value", "'vlm' 'vllm'"),
    ("vllm", SMALL + " --json", "emit-with-other-answer", "--emit --json"),
    ("vllm", SMALL + " --html x", "emit-with-other-answer", "--emit --html"),
    ("vllm", SMALL + " --engine sglang", "emit-engine-mismatch", "--emit vllm --engine sglang"),
    ("kuberay", SMALL + " --port 8000", "emit-without-port", "--port 8000 kuberay"),
    ("vllm", "Qwen3-8B --gpus 4xRTX4090 -tp 1 -dp 4 --port 65533", "too-few-ports", "65533 3 65535"),
]


def test_one_clear_line_and_nothing_written(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    entries = [
        refused_line(f"plan {words} --emit {target} --emit-to {tmp_path}/none", 2, code, values)
        for target, words, code, values in REFUSED
    ]
    assert not (tmp_path / "none").exists()
    golden("errors/emit.txt", "".join(entries).replace(str(tmp_path), "FOLDER"))


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    words = "plan --gpus 1xH100 --infernet-config /nowhere.json --emit infernet"
    refused_line(f"{words} --emit-to {tmp_path}/none", 1, "cannot-read-infernet-config", "/nowhere.json")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("target", "words", "told"),
    [
        ("vllm", "Llama-3.3-70B-Instruct --gpus 1xRTX4090", "119.2 GB"),
        ("weft", "Llama-3.1-405B-Instruct --nodes 2x8xH100", "--emit vllm"),
        ("weft", "Llama-3.1-8B-Instruct --gpus 1xMI300X", "NVIDIA"),
        ("vllm", "Llama-3.1-8B-Instruct --gpus 1xH100 --kv-cache-dtype int8", "--kv-cache-dtype fp8"),
        ("transformers", "Qwen/Qwen-7B-Chat --gpus 1xH100", "checkpoint"),
    ],
)
def test_plans_that_the_target_cannot_run(target: str, words: str, told: str, tmp_path: Path) -> None:
    found, out, err = emit(target, words, "--emit-to", str(tmp_path / "none"))
    assert (found, out) == (3, "") and told in err
    assert err.startswith("weft: error: ") and err.count("\n") == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "tab\t", "\x1b[31m", "-x", "--host", "e\u202e"])
@pytest.mark.parametrize("target", ["vllm", "infernet", "kuberay"])
def test_names_that_nobody_could_ask_for(target: str, name: str) -> None:
    words = ["plan", *SMALL.split(), "--emit", target, f"--served-model-name={name}"]
    refused_line(words, 2, "unusable-served-name", "--served-model-name")


@pytest.mark.parametrize("name", ["a b", "it's", "$(touch x)", "a;b", "a#b", "a\\b", '"a"', "`id`", "*", "${HOME}"])
def test_a_node_s_environment_holds_plain_names_only(name: str) -> None:
    """A shell, systemd and Docker read other names each in its own way."""
    words = ["plan", *SMALL.split(), "--emit", "infernet", f"--served-model-name={name}"]
    refused_line(words, 1, "name-unsafe-in-environment", "--served-model-name")
    assert emit("infernet", SMALL, "--served-model-name", "qwen3:8b")[0] == 0


def test_an_empty_folder_is_none() -> None:
    refused_line(["plan", *SMALL.split(), "--emit", "vllm", "--emit-to", ""], 2, "emit-to-empty", "--emit-to")


def test_force_needs_files() -> None:
    refused_line(f"plan {SMALL} --emit vllm --force", 2, "force-without-emit-to", "--force --emit-to")


@pytest.mark.parametrize("flag", ["--emit-to x", "--force", "--port 8000", "--served-model-name a"])
def test_flags_of_emit_need_it(flag: str) -> None:
    refused_line(f"plan {SMALL} {flag}", 2, "emit-missing", f"{flag.split()[0]} --emit")


# --- whatever the plan ---


MODELS = ["demo", "Qwen3-8B", "Qwen2.5-32B-Instruct", "Llama-3.3-70B-Instruct", "Qwen3-30B-A3B", "gpt-oss-20b", "gpt2"]
HARDWARE = ["--gpus 1xRTX4090", "--gpus 3xRTX3090", "--gpus 4xA100", "--gpus 1xRTX4090+1xRTX3060", "--gpus 2xMI300X"]
HARDWARE += ["--nodes 2x2xL40S", "--nodes 3x1xH100", "--gpus 1xT4"]
CUTS = ["", "-tp 2", "-pp 2", "-dp 2", "-tp 2 -ep", "--tensor-split 3,1", "-dp 2 -ep", "--precision int4"]
CUTS += ["--precision fp8", "--precision q4_k_m", "--kv-cache-dtype fp8"]


@settings(max_examples=60)
@given(st.sampled_from(sorted(TARGETS)), st.sampled_from(MODELS), st.sampled_from(HARDWARE), st.sampled_from(CUTS))
def test_every_plan_is_written_or_refused_in_one_line(target: str, model: str, hardware: str, cut: str) -> None:
    status, out, err = emit(target, f"{model} {hardware} {cut}")
    errors = [line for line in err.splitlines() if line.startswith("weft: error: ")]
    if status == 0:
        assert out and not errors
    else:
        # 2: more ranks than there are GPUs, or experts that the model has not.
        assert status in (2, 3) and out == "" and len(errors) == 1 and "internal" not in err


# --- Infernet's configuration ---


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(content: object) -> str:
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_the_book_s_json_names_the_model_and_the_port(config: Any) -> None:
    status, out, err = emit("infernet", "--gpus 8xRTX4090", "--infernet-config", config(BOOK))
    assert status == 0
    assert "weft serve Qwen/Qwen2.5-72B-Instruct" in out and "--port 8123" in out
    assert "VLLM_HOST=http://127.0.0.1:8123" in out
    for key in BOOK:
        assert f"{key} " in err
    has_values(err, "vram_tier >=48gb", "RTX 4090", "16-24gb")


def test_the_matching_one_of_two_instances_is_taken(config: Any) -> None:
    path = config(TWO)
    named = (("Llama-3.1-8B-Instruct", "llama3.1:8b", 8001), ("Qwen2.5-14B-Instruct", "qwen2.5:14b", 8000))
    for model, tag, port in named:
        status, out, err = emit("infernet", f"{model} --gpus 2xRTX4090", "--infernet-config", path)
        assert status == 0 and f"--served-model-name {tag} " in out and f"--port {port}" in out
        assert f"INFERNET_ENGINE_MODEL={tag}\n" in out
        has_values(err, tag, next(one for one in TWO["served_models"] if one != tag))
    # A tag stands for the model that answers.
    assert "weft serve Qwen/Qwen2.5-14B-Instruct" in out


def test_both_of_two_instances_are_served_at_one_address(config: Any, tmp_path: Path) -> None:
    path, folder = config(TWO), tmp_path / "node"
    status, out, err = emit("infernet", f"--gpus 4xRTX4090 --emit-to {folder}", "--infernet-config", path)
    assert status == 0 and out == ""
    has_values(err, "8001", "infernet.env", "models.yaml")
    models = set_file.read_model_set(str(folder / "models.yaml"))
    assert models is not None
    assert [entry.names[0] for entry in models.entries] == TWO["served_models"]
    assert [entry.config.device_ids for entry in models.entries] == [(0, 1), (2, 3)]
    # The file is a whole command line of the server, and a plan of it has both.
    served = parsed(["serve", "--config", str(folder / "models.yaml")])
    assert (served.server.port, served.server.list_served_only, served.server.reset_on_error) == (8000, True, True)
    status, plan = weft_json("plan", "--config", str(folder / "models.yaml"), "--gpus", "4xRTX4090")
    assert status == 0 and len(plan["models"]) == 2
    assert "INFERNET_ENGINE_MODEL=qwen2.5:14b\n" in (folder / "infernet.env").read_text()
    assert "--config models.yaml" in (folder / "weft.sh").read_text()
    # One of them gets more than its half if it needs more.
    big = {"vllm_instances": [{"model": "qwen2.5:32b"}, {"model": "qwen2.5:0.5b"}]}
    status, out, err = emit("infernet", "--gpus 4xRTX4090", "--infernet-config", config(big))
    assert status == 0 and "device-ids: 0,1,2" in out
    refused_line(
        ["plan", "--infernet-config", path, "--gpus", "4xRTX4090", "--emit", "infernet", "--served-model-name", "x"],
        2,
        "emit-flag-beside-set",
        "--served-model-name",
    )


def test_a_configuration_is_planned_without_files(config: Any) -> None:
    assert weft_json("plan", "--infernet-config", config(BOOK), "--gpus", "8xRTX4090")[1]["best"]
    # Its models get the shares that the written files give them, and that weft serve --config gives them.
    for flag in ("--infernet-config", "--config"):
        status, plan = weft_json("plan", flag, config(TWO), "--gpus", "2xRTX4090+2xRTX4090")
        assert status == 0
        assert [model["devices"] for model in plan["models"]] == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]


WITHOUT_ROOM = [
    "Qwen2.5-72B-Instruct --gpus 1xRTX4090 --emit weft --port 9000 --served-model-name mine",
    "Qwen2.5-72B-Instruct --gpus 4xRTX4090 --emit infernet --emit-to nowhere --force",
    "Qwen2.5-72B-Instruct --gpus 2xA100 --max-memory 0=40GB,1=40GB --emit weft",
    "Llama-3.3-70B-Instruct --gpus 4090+3090 --precision q4_k_m --emit weft",
    "llama3.3:70b --gpus 4090+3090 --emit weft",
    "DeepSeek-R1 --gpus 8xA100 --emit weft",
]


@pytest.mark.parametrize("words", WITHOUT_ROOM)
def test_the_ways_out_of_a_refusal_work(words: str) -> None:
    """A refused export names a plan; the plan names commands, and each of them fits."""
    status, _, err = weft("plan", *words.split())
    named = re.search(r"weft (plan .*) tells", err)
    assert status == 3 and named
    status, out, _ = weft(*shlex.split(named[1]))
    commands = re.findall(r"try: weft (plan .*?) \(", out)
    assert status == 3 and commands
    for command in commands:
        assert weft(*shlex.split(command))[0] == 0, command


def test_what_limits_memory_may_be_left_to_the_cpu() -> None:
    out = weft("plan", "Qwen2.5-72B-Instruct", "--gpus", "2xA100", "--max-memory", "0=40GB,1=40GB")[1]
    assert "0=40GB,1=40GB,cpu=128GB" in out and "-q int4" in out


def test_other_targets_are_named_for_a_model_that_one_cannot_run() -> None:
    status, _, err = weft("plan", "Qwen/Qwen-72B-Chat", "--gpus", "2xA100", "--emit", "transformers")
    targets = re.findall(r"--emit (\w+)", err)
    assert status == 3 and {"weft", "vllm"} <= set(targets)
    for target in targets:
        assert weft("plan", "Qwen/Qwen-72B-Chat", "--gpus", "2xA100", "--emit", target)[0] == 0


def test_flags_win_over_the_configuration(config: Any) -> None:
    words = "Qwen3-8B --gpus 1xRTX4090 --port 9000 --served-model-name mine"
    out = emit("infernet", words, "--infernet-config", config(BOOK))[1]
    assert "--served-model-name mine " in out and "--port 9000" in out


def test_settings_that_the_node_reads_give_no_warning(config: Any) -> None:
    live = {"controlPlane": {"url": "x"}, "node": {}, "engine": {"backend": "vllm", "model": "Qwen/Qwen3-8B"}}
    status, out, err = emit("infernet", "--gpus 1xRTX4090", "--infernet-config", config(live))
    assert (status, err) == (0, "") and "weft serve Qwen/Qwen3-8B" in out
    # Keys of the node's own never appear.
    secret = {**live, "node": {"privateKey": "0123456789abcdef"}}
    assert "0123456789abcdef" not in emit("infernet", "--gpus 1xRTX4090", "--infernet-config", config(secret))[1]


def test_two_instances_of_one_model_are_none_of_another(config: Any) -> None:
    same = [{"host": f"http://localhost:{port}", "model": "qwen2.5:14b"} for port in (8000, 8001)]
    status, _, err = emit("infernet", "--gpus 1xA100", "--infernet-config", config({"vllm_instances": same}))
    assert status == 0
    (line,) = err.splitlines()
    assert "vllm_instances" in line


@pytest.mark.parametrize(
    ("content", "status", "code", "value"),
    [
        ("{", 1, "infernet-config-not-json", ""),
        ([], 1, "infernet-config-not-object", ""),
        ({}, 2, "model-missing", "MODEL"),
        ({"vllm_model": 3}, 1, "infernet-value-not-text", "vllm_model"),
        ({"engine": 4}, 1, "infernet-engine-not-object", "engine"),
        ({"vllm_instances": [1]}, 1, "infernet-instances-not-objects", "vllm_instances"),
        ({"served_models": "x"}, 1, "infernet-served-models-not-names", "served_models"),
        ({"vllm_model": "m", "vllm_host": "http://a:x"}, 1, "infernet-host-not-address", "'http://a:x'"),
        ("[" * 100_000, 1, "infernet-config-not-json", ""),
        ({"served_models": [" "]}, 1, "infernet-served-models-not-names", "served_models"),
    ],
)
def test_a_broken_configuration(config: Any, content: object, status: int, code: str, value: str) -> None:
    words = ["plan", "--gpus", "1xRTX4090", "--emit", "infernet", "--infernet-config", config(content)]
    refused_line(words, status, code, value)


@pytest.mark.parametrize(
    ("mib", "tier"),
    [
        (0, "unknown"),
        (8191, "<8gb"),
        (8192, "8-16gb"),
        (16384, "16-24gb"),
        (24564, "16-24gb"),  # RTX 4090
        (24576, "24-48gb"),  # RTX 3090
        (49140, "24-48gb"),  # RTX 6000 Ada
        (49152, ">=48gb"),
        (81920, ">=48gb"),
    ],
)
def test_tiers_are_of_one_gpu(mib: int, tier: str) -> None:
    assert vram_tier(mib << 20) == tier


def test_tags_are_names_of_the_catalogue() -> None:
    assert model_of_tag("llama3.1:8b") == "meta-llama/Llama-3.1-8B-Instruct"
    assert model_of_tag("qwen2.5:14b") == "Qwen/Qwen2.5-14B-Instruct"
    assert model_of_tag("nobody:1b") == "nobody:1b"
    # A model's own name stands for itself.
    names = {name for entry in entries() for name in entry.names if "/" in name}
    assert all(comparable_name(model_of_tag(name)).startswith(comparable_name(name)) for name in names)


def test_the_only_instance_is_meant_whatever_it_is_called(config: Any) -> None:
    found = read_node_config(config({"vllm_model": "house-model", "vllm_host": "http://localhost:8123"}))
    here = found.serving("Qwen/Qwen3-8B")
    assert here is not None and (here.model, here.port) == ("house-model", 8123)
    assert read_node_config(config(TWO)).serving("Qwen/Qwen3-8B") is None


# --- what is typed ---


def test_names_of_files_are_no_syntax(tmp_path: Path) -> None:
    folder = tmp_path / "my $(echo x) 'models'" / "Tiny-2.5-1B"
    folder.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64}
    config |= {"intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "max_position_embeddings": 512}))

    def written(target: str, *more: str) -> str:
        status, out, err = weft("plan", str(folder), "--gpus", "1xRTX4090", "--emit", target, *more)
        assert status == 0, err
        return out

    for target in ("weft", "vllm"):
        status, (call,), _ = run(written(target), tmp_path)
        assert status == 0 and call["words"][2] == str(folder)
        # A folder's name has no ending to be cut off.
        assert flags(call["words"])["served-model-name"] == ["Tiny-2.5-1B"]
    service = yaml.safe_load(written("compose"))["services"]["replica-0"]
    escaped = str(folder).replace("$", "$$")
    assert service["command"][1] == escaped and f"{escaped}:{escaped}:ro" in service["volumes"]
    assert f"FROM {folder}\n" in written("ollama")
    # What is wanted of the user is told in the script's own syntax.
    status, calls, err = run(written("vllm", "--precision", "int4"), tmp_path)
    assert status and not calls
    has_values(err, "MODEL", "AWQ", "GPTQ", "4-bit", "Tiny-2.5-1B")


@pytest.mark.parametrize(
    ("typed", "engine", "loaded"),
    [
        ("Qwen2.5-7B-Instruct", "vllm", "vllm serve Qwen/Qwen2.5-7B-Instruct "),
        ("qwen/qwen2.5-7b-instruct", "vllm", "vllm serve Qwen/Qwen2.5-7B-Instruct "),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "vllm", "vllm serve Qwen/Qwen2.5-7B-Instruct-AWQ "),
        ("Qwen2.5-7B-Instruct-AWQ", "vllm", 'vllm serve "$MODEL" '),
        ("Qwen2.5-7B-Instruct --precision int4", "vllm", 'vllm serve "$MODEL" '),
        ("Qwen2.5-7B-Instruct --precision fp8", "vllm", "--quantization fp8 "),
        ("Qwen2.5-7B-Instruct --precision fp16", "vllm", "--dtype float16 "),
        ("Qwen2.5-7B-Instruct --precision q4_k_m", "vllm", "--tokenizer Qwen/Qwen2.5-7B-Instruct "),
        ("demo", "vllm", "vllm serve HuggingFaceTB/SmolLM2-135M-Instruct "),
        ("demo", "weft", "weft serve demo "),
        ("demo", "ollama", "FROM ./REPLACE_WITH_A_GGUF_FILE_IN_Q4_1_OF_HUGGINGFACETB_SMOLLM2_135M_INSTRUCT\n"),
        ("demo", "transformers", 'MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"\n'),
        ("gpt-oss-20b", "vllm", "vllm serve openai/gpt-oss-20b "),
        ("Qwen2.5-7B-Instruct --precision q8_0", "transformers", 'MODEL = "Qwen/Qwen2.5-7B-Instruct"\n'),
    ],
)
def test_the_checkpoint_is_what_the_name_and_the_precision_say(typed: str, engine: str, loaded: str) -> None:
    status, out, _ = emit(engine, f"{typed} --gpus 1xRTX4090")
    assert status == 0 and loaded in out


def test_visible_gpus_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for this machine counts the GPUs that CUDA_VISIBLE_DEVICES leaves."""
    cluster = parse_gpus("2xRTX4090")
    monkeypatch.setattr("weft.cli.plan_question.described_cluster", lambda said: cluster)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert "CUDA_VISIBLE_DEVICES=5,7 " in emit("weft", "Qwen2.5-14B-Instruct -pp 2")[1]
    assert "CUDA_VISIBLE_DEVICES=0,1 " in emit("weft", "Qwen2.5-14B-Instruct -pp 2 --gpus 2xRTX4090")[1]


def test_gpus_that_cuda_counts_in_its_own_order_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, machine = parse_gpus("2xRTX4090"), two_consumer_cards().install(monkeypatch)
    names = [card.uuid for card in machine.cards]
    monkeypatch.setattr("weft.cli.plan_question.described_cluster", lambda said: cluster)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setattr(cuda, "visible_uuids", lambda: [cuda.uuid_digits(name) for name in reversed(names)])
    assert f"CUDA_VISIBLE_DEVICES={names[1]},{names[0]} " in emit("weft", "Qwen2.5-14B-Instruct -pp 2")[1]


@pytest.mark.parametrize("engine", ["weft", "vllm", "ollama", "transformers"])
def test_a_slice_is_named_and_not_numbered(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is a whole board's: that of another one, where the slice is not on the first."""
    machine = sliced()
    machine.cards = machine.cards[::-1]
    machine.install(monkeypatch)
    here = host_cluster(probe_host({}, tmp_path), Speeds(machine=""))
    monkeypatch.setattr("weft.cli.plan_question.described_cluster", lambda said: here)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    status, out, err = emit(engine, "Qwen3-0.6B")
    assert status == 0 and "CUDA_VISIBLE_DEVICES=MIG-a " in out and err == ""


def test_slices_that_are_elsewhere_are_to_be_named(tmp_path: Path) -> None:
    file = tmp_path / "slice.yaml"
    figures = "memory: 20GB, bandwidth: 777GB/s, tflops: {bf16: 121}, capability: 8.0"
    file.write_text(f"nodes:\n- gpus:\n  - {{name: A100 MIG 3g.20gb, {figures}}}\n")
    status, out, err = emit("weft", f"Qwen3-0.6B --gpus {file}")
    said = "A100 MIG 3g.20gb is a MIG slice"
    assert status == 0 and said in err and said in " ".join(out.replace("#", "").split())


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("Qwen3-0.6B", ["Qwen/Qwen3-0.6B", "--dtype bfloat16"]),
        ("Qwen3-0.6B --precision int8", ["Qwen/Qwen3-0.6B", "--quantization int8"]),
        ("Qwen3-0.6B --precision q4_1", ["Qwen/Qwen3-0.6B", "--quantization q4_1"]),
        ("Qwen3-0.6B --precision q6_k", ['"$MODEL"']),
        ("demo", ["weft serve demo"]),
        ("demo --precision bf16", ["weft serve demo", "--quantization none", "--dtype bfloat16"]),
    ],
)
def test_on_a_cpu_weft_makes_the_weights_itself(typed: str, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = GpuSpec(
        name="a CPU",
        memory_bytes=16 << 30,
        bandwidth_Bps=4e10,
        flops={"bf16": 1e12, "fp16": 1e12, "fp32": 1e12},
        nvlink_Bps=0,
        pcie_Bps=0,
        capability=(0, 0),
        source="made up",
        kind="cpu",
    )
    monkeypatch.setattr(
        "weft.cli.plan_question.described_cluster", lambda said: Cluster((Node((cpu,), "memory"),), 1e9)
    )
    status, out, _ = emit("weft", typed)
    assert status == 0 and "--device cpu" in out and "CUDA" not in out
    assert all(it in out for it in said)
    assert ("--quantization" in out) == any("--quantization" in it for it in said)
    status, out, err = emit("vllm", "Qwen3-0.6B")
    assert (status, out) == (3, "") and "vLLM" in err and "--gpus" in err
