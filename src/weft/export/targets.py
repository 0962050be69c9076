"""Targets: the systems that a plan can be written for."""

from __future__ import annotations

from weft.export import compose, engines, infernet, kuberay, nginx, ollama, transformers, vllm, weft_serve
from weft.export.target import Target

TARGETS = {
    target.name: target
    for target in (
        Target(
            name="weft",
            title="Weft",
            engines=("weft",),
            write=weft_serve.write,
            cannot=weft_serve.cannot,
        ),
        Target(
            name="vllm",
            title="vLLM",
            engines=("vllm",),
            write=vllm.write,
            cannot=vllm.cannot,
        ),
        Target(
            name="transformers",
            title="Transformers",
            engines=("transformers",),
            write=transformers.write,
            cannot=transformers.cannot,
            instead=transformers.INSTEAD,
            port=0,
        ),
        Target(
            name="ollama",
            title="Ollama",
            engines=("llama.cpp",),
            write=ollama.write,
            cannot=ollama.cannot,
            instead=ollama.INSTEAD,
            port=ollama.PORT,
        ),
        Target(
            name="infernet",
            title="Infernet",
            engines=("weft", "vllm"),
            write=infernet.write,
            cannot=engines.cannot,
        ),
        Target(
            name="nginx",
            title="nginx",
            engines=("weft", "vllm", "sglang", "trtllm", "llama.cpp"),
            write=nginx.write,
            cannot=engines.cannot,
        ),
        Target(
            name="kuberay",
            title="KubeRay",
            engines=("vllm",),
            write=kuberay.write,
            cannot=kuberay.cannot,
            port=0,
        ),
        Target(
            name="compose",
            title="Docker Compose",
            engines=("weft", "vllm"),
            write=compose.write,
            cannot=compose.cannot,
        ),
    )
}
