"""Flags of weft plan: the hardware, the workload, and the parts of the layout that are fixed."""

from __future__ import annotations

from argparse import ArgumentTypeError
from math import inf

from weft.checkpoint.quantised.schemes import ONLINE_QUANTIZATIONS
from weft.cli.flags import values
from weft.cli.flags.flags import Flag, engine_flag
from weft.config import EngineConfig
from weft.http.options import ServeOptions

# The same as in planner.question and planner.profiles, which are too slow to import for --help.
OBJECTIVES = ("throughput", "latency", "cost")
ENGINES = ("weft", "vllm", "trtllm", "sglang", "llama.cpp", "transformers")
# The same as in export.targets, and what each writes.
TARGETS = {
    "weft": "weft serve for each replica",
    "vllm": "vllm serve, and the start of Ray on every node",
    "transformers": "a Python script with device_map and max_memory",
    "ollama": "a Modelfile, and the commands of its servers",
    "infernet": "the environment and engine configuration of a node",
    "systemd": "a service and its socket for each replica",
    "nginx": "a load balancer with TLS",
    "kuberay": "a RayService and a RayJob for Kubernetes",
    "compose": "a Docker Compose file",
}


def concurrency(text: str) -> int | None:
    """Number of requests at once; None for max, as many as fit."""
    return None if text.lower() == "max" else values.at_least(1)(text)


def price(text: str) -> float:
    """A price in dollars, above 0."""
    try:
        dollars = float(text.removeprefix("$"))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a price in dollars, as in 2.49") from None
    if not 0 < dollars < inf:
        raise ArgumentTypeError(f"{text!r} is not a price in dollars: it must be above 0")
    return dollars


def share(text: str) -> float:
    """A share above 0, up to 1."""
    try:
        part = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a share, as in 0.9") from None
    if not 0 < part <= 1:
        raise ArgumentTypeError(f"{text!r} is not a share: it must be above 0 and at most 1")
    return part


def rate(text: str) -> float:
    """A rate in requests per second, above 0."""
    if "," in text:
        raise ArgumentTypeError(f"{text!r} is several rates; weft simulate takes several with --rates")
    try:
        per_second = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a rate in requests per second, as in 4 or 0.5") from None
    if not 0 < per_second < inf:
        raise ArgumentTypeError(f"{text!r} is not a rate in requests per second: it must be above 0")
    return per_second


