"""Infernet: the environment and configuration of a provider node with Weft or vLLM behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from weft.errors import ConfigError
from weft.study.export import vllm, weft_serve
from weft.study.export.deployment import Deployment
from weft.study.export.files import PRIVATE, ExportFile
from weft.study.export.header import TargetRemarks, header_comment
from weft.study.export.infernet_config import NodeConfig, vram_tier
from weft.study.export.shell import Flags, Placeholder

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
    check_name(deployment.names[0])
    remarks = TargetRemarks(omitted_options(deployment), [*deployment.checkpoint.placeholders, KEY], NEXT_STEPS)
    header = header_comment("infernet", deployment, remarks)
    return [
        *node_files(header, deployment.names[0], server_url(deployment)),
        *(
            vllm.vllm_files(deployment)
            if deployment.question.engine == "vllm"
            else weft_serve.weft_files(deployment, NODE_FLAGS)
        ),
    ]


def check_name(name: str) -> None:
    """Raise ConfigError for a name that the node's environment cannot hold."""
    if not PLAIN.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be written into the node's environment, where letters, digits and "
            "./:@+,=- are safe; give another name with --served-model-name",
            code="name-unsafe-in-environment",
        )


def node_files(header: str, name: str, url: str) -> list[ExportFile]:
    """The node's environment, and its engine's part of the configuration, for a model at a server."""
    variables = {
        "INFERNET_ENGINE_BACKEND": BACKEND,
        "INFERNET_ENGINE_MODEL": name,
        "VLLM_HOST": url,
        "VLLM_MODEL": name,
    }
    # Read by systemd's EnvironmentFile and by docker --env-file, which support neither quotes nor export.
    lines = [header, "", *(f"{variable}={value}" for variable, value in variables.items())]
    engine = {"backend": BACKEND, "model": name, "ollamaHost": url}
    return [
        ExportFile("infernet.env", "\n".join([*lines, f"#{KEY.name}="]) + "\n", PRIVATE),
        ExportFile("infernet-engine.json", json.dumps({"engine": engine}, indent=2) + "\n"),
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
    if len(deployment.nodes) > 1 or deployment.candidate.layout.parallelism.shares_experts:
        omissions.append("the address: the node is assumed to run next to the first server")
    return omissions


def config_warnings(config: NodeConfig, model: str, memory: Sequence[tuple[str, int]]) -> list[str]:
    """Sentences on settings without their apparent effect, for `model` on GPUs of these names and bytes."""
    texts = [*config.warnings, *tier_warnings(config, memory)]
    own = config.serving(model)
    others = dict.fromkeys(server.model for server in config.instances)
    if own and len(others) > 1:
        names = " and ".join(name for name in others if name != own.model)
        texts.append(f"this is for {own.model}; without MODEL one server has {names} too")
    return texts


def tier_warnings(config: NodeConfig, memory: Sequence[tuple[str, int]]) -> list[str]:
    """A sentence on a vram_tier that is none of these GPUs'; [] if it is."""
    if config.tier is None or all(vram_tier(size) == config.tier for _, size in memory):
        return []
    tiers = dict.fromkeys(f"{name} is {vram_tier(size)}" for name, size in memory)
    return [f"vram_tier {config.tier} is no GPU's here, and a sum is never reported: {', '.join(tiers)}"]
