"""Infernet: what a provider node reads to work with Weft, or with vLLM, behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from weft.errors import ConfigError
from weft.export import vllm, weft_serve
from weft.export.deployment import Deployment
from weft.export.files import PRIVATE, ExportFile
from weft.export.header import TargetRemarks, header_comment
from weft.export.infernet_config import NodeConfig, vram_tier
from weft.export.shell import Placeholder
from weft.export.target import shares_experts

MERGE = """\
config="${XDG_CONFIG_HOME:-$HOME/.config}/infernet/config.json"
merged=$(jq -s '.[0] * .[1]' "$config" infernet-engine.json) && printf '%s\\n' "$merged" >"$config\""""
# How to go on.
USE = (
    "start the server first: the node takes it only where GET /v1/models answers within 500 ms",
    f"merge the engine into the node's own file, which holds its keys and stays private:\n{MERGE}",
    "start the node with the variables of infernet.env",
)
BACKEND = "vllm"  # the node's word for any server with OpenAI's API
# What systemd, Docker and a shell that reads the file itself take alike.
PLAIN = re.compile(r"[\w./:@+,=-]+")
KEY = Placeholder("VLLM_API_KEY", "only where the server asks for a key")


def infernet_files(deployment: Deployment) -> list[ExportFile]:
    """The node's environment, the part of its configuration that it reads, and the server's commands."""
    if not PLAIN.fullmatch(deployment.names[0]):
        raise ConfigError(
            f"{deployment.names[0]!r} cannot stand in the node's environment: those who read it agree on letters, figures and "
            "./:@+,=- only; --served-model-name gives another name"
        )
    remarks = TargetRemarks(omitted_options(deployment), [*deployment.checkpoint.placeholders, KEY], USE)
    variables = {
        "INFERNET_ENGINE_BACKEND": BACKEND,
        "INFERNET_ENGINE_MODEL": deployment.names[0],
        "VLLM_HOST": server_url(deployment),
        "VLLM_MODEL": deployment.names[0],
    }
    # Read by systemd's EnvironmentFile and by docker --env-file, which know no quotes and no export.
    lines = [
        header_comment("infernet", deployment, remarks),
        "",
        *(f"{name}={value}" for name, value in variables.items()),
    ]
    engine = {"backend": BACKEND, "model": deployment.names[0], "ollamaHost": server_url(deployment)}
    return [
        ExportFile("infernet.env", "\n".join([*lines, f"#{KEY.name}="]) + "\n", PRIVATE),
        ExportFile("infernet-engine.json", json.dumps({"engine": engine}, indent=2) + "\n"),
        *(vllm.vllm_files(deployment) if deployment.question.engine == "vllm" else weft_serve.weft_files(deployment)),
    ]


def server_url(deployment: Deployment) -> str:
    """Where the node finds its server; in numbers, since localhost may also be ::1, where nobody listens."""
    return f"http://127.0.0.1:{deployment.servers[0].port}"


def vram_tiers(deployment: Deployment) -> str:
    """The tier of each GPU that is used, in words."""
    memory = {
        gpu.name: gpu.memory_bytes
        for gpu in (deployment.question.cluster.gpus[at] for at in deployment.candidate.layout.gpus)
    }
    return ", ".join(f"{name} is {vram_tier(size)}" for name, size in memory.items())


def omitted_options(deployment: Deployment) -> list[str]:
    """What the node does otherwise than its book says."""
    found = [
        f"vram_tier: the node tells it for each GPU by itself, and never sums them: {vram_tiers(deployment)}",
        "Ollama's API on the same port: early versions of the node list models by its /api/tags; Weft and vLLM answer "
        "OpenAI's /v1/models, which newer ones ask",
    ]
    if len(deployment.servers) > 1:
        found.append(
            "the other replicas: the node calls one address, here the first one's; with weft plan --emit nginx before "
            "all of them, that one's goes into VLLM_HOST and ollamaHost"
        )
    if len(deployment.nodes) > 1 or shares_experts(deployment.candidate.layout):
        found.append("the address: the node is taken to run beside the first server")
    return found


def config_warnings(config: NodeConfig, model: str, memory: Sequence[tuple[str, int]]) -> list[str]:
    """What of a configuration does not do what it seems to, with `model` on GPUs of these names and bytes."""
    found = list(config.warnings)
    told = dict.fromkeys(f"{name} is {vram_tier(size)}" for name, size in memory)
    if config.tier is not None and any(vram_tier(size) != config.tier for _, size in memory):
        found.append(f"vram_tier {config.tier} is no GPU's here, and a sum is never told: {', '.join(told)}")
    here = config.serving(model)
    others = dict.fromkeys(it.model for it in config.instances if here and it.model != here.model)
    if here and others:
        found.append(f"this is for {here.model}; {' and '.join(others)} cannot be served by the same node")
    return found