HARDWARE = (
    Flag(
        name="gpus",
        metavar="4xRTX4090",
        help="GPUs, as in 8xH100@nvlink or 1xRTX4090+1xRTX3090, of several machines as in 2x8xH100, or a YAML file "
        "that describes any hardware (docs/hardware.md). Default: this machine's, or its CPU",
    ),
    Flag(name="nodes", metavar="2x8xH100", help="several machines, or 1x8xH100+2x4xA100"),
    Flag(
        name="network",
        metavar="400Gb",
        help="network of each machine: RDMA, or Ethernet up to 25Gb; else as in 100Gb-ethernet, 10Gb-rdma",
    ),
    Flag(
        name="cluster",
        metavar="FILE.yaml",
        help="the machines and the network that the last start on several nodes has measured; they are written to this "
        "file, which --gpus takes",
    ),
    Flag(name="refresh-hardware", parse=None, help="measure this machine again and ignore cached figures"),
    Flag(name="price", parse=price, metavar="DOLLARS", help="rent of one GPU per hour"),
)
LAYOUT = (
    Flag(
        name="precision",
        help="bf16 fp16 fp32 fp8 int8 int4 mxfp4 nvfp4 or a GGUF type; several with commas are "
        "compared. Default: the precision in which the model is published",
    ),
    Flag(
        name="quantization",
        short="-q",
        choices=tuple(ONLINE_QUANTIZATIONS),
        help="instead of --precision: the weights as weft serve with this flag compresses them; int4 means q4_1",
    ),
    Flag(
        name="kv-cache-dtype",
        config_default=EngineConfig.kv_cache_dtype,
        help="precision of the KV cache; auto: 16 bits, or the engine's choice for the model",
    ),
    Flag(
        name="tensor-parallel-size", short="-tp", parse=values.at_least(1), help="number of ranks that share each layer"
    ),
    Flag(
        name="pipeline-parallel-size",
        short="-pp",
        parse=values.at_least(1),
        help="number of pipeline stages, each with some of the layers",
    ),
    Flag(
        name="data-parallel-size",
        short="-dp",
        parse=values.at_least(1),
        help="number of independent replicas of the model; with --enable-expert-parallel: of attention groups, which "
        "share one set of experts",
    ),
    Flag(
        name="enable-expert-parallel",
        short="-ep",
        parse=None,
        help="deal whole experts out to ranks, instead of cutting every expert into slices",
    ),
    Flag(
        name="expert-parallel-size",
        parse=values.at_least(1),
        help="number of parts into which the experts are dealt; the ranks of a part divide each expert's columns. "
        "Default: tensor-parallel size times data-parallel size",
    ),
    Flag(name="tensor-split", parse=values.decimals, metavar="2,1", help="share of each tensor-parallel rank"),
    engine_flag("pipeline-split"),
    engine_flag("device-map"),
    engine_flag("max-memory"),
    Flag(
        name="gpu-memory-utilization",
        parse=share,
        metavar="SHARE",
        help="share of each GPU's memory that the engine "
        "may use. Default: the engine's own, or more if a single request needs more",
    ),
    Flag(name="max-model-len", parse=values.at_least(1), help="tokens of the longest request that must fit"),
    Flag(
        name="max-num-batched-tokens",
        parse=values.at_least(1),
        help="maximum tokens of one step. Default: the engine's own; weft chooses it for the model and the devices",
    ),
)
MAX_NUM_SEQS = Flag(
    name="max-num-seqs",
    parse=values.at_least(1),
    help="maximum number of requests that run at once in a replica. Default: the engine's own",
)
ENGINE = (
    MAX_NUM_SEQS,
    Flag(
        name="speculative-config",
        short="-sc",
        parse=values.mapping,
        metavar="JSON",
        help='count the memory of speculative decoding, as in weft serve: {"method": "ngram"} or {"model": NAME}; its '
        "gain in speed is not predicted",
    ),
    engine_flag("deterministic"),
)
LOAD = (
    Flag(name="engine", choices=ENGINES, default="weft", help="the engine whose speed and memory are predicted"),
    Flag(name="objective", choices=OBJECTIVES, default="throughput", help="the figure by which layouts are ranked"),
    Flag(
        name="concurrency", parse=concurrency, metavar="N|max", help="number of requests at once; max: as many as fit"
    ),
    Flag(
        name="input-len",
        parse=values.at_least(1),
        help="tokens of a prompt. Default: 1024, or fewer if the model's context is short",
    ),
    Flag(
        name="output-len",
        parse=values.at_least(1),
        help="tokens of an answer. Default: 1024, or fewer if the model's context is short",
    ),
)
RATE = Flag(name="rate", parse=rate, metavar="R", help="requests that arrive per second, at random times")
USERS = Flag(
    name="users",
    parse=values.at_least(1),
    metavar="N",
    help="instead of --rate: number of users, each of whom asks, waits for the answer and asks again",
)
THINK = Flag(name="think", metavar="TIME", help="time between an answer and the user's next question, as in 5s")
SLO = Flag(
    name="slo",
    metavar="TARGETS",
    help="latency targets for ttft, tpot, itl, e2e or queue, as in ttft_p95=1s,tpot_p95=50ms",
)
PROMISE = (RATE, USERS, THINK, SLO)  # a load and a promise: the plan is simulated
ANSWER = (
    Flag(
        name="check",
        metavar="CLAIM",
        help='judge a claim, as in "Qwen2.5-72B Q4 on 2xRTX4090, 30-45 tok/s" (docs/planning.md has the other forms)',
    ),
    Flag(name="json", parse=None, help="print one JSON object, which weft serve --plan FILE runs"),
    Flag(
        name="html",
        metavar="FILE",
        help="also write the plan as an HTML page; - writes only the page, to standard output",
    ),
)
MODEL = (
    engine_flag("model"),
    Flag(name="refresh", parse=None, help="ask the hub even about a model in Weft's catalogue"),
    engine_flag("revision"),
    engine_flag("hf-token"),
)
EXPORT = (
    Flag(
        name="emit",
        choices=tuple(TARGETS),
        help="instead of the answer, print files that run the plan; "
        + "; ".join(f"{target}: {what}" for target, what in TARGETS.items()),
    ),
    Flag(name="emit-to", metavar="DIR", help="write the files to this directory instead of standard output"),
    Flag(name="force", parse=None, help="overwrite existing files"),
    Flag(
        name="port",
        parse=values.at_least(1),
        config_default=ServeOptions.port,
        help="port of the first replica; the others get the next ones; 11434 for ollama",
    ),
    Flag(name="served-model-name", several=True, help="names of the model in the API, instead of MODEL"),
    Flag(
        name="infernet-config",
        metavar="FILE",
        help="JSON configuration of an Infernet node, as in its code or its documentation: model, names and port are "
        "taken from it, and fields that the node does not read are listed",
    ),
)
PLAN = (
    ("model", MODEL),
    ("hardware", HARDWARE),
    ("layout", (*LAYOUT, *ENGINE)),
    ("workload", LOAD),
    ("promise", PROMISE),
    ("answer", ANSWER),
    ("export", EXPORT),
)
