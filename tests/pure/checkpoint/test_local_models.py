"""weft pull, ls, rm, ps and stop, and the names of GGUF files on the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.pure.commands import weft
from tests.pure.hubs import Hub, running_hub
from tests.refusals import refuses
from weft.api.service.run_files import announced, running_servers
from weft.checkpoint import checkpoint, lookup
from weft.checkpoint.files import gguf_types
from weft.checkpoint.hub import demo, hub, local_models, model_names
from weft.checkpoint.hub.pull import pull_model
from weft.checkpoint.names import catalogue, gguf_reference
from weft.checkpoint.names.gguf_reference import GgufReference, choose_files, listed, parse_name, short_name
from weft.errors import ModelError

REPOSITORY = "owner/tiny_gguf"
ADDRESS = f"hf.co/{REPOSITORY}:Q4_K_M"
WEIGHTS = bytes(range(256)) * 100


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub on loopback, and an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(demo, "cached_demo", lambda: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with running_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        server.repositories[REPOSITORY] = {"tiny-Q4_K_M.gguf": WEIGHTS, "tiny-q8_0.gguf": WEIGHTS + WEIGHTS}
        server.repositories["owner/whole"] = {"config.json": b"{}", "model.safetensors": WEIGHTS}
        yield server


@pytest.mark.parametrize(
    ("name", "repository", "quantization"),
    [
        ("llama3:70b", "bartowski/Meta-Llama-3-70B-Instruct-GGUF", "Q4_K_M"),
        ("qwen2.5:14b", "Qwen/Qwen2.5-14B-Instruct-GGUF", "Q4_K_M"),
        ("qwen2.5:14b-instruct-q8_0", "Qwen/Qwen2.5-14B-Instruct-GGUF", "Q8_0"),
        ("qwen2.5:latest", "Qwen/Qwen2.5-7B-Instruct-GGUF", "Q4_K_M"),
        ("Mistral", "bartowski/Mistral-7B-Instruct-v0.3-GGUF", "Q4_K_M"),
        ("gpt-oss:20b", "ggml-org/gpt-oss-20b-GGUF", "MXFP4"),
        ("mixtral:8x22b", "MaziyarPanahi/Mixtral-8x22B-Instruct-v0.1-GGUF", "Q4_K_M"),
        ("mixtral:8x7b-instruct-v0.1-q4_0", "TheBloke/Mixtral-8x7B-Instruct-v0.1-GGUF", "Q4_0"),
        ("qwen3:30b-a3b-q8_0", "Qwen/Qwen3-30B-A3B-GGUF", "Q8_0"),
        ("deepseek-r1:671b", "unsloth/DeepSeek-R1-GGUF", "Q4_K_M"),
        ("hf.co/Owner/Repo", "Owner/Repo", "Q4_K_M"),
        ("HF.co/Owner/Repo:iq4_xs", "Owner/Repo", "IQ4_XS"),
        ("huggingface.co/Owner/Repo:latest", "Owner/Repo", "Q4_K_M"),
    ],
)
def test_names_of_files(name: str, repository: str, quantization: str) -> None:
    assert parse_name(name) == GgufReference(repository, quantization)


@pytest.mark.parametrize(
    "name", ["llama3:9b", "llama3:8b-", "unheard-of", "qwen2.5:14b:q8", "Qwen/Qwen2.5-14B", "demo", ""]
)
def test_other_names_are_no_files(name: str) -> None:
    assert parse_name(name) is None


@pytest.mark.parametrize("row", listed(), ids=lambda row: row.tag)
def test_every_tag_that_is_fetched_is_planned(row: gguf_reference.Listed, server: Hub) -> None:
    model = lookup.look_up(row.tag)
    assert model.name == model_names.full_name(row.tag) == str(parse_name(row.tag))
    assert model.precision in gguf_types.MIXES
    whole = model_names.whole_model(GgufReference(row.name, row.quantization))
    assert whole and catalogue.find(whole).shape == model.shape
    # The size in the tag is the model's; Mixtral's tells experts.
    size = row.tag.partition(":")[2].removesuffix("b")
    if "x" not in size:
        millions = float(size.removesuffix("m")) * (1 if size.endswith("m") else 1000)
        assert millions == pytest.approx(model.params / 1e6, rel=0.2)
    assert not server.requests


def test_an_id_without_its_owner_is_no_tag() -> None:
    assert model_names.full_name("DeepSeek-R1") == "deepseek-ai/DeepSeek-R1"
    assert model_names.full_name("phi-4") == "microsoft/phi-4"
    assert model_names.full_name("phi4") == "hf.co/bartowski/phi-4-GGUF:Q4_K_M"


@pytest.mark.parametrize("name", ["gemma2:9b", "gemma2:27b"])
def test_what_the_engine_does_not_run_is_told_before_anything_is_fetched(name: str, server: Hub) -> None:
    for fetch in (pull_model, checkpoint.resolve):
        with refuses(ModelError, "architecture-not-run", name):
            fetch(name)
    assert not server.requests
    assert lookup.look_up(name).precision == "q4_k_m"  # it can be planned


@pytest.mark.parametrize(
    "name",
    [
        "qwen2.5vl:7b",
        "Qwen2.5-VL-7B-Instruct",
        "llava:7b",
        "llama3.2-vision:11b",
        "minicpm-v",
        "gemma3n:e4b",
        "nomic-embed-text",
        "bge-m3",
        "whisper",
    ],
)
def test_kinds_of_models_that_are_not_there(name: str, server: Hub) -> None:
    for find in (lookup.look_up, checkpoint.resolve, pull_model):
        with refuses(ModelError, "kind-not-run", name):
            find(name)
    assert not server.requests


def test_every_tag_reads_back() -> None:
    for row in listed():
        reference = parse_name(row.tag)
        assert reference and short_name(reference) == row.tag
        assert parse_name(str(reference)) == reference
    families = [row.tag.partition(":")[0] for row in listed() if row.latest]
    assert len(families) == len(set(families))


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "mmproj-a-Q4_K_M.gguf"], ["a-Q4_K_M.gguf"]),
        (["a.q4_k_m.gguf"], ["a.q4_k_m.gguf"]),
        (
            ["b/a-Q4_K_M-00002-of-00002.gguf", "b/a-Q4_K_M-00001-of-00002.gguf"],
            ["b/a-Q4_K_M-00001-of-00002.gguf", "b/a-Q4_K_M-00002-of-00002.gguf"],
        ),
        (["a-Q4_K_M-00001-of-00001.gguf", "a-Q4_K_M.gguf"], ["a-Q4_K_M.gguf"]),
    ],
)
def test_the_file_of_a_quantisation(names: list[str], chosen: list[str]) -> None:
    assert choose_files(names, GgufReference("o/r", "Q4_K_M")) == chosen


def test_quantisations_that_are_not_there_are_named() -> None:
    with refuses(ModelError, "no-such-quantization", "Q5_K_M, Q8_0"):
        choose_files(["a-Q5_K_M.gguf", "a-Q8_0.gguf"], GgufReference("o/r", "Q4_K_M"))
    with refuses(ModelError, "no-such-quantization", "o/r"):
        choose_files(["model.safetensors"], GgufReference("o/r", "Q4_K_M"))
    with refuses(ModelError, "gguf-parts-missing"):
        choose_files(["a-Q4_K_M-00001-of-00002.gguf"], GgufReference("o/r", "Q4_K_M"))


def test_what_is_fetched_serves_without_the_hub(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull_model(ADDRESS)
    assert path.read_bytes() == WEIGHTS
    server.requests.clear()
    assert hub.fetch_gguf(GgufReference(REPOSITORY, "Q4_K_M")) == path and not server.requests
    with pytest.raises(ModelError, match=path.name):
        checkpoint.resolve(ADDRESS)  # it is found; its bytes are no model
    row = gguf_reference.Listed(tag="qwen3:8b", name=REPOSITORY)
    monkeypatch.setattr(gguf_reference, "listed", lambda: (row,))
    assert model_names.full_name("qwen3:8b") == ADDRESS
    local_models.remove_model(local_models.list_models()[0])
    assert model_names.full_name("qwen3:8b") == ADDRESS


def test_the_commands(server: Hub) -> None:
    status, out, _ = weft("pull", ADDRESS)
    assert status == 0 and Path(out.strip()).read_bytes() == WEIGHTS
    assert weft("pull", f"hf.co/{REPOSITORY}:Q8_0")[0] == weft("pull", "owner/whole")[0] == 0
    names = {ADDRESS, f"hf.co/{REPOSITORY}:Q8_0", "owner/whole"}
    rows = {row["name"]: row for row in json.loads(weft("ls", "--json")[1])["models"]}
    assert rows.keys() == names
    assert (rows[ADDRESS]["bytes"], rows[ADDRESS]["quantization"]) == (len(WEIGHTS), "Q4_K_M")
    assert (rows["owner/whole"]["format"], rows["owner/whole"]["quantization"]) == ("safetensors", None)
    assert all(name in weft("ls")[1] for name in names)
    assert weft("rm", ADDRESS, "owner/whole")[0] == 0
    assert [row["name"] for row in json.loads(weft("ls", "--json")[1])["models"]] == [f"hf.co/{REPOSITORY}:Q8_0"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pull"], "needs the name of a model"),
        (["pull", "nobody:13b"], "hf.co/OWNER/REPO:QUANT"),
        (["rm"], "needs the name of a model"),
        (["rm", "nobody"], "weft ls"),
        (["stop"], "needs the name of a model"),
        (["stop", "nobody"], "no server of 'nobody'"),
    ],
)
def test_refusals(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    status, out, error = weft(*words)
    assert status in (1, 2) and not out and said in error and error.count("\n") == 1


SERVER = """
import sys, time
from weft.api.service.run_files import announced
with announced(["tiny", "other"], "http://127.0.0.1:9"):
    print("up", flush=True)
    time.sleep(600)
"""


def test_servers_are_listed_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert running_servers() == []
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"up\n"
        (row,) = json.loads(weft("ps", "--json")[1])["servers"]
        assert (row["models"], row["url"], row["pid"]) == (["tiny", "other"], "http://127.0.0.1:9", process.pid)
        assert {state["state"] for state in row["states"]} == {"no answer"}
        assert "tiny, other" in weft("ps")[1]
        assert weft("stop", "other:latest")[0] == 0
        assert process.wait(60) != 0
    # Killed before it could remove its file: nobody is listed, and nobody's process is stopped.
    assert running_servers() == [] and not list((tmp_path / "weft" / "running").iterdir())


def test_a_server_that_ends_is_no_longer_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    began = time.time()
    with announced(["tiny"], "http://127.0.0.1:9"):
        (server,) = running_servers()
        assert server.pid == os.getpid() and server.began_s >= began
    assert running_servers() == []
