"""Hints for an unknown flag or command: the name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from weft.cli.commands import COMMANDS, Command
from weft.cli.flags.declared import flag_groups
from weft.cli.flags.flags import EngineFlags

SIMILAR = 0.7  # as difflib counts; less similar names would mislead
# The parallel sizes in SGLang's spelling.
ALIASES = {
    "--tp": "--tensor-parallel-size",
    "--pp": "--pipeline-parallel-size",
    "--dp": "--data-parallel-size",
    "--ep": "--enable-expert-parallel",
}
# Other names of commands: from Ollama and from package managers.
COMMAND_ALIASES = {"list": "ls", "rmi": "rm", "remove": "rm", "download": "pull", "up": "serve", "start": "serve"}
# Words that are no commands, and what does the same.
NO_COMMANDS = {
    "update": "git pull in the checkout, then scripts/setup",
    "upgrade": "git pull in the checkout, then scripts/setup",
    "uninstall": "delete the checkout's .venv, ~/.cache/weft and the models that weft ls shows",
    "show": "weft plan NAME describes a model, weft ls lists those here",
    "info": "weft plan NAME describes a model, weft hardware this machine",
    "logs": "weft serve writes its log to standard error",
    "create": "a name for a model: weft serve MODEL --served-model-name NAME",
}

# Weft's flag for names of other programs: llama.cpp (short ones too), Ollama, SGLang, TGI, Transformers.
OTHER_NAMES = {
    "max-model-len": "ctx-size ctx context context-size context-len max-context c num-ctx n-ctx context-length "
    "max-total-tokens max-seq-len max-seq-length",
    "max-tokens": "n n-predict num-predict predict max-new-tokens",
    "tensor-parallel-size": "tp-size num-shard tensor-parallel",
    "pipeline-parallel-size": "pp-size pipeline-parallel",
    "data-parallel-size": "dp-size data-parallel",
    "expert-parallel-size": "ep-size",
    "tensor-split": "ts gpu-split",
    "device-ids": "mg main-gpu base-gpu-id gpu-id gpu gpu-ids",
    "gpus": "num-gpus n-gpus gpu",
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
    "quantization": "quantize quant load-in-4bit load-in-8bit bits",
    "precision": "format weights gguf-type",
    "base-url": "url endpoint-url server",
    "network": "interconnect bandwidth net",
    "chat-template": "chat-template-file",
}
# Explanations for flags of other programs that have no counterpart.
EXPLANATIONS = {
    "the model is the argument, as in {example}": "m model-path model-id model-name hf hf-repo",
    "all layers are on the GPUs; with --device cpu none are": "ngl n-gpu-layers gpu-layers num-gpu",
    "each rank uses its share of the cores; OMP_NUM_THREADS limits its threads": "t threads tb threads-batch",
    "VLLM_LOGGING_LEVEL=DEBUG in the environment logs more": "log-level loglevel v",
    "a server keeps its model until a client sends keep_alive: 0; models of a set have it in their file": "keepalive "
    "keep-alive",
    "2>/dev/null hides the notices; answers and reports go to standard output": "quiet q silent no-progress",
    "Weft computes no LoRA adapters: merge one into its model and serve that": "lora lora-path lora-modules adapter "
    "adapters lora-scaled",
    "for a conversation: weft chat MODEL": "i interactive cnv conversation",
}
# Flags of other commands, and the way to the same thing in commands that start an engine.
IN_ENGINE_COMMANDS = {
    "gpus": "weft {name} uses this machine's GPUs; choose them with --device-ids",
    "nodes": "weft {name} uses this machine's GPUs; weft plan, cost and simulate take --nodes",
    "precision": "weft {name} has --dtype and --quantization",
}
IN_REQUESTS = "it is set in each request; its default is in the model's generation_config.json"
SAMPLING_NAMES = ("temperature", "top-p", "top-k", "min-p", "max-tokens", "stop", "min-tokens", "repetition-penalty")


def unknown_flag(command: Command, option: str) -> str:
    """Text after "unknown flag --x for weft y": a semicolon with a hint, or the command that lists the flags.

    The hint is the first of these that exists: another program's name for a flag of this command, a longer flag of this
    command, the same flag of other commands, a name in other programs, a similar flag of this command.
    """
    name = option.lstrip("-")
    own = [f"--{flag.name}" for flag in command.flags]
    hint = (
        _by_its_other_name(command, name)
        or did_you_mean(option, [flag for flag in own if flag.startswith(f"{option}-")])
        or _in_other_commands(command, name)
        or _in_other_programs(command, name)
        or did_you_mean(option, own)
    )
    return f"; {hint}" if hint else f" (see weft {command.name} --help-all)"


def unknown_command(word: str, commands: Iterable[str]) -> str:
    """Text after "unknown command 'x'"."""
    known = list(commands)
    near = get_close_matches(word, [*known, *COMMAND_ALIASES], n=1, cutoff=SIMILAR)
    alias = COMMAND_ALIASES.get(near[0]) if near else None
    if word in NO_COMMANDS:
        return f"; {NO_COMMANDS[word]}"
    hint = f"did you mean {alias}?" if alias else did_you_mean(word, known)
    return f"; {hint}{' commands' if hint else 'commands'}: {', '.join(known)}"


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """ "did you mean X?" if a known name begins with `word` or is spelled similarly, else ""."""
    plain = {name.lstrip("-"): name for name in known}
    bare = word.lstrip("-")
    longer = [name for name in plain if name.startswith(f"{bare}-")]
    close = longer or get_close_matches(bare, plain, n=1, cutoff=SIMILAR)
    return f"did you mean {plain[close[0]]}?" if close else ""


def _by_its_other_name(command: Command, name: str) -> str:
    """The hint for another program's name of a flag that the command has; "" for any other name."""
    own = {flag.name for flag in command.flags}
    listing = (ours for ours, names in OTHER_NAMES.items() if name in names.split())
    ours = next((ours for ours in listing if ours.removeprefix("no-") in own), "")
    return f"Weft's name for it is --{ours}" if ours else ""


def _in_other_programs(command: Command, name: str) -> str:
    """The hint for a name that other programs use; "" for any other name."""
    ours = _key_of(name, OTHER_NAMES)
    if not ours:
        return _key_of(name, EXPLANATIONS).format(example=command.example)
    return _in_other_commands(command, ours, f"Weft's name for it is --{ours}, which")


def _key_of(name: str, names: Mapping[str, str]) -> str:
    """The first key whose list of names has `name`, else ""."""
    return next((key for key, listed in names.items() if name in listed.split()), "")


def _commands_with_flag(name: str) -> list[str]:
    return [command.name for command in COMMANDS.values() if any(flag.name == name for flag in command.flags)]


def _in_other_commands(command: Command, name: str, subject: str = "it") -> str:
    """The hint for a flag that only other commands have; "" if none has the flag."""
    if flag_groups(EngineFlags)[0] in command.groups and name in IN_ENGINE_COMMANDS:
        return IN_ENGINE_COMMANDS[name].format(name=command.name)
    if command.name == "serve" and name in SAMPLING_NAMES:
        return IN_REQUESTS
    bare = name.removeprefix("no-")
    having = _commands_with_flag(bare)
    if len(having) > 3:
        having = [*having[:3], "others"]
    if len(having) > 1:
        having = [", ".join(having[:-1]), having[-1]]
    return f"{subject} belongs to weft {' and '.join(having)}" if having else ""
