"""Hints: what somebody may have meant by a flag or a command that is not there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from weft.cli.commands import COMMANDS, Command
from weft.cli.flags import ENGINE

SIMILAR = 0.7  # names that are less alike mislead
# The parallel sizes as SGLang's users write them.
ALIASES = {
    "--tp": "--tensor-parallel-size",
    "--pp": "--pipeline-parallel-size",
    "--dp": "--data-parallel-size",
    "--ep": "--enable-expert-parallel",
}
# Commands of Ollama that are still to come.
SHELF = ("pull", "list", "ls", "rm", "ps")

# Our flag for what other programs call otherwise: llama.cpp (short ones too), Ollama, SGLang, TGI, Transformers.
HABITS = {
    "max-model-len": "ctx-size c num-ctx n-ctx context-length max-total-tokens max-seq-len max-seq-length",
    "max-tokens": "n n-predict num-predict predict max-new-tokens",
    "tensor-parallel-size": "tp-size num-shard tensor-parallel",
    "pipeline-parallel-size": "pp-size pipeline-parallel",
    "data-parallel-size": "dp-size data-parallel",
    "enable-expert-parallel": "ep-size expert-parallel-size",
    "tensor-split": "ts gpu-split",
    "device-ids": "mg main-gpu base-gpu-id gpu-id gpu gpu-ids",
    "gpus": "num-gpus n-gpus",
    "temperature": "temp",
    "repetition-penalty": "repeat-penalty",
    "seed": "s random-seed",
    "prompt": "p",
    "system-prompt": "sys system",
    "max-num-batched-tokens": "b ub batch-size chunked-prefill-size max-batch-prefill-tokens",
    "max-num-seqs": "np parallel num-parallel max-running-requests max-batch-size max-concurrent-requests",
    "attention-backend": "fa flash-attn",
    "kv-cache-dtype": "ctk ctv cache-type-k cache-type-v",
    "speculative-config": "md model-draft draft speculative-draft-model-path speculative-algorithm",
    "gpu-memory-utilization": "mem-fraction-static gpu-memory-fraction cuda-memory-fraction",
    "no-enable-prefix-caching": "disable-radix-cache",
    "enforce-eager": "disable-cuda-graph",
    "scheduling-policy": "schedule-policy",
    "quantization": "quantize quant load-in-4bit load-in-8bit",
    "chat-template": "chat-template-file",
    "api-key": "api-key-file",
}
# What has no flag of ours.
NOTES = {
    "the model is the argument, as in {example}": "m model-path model-id model-name hf hf-repo",
    "all layers are on the GPUs; with --device cpu none are": "ngl n-gpu-layers gpu-layers num-gpu",
    "each rank takes its share of the cores; OMP_NUM_THREADS limits its threads": "t threads tb threads-batch",
    "VLLM_LOGGING_LEVEL=DEBUG in the environment tells more": "log-level loglevel v",
    "a server keeps its model until it ends": "keepalive keep-alive",
    "weft chat MODEL talks": "i interactive cnv conversation",
}
# Flags of other commands that an engine has in another way.
IN_ENGINES = {
    "gpus": "weft {name} uses this machine's GPUs; choose them with --device-ids",
    "nodes": "weft {name} uses this machine's GPUs; weft plan, cost and simulate take --nodes",
    "precision": "weft {name} has --dtype and --quantization",
}
IN_REQUESTS = "set in each request; left out there, the model's generation_config.json counts"
SAMPLED = ("temperature", "top-p", "top-k", "min-p", "max-tokens", "stop", "min-tokens", "repetition-penalty")


def unknown_flag(command: Command, option: str) -> str:
    """What follows "unknown flag --x for weft y": a semicolon with the hint, or where to look.

    Looked for in this order: a longer flag of this command, the flag in other commands, what other programs call so, a
    name that is alike.
    """
    name = option.lstrip("-")
    ours = next((flag for flag, theirs in HABITS.items() if name in theirs.split()), "")
    note = next((text for text, theirs in NOTES.items() if name in theirs.split()), "")
    own = [f"--{flag.name}" for flag in command.flags]
    hint = (
        alike(option, [flag for flag in own if flag.startswith(f"{option}-")])
        or _elsewhere(command, name)
        or (ours and (_own(command, ours) or _elsewhere(command, ours, f"--{ours}")))
        or note.format(example=command.example)
        or alike(option, own)
    )
    return f"; {hint}" if hint else f" (see weft {command.name} --help)"


def unknown_command(word: str, commands: Iterable[str]) -> str:
    """What follows "unknown command 'x'"."""
    if word in SHELF:
        return ": models are fetched at first use, as in weft run MODEL"
    known = list(commands)
    hint = alike(word, known)
    return f"; {hint}{' commands' if hint else 'commands'}: {', '.join(known)}"


def alike(word: str, known: Sequence[str]) -> str:
    """ "did you mean X?" if a known name begins with `word` or is spelled like it, else ""."""
    plain = {name.lstrip("-"): name for name in known}
    bare = word.lstrip("-")
    longer = [name for name in plain if name.startswith(f"{bare}-")]
    close = longer or get_close_matches(bare, plain, n=1, cutoff=SIMILAR)
    return f"did you mean {plain[close[0]]}?" if close else ""


def _own(command: Command, name: str) -> str:
    """The hint for a flag that the command has under the name `name`."""
    has = any(flag.name == name.removeprefix("no-") for flag in command.flags)
    return f"here it is --{name}" if has else ""


def _elsewhere(command: Command, name: str, called: str = "it") -> str:
    """The hint for a flag that only other commands have; "" if none has it."""
    engine = ENGINE[0] in command.groups
    if engine and name in IN_ENGINES:
        return IN_ENGINES[name].format(name=command.name)
    if command.name == "serve" and name in SAMPLED:
        return IN_REQUESTS
    bare = name.removeprefix("no-")
    having = [other.name for other in COMMANDS.values() if bare in (flag.name for flag in other.flags)]
    if not having:
        return ""
    *first, last = having[:3]
    listed = f"{', '.join(first)} and {last}" if first else last
    more = " and others" if len(having) > 3 else ""
    return f"{called} belongs to weft {', '.join(having[:3]) if more else listed}{more}"
