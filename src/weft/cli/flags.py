"""Flags as data. Names and meanings are vLLM's if vLLM has the flag; defaults are in the configs."""

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
    """`--name VALUE`, or if `parse` is None, the pair `--name` and `--no-name`.

    `field` is the config's field if it differs from the name. A flag with `several` takes one or more values; a flag
    with `repeated` may be given several times. `default` is for a flag whose default is in no config.
    """

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
    Flag(name="model", help="the model, if it is not given as the argument"),
    Flag(name="tokenizer", help="directory, file or name to take the tokeniser from, instead of the model's"),
    Flag(name="skip-tokenizer-init", parse=None, help="load no tokeniser: prompts and answers are token ids"),
    Flag(name="revision", help="branch, tag or commit of a model on the hub"),
    Flag(name="hf-token", help="token for the hub; HF_TOKEN in the environment is safer, because `ps` shows flags"),
    Flag(name="download-dir", help="directory for models from the hub, instead of HF_HOME"),
    Flag(
        name="load-format",
        choices=("auto", "safetensors", "gguf", "dummy"),
        help="format of the checkpoint; dummy: random weights in the model's shape, read from no file",
    ),
    Flag(
        name="dtype",
        choices=("auto", "bfloat16", "float16", "half", "float32", "float"),
        help="number format to compute in; auto: the checkpoint's, or bfloat16 for float32 checkpoints and GGUF",
    ),
    Flag(
        name="quantization",
        short="-q",
        choices=QUANTIZATIONS,
        help="format of the weights in memory; auto: the checkpoint's, if there are kernels for it; none: 16 or 32 "
        "bits as --dtype says; int8 to q8_0: compress the weights while they load (int4 means q4_1); the others are "
        "vLLM's names of checkpoint formats and mean auto",
    ),
    Flag(name="seed", parse=values.size, help="random seed for requests that give none"),
    Flag(
        name="generation-config",
        choices=("auto", "vllm"),
        help="auto: use the model's own sampling defaults; vllm: ignore them",
    ),
    Flag(name="chat-template", metavar="FILE", help="a Jinja template, or a file with one, instead of the model's"),
)
LAYOUT = (
    Flag(name="plan", metavar="FILE", help="run the plan that weft plan MODEL --json printed; MODEL may be left out"),
    Flag(name="tensor-parallel-size", short="-tp", parse=values.size, help="number of ranks that share each layer"),
    Flag(
        name="tensor-split",
        parse=values.decimals,
        metavar="2,1",
        help="uneven tensor parallelism: each rank's share, rounded to whole KV groups",
    ),
    Flag(
        name="pipeline-parallel-size",
        short="-pp",
        parse=values.size,
        help="number of pipeline stages, each with some of the layers",
    ),
    Flag(name="pipeline-split", parse=values.integers, metavar="20,12", help="layers per stage"),
    Flag(name="device-map", parse=values.device_map, metavar="MAP", help=values.DEVICE_MAP),
    Flag(
        name="distributed-executor-backend",
        field="executor",
        choices=(*EXECUTORS, *EXECUTORS.values()),
        help="mp or processes: a process per rank; uni or inline: a thread per rank. Default: a thread for one rank, "
        "processes for several and in weft serve",
    ),
    Flag(name="device", choices=("auto", "cpu", "cuda"), help="auto: GPUs if there are any"),
    Flag(
        name="device-ids",
        parse=values.integers,
        metavar="0,1",
        help="the GPU of each rank, numbered among the visible ones",
    ),
)
MEMORY = (
    Flag(
        name="gpu-memory-utilization",
        parse=values.decimals,
        help="share of each GPU's memory to use; a list gives one share per rank",
    ),
    Flag(name="max-memory", parse=values.max_memory, metavar="0=40GB,1=40GB", help=values.MAX_MEMORY),
    Flag(
        name="kv-cache-memory-bytes",
        parse=values.size,
        help="size of the KV cache on each GPU (on a CPU: of each rank), instead of measuring; G is GiB, g is GB",
    ),
    Flag(
        name="kv-cache-dtype",
        choices=("auto", "fp8", "fp8_e4m3"),
        help="auto: the format of --dtype; fp8: 8 bits, on GPUs that have FP8",
    ),
    Flag(name="block-size", parse=values.size, help="tokens per KV block"),
    Flag(
        name="enable-prefix-caching", parse=None, help="reuse the KV blocks of prompts that begin with the same tokens"
    ),
    Flag(
        name="attention-backend",
        help="auto (the fastest available), cpu (compiled), triton, flashinfer or varlen (GPUs; varlen is torch's "
        "FlashAttention, for prompts) or torch (slow, runs everywhere); vLLM's names work too",
    ),
    Flag(name="enforce-eager", parse=None, help="use no CUDA graphs"),
)
SCHEDULING = (
    Flag(
        name="max-model-len",
        parse=values.length,
        help="maximum tokens of prompt and answer together; auto: as many as fit",
    ),
    Flag(name="max-num-seqs", parse=values.size, help="maximum number of requests that run at once"),
    Flag(
        name="max-num-batched-tokens",
        parse=values.size,
        help="maximum tokens of one step. Default: chosen for the model and its devices, so that no answer waits long "
        "for the prompts of others",
    ),
    Flag(
        name="max-num-queued-reqs",
        parse=values.size,
        help="maximum number of waiting requests; further ones get status 429",
    ),
    Flag(name="scheduling-policy", choices=("fcfs", "priority"), help="order in which requests start"),
    Flag(
        name="speculative-config",
        short="-sc",
        parse=values.mapping,
        metavar="JSON",
        help='speculative decoding: {"method": "ngram"} or {"model": NAME} of a draft model; also '
        "num_speculative_tokens, prompt_lookup_min, prompt_lookup_max",
    ),
    Flag(
        name="async-scheduling",
        parse=None,
        help="schedule a step before the previous one's tokens are known (default: on for GPUs)",
    ),
)
ENGINE = (("model", MODEL), ("layout", LAYOUT), ("memory", MEMORY), ("scheduling", SCHEDULING))

