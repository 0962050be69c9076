"""Lookup: what a name stands for, from a directory, a file, the catalogue, and a hub on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from tests.pure.commands import weft
from tests.refusals import has_values, refuses
from weft.checkpoint.architectures.parameters import parameter_count
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.hub import headers as hub_headers
from weft.checkpoint.hub import model_names
from weft.checkpoint.lookup import look_up
from weft.checkpoint.names import catalogue
from weft.checkpoint.tensor_index import expected_tensors
from weft.cli import dispatch
from weft.engine.client.arguments import engine_config
from weft.errors import ModelError

QWEN3 = catalogue.find("Qwen3-0.6B")
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "vocab_size": 320,
    "torch_dtype": "bfloat16",
}


def safetensors(shape: ModelShape) -> bytes:
    """A file of this shape: a real header, and no more than that."""
    tensors, at = {}, 0
    for name, dims in expected_tensors(shape):
        size = 2 * prod(dims)
        tensors[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    return len(header).to_bytes(8, "little") + header


class Hub(ThreadingHTTPServer):
    """Answers for `files` (path -> content); `asked` has each request's path, range and authorization."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.moved: dict[str, str] = {}
        self.codes: dict[str, tuple[int, str]] = {}
        self.asked: list[tuple[str, str | None, str | None]] = []
        self.silent: set[str] = set()
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        hub, path = self.server, self.path
        hub.asked.append((path, self.headers["Range"], self.headers["Authorization"]))
        if path in hub.silent:
            hub.over.wait(30)
            return
        code, reason = hub.codes.get(path, (404, "EntryNotFound"))
        if path in hub.moved:
            self.send_response(302)
            self.send_header("Location", hub.moved[path])
            self.end_headers()
        elif path not in hub.files:
            self.send_response(code)
            self.send_header("X-Error-Code", reason)
            self.end_headers()
        else:
            first, last = (self.headers["Range"] or "bytes=0-999999999").removeprefix("bytes=").split("-")
            data = hub.files[path][int(first) : int(last) + 1]
            self.send_response(206)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def put(hub: Hub, name: str, config: dict[str, object], *, files: int = 1, revision: str = "main") -> None:
    """A repository with this config.json and as many files of weights, each with all tensors."""
    base = f"/{name}/resolve/{revision}/"
    hub.files[base + "config.json"] = json.dumps(config).encode()
    header = safetensors(look_up_config(config))
    if files == 1:
        hub.files[base + "model.safetensors"] = header
        return
    weight_map = {f"t{n}": f"model-{n}.safetensors" for n in range(files)}
    hub.files[base + "model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    hub.files |= {base + file: header for file in weight_map.values()}


def look_up_config(config: dict[str, object]) -> ModelShape:
    from weft.checkpoint.config import config_json
    from weft.checkpoint.files.fields import Fields

    return config_json.shape_from_config(Fields(config, "config.json"), run=False)


def test_the_catalogue_answers_without_the_hub(hub: Hub) -> None:
    assert look_up("Qwen/Qwen3-0.6B") == look_up("qwen3-0.6b") == QWEN3
    assert look_up("demo").precision == look_up("demo", refresh=True).precision == "q4_1"
    assert hub.asked == []


@pytest.mark.parametrize("files", [1, 3])
def test_another_model_is_asked_for_by_its_headers(hub: Hub, files: int) -> None:
    put(hub, "someone/mixed", MIXTRAL, files=files)
    model = look_up("someone/mixed")
    assert model.shape == look_up_config(MIXTRAL)
    assert model.params == parameter_count(model.shape)
    assert model.stored_bytes == files * 2 * model.params
    assert (model.name, model.precision) == ("someone/mixed", "bf16")
    assert hub.url in model.source
    assert all(asked[1] is not None for asked in hub.asked)


def test_a_long_header_is_read_to_its_end(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_headers, "FIRST", 100)
    put(hub, "someone/mixed", MIXTRAL)
    model = look_up("someone/mixed")
    assert model.stored_bytes == 2 * model.params


def test_refresh_and_revision_ask_the_hub_for_known_models(hub: Hub) -> None:
    put(hub, "Qwen/Qwen3-0.6B", MIXTRAL)
    put(hub, "Qwen/Qwen3-0.6B", MIXTRAL | {"num_hidden_layers": 3}, revision="v2")
    assert len(look_up("Qwen3-0.6B", refresh=True).shape.layers) == 2
    assert len(look_up("Qwen3-0.6B", revision="v2").shape.layers) == 3
    assert len(look_up("Qwen3-0.6B").shape.layers) == 28


def test_a_token_goes_to_the_hub_and_no_further(hub: Hub) -> None:
    put(hub, "someone/mixed", MIXTRAL)
    base = "/someone/mixed/resolve/main/"
    hub.files["/store"] = hub.files.pop(base + "model.safetensors")
    hub.moved[base + "model.safetensors"] = "/store"
    model = look_up("someone/mixed", hf_token="secret")
    assert model.stored_bytes == 2 * model.params
    assert {authorization for path, _, authorization in hub.asked if path != "/store"} == {"Bearer secret"}
    assert {authorization for path, _, authorization in hub.asked if path == "/store"} == {None}


def test_without_the_headers_the_config_is_enough(hub: Hub) -> None:
    put(hub, "someone/mixed", MIXTRAL)
    del hub.files["/someone/mixed/resolve/main/model.safetensors"]
    assert look_up("someone/mixed").stored_bytes is None
    hub.files["/someone/mixed/resolve/main/model.safetensors"] = (99).to_bytes(8, "little") + b"{damaged"
    assert look_up("someone/mixed").stored_bytes is None
    hub.silent.add("/someone/mixed/resolve/main/model.safetensors")
    assert look_up("someone/mixed", patience=0.3).stored_bytes is None


def test_quantised_repositories_say_their_precision(hub: Hub) -> None:
    put(hub, "someone/mixed", MIXTRAL | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    assert look_up("someone/mixed").precision == "int4"
    put(hub, "someone/mixed", MIXTRAL | {"quantization_config": {"quant_method": "aqlm"}})
    with refuses(ModelError, "unknown-quantization", "aqlm", "--precision"):
        look_up("someone/mixed")


@pytest.mark.parametrize(
    ("status", "reason", "code", "values"),
    [
        (401, "GatedRepo", "gated-model", ("someone/mixed", "--hf-token")),
        (403, "", "gated-model", ("someone/mixed",)),
        (401, "", "no-such-model", ("'someone/mixed'",)),
        (404, "RepoNotFound", "no-such-model", ("'someone/mixed'",)),
        (404, "RevisionNotFound", "no-such-revision", ("'main'",)),
        (404, "EntryNotFound", "missing-hub-file", ("config.json",)),
        (500, "", "hub-unreachable", ("HTTP 500",)),
    ],
)
def test_refusals_of_the_hub(hub: Hub, status: int, reason: str, code: str, values: tuple[str, ...]) -> None:
    hub.codes["/someone/mixed/resolve/main/config.json"] = status, reason
    with refuses(ModelError, code, *values):
        look_up("someone/mixed")


def test_damaged_and_silent(hub: Hub) -> None:
    hub.files["/someone/mixed/resolve/main/config.json"] = b"{oops"
    with refuses(ModelError, "damaged-hub-file", "config.json"):
        look_up("someone/mixed")
    hub.silent.add("/someone/mixed/resolve/main/config.json")
    with refuses(ModelError, "hub-unreachable"):
        look_up("someone/mixed", patience=0.2)


def test_no_hub_at_all(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with refuses(ModelError, "hub-unreachable", "http://127.0.0.1:9", "refused"):
        look_up("someone/mixed")
    monkeypatch.setattr(constants, "ENDPOINT", "nowhere")
    with refuses(ModelError, "hub-unreachable", "nowhere"):
        look_up("someone/mixed")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refuses(ModelError, "unknown-model-offline", "'someone/mixed'", "HF_HUB_OFFLINE"):
        look_up("someone/mixed")
    assert look_up("Qwen3-0.6B") == QWEN3


def test_a_bare_name_of_nobodys_gets_the_nearest(hub: Hub) -> None:
    with refuses(ModelError, "unknown-model", "'Qwen3-0.7B'", "Qwen/Qwen3-"):
        look_up("Qwen3-0.7B")
    assert hub.asked == []


def test_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    model = look_up(str(tmp_path))
    assert model.shape == look_up_config(MIXTRAL) and model.stored_bytes is None
    (tmp_path / "model.safetensors").write_bytes(safetensors(model.shape) + bytes(2 * model.params))
    assert look_up(str(tmp_path)).stored_bytes == 2 * model.params
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with refuses(ModelError, "short-safetensors-header"):
        look_up(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["./nothing", "/nowhere/model.gguf", "model.gguf", "~nobody-at-all/x", "a/b/c", "jemand/größer", "some one/x"],
)
def test_nothing_there(name: str) -> None:
    with refuses(ModelError, "cannot-read-model" if name.startswith("~") else "no-such-model", name):
        look_up(name)


def test_models_of_the_catalogue_need_no_http() -> None:
    """Importing TLS takes longer than most plans."""
    script = (
        "import sys; from weft.cli.main import main; main(['plan', 'Llama-3.1-8B', '--gpus', '4xH100', '--json']); "
        "sys.exit(', '.join({'http.client', 'ssl', 'asyncio', 'yaml', 'numpy'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("{"), done.stderr


# --- what people call a model ---


def keep(folder: Path, name: str) -> Path:
    """A repository in a hub cache under `folder`, of Mixtral's shape."""
    repository = folder / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps(MIXTRAL))
    return snapshot


def test_a_path_and_the_cache_go_before_nicknames(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    assert model_names.full_name("mistral-7b") == "mistralai/Mistral-7B-v0.3"
    snapshot = keep(tmp_path / "hub", "mistral-7b")
    assert model_names.full_name("mistral-7b") == "mistral-7b"
    assert look_up("mistral-7b").shape == look_up_config(MIXTRAL)
    assert model_names.full_name("qwen3:8b") == "hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M"
    (tmp_path / "qwen3:8b").symlink_to(snapshot)
    assert model_names.full_name("qwen3:8b") == "qwen3:8b"
    assert look_up("qwen3:8b").shape == look_up_config(MIXTRAL)
    assert hub.asked == []


def test_downloaded_models_are_planned_offline(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    keep(tmp_path, "someone/mixed")
    assert look_up("someone/mixed").shape == look_up_config(MIXTRAL)


def test_only_another_name_is_told() -> None:
    notice = model_names.notice("llama3.3:70b", "hf.co/bartowski/Llama-3.3-70B-Instruct-GGUF:Q4_K_M")
    has_values(notice, "llama3.3:70b", "hf.co/bartowski/Llama-3.3-70B-Instruct-GGUF:Q4_K_M")
    has_values(notice, "meta-llama/Llama-3.3-70B-Instruct")
    unknown_file = model_names.notice("gemma2:2b", "google/gemma-2-2b-it")
    has_values(unknown_file, "google/gemma-2-2b-it", "hf.co/OWNER/REPO:QUANT")
    assert model_names.notice("qwen3-0.6b", "Qwen/Qwen3-0.6B") == model_names.notice("m", "m") == ""


@pytest.mark.parametrize(
    ("name", "code", "values"),
    [
        ("qwen3", "model-not-downloaded", ("HF_HUB_OFFLINE", "Qwen/Qwen3-8B")),
        ("qwen3:9b", "no-such-model", ("qwen3:9b", "Qwen/Qwen3-8B")),
        ("Qwen/Qwen3-8B", "model-not-downloaded", ("Qwen/Qwen3-8B",)),
        ("qwen3:8b", "model-not-downloaded", ("Qwen/Qwen3-8B",)),
    ],
)
def test_models_that_cannot_be_fetched(
    name: str, code: str, values: tuple[str, ...], hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with refuses(ModelError, code, *values):
        resolve(name, download_dir=str(tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        "plan llama3.3:70b --gpus 4xH100 --json",
        "cost llama3.3:70b --gpus 4xH100 --json",
        "run llama3.3:70b --prompt p",
        "chat llama3.3:70b",
        "serve llama3.3:70b --port 0",
        "bench latency llama3.3:70b",
        "bench serve llama3.3:70b",
        "simulate llama3.3:70b --gpus 4xH100",
    ],
)
def test_every_command_tells_which_model_it_took(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(
        dispatch, "import_module", lambda _: SimpleNamespace(main=lambda arguments: taken.append(arguments.model) or 0)
    )
    status, out, err = weft(*words.split())
    assert (status, out) == (0, "")
    file = "hf.co/bartowski/Llama-3.3-70B-Instruct-GGUF:Q4_K_M"
    assert err == f"weft: {model_names.notice('llama3.3:70b', file)}\n"
    assert taken == [file]


def test_a_server_knows_its_model_by_the_name_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(
        dispatch, "import_module", lambda _: SimpleNamespace(main=lambda arguments: taken.append(arguments.model) or 0)
    )
    assert weft("bench", "serve", "qwen3:8b", "--base-url", "http://127.0.0.1:9") == (0, "", "")
    assert taken == ["qwen3:8b"]


def test_python_takes_the_same_names() -> None:
    assert engine_config("qwen3:8b", {}).model == "hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M"
    assert engine_config("Qwen3-8B", {}).model == "Qwen/Qwen3-8B"
    assert engine_config("demo", {"data_parallel_size": 1, "enable_lora": False}).model == "demo"
