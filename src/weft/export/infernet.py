"""Infernet: the environment and configuration of a provider node with Weft or vLLM behind it."""

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
from weft.export.shell import Flags, Placeholder

MERGE = """\
config="${XDG_CONFIG_HOME:-$HOME/.config}/infernet/config.json"
merged=$(jq -s '.[0] * .[1]' "$config" infernet-engine.json) && printf '%s\\n' "$merged" >"$config\""""
NEXT_STEPS = (
    "start the server first: the node accepts it only if GET /v1/models answers within 500 ms",
    f"merge the engine into the node's own file, which holds its keys and stays private:\n{MERGE}",
    "start the node with the variables of infernet.env",
)
# The node takes a stream with an error event for complete, and offers every model that is listed.
NODE_FLAGS: Flags = {"open-listing": True, "reset-on-error": True, "list-served-only": True}
BACKEND = "vllm"  # the node's word for any server with OpenAI's API
# Characters that systemd, Docker and a shell read alike in the file.
PLAIN = re.compile(r"[\w./:@+,=-]+")
KEY = Placeholder("VLLM_API_KEY", "only if the server demands a key")


def infernet_files(deployment: Deployment) -> list[ExportFile]:
    """The node's environment, its engine's part of the configuration, and the server's commands."""
    if not PLAIN.fullmatch(deployment.names[0]):
        raise ConfigError(
            f"{deployment.names[0]!r} cannot be written into the node's environment, where letters, digits and "
            "./:@+,=- are safe; give another name with --served-model-name",
            code="name-unsafe-in-environment",
        )
    remarks = TargetRemarks(omitted_options(deployment), [*deployment.checkpoint.placeholders, KEY], NEXT_STEPS)
    variables = {
        "INFERNET_ENGINE_BACKEND": BACKEND,
        "INFERNET_ENGINE_MODEL": deployment.names[0],
        "VLLM_HOST": server_url(deployment),
        "VLLM_MODEL": deployment.names[0],
    }
    # Read by systemd's EnvironmentFile and by docker --env-file, which support neither quotes nor export.
    lines = [
        header_comment("infernet", deployment, remarks),
        "",
        *(f"{name}={value}" for name, value in variables.items()),
    ]
    engine = {"backend": BACKEND, "model": deployment.names[0], "ollamaHost": server_url(deployment)}
    return [
        ExportFile("infernet.env", "\n".join([*lines, f"#{KEY.name}="]) + "\n", PRIVATE),
        ExportFile("infernet-engine.json", json.dumps({"engine": engine}, indent=2) + "\n"),
        *(
            vllm.vllm_files(deployment)
            if deployment.question.engine == "vllm"
            else weft_serve.weft_files(deployment, NODE_FLAGS)
        ),
    ]


def server_url(deployment: Deployment) -> str:
    """URL of the server for the node; not localhost, which may be ::1, where nothing listens."""
    return f"http://127.0.0.1:{deployment.servers[0].port}"


def vram_tiers(deployment: Deployment) -> str:
    """The tier of each GPU in use, in words."""
    memory = {
        gpu.name: gpu.memory_bytes
        for gpu in (deployment.question.cluster.gpus[at] for at in deployment.candidate.layout.gpus)
    }
    return ", ".join(f"{name} is {vram_tier(size)}" for name, size in memory.items())


def omitted_options(deployment: Deployment) -> list[str]:
    """Differences between the node and its book, in words."""
    omissions = [
        f"vram_tier: the node reports it for each GPU separately, and never sums them: {vram_tiers(deployment)}",
    ]
    if deployment.question.engine == "vllm":
        omissions.append(
            "Ollama's API on the same port: early versions of the node list models by its /api/tags; vLLM answers "
            "OpenAI's /v1/models, which newer versions use"
        )
    if len(deployment.servers) > 1:
        omissions.append(
            "the other replicas: the node calls one address, here the first replica's; with weft plan --emit nginx in "
            "front of all of them, put nginx's address into VLLM_HOST and ollamaHost"
        )
    if len(deployment.nodes) > 1 or deployment.candidate.layout.shares_experts:
        omissions.append("the address: the node is assumed to run beside the first server")
    return omissions


def config_warnings(config: NodeConfig, model: str, memory: Sequence[tuple[str, int]]) -> list[str]:
    """Sentences on settings without their apparent effect, for `model` on GPUs of these names and bytes."""
    texts = list(config.warnings)
    tiers = dict.fromkeys(f"{name} is {vram_tier(size)}" for name, size in memory)
    if config.tier is not None and any(vram_tier(size) != config.tier for _, size in memory):
        texts.append(f"vram_tier {config.tier} is no GPU's here, and a sum is never reported: {', '.join(tiers)}")
    own = config.serving(model)
    others = dict.fromkeys(server.model for server in config.instances)
    if own and len(others) > 1:
        names = " and ".join(name for name in others if name != own.model)
        texts.append(f"this is for {own.model}; {names} cannot be served by the same node")
    return texts