SERVER = (
    Flag(name="host", help="address to listen on; 0.0.0.0 means all"),
    Flag(name="port", parse=values.size, help="port to listen on; 0 picks a free one"),
    Flag(name="uds", metavar="PATH", help="listen on this Unix socket instead"),
    Flag(
        name="api-key",
        repeated=True,
        help="key that clients must send; VLLM_API_KEY in the environment is safer, because `ps` shows flags",
    ),
    Flag(name="served-model-name", several=True, help="names of the model in the API, instead of MODEL"),
    Flag(name="root-path", help="path prefix that a reverse proxy removes"),
    Flag(name="ssl-keyfile", metavar="FILE", help="key for HTTPS"),
    Flag(name="ssl-certfile", metavar="FILE", help="certificate for HTTPS"),
    Flag(
        name="allowed-origins", parse=values.words, metavar="LIST", help="origins from which browsers may call the API"
    ),
    Flag(
        name="shutdown-timeout", parse=float, metavar="S", help="seconds that running requests have left after SIGTERM"
    ),
    Flag(
        name="max-body-bytes",
        parse=values.size,
        help="maximum size of a request body (default: 8 MiB, or 16 bytes per token of --max-model-len if more)",
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
    Flag(
        name="refuse-while-asleep",
        parse=None,
        help="answer requests with status 503 while the engine sleeps, instead of letting them wait",
    ),
    Flag(name="profile-directory", metavar="DIR", help="where POST /start_profile writes traces"),
    Flag(name="disable-log-stats", parse=None, help="do not log statistics every ten seconds"),
    Flag(name="enable-request-id-headers", parse=None, help="send the header X-Request-Id with every answer"),
    Flag(name="response-role", help="role of the answers' messages"),
    Flag(
        name="default-chat-template-kwargs",
        parse=values.mapping,
        metavar="JSON",
        help="variables of the chat template, for requests that give none",
    ),
)
SAMPLING = (
    Flag(name="temperature", parse=float, help="0 always takes the most likely token"),
    Flag(name="top-p", parse=float, help="sample only from the most likely tokens that together have this probability"),
    Flag(name="top-k", parse=int, help="sample only from this many of the most likely tokens; 0: from all"),
    Flag(
        name="min-p", parse=float, help="drop tokens less likely than this share of the most likely one's probability"
    ),
    Flag(
        name="repetition-penalty",
        parse=float,
        help="above 1: fewer tokens that are already in the prompt or the answer",
    ),
    Flag(name="presence-penalty", parse=float, help="above 0: fewer tokens that are already in the answer"),
    Flag(name="frequency-penalty", parse=float, help="above 0: fewer tokens that are in the answer often"),
    Flag(
        name="max-tokens",
        parse=values.length,
        help="maximum tokens of the answer; auto: up to --max-model-len (default: 512 in weft run, 200 in weft demo, "
        "auto in weft chat)",
    ),
    Flag(name="min-tokens", parse=values.size, help="minimum tokens of the answer"),
    Flag(name="stop", repeated=True, metavar="TEXT", help="end the answer before this text"),
    Flag(name="ignore-eos", parse=None, help="continue after the model's end token"),
)


# Defaults of the configs, by field.
DEFAULTS = {
    option.name: option.default
    for option in (*fields(ServeOptions), *fields(EngineConfig))
    if option.default is not MISSING
}


def given_values(arguments: Namespace, flags: tuple[Flag, ...]) -> dict[str, Any]:
    """Values of the flags that were given, by field."""
    return {flag.dest: getattr(arguments, flag.dest) for flag in flags if hasattr(arguments, flag.dest)}


def engine_config(arguments: Namespace, **ours: Any) -> EngineConfig:
    """The config of an engine; `ours` are the command's own defaults for flags that were not given.

    Raises ConfigError for a value out of range.
    """
    from weft.plan.layout import check_config  # not for --help

    given = given_values(arguments, tuple(flag for _, group in ENGINE for flag in group))
    if "executor" in given:
        given["executor"] = EXECUTORS.get(given["executor"], given["executor"])
    config = EngineConfig(**{**ours, **given})
    check_config(config)
    return config


def serve_options(arguments: Namespace, environment: Mapping[str, str]) -> ServeOptions:
    """The options of a server, and its admin key, WEFT_ADMIN_KEY of the environment.

    The environment's VLLM_API_KEY counts if no --api-key is given.
    """
    given = given_values(arguments, SERVER)
    for name in ("api_key", "served_model_name"):
        if name in given:
            given[name] = tuple(given[name])
    if "api_key" not in given and environment.get("VLLM_API_KEY"):
        given["api_key"] = (environment["VLLM_API_KEY"],)
    return ServeOptions(**given, admin_key=environment.get("WEFT_ADMIN_KEY"))


def sampling_options(arguments: Namespace, **ours: Any) -> dict[str, Any]:
    """Sampling parameters by name: the flags that were given, else the command's own defaults `ours`.

    The engine's --seed is the request's seed too. Raises RequestError for a value out of range, before an engine
    starts.
    """
    given = given_values(arguments, SAMPLING)
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    if hasattr(arguments, "seed"):
        given["seed"] = arguments.seed
    options = {**ours, **given}
    SamplingParams(**options)
    return options
