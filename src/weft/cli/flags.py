"""Every flag as data. Names and meanings are vLLM's where vLLM has one; defaults live in the configs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from weft.cli import values
from weft.client.arguments import EXECUTORS
from weft.config import EngineConfig
from weft.core.params import SamplingParams
from weft.formats.schemes import QUANTIZATIONS
from weft.serving.options import ServeOptions


@dataclass(frozen=True, kw_only=True)
class Flag:
    """`--name VALUE`, or with `parse` None the pair `--name` and `--no-name`. `field` is the config's field
    where it is not the name's; `several`: takes one or more values; `repeated`: may be given again. `default` is
    told in the help where no config holds it."""

    name: str
    help: str
    parse: Callable[[str], Any] | None = str
    field: str = ""
    short: str = ""
    choices: tuple[str, ...] = ()
    metavar: str = ""
    several: bool = False
    repeated: bool = False
    default: Any = None

    @property
    def option(self) -> str:
        return "--" + self.name

    @property
    def dest(self) -> str:
        return self.field or self.name.replace("-", "_")


MODEL = (
    Flag(name="model", help="the model, where it is not given as an argument"),
    Flag(name="tokenizer", help="take the tokeniser from this directory, file or name instead of the model's"),
    Flag(name="skip-tokenizer-init", parse=None, help="no tokeniser: prompts and answers are token ids"),
    Flag(name="revision", help="branch, tag or commit of a model on the hub"),
    Flag(name="hf-token", help="token for the hub; better HF_TOKEN in the environment, for flags show in `ps`"),
    Flag(name="download-dir", help="where models from the hub are kept, instead of HF_HOME"),
    Flag(
        name="load-format",
        choices=("auto", "safetensors", "gguf", "dummy"),
        help="what the checkpoint is; dummy: random weights of the model's shape, no files read",
    ),
    Flag(
        name="dtype",
        choices=("auto", "bfloat16", "float16", "half", "float32", "float"),
        help="what to compute in; auto: the checkpoint's, bfloat16 for float32 checkpoints and GGUF",
    ),
    Flag(
        name="quantization",
        short="-q",
        choices=QUANTIZATIONS,
        help="how to hold the weights; auto: as the checkpoint does, where there are kernels for that; none: in 16 or "
        "32 bits as --dtype says; int8 to q8_0 are made while loading, int4 being q4_1; the others are auto in vLLM's "
        "words, for a checkpoint of that kind",
    ),
    Flag(name="seed", parse=values.size, help="start of every random stream whose request gives no seed"),
    Flag(
        name="generation-config",
        choices=("auto", "vllm"),
        help="auto: the model's own sampling defaults; vllm: none",
    ),
    Flag(name="chat-template", metavar="FILE", help="a Jinja template, or a file with one, instead of the model's"),
)
LAYOUT = (
    Flag(name="plan", metavar="FILE", help="carry out what weft plan MODEL --json printed; MODEL may be left out"),
    Flag(name="tensor-parallel-size", short="-tp", parse=values.size, help="ranks that cut each layer among them"),
    Flag(
        name="tensor-split",
        parse=values.decimals,
        metavar="2,1",
        help="uneven tensor parallel: each rank's weight, rounded to whole KV groups",
    ),
    Flag(name="pipeline-parallel-size", short="-pp", parse=values.size, help="stages that hold the layers in turn"),
    Flag(name="pipeline-split", parse=values.integers, metavar="20,12", help="layers per stage"),
    Flag(name="device-map", parse=values.device_map, metavar="MAP", help=values.DEVICE_MAP),
    Flag(
        name="distributed-executor-backend",
        field="executor",
        choices=(*EXECUTORS, *EXECUTORS.values()),
        help="mp or processes: a process per rank; uni or inline: ranks are threads. Left out: threads for one "
        "rank, processes for more and in weft serve",
    ),
    Flag(name="device", choices=("auto", "cpu", "cuda"), help="auto: GPUs where there are any"),
    Flag(name="device-ids", parse=values.integers, metavar="0,1", help="each rank's GPU, among the visible ones"),
)
MEMORY = (
    Flag(
        name="gpu-memory-utilization",
        parse=values.decimals,
        help="share of each GPU's memory to use; a list gives one per rank",
    ),
    Flag(name="max-memory", parse=values.max_memory, metavar="0=40GB,1=40GB", help=values.MAX_MEMORY),
    Flag(
        name="kv-cache-memory-bytes",
        parse=values.size,
        help="size of the KV cache on each GPU (on a CPU: of each rank), instead of measuring; G means GiB, g means GB",
    ),
    Flag(
        name="kv-cache-dtype",
        choices=("auto", "fp8", "fp8_e4m3"),
        help="auto: as computed in (--dtype); fp8: in 8 bits, on GPUs that have them",
    ),
    Flag(name="block-size", parse=values.size, help="tokens per KV block"),
    Flag(name="enable-prefix-caching", parse=None, help="reuse the KV blocks of prompts that begin alike"),
    Flag(
        name="attention-backend",
        help="auto (the fastest there is), cpu (compiled), triton, flashinfer or varlen (GPUs; the last is torch's "
        "FlashAttention, for prompts) or torch (slow, right everywhere); vLLM's names do too",
    ),
    Flag(name="enforce-eager", parse=None, help="no CUDA graphs"),
)
SCHEDULING = (
    Flag(name="max-model-len", parse=values.length, help="most tokens of prompt and answer; auto: what fits"),
    Flag(name="max-num-seqs", parse=values.size, help="most requests that run at once"),
    Flag(
        name="max-num-batched-tokens",
        parse=values.size,
        help="most tokens of one step; left out: chosen for the model and its devices, so that answers never wait long "
        "for others' prompts",
    ),
    Flag(name="max-num-queued-reqs", parse=values.size, help="most requests that wait; over it: 429"),
    Flag(name="scheduling-policy", choices=("fcfs", "priority"), help="order in which requests start"),
    Flag(
        name="speculative-config",
        short="-sc",
        parse=values.mapping,
        metavar="JSON",
        help='guess tokens ahead, and confirm many in one step: {"method": "ngram"} or {"model": NAME}; also '
        "num_speculative_tokens, prompt_lookup_min, prompt_lookup_max",
    ),
    Flag(
        name="async-scheduling",
        parse=None,
        help="schedule a step before the last one's tokens are known; left out: on GPUs",
    ),
)
ENGINE = (("model", MODEL), ("layout", LAYOUT), ("memory", MEMORY), ("scheduling", SCHEDULING))

SERVER = (
    Flag(name="host", help="address to listen on; 0.0.0.0 for all"),
    Flag(name="port", parse=values.size, help="port to listen on; 0 picks a free one"),
    Flag(name="uds", metavar="PATH", help="listen on this Unix socket instead"),
    Flag(
        name="api-key",
        repeated=True,
        help="key that clients must send; better VLLM_API_KEY in the environment, for flags show in `ps`",
    ),
    Flag(name="served-model-name", several=True, help="names that the API knows the model by, instead of MODEL"),
    Flag(name="root-path", help="path prefix that a proxy strips"),
    Flag(name="ssl-keyfile", metavar="FILE", help="key for HTTPS"),
    Flag(name="ssl-certfile", metavar="FILE", help="certificate for HTTPS"),
    Flag(name="allowed-origins", parse=values.words, metavar="LIST", help="origins that browsers may call from"),
    Flag(name="shutdown-timeout", parse=float, metavar="S", help="seconds that running requests get after SIGTERM"),
    Flag(
        name="max-body-bytes",
        parse=values.size,
        help="longest request body (default: 8 MiB, or 16 bytes per token of the model's length if more)",
    ),
    Flag(
        name="keepalive-interval",
        parse=float,
        metavar="S",
        help="seconds between keep-alive messages while no token is sent",
    ),
    Flag(
        name="progress-timeout",
        parse=float,
        metavar="S",
        help="/health fails if requests run but no step has finished for this many seconds",
    ),
    Flag(name="disable-log-stats", parse=None, help="no line of statistics every ten seconds"),
    Flag(name="enable-request-id-headers", parse=None, help="send X-Request-Id with every answer"),
    Flag(name="response-role", help="role of the answers"),
    Flag(
        name="default-chat-template-kwargs",
        parse=values.mapping,
        metavar="JSON",
        help="variables for the chat template where a request gives none",
    ),
)
SAMPLING = (
    Flag(name="temperature", parse=float, help="0 takes the likeliest token"),
    Flag(name="top-p", parse=float, help="keep the likeliest tokens that make up this probability"),
    Flag(name="top-k", parse=int, help="keep this many of the likeliest tokens; 0: all"),
    Flag(name="min-p", parse=float, help="keep tokens at least this likely, relative to the likeliest"),
    Flag(name="repetition-penalty", parse=float, help="above 1: fewer tokens that were there before"),
    Flag(name="presence-penalty", parse=float, help="above 0: fewer tokens that were in the answer"),
    Flag(name="frequency-penalty", parse=float, help="above 0: the fewer, the more often they were"),
    Flag(
        name="max-tokens",
        parse=values.length,
        help="longest answer in tokens; auto: up to the model's length (default: 512 in weft run, 200 in weft demo, "
        "auto in weft chat)",
    ),
    Flag(name="min-tokens", parse=values.size, help="shortest answer in tokens"),
    Flag(name="stop", repeated=True, metavar="TEXT", help="end the answer before this text"),
    Flag(name="ignore-eos", parse=None, help="go on after the model's end token"),
)


# What a flag's field is where it is not given.
DEFAULTS = {it.name: it.default for it in (*fields(ServeOptions), *fields(EngineConfig)) if it.default is not MISSING}


def told(arguments: Namespace, flags: tuple[Flag, ...]) -> dict[str, Any]:
    """What was said with those flags, by field."""
    return {flag.dest: getattr(arguments, flag.dest) for flag in flags if hasattr(arguments, flag.dest)}


def engine_config(arguments: Namespace, **ours: Any) -> EngineConfig:
    """The config of an engine; `ours` are a command's own defaults for what was not said. Raises ConfigError for
    a value out of range."""
    from weft.plan.layout import check_config  # not for --help

    said = told(arguments, tuple(flag for _, group in ENGINE for flag in group))
    if "executor" in said:
        said["executor"] = EXECUTORS.get(said["executor"], said["executor"])
    config = EngineConfig(**{**ours, **said})
    check_config(config)
    return config


def serve_options(arguments: Namespace, environment: Mapping[str, str]) -> ServeOptions:
    """The options of a server."""
    said = told(arguments, SERVER)
    for name in ("api_key", "served_model_name"):
        if name in said:
            said[name] = tuple(said[name])
    if "api_key" not in said and environment.get("VLLM_API_KEY"):
        said["api_key"] = (environment["VLLM_API_KEY"],)
    return ServeOptions(**said)


def sampling(arguments: Namespace, **ours: Any) -> dict[str, Any]:
    """What was said about sampling, over a command's own defaults; the engine's seed is the request's too.

    Raises RequestError at once for a value out of range, not when the engine has started.
    """
    said = told(arguments, SAMPLING)
    if "stop" in said:
        said["stop"] = tuple(said["stop"])
    if hasattr(arguments, "seed"):
        said["seed"] = arguments.seed
    chosen = {**ours, **said}
    SamplingParams(**chosen)
    return chosen
