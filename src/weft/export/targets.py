"""Targets: the systems that a plan can be written for."""

from __future__ import annotations

from weft.export import compose, engines, infernet, kuberay, nginx, ollama, transformers, vllm, weft_serve
from weft.export.target import Target

SERVERS = ("weft", "vllm", "sglang", "trtllm", "llama.cpp")  # engines with an HTTP port of their own

TARGETS = {
    target.name: target
    for target in (
        Target("weft", "Weft", ("weft",), weft_serve.write, weft_serve.cannot),
        Target("vllm", "vLLM", ("vllm",), vllm.write, vllm.cannot),
        Target(
            "transformers",
            "Transformers",
            ("transformers",),
            transformers.write,
            transformers.cannot,
            instead=transformers.INSTEAD,
            port=0,
        ),
        Target(
            "ollama", "Ollama", ("llama.cpp",), ollama.write, ollama.cannot, instead=ollama.INSTEAD, port=ollama.PORT
        ),
        Target("infernet", "Infernet", ("weft", "vllm"), infernet.infernet_files, engines.unsupported),
        Target("nginx", "nginx", SERVERS, nginx.write, engines.unsupported),
        Target("kuberay", "KubeRay", ("vllm",), kuberay.write, kuberay.cannot, port=0),
        Target("compose", "Docker Compose", ("weft", "vllm"), compose.write, compose.cannot),
    )
}
