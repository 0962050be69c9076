"""The flags of weft plan: what hardware, what is asked of it, and how much of the answer is given already."""

from __future__ import annotations

from argparse import ArgumentTypeError
from math import inf

from weft.cli import values
from weft.cli.flags import Flag
from weft.formats.schemes import ONLINE_QUANTIZATIONS

# As planner.question and planner.profiles have them; those are not for --help to read.
OBJECTIVES = ("throughput", "latency", "cost")
ENGINES = ("weft", "vllm", "trtllm", "sglang", "llama.cpp", "transformers")
# As export.targets has them, and what each gets.
TARGETS = {
    "weft": "weft serve for each replica",
    "vllm": "vllm serve, and Ray's start on every node",
    "transformers": "a Python script with device_map and max_memory",
    "ollama": "a Modelfile, and its servers",
    "infernet": "a node's environment and engine configuration",
    "nginx": "a balancer with TLS",
    "kuberay": "a RayService for Kubernetes",
    "compose": "a Docker Compose file",
}


def concurrency(text: str) -> int | None:
    """Requests at once; max is as many as fit."""
    return None if text.lower() == "max" else values.at_least(1)(text)


def price(text: str) -> float:
    """Dollars, above 0."""
    try:
        dollars = float(text.removeprefix("$"))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no price in dollars, as in 2.49") from None
    if not 0 < dollars < inf:
        raise ArgumentTypeError(f"{text!r} is no price in dollars: it must be above 0")
    return dollars


def share(text: str) -> float:
    """Above 0, up to 1."""
    try:
        part = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no share, as in 0.9") from None
    if not 0 < part <= 1:
        raise ArgumentTypeError(f"{text!r} is no share: above 0, up to 1")
    return part


def rate(text: str) -> float:
    """Requests per second, above 0."""
    try:
        per_second = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no rate in requests per second, as in 4 or 0.5") from None
    if not 0 < per_second < inf:
        raise ArgumentTypeError(f"{text!r} is no rate in requests per second: it must be above 0")
    return per_second


