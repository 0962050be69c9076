"""EngineConfig: every option of an engine, and the only place for its defaults.

An option is declared once, as a field with its type, default and help text. The check of its value, its flag and
docs/cli.md come from this declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Flag, auto
from typing import Any, Literal

from weft.checkpoint.quantised.registry import QUANTIZATIONS
from weft.errors import ConfigError

PRODUCT_BACKENDS = ("auto", "own", "humming")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")  # the last two are synonyms

DeviceMap = dict[str, int | str] | str  # modules to devices, or auto, balanced, sequential, ...
DeviceIds = tuple[int | Literal["cpu"], ...]  # GPUs by their numbers, or the CPU
MaxMemory = dict[int | str, int | str]  # of each device to be used: bytes, or a text such as "40GB"


class Scope(Flag):
    """The servers that have an option where several models share an address."""

    ADDRESS = auto()  # the server at the address
    MODELS = auto()  # each model's server, which the address passes it on to
    EACH = auto()  # each model's server; a model may have a value of its own, in the file of the set
    SINGLE = auto()  # none of them: only a server of one model has it


@dataclass(frozen=True, kw_only=True)
class Option:
    """The part of an option's declaration that its field's name, type and default do not say.

    For every caller:

    - `choices`: the values that are allowed; () allows all.
    - `synonyms`: other names of the choices, which the config replaces.
    - `minimum`: the smallest number that is allowed.
    - `scope`: the servers that have an option of the HTTP server where several models share an address.

    For the command line:

    - `help`: the flag's help text.
    - `flag`: the flag's name without dashes, if it is not the field's. It is a keyword of `LLM` too.
    - `short`: a short form, with its dash.
    - `metavar`: stands for the value in the help; by default the last word of the name.
    - `auto`: the flag takes auto and -1 as well, which mean None.
    - `several`: the flag takes one or more values, a tuple. `repeated`: the flag may be given several times, likewise.
    """

    help: str
    choices: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    minimum: int | None = None
    scope: Scope = Scope.SINGLE
    flag: str = ""
    short: str = ""
    metavar: str = ""
    auto: bool = False
    several: bool = False
    repeated: bool = False

    def checked(self, name: str, value: Any) -> Any:
        """Return a value, or the choice that it is a synonym of. Raises ConfigError for a value that is not allowed."""
        if self.choices:
            value = self.synonyms.get(value, value)
            if value not in self.choices:
                known = ", ".join(self.choices)
                raise ConfigError(f"{name} is {value!r}; it must be one of {known}", code="unknown-choice")
        if self.minimum is not None and value < self.minimum:
            raise ConfigError(f"{name} is {value}; it must be {self.minimum} or more", code="below-minimum")
        return value


def option(default: Any = MISSING, *, default_factory: Any = MISSING, **declaration: Any) -> Any:
    """Declare a field of a config with `Option(**declaration)`; an option without a default must be given."""
    metadata = {"option": Option(**declaration)}
    return field(default=default, default_factory=default_factory, metadata=metadata)


def declared_options(config: type[OptionGroup]) -> dict[str, Option]:
    """The options of a config class, by field. A field without a declaration, such as a secret, has no flag."""
    return {declared.name: declared.metadata["option"] for declared in fields(config) if "option" in declared.metadata}


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Base of classes whose fields are options; their values are not checked."""


@dataclass(frozen=True, kw_only=True)
class Options(OptionGroup):
    """Base of config classes, whose fields are options. Raises ConfigError for a value that is not allowed."""

    def __post_init__(self) -> None:
        for name, declared in declared_options(type(self)).items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, declared.checked(name, value))  # the way to set a frozen field


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """The model, its tokenizer, and the formats of its weights."""

    model: str = option(help="the model, if it is not given as the argument")
    tokenizer: str | None = option(
        None, help="directory, file or name to take the tokeniser from, instead of the model's"
    )
    skip_tokenizer_init: bool = option(False, help="load no tokeniser: prompts and answers are token ids")
    revision: str | None = option(None, help="branch, tag or commit of a model on the hub")
    hf_token: str | None = option(
        None, help="token for the hub; HF_TOKEN in the environment is safer, because `ps` shows flags"
    )
    download_dir: str | None = option(None, help="directory for models from the hub, instead of HF_HOME")
    load_format: str = option(
        "auto",
        choices=("auto", "safetensors", "gguf", "dummy", "sharded_state"),
        help="format of the checkpoint; dummy: random weights in the model's shape, read from no file; sharded_state: "
        "a file per rank, as weft shard writes them",
    )
    strict_checkpoint: bool = option(
        False, help="refuse a checkpoint with tensors that nothing reads, instead of a warning that names them"
    )
    model_impl: str = option(
        "auto",
        choices=("auto", "weft", "transformers"),
        synonyms={"vllm": "weft"},  # as a vLLM command line says it
        help="weft: Weft's own models; transformers: Transformers' class for the model, with Weft's products and "
        "attention; auto: that class for architectures that Weft has no model of",
    )
    dtype: str = option(
        "auto",
        choices=("auto", "bfloat16", "float16", "half", "float32", "float"),
        help="number format to compute in; auto: the checkpoint's, or bfloat16 for float32 checkpoints and GGUF",
    )
    quantization: str = option(
        "auto",
        short="-q",
        choices=QUANTIZATIONS,
        help="format of the weights in memory; auto: the checkpoint's, if there are kernels for it; none: 16 or 32 "
        "bits as --dtype says; int8 to q8_0: compress the weights while they load (int4 means q4_1, fp8 a scale per "
        "row), unless the checkpoint has that format; the others are vLLM's names of checkpoint formats and mean "
        "auto, in float32 too",
    )
    seed: int = option(0, minimum=0, help="random seed for requests that give none")
    generation_config: str = option(
        "auto",
        choices=("auto", "vllm"),
        help="auto: use the model's own sampling defaults; vllm: ignore them",
    )
    chat_template: str | None = option(
        None, metavar="FILE", help="a Jinja template, or a file with one, instead of the model's"
    )


