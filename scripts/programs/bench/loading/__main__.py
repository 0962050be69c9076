"""`scripts/bench loading`: seconds, bytes read and memory of loads of a checkpoint, by Weft's ranks and other loaders.

    scripts/bench loading FOLDER [--llama-cpp PYTHON] [--rounds N]

FOLDER gets a random Llama of 2.03 billion parameters in bf16, unless it has one: 4.06 GB as safetensors in two files,
the same as GGUF, and as a file for each of two ranks. `--llama-cpp` names an interpreter that has llama-cpp-python.
Each load is a process of its own, which makes one token; loaders take turns. "cold": the files were dropped from
memory before. Prints one JSON object for each load:

- `load_s`: of Weft the longest load of a rank, with the packing of matrices; of Transformers `from_pretrained`; of
  llama.cpp `llama_model_load_from_file`.
- `token_s`: from the start of the process to the token, for which all weights have been read.
- `disk_bytes`: `read_bytes` of /proc/PID/io, summed over processes; `of_the_files` is the ratio to the files' size.
- `peak_bytes`, `own_bytes`: the most memory of a process; and the most that is its own, not pages of files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
sys.path.insert(0, str(ROOT / "src"))

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 30, 2048, 8192, 32, 8, 64, 49152
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TOKENS = [5, 6, 7, 8]
POLL_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench loading", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-cpp", help="an interpreter with llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--loader", choices=LOADERS, help="load here, and wait for the end of the standard input")
    given = parser.parse_args()
    if given.loader:
        LOADERS[given.loader](given.folder)
        return
    write_checkpoint(given.folder)
    for _ in range(given.rounds):
        for cold in (True, False):
            for loader in LOADERS:
                if loader != "llama.cpp" or given.llama_cpp:
                    print(json.dumps(measure(loader, given.folder, given.llama_cpp, cold=cold)), flush=True)


# --- the checkpoint ---


def tensors() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield each tensor's name in safetensors and in GGUF, and its dims."""
    yield "model.embed_tokens.weight", "token_embd.weight", (VOCAB, HIDDEN)
    for n in range(LAYERS):
        ours, theirs = f"model.layers.{n}.", f"blk.{n}."
        yield ours + "input_layernorm.weight", theirs + "attn_norm.weight", (HIDDEN,)
        yield ours + "self_attn.q_proj.weight", theirs + "attn_q.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield ours + "self_attn.k_proj.weight", theirs + "attn_k.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield ours + "self_attn.v_proj.weight", theirs + "attn_v.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield ours + "self_attn.o_proj.weight", theirs + "attn_output.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield ours + "post_attention_layernorm.weight", theirs + "ffn_norm.weight", (HIDDEN,)
        yield ours + "mlp.gate_proj.weight", theirs + "ffn_gate.weight", (FFN, HIDDEN)
        yield ours + "mlp.up_proj.weight", theirs + "ffn_up.weight", (FFN, HIDDEN)
        yield ours + "mlp.down_proj.weight", theirs + "ffn_down.weight", (HIDDEN, FFN)
    yield "model.norm.weight", "output_norm.weight", (HIDDEN,)
    yield "lm_head.weight", "output.weight", (VOCAB, HIDDEN)