HARDWARE = (
    Flag(
        name="gpus",
        metavar="4xRTX4090",
        help="GPUs of one machine, as in 8xH100@nvlink or 1xRTX4090+1xRTX3090, or a YAML file that describes any "
        "hardware (docs/hardware.md); left out: this machine's, or its CPU",
    ),
    Flag(name="nodes", metavar="2x8xH100", help="several machines, or 1x8xH100+2x4xA100"),
    Flag(name="network", metavar="400Gb", help="bandwidth between machines, per machine"),
    Flag(name="refresh-hardware", parse=None, help="measure this machine again, whatever the cache knows of it"),
    Flag(name="price", parse=price, metavar="DOLLARS", help="rent of one GPU for an hour"),
)
CUT = (
    Flag(
        name="precision",
        help="bf16 fp16 fp32 fp8 int8 int4 mxfp4 nvfp4 or a GGUF type; several with commas are "
        "compared; left out: as the model is published",
    ),
    Flag(
        name="quantization",
        short="-q",
        choices=tuple(ONLINE_QUANTIZATIONS),
        help="instead of --precision: what weft serve makes of the model's own weights with this flag; int4 is q4_1",
    ),
    Flag(name="kv-cache-dtype", help="precision of the KV cache; auto: 16 bit, or what the engine takes for the model"),
    Flag(name="tensor-parallel-size", short="-tp", parse=values.at_least(1), help="ranks that cut each layer"),
    Flag(name="pipeline-parallel-size", short="-pp", parse=values.at_least(1), help="stages that hold the layers"),
    Flag(name="data-parallel-size", short="-dp", parse=values.at_least(1), help="replicas of the whole"),
    Flag(
        name="enable-expert-parallel",
        short="-ep",
        parse=None,
        help="give each GPU whole experts instead of a slice of each",
    ),
    Flag(name="tensor-split", parse=values.decimals, metavar="2,1", help="each tensor-parallel rank's weight"),
    Flag(name="pipeline-split", parse=values.integers, metavar="20,12", help="layers per stage"),
    Flag(name="device-map", parse=values.device_map, metavar="MAP", help=values.DEVICE_MAP),
    Flag(name="max-memory", parse=values.max_memory, metavar="0=40GB,1=40GB", help=values.MAX_MEMORY),
    Flag(
        name="gpu-memory-utilization",
        parse=share,
        metavar="SHARE",
        help="share of each GPU's memory that the engine "
        "takes; left out: the engine's usual, and more where a single request needs it",
    ),
    Flag(name="max-model-len", parse=values.at_least(1), help="longest request that must fit, in tokens"),
    Flag(
        name="max-num-batched-tokens",
        parse=values.at_least(1),
        help="most tokens of one step; left out: as the engine takes, which for weft is chosen for the model and "
        "the devices",
    ),
)
MAX_NUM_SEQS = Flag(
    name="max-num-seqs",
    parse=values.at_least(1),
    help="most requests that run at once in a replica; left out: the engine's",
)
ENGINE = (
    MAX_NUM_SEQS,
    Flag(
        name="speculative-config",
        short="-sc",
        parse=values.mapping,
        metavar="JSON",
        help='count what guessing ahead takes, as weft serve has it: {"method": "ngram"} or {"model": NAME}; what it '
        "gains is not predicted",
    ),
)
LOAD = (
    Flag(name="engine", choices=ENGINES, default="weft", help="whose speed and memory to predict"),
    Flag(name="objective", choices=OBJECTIVES, default="throughput", help="what the best layout is best at"),
    Flag(name="concurrency", parse=concurrency, metavar="N|max", help="requests at once; max: as many as fit"),
    Flag(name="input-len", parse=values.at_least(1), help="prompt tokens; left out: 1024, or what the model can"),
    Flag(name="output-len", parse=values.at_least(1), help="answer tokens; left out: 1024, or what the model can"),
)
RATE = Flag(name="rate", parse=rate, metavar="R", help="requests per second, whatever becomes of them")
USERS = Flag(
    name="users",
    parse=values.at_least(1),
    metavar="N",
    help="instead: number of users, who each ask, wait for the answer, and ask again",
)
THINK = Flag(name="think", metavar="TIME", help="time that a user takes from an answer to the next question, as in 5s")
SLO = Flag(
    name="slo",
    metavar="TARGETS",
    help="what is promised: ttft, tpot, itl, e2e or queue, as in ttft_p95=1s,tpot_p95=50ms",
)
PROMISE = (RATE, USERS, THINK, SLO)  # simulated, with a load and a promise
TOLD = (
    Flag(name="check", metavar="CLAIM", help='judge "MODEL PRECISION on NxGPU[ at N tokens], X tok/s"'),
    Flag(name="json", parse=None, help="print one JSON object, which weft serve --plan FILE carries out"),
    Flag(name="html", metavar="FILE", help="write the plan as a page of its own, too; - for standard output instead"),
)
NAMED = (
    Flag(name="model", help="the model, where it is not given as an argument"),
    Flag(name="refresh", parse=None, help="ask the hub also about a model that Weft knows by itself"),
    Flag(name="revision", help="branch, tag or commit of a model on the hub"),
    Flag(name="hf-token", help="token for the hub; better HF_TOKEN in the environment, for flags show in `ps`"),
)
EXPORT = (
    Flag(
        name="emit",
        choices=tuple(TARGETS),
        help="print what runs the plan instead of the answer; "
        + "; ".join(f"{target}: {what}" for target, what in TARGETS.items()),
    ),
    Flag(name="emit-to", metavar="DIR", help="files in this directory instead of standard output"),
    Flag(name="force", parse=None, help="overwrite files that are there"),
    Flag(name="port", parse=values.at_least(1), help="port of the first replica, the others follow; for ollama 11434"),
    Flag(name="served-model-name", several=True, help="names that the API knows the model by, instead of MODEL"),
    Flag(
        name="infernet-config",
        metavar="FILE",
        help="JSON of an Infernet node, as its code or its book has it: model, names and port are taken from it, and "
        "what the node does not read is told",
    ),
)
PLAN = (
    ("model", NAMED),
    ("hardware", HARDWARE),
    ("layout", (*CUT, *ENGINE)),
    ("workload", LOAD),
    ("promise", PROMISE),
    ("answer", TOLD),
    ("export", EXPORT),
)