@dataclass(frozen=True, kw_only=True)
class PoolingOptions(OptionGroup):
    """Use of the model: for answers, or for embeddings and scores. vLLM's flags; its later versions lack `task`."""

    runner: str = option(
        "auto",
        choices=("auto", "generate", "pooling"),
        help="generate: answers alone; pooling: embeddings or scores alone; auto: what the model's files declare",
    )
    convert: str = option(
        "auto",
        choices=("auto", "none", "embed", "classify"),
        help="let a model that answers embed too, by the state after the last token, or score (classify) by its logits "
        "of yes and no; none: the model as it is",
    )
    task: str = option(
        "auto",
        choices=("auto", "generate", "embed", "score"),
        synonyms={"embedding": "embed", "classify": "score"},
        help="embed is --convert embed, score is --convert classify, generate is --runner generate",
    )
    hf_overrides: dict[str, Any] | None = option(
        None,
        metavar="JSON",
        help='\'{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"], '
        '"is_original_qwen3_reranker": true}\', by which vLLM serves Qwen3-Reranker, is --convert classify; '
        '{"is_matryoshka": true} changes nothing; others are refused',
    )


@dataclass(frozen=True, kw_only=True)
class LayoutOptions(OptionGroup):
    """The ranks, each one's share of the model, and their devices. The planner chooses what is left open."""

    plan: str | None = option(
        None, metavar="FILE", help="run the plan that weft plan MODEL --json printed; MODEL may be left out"
    )
    objective: str = option(
        "throughput",
        choices=("throughput", "latency"),
        help="what the planner makes of the GPUs: most tokens per second for all requests together, or the fastest "
        "answer to one user, which is the default of weft run and chat",
    )
    tensor_parallel_size: int | None = option(
        None, minimum=1, short="-tp", help="number of ranks that share each layer"
    )
    tensor_split: tuple[float, ...] | None = option(
        None, metavar="2,1", help="uneven tensor parallelism: each rank's share, rounded to whole KV groups"
    )
    pipeline_parallel_size: int | None = option(
        None, minimum=1, short="-pp", help="number of pipeline stages, each with some of the layers"
    )
    pipeline_split: tuple[int, ...] | None = option(None, metavar="20,12", help="layers per stage")
    data_parallel_size: int | None = option(
        None,
        minimum=1,
        short="-dp",
        help="number of replicas: engines with the whole model, each on its own GPUs or its share of the cores; with "
        "--enable-expert-parallel: of attention groups of one engine, which share one set of experts",
    )
    enable_expert_parallel: bool = option(
        False, short="-ep", help="deal whole experts out to ranks, instead of cutting every expert into slices"
    )
    expert_parallel_size: int | None = option(
        None,
        minimum=1,
        help="number of parts into which the experts are dealt; the ranks of a part divide each expert's columns. "
        "Default: tensor-parallel size times data-parallel size",
    )
    device_map: DeviceMap | None = option(
        None,
        metavar="MAP",
        help="the device of each module, as in Transformers: a JSON or YAML file or inline JSON from modules to GPU "
        "numbers, or one of auto balanced balanced_low_0 sequential",
    )
    executor: str | None = option(
        None,
        flag="distributed-executor-backend",
        choices=("processes", "inline", "ray"),
        synonyms={"mp": "processes", "uni": "inline"},  # vLLM's names
        help="mp or processes: a process per rank; uni or inline: a thread per rank; ray: an actor per rank, on a Ray "
        "cluster. Default: a thread for one rank, processes for several and in weft serve",
    )
    device: str = option("auto", choices=("auto", "cpu", "cuda"), help="auto: GPUs if there are any")
    device_ids: DeviceIds | None = option(
        None,
        metavar="0,1",
        help="the GPU of each rank, numbered among the visible ones; cpu for a pipeline stage on the CPU",
    )


