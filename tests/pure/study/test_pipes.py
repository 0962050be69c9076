"""Pipes and devices in the place of files that users, models and configurations name: refused in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pure.commands import refused_line
from tests.refusals import refuses
from weft.checkpoint import checkpoint, lookup
from weft.cli.flags.cost_flags import read_demand
from weft.engine.cluster.hosts import read_hosts
from weft.engine.processes.keys import read_private
from weft.engine.templates import template
from weft.engine.text.tokenizer import load_tokenizer
from weft.errors import ConfigError, ModelError, WeftError
from weft.http.certificate import validity_fault
from weft.http.key_file import read_keys
from weft.machine.hardware.hardware_file import read_hardware_file
from weft.planner.report.plan_file import load_plan_file
from weft.study.bench.compare import read_result
from weft.study.bench.prompts import read_prompts
from weft.study.export.infernet_config import read_node_config
from weft.study.simulate.trace import read_trace

READERS: dict[str, Callable[[str], object]] = {
    "hosts.yaml": read_hosts,
    "hardware.yaml": read_hardware_file,
    "plan.json": load_plan_file,
    "node.json": read_node_config,
    "trace.csv": read_trace,
    "result.json": read_result,
    "prompts.jsonl": lambda path: read_prompts(path, output_len=8),
}


@pytest.fixture(params=["pipe", "device"])
def unfit(request: pytest.FixtureRequest) -> Callable[[Path], str]:
    """A function that puts a pipe or a device at a path, and returns the path as text."""

    def put(path: Path) -> str:
        os.mkfifo(path, 0o600) if request.param == "pipe" else path.symlink_to("/dev/zero")
        return str(path)

    return put


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_a_user_names(name: str, unfit: Callable[[Path], str], tmp_path: Path) -> None:
    path = unfit(tmp_path / name)
    with pytest.raises(WeftError) as refused:
        READERS[name](path)
    assert path in str(refused.value) and "only regular files" in str(refused.value)


def test_secrets_and_certificates(unfit: Callable[[Path], str], tmp_path: Path) -> None:
    path = unfit(tmp_path / "key")
    with pytest.raises(OSError, match="only regular files"):
        read_private(Path(path))
    with pytest.raises(OSError, match="only regular files"):
        validity_fault(path, None)
    with refuses(ConfigError, "cannot-read-config", path):
        read_keys(path)


def test_flags_that_name_files(unfit: Callable[[Path], str], tmp_path: Path) -> None:
    path = unfit(tmp_path / "a.yaml")
    refused_line(["serve", "--config", path], 2, "cannot-read-config", path)
    with refuses(ConfigError, "bad-chat-template-flag", path):
        template._read_option(path)
    with pytest.raises(Exception, match="only regular files"):
        read_demand(path)


def test_the_files_of_a_model(unfit: Callable[[Path], str], tmp_path: Path) -> None:
    path = unfit(tmp_path / "model.gguf")
    for read in (checkpoint.resolve, lookup.look_up, load_tokenizer):
        with refuses(ModelError, "not-a-regular-file", path):
            read(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    for name, code in (("model.safetensors.index.json", "not-a-regular-file"), ("a.safetensors", "not-a-regular-file")):
        unfit(tmp_path / name)
        with refuses(ModelError, code, name):
            checkpoint.resolve(str(tmp_path))
        (tmp_path / name).unlink()