def write_checkpoint(folder: Path) -> None:
    """Write what FOLDER lacks of: safetensors, GGUF, files of ranks."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors())
    if not (folder / "model.safetensors.index.json").exists():
        some = torch.randn((1 << 24) + 7, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        index: dict[str, str] = {}
        for number, half in enumerate(halves):
            file = f"model-{number + 1:05}-of-00002.safetensors"
            made = {name: draw(some, dims) for name, _, dims in half}
            save_file(made, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(made, file)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    if not gguf_file(folder).exists():
        write_gguf(folder, names)
    if not shards(folder).exists():
        words = ["shard", str(folder), str(shards(folder)), "-tp", "2", "--dtype", "bfloat16", "--skip-tokenizer-init"]
        subprocess.run([sys.executable, "-m", "weft", *words], check=True, stdout=subprocess.DEVNULL)


def draw(some: Any, dims: Sequence[int]) -> Any:
    """A tensor [dims] of random numbers near 0, or near 1 for a vector."""
    import torch

    count = dims[0] * (dims[1] if len(dims) > 1 else 1)
    values = some.repeat(-(-count // len(some)))[:count].view(*dims).clone()
    return values if len(dims) > 1 else values + torch.ones((), dtype=torch.bfloat16)


def gguf_file(folder: Path) -> Path:
    return folder / "gguf" / "model.gguf"


def shards(folder: Path) -> Path:
    return folder.with_name(folder.name + "-shards")


def write_gguf(folder: Path, names: list[tuple[str, str, tuple[int, ...]]]) -> None:
    """The same tensors in llama.cpp's format, without a vocabulary. Rows of queries and keys are not put into
    llama.cpp's order: for a load they are as good."""
    import gguf
    import numpy as np
    from safetensors import safe_open

    gguf_file(folder).parent.mkdir(exist_ok=True)
    partial = gguf_file(folder).with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, theirs, dims in names:
        with safe_open(folder / index[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        if len(dims) == 1:
            writer.add_tensor(theirs, tensor.float().numpy())
        else:
            octets = tensor.view(dtype=__import__("torch").uint8).numpy()
            writer.add_tensor(theirs, np.ascontiguousarray(octets), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(gguf_file(folder))


# --- loaders, in processes of their own ---


def load_weft(folder: Path, **options: Any) -> None:
    from weft import LLM, SamplingParams

    common = {"dtype": "bfloat16", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 50_000_000}
    with LLM(str(folder), executor="processes", max_model_len=256, **common, **options) as llm:
        loaded = max(one.load_s for one in llm.capacities)
        once = SamplingParams(temperature=0, max_tokens=1)
        llm.generate([{"prompt_token_ids": TOKENS}], once, use_tqdm=False)
        report(loaded)


def load_ranks(folder: Path) -> None:
    load_weft(folder, tensor_parallel_size=2)


def load_shards(folder: Path) -> None:
    load_weft(shards(folder), load_format="sharded_state")


def load_transformers(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    began = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    loaded = time.monotonic() - began
    with torch.inference_mode():
        model(torch.tensor([TOKENS])).logits[0, -1].argmax().item()
    report(loaded)


def load_llama_cpp(folder: Path) -> None:
    import ctypes

    import llama_cpp as llama

    quiet = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(quiet, ctypes.c_void_p())
    llama.llama_backend_init()
    began = time.monotonic()
    model = llama.llama_model_load_from_file(str(gguf_file(folder)).encode(), llama.llama_model_default_params())
    loaded = time.monotonic() - began
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 256, 2, 2
    context = llama.llama_init_from_model(model, params)
    tokens = (llama.llama_token * len(TOKENS))(*TOKENS)
    if llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(TOKENS))):
        raise SystemExit("llama_decode failed")
    report(loaded)


def report(load_s: float) -> None:
    """Print the seconds; wait until the parent has read what this process has in /proc."""
    print(json.dumps(load_s), flush=True)
    sys.stdin.read()


LOADERS = {
    "weft tp2": load_ranks,
    "weft tp2, sharded_state": load_shards,
    "transformers": load_transformers,
    "llama.cpp": load_llama_cpp,
}


# --- measurement ---


def files_of(loader: str, folder: Path) -> list[Path]:
    if loader == "llama.cpp":
        return [gguf_file(folder)]
    return sorted((shards(folder) if "sharded" in loader else folder).glob("*.safetensors"))


def measure(loader: str, folder: Path, llama_cpp: str | None, *, cold: bool) -> dict[str, Any]:
    """Load in a process of its own, see the module's docstring."""
    files = files_of(loader, folder)
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 24):
                    pass
    python = llama_cpp if loader == "llama.cpp" and llama_cpp else sys.executable
    began = time.monotonic()
    process = subprocess.Popen(
        [python, __file__, str(folder), "--loader", loader], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    peaks = Peaks(process.pid)
    assert process.stdout is not None and process.stdin is not None
    line = process.stdout.readline()
    token_s = time.monotonic() - began
    peaks.stop()
    family = family_of(process.pid)
    disk, called = (sum(read_counter(pid, name) for pid in family) for name in ("read_bytes", "rchar"))
    process.stdin.close()
    if process.wait() or not line:
        raise SystemExit(f"{loader} ended with {process.returncode}")
    size = sum(path.stat().st_size for path in files)
    return {
        "loader": loader,
        "files": "cold" if cold else "warm",
        "load_s": round(json.loads(line), 2),
        "token_s": round(token_s, 2),
        "disk_bytes": disk,
        "called_bytes": called,
        "of_the_files": round(disk / size, 3),
        "peak_bytes": peaks.peak,
        "own_bytes": peaks.own,
    }


def family_of(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def read_counter(pid: int, name: str) -> int:
    """A number of /proc/PID/io; 0 for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in text.splitlines())[name])


class Peaks:
    """The most memory of a process of a family, and the most that is its own, seen every POLL_S."""

    def __init__(self, pid: int) -> None:
        self.peak = self.own = 0
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            for pid in family_of(self._pid):
                try:
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                except OSError:
                    continue
                values = {
                    line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "RssAnon"))
                }
                self.peak = max(self.peak, 1024 * int(values.get("VmRSS", 0)))
                self.own = max(self.own, 1024 * int(values.get("RssAnon", 0)))


if __name__ == "__main__":
    main()
