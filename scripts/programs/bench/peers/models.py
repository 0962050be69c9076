"""The same weights for everybody: the demo's, dequantised to bfloat16, and random ones: 1.1 billion of a dense model,
1.4 billion of a mixture of experts, 1.05 billion of one with latent attention. Each form is made once, by the peers'
own converters, below the folder of the benchmark."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

from scripts.programs.bench.peers.environments import (
    LLAMA_CPP,
    ONNX_RUNTIME,
    OPENVINO,
    TRANSFORMERS,
    Missing,
    run_quietly,
)

SMALL, LARGE, MIXTURE = "SmolLM2-135M", "Llama-1.1B-random", "Qwen3-MoE-1.4B-random"
LATENT = "DeepSeek-V2-1B-random"
FILE_TYPES = {"q4_0": 2, "q4_k_m": 15}  # llama.cpp's llama_ftype
HERE = Path(__file__).parent


class Models:
    """Paths by form; each is made when it is first asked for, and raises Missing where it cannot be."""

    def __init__(self, folder: Path, demo: Path) -> None:
        self.folder, self.demo = folder, demo
        self.models = folder / "models"
        self.models.mkdir(parents=True, exist_ok=True)

    def folder_of(self, name: str) -> Path:
        """The model as a Hugging Face folder in bfloat16."""
        target = self.models / name
        if not (target / "model.safetensors").exists():
            python = TRANSFORMERS.python(self.folder)
            source = self.demo if name == SMALL else self.folder_of(SMALL)
            print(f"making {name}", file=sys.stderr, flush=True)
            run_quietly([str(python), str(HERE / "checkpoints.py"), name, str(source), str(target)])
        return target

    def openvino(self, name: str) -> Path:
        target = self.models / f"{name}-openvino"
        if not (target / "openvino_model.xml").exists():
            tool = OPENVINO.python(self.folder).with_name("optimum-cli")
            form = ("--task", "text-generation-with-past", "--weight-format", "fp16")
            run_quietly([str(tool), "export", "openvino", "--model", str(self.folder_of(name)), *form, str(target)])
        return target

    def onnx_int4(self, name: str) -> Path:
        target = self.models / f"{name}-onnx-int4"
        if not (target / "genai_config.json").exists():
            python = ONNX_RUNTIME.python(self.folder)
            builder = ["-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
            run_quietly([str(python), *builder, "-i", str(self.folder_of(name)), "-o", str(target)])
        return target

    def gguf(self, name: str) -> Path:
        """In bfloat16, by the converter that lies in llama-cpp-python's source package."""
        target = self.models / f"{name}-bf16.gguf"
        if not target.exists():
            python, sources = TRANSFORMERS.python(self.folder), self.folder / "llama.cpp-sources"
            converters = list(sources.glob("*/vendor/llama.cpp/convert_hf_to_gguf.py"))
            if not converters:
                wanted = LLAMA_CPP.installs[0][0]
                fetch = [
                    "-m",
                    "pip",
                    "download",
                    "-qq",
                    "--no-deps",
                    "--no-binary",
                    ":all:",
                    "-d",
                    str(sources),
                    wanted,
                ]
                run_quietly([str(python), *fetch])
                for archive in sources.glob("*.tar.gz"):
                    with tarfile.open(archive) as packed:
                        packed.extractall(sources, filter="data")
                converters = list(sources.glob("*/vendor/llama.cpp/convert_hf_to_gguf.py"))
            if not converters:
                raise Missing("llama-cpp-python's source package holds no converter")
            run_quietly(
                [
                    str(python),
                    str(converters[0]),
                    str(self.folder_of(name)),
                    "--outtype",
                    "bf16",
                    "--outfile",
                    str(target),
                ]
            )
        return target

    def gguf_mix(self, name: str, mix: str) -> Path:
        """In one of FILE_TYPES, by llama.cpp itself."""
        target = self.models / f"{name}-{mix}.gguf"
        if not target.exists():
            python = LLAMA_CPP.python(self.folder)
            program = (
                "import sys, llama_cpp as l; p = l.llama_model_quantize_default_params(); p.ftype = int(sys.argv[3]); "
                "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))"
            )
            run_quietly([str(python), "-c", program, str(self.gguf(name)), str(target), str(FILE_TYPES[mix])])
        return target

    def text(self) -> list[int]:
        """Real English as token ids: CPython's own language reference."""
        target = self.models / "text.json"
        if not target.exists():
            python = TRANSFORMERS.python(self.folder)
            run_quietly([str(python), str(HERE / "checkpoints.py"), "text", str(self.folder_of(SMALL)), str(target)])
        return list(json.loads(target.read_text()))
