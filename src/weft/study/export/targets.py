"""The systems that a plan can be exported to."""

from __future__ import annotations

from weft.study.export import (
    compose,
    engines,
    infernet,
    kuberay,
    nginx,
    ollama,
    systemd,
    transformers,
    vllm,
    weft_serve,
)
from weft.study.export.target import ExportTarget

SERVERS = ("weft", "vllm", "sglang", "trtllm", "llama.cpp")  # engines with an HTTP port of their own

TARGETS = {
    target.name: target
    for target in (
        ExportTarget("weft", "Weft", ("weft",), weft_serve.weft_files, weft_serve.unsupported),
        ExportTarget("vllm", "vLLM", ("vllm",), vllm.vllm_files, vllm.unsupported),
        ExportTarget(
            "transformers",
            "Transformers",
            ("transformers",),
            transformers.transformers_files,
            transformers.unsupported,
            substitutes=transformers.PRECISION_SUBSTITUTES,
            port=0,
        ),
        ExportTarget(
            "ollama",
            "Ollama",
            ("llama.cpp",),
            ollama.ollama_files,
            ollama.unsupported,
            substitutes=ollama.PRECISION_SUBSTITUTES,
            port=ollama.PORT,
        ),
        ExportTarget("infernet", "Infernet", ("weft", "vllm"), infernet.infernet_files, engines.unsupported),
        ExportTarget("systemd", "systemd", ("weft",), systemd.systemd_files, weft_serve.unsupported),
        ExportTarget("nginx", "nginx", SERVERS, nginx.nginx_files, engines.unsupported),
        ExportTarget("kuberay", "KubeRay", ("weft", "vllm"), kuberay.kuberay_files, kuberay.unsupported, port=0),
        ExportTarget("compose", "Docker Compose", ("weft", "vllm"), compose.compose_files, compose.unsupported),
    )
}
