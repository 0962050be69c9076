"""Starts with a model whose files were made to harm: `weft run`, `plan` and `serve` end with one clear line."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scripts.programs.abuse.case import Life, Outcome
from scripts.programs.abuse.server import ROOT

CPU_S = 10.0  # of a start, with what imports take; the wall clock is no measure on a machine that does other work
WALL_S = 60
MEMORY_BYTES = 2 << 30
LINE = 700  # characters of an error, without the model's path
# Commands, of which a plan reads no vocabulary and no weights.
RUN, PLAN, SERVE = ("run", "{}", "a"), ("plan", "{}"), ("serve", "{}", "--port", "0")  # {}: the model
Make = Callable[[Path], object]  # damages the model of a folder


class Start(NamedTuple):
    """Status of a command, 124 if it did not end; what it wrote to standard error; CPU seconds and bytes of memory."""

    status: int
    said: str
    cpu_s: float
    memory_bytes: int


def start(words: list[str], folder: Path) -> Start:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(folder / "cache")}
    environment |= {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "weft", *words]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, env=environment
        )
        deadline = time.monotonic() + WALL_S
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.02)
        if not ended[0]:
            process.kill()
            ended = os.wait4(process.pid, 0)
            process.returncode = 124
        else:
            process.returncode = os.waitstatus_to_exitcode(ended[1])
    usage: resource.struct_rusage = ended[2]
    text = (folder / "said").read_text(errors="replace")
    return Start(process.returncode, text, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def fault_of(one: Start, model: Path, *, may_work: bool) -> str:
    """Reason why a refusal is none; empty if it is one clear line, soon and in little memory.

    A file that is harmless in the way it is read here `may_work`; a server is then stopped.
    """
    lines = [line for line in one.said.splitlines() if "error" in line]
    if may_work and one.status in (0, 124) and not lines and one.memory_bytes <= MEMORY_BYTES:
        return ""
    if one.status not in (1, 2) or "Traceback" in one.said or "panicked at" in one.said:
        return f"status {one.status}: {one.said[-500:]}"
    if len(lines) != 1 or len(lines[0].replace(str(model), "")) > LINE:
        return f"{len(lines)} lines of errors: {one.said[-500:]}"
    if one.cpu_s > CPU_S or one.memory_bytes > MEMORY_BYTES:
        return f"{one.cpu_s:.1f} s of CPU time and {one.memory_bytes >> 20} MiB: {lines[0]}"
    return ""


def refused(
    seed: str, kinds: dict[str, Make], commands: tuple[tuple[str, ...], ...], words: tuple[str, ...]
) -> Outcome:
    """Each command with each damaged copy of a seed."""
    statuses: Counter[str] = Counter()
    unexpected = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_seeds(folder / "seeds")
        for kind, damage in kinds.items():
            for command in commands:
                model = folder / "model"
                shutil.copytree(folder / "seeds" / seed, model)
                damage(model)
                one = start([word.format(model) for word in command], folder)
                statuses[f"{command[0]} ends with {one.status}"] += 1
                if fault := fault_of(one, model, may_work=kind in MAY_WORK):
                    unexpected.append(f"{kind}, weft {command[0]}: {fault}")
                shutil.rmtree(model)
    return Outcome(dict(statuses), unexpected)


def write_seeds(folder: Path) -> None:
    """Write all seeds in a process of its own, which imports torch."""
    code = "import sys; from pathlib import Path; from scripts.programs.conformance.files.seeds import write_seeds"
    code += "; write_seeds(Path(sys.argv[1]))"
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    subprocess.run([sys.executable, "-c", code, str(folder)], env={**os.environ, "PYTHONPATH": path}, check=True)


def in_json(name: str, **fields: Any) -> Make:
    """Put fields into a JSON file of the model."""

    def damage(model: Path) -> None:
        path = model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return damage


def instead(name: str, put: Callable[[Path], object]) -> Make:
    """Put something else in the place of a file."""

    def damage(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        put(model / name)

    return damage


def without(suffix: str) -> Make:
    """Remove the tensors with a suffix."""
    return tensors(lambda name, tensor: None if name.endswith(suffix) else tensor)


def tensors(change: Callable[[str, Any], Any]) -> Make:
    def damage(model: Path) -> None:
        from safetensors.torch import load_file, save_file  # as numpy has no bfloat16

        path = model / "model.safetensors"
        changed = {name: change(name, tensor) for name, tensor in load_file(path).items()}
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path)

    return damage


def steps(*given: Any) -> Make:
    return in_json("tokenizer.json", normalizer={"type": "Sequence", "normalizers": list(given)})


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


def patterns(*ignored: str) -> Make:
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ignored}
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
    return in_json("config.json", quantization_config=settings | {"config_groups": {"group_0": group}})


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
VOCABULARIES: dict[str, Make] = {
    "a long prefix": steps({"type": "Prepend", "prepend": "x" * 30_000_000}),
    "doubled 34 times": steps(*[DOUBLE] * 34),
    "an empty map": in_json("tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": ""}),
    "3 GB of a template": instead("chat_template.jinja", sparse),
}


def only_pipe(model: Path) -> None:
    """Nothing but a pipe that is named as weights are."""
    for path in model.iterdir():
        path.unlink()
    os.mkfifo(model / "a.gguf")


def pipe_as_index(model: Path) -> None:
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors.index.json")


PIPES: dict[str, Make] = {
    "a pipe named .gguf": only_pipe,
    "a pipe as the weights": instead("model.safetensors", os.mkfifo),
    "a pipe as the index": pipe_as_index,
    "a device as the configuration": instead("config.json", lambda path: path.symlink_to("/dev/zero")),
}
# `weft plan` opens no index, and expressions are read without going back.
MAY_WORK = ("a pipe as the index", "nested quantifiers")
EXPRESSIONS: dict[str, Make] = {
    "nested quantifiers": patterns("re:([a-z0-9_.]+)+X"),
    "300,000 expressions": patterns(*[f"re:x{n}" for n in range(300_000)]),
}
DAMAGED: dict[str, dict[str, Make]] = {
    "compressed": {"no zero points": without("weight_zero_point"), "no shape": without("weight_shape")},
    "gptq": {"no groups of columns": without("g_idx")},
    "fp8": {"scales cut": tensors(lambda name, it: it[:1, :1].clone() if name.endswith("_scale_inv") else it)},
    "nf4": {"no map": without("quant_map")},
}


def life(name: str, seed: str, kinds: dict[str, Make], *commands: tuple[str, ...]) -> Life:
    return Life(f"files-{name}", "files", partial(refused, seed, kinds, commands))


LIVES = (
    life("vocabularies", "plain", VOCABULARIES, RUN, SERVE),
    life("pipes", "plain", PIPES, RUN, PLAN, SERVE),
    life("expressions", "plain", EXPRESSIONS, RUN, PLAN, SERVE),
    *(life(f"damaged-{seed}", seed, kinds, RUN, SERVE) for seed, kinds in DAMAGED.items()),
)