@dataclass(frozen=True, kw_only=True)
class NodeOptions(OptionGroup):
    """Several nodes that run one engine: one command on each."""

    nnodes: int | None = option(
        None, minimum=1, help="number of nodes that run the engine; `weft serve` takes torchrun's GROUP_WORLD_SIZE too"
    )
    node_rank: int | None = option(
        None, minimum=0, help="number of this node; node 0, the head, answers requests (GROUP_RANK counts too)"
    )
    master_addr: str | None = option(
        None, metavar="ADDRESS", help="address of node 0 that the other nodes reach (MASTER_ADDR counts too)"
    )
    master_port: int | None = option(
        None, minimum=1, help="port of node 0 at which the other nodes join (default: 29501; MASTER_PORT counts too)"
    )
    headless: bool = option(False, help="run ranks only, for the head at --master-addr: no server, no core")
    start_timeout: int = option(
        600, minimum=1, metavar="SECONDS", help="time for all nodes to join; later it is said which are missing"
    )
    cluster_key_file: str | None = option(
        None,
        metavar="FILE",
        help="file with the key that all nodes have, which only you may read; else WEFT_CLUSTER_KEY of the environment",
    )
    cluster_cert_file: str | None = option(
        None,
        metavar="FILE",
        help="certificate and key of this node, from weft cluster cert: connections between nodes run inside TLS",
    )
    allow_public: bool = option(
        False, help="let nodes connect at addresses outside the private, link-local and loopback ranges"
    )


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(OptionGroup):
    """Memory of the devices, the KV cache, and the kernels that read it."""

    gpu_memory_utilization: tuple[float, ...] = option(
        (0.9,), help="share of each GPU's memory to use; a list gives one share per rank"
    )
    max_memory: MaxMemory | None = option(
        None,
        metavar="0=40GB,1=40GB",
        help="limit for the memory of each device; a GPU that is not named is not used, as in accelerate. With "
        "cpu=SIZE: layers that no GPU has room for run on the CPU",
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        minimum=1,
        help="size of the KV cache on each GPU (on a CPU: of each rank), instead of measuring; G is GiB, g is GB",
    )
    kv_cache_dtype: str = option(
        "auto",
        choices=KV_CACHE_DTYPES,
        help="auto: the format of --dtype; fp8: 8 bits, on GPUs that have FP8",
    )
    block_size: int = option(16, minimum=1, help="tokens per KV block")
    enable_prefix_caching: bool = option(True, help="reuse the KV blocks of prompts that begin with the same tokens")
    # plan.backends checks the name, which may be vLLM's, in any case.
    attention_backend: str = option(
        "auto",
        help="auto (the fastest available), cpu (compiled), triton, flashinfer or varlen (GPUs; varlen is torch's "
        "FlashAttention, for prompts) or torch (slow, runs everywhere); vLLM's names work too",
    )
    product_backend: str = option(
        "auto",
        choices=PRODUCT_BACKENDS,
        help="products with quantised weights on GPUs: own (Weft's kernels), humming (the library humming-kernels, an "
        "extra) or auto (own until both are measured)",
    )
    deterministic: bool = option(
        False,
        help="the same tokens for a request whatever else is in the batch, by kernels that sum in one order (on CPUs; "
        "VLLM_BATCH_INVARIANT=1 counts too)",
    )
    enforce_eager: bool = option(False, help="use no CUDA graphs")


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions(OptionGroup):
    """Limits of requests and steps, and the order of requests. Lengths are in tokens."""

    max_model_len: int | None = option(
        None,
        minimum=1,
        auto=True,
        help="maximum tokens of prompt and answer together; auto: as many as fit",
    )
    max_num_seqs: int = option(256, minimum=1, help="maximum number of requests that run at once")
    max_num_batched_tokens: int | None = option(
        None,
        minimum=1,
        help="maximum tokens of one step. Default: chosen for the model and its devices, so that no answer waits long "
        "for the prompts of others",
    )
    max_num_queued_reqs: int = option(
        1024, minimum=1, help="maximum number of waiting requests; further ones get status 429"
    )
    scheduling_policy: str = option(
        "fcfs",
        choices=("fcfs", "priority", "fair"),
        help="order in which requests start; fair: keys of --api-key-file share the engine by their weights",
    )
    speculative_config: dict[str, Any] | None = option(
        None,
        short="-sc",
        metavar="JSON",
        help='speculative decoding: {"method": "ngram"} or {"model": NAME} of a draft model; also '
        "num_speculative_tokens, prompt_lookup_min, prompt_lookup_max",
    )
    async_scheduling: bool | None = option(
        None, help="schedule a step before the previous one's tokens are known (default: on for GPUs)"
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Options, ModelOptions, PoolingOptions, LayoutOptions, NodeOptions, MemoryOptions, SchedulingOptions):
    """Options of an engine. The flag of `max_model_len` is `--max-model-len`; None leaves the decision to the planner.

    Raises ConfigError for a value that is not allowed.
    """


DEFAULT_CONFIG = EngineConfig(model="")  # all defaults
