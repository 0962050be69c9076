"""Flags of weft plan: the hardware, the workload, and the parts of the layout that are fixed."""

from __future__ import annotations

from argparse import ArgumentTypeError
from math import inf
from typing import Annotated, Any, Literal

from weft.checkpoint.quantised.schemes import ONLINE_QUANTIZATIONS
from weft.cli.flags import values
from weft.cli.flags.declared import Arguments, Bundle, Flags, Group, flag
from weft.config import DeviceMap, EngineConfig, MaxMemory
from weft.http.options import ServeOptions

# The same as in planner.question and planner.profiles, which are too slow to import for --help.
Objective = Literal["throughput", "latency", "cost"]
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


class DescribedHardware(Flags):
    """Hardware that need not be here."""

    gpus: str | None = flag(
        metavar="4xRTX4090",
        help="GPUs, as in 8xH100@nvlink or 1xRTX4090+1xRTX3090, of several machines as in 2x8xH100, or a YAML file "
        "that describes any hardware (docs/hardware.md). Default: this machine's, or its CPU",
    )
    nodes: str | None = flag(metavar="2x8xH100", help="several machines, or 1x8xH100+2x4xA100")
    network: str | None = flag(
        metavar="400Gb",
        help="network of each machine: RDMA, or Ethernet up to 25Gb; else as in 100Gb-ethernet, 10Gb-rdma",
    )


REFRESH_HARDWARE = flag(False, help="measure this machine again and ignore cached figures")


class Hardware(DescribedHardware):
    """The hardware to plan for."""

    cluster: str | None = flag(
        metavar="FILE.yaml",
        help="the machines and the network that the last start on several nodes has measured; they are written to "
        "this file, which --gpus takes",
    )
    refresh_hardware: bool = REFRESH_HARDWARE
    price: float | None = flag(parse=price, metavar="DOLLARS", help="rent of one GPU per hour")


class Layout(Flags):
    """The part of the layout that is fixed."""

    precision: str | None = flag(
        help="bf16 fp16 fp32 fp8 int8 int4 mxfp4 nvfp4 or a GGUF type; several with commas are "
        "compared. Default: the precision in which the model is published"
    )
    quantization: str | None = flag(
        short="-q",
        choices=tuple(ONLINE_QUANTIZATIONS),
        help="instead of --precision: the weights as weft serve with this flag compresses them; int4 means q4_1",
    )
    kv_cache_dtype: str | None = flag(
        config_default=EngineConfig.kv_cache_dtype,
        help="precision of the KV cache; auto: 16 bits, or the engine's choice for the model",
    )
    tensor_parallel_size: int | None = flag(
        short="-tp", parse=values.at_least(1), help="number of ranks that share each layer"
    )
    pipeline_parallel_size: int | None = flag(
        short="-pp", parse=values.at_least(1), help="number of pipeline stages, each with some of the layers"
    )
    data_parallel_size: int | None = flag(
        short="-dp",
        parse=values.at_least(1),
        help="number of independent replicas of the model; with --enable-expert-parallel: of attention groups, "
        "which share one set of experts",
    )
    enable_expert_parallel: bool | None = flag(
        short="-ep", help="deal whole experts out to ranks, instead of cutting every expert into slices"
    )
    expert_parallel_size: int | None = flag(
        parse=values.at_least(1),
        help="number of parts into which the experts are dealt; the ranks of a part divide each expert's columns. "
        "Default: tensor-parallel size times data-parallel size",
    )
    tensor_split: tuple[float, ...] | None = flag(metavar="2,1", help="share of each tensor-parallel rank")
    pipeline_split: tuple[int, ...] | None = flag()
    device_map: DeviceMap | None = flag()
    max_memory: MaxMemory | None = flag()
    gpu_memory_utilization: float | None = flag(
        parse=share,
        metavar="SHARE",
        help="share of each GPU's memory that the engine "
        "may use. Default: the engine's own, or more if a single request needs more",
    )
    max_model_len: int | None = flag(parse=values.at_least(1), help="tokens of the longest request that must fit")
    max_num_batched_tokens: int | None = flag(
        parse=values.at_least(1),
        help="maximum tokens of one step. Default: the engine's own; weft chooses it for the model and the devices",
    )


class LimitFlags(Flags):
    """The fields of `EngineLimits`."""

    max_num_seqs: int | None = flag(
        parse=values.at_least(1),
        help="maximum number of requests that run at once in a replica. Default: the engine's own",
    )


class PlannedEngine(LimitFlags):
    """Options of the engine that the plan counts."""

    speculative_config: dict[str, Any] | None = flag(
        short="-sc",
        metavar="JSON",
        help='count the memory of speculative decoding, as in weft serve: {"method": "ngram"} or {"model": NAME}; '
        "its "
        "gain in speed is not predicted",
    )
    deterministic: bool = flag(False)


class Aim(Flags):
    """The engine that is planned for, and the figure that counts."""

    engine: str = flag("weft", choices=ENGINES, help="the engine whose speed and memory are predicted")
    objective: Objective = flag("throughput", help="the figure by which layouts are ranked")


class WorkloadFlags(Flags):
    """The requests that are planned for."""

    concurrency: int | None = flag(
        parse=concurrency, metavar="N|max", help="number of requests at once; max: as many as fit"
    )
    input_len: int | None = flag(
        parse=values.at_least(1), help="tokens of a prompt. Default: 1024, or fewer if the model's context is short"
    )
    output_len: int | None = flag(
        parse=values.at_least(1), help="tokens of an answer. Default: 1024, or fewer if the model's context is short"
    )


RATE = flag(parse=rate, metavar="R", help="requests that arrive per second, at random times")
USERS = flag(
    parse=values.at_least(1),
    metavar="N",
    help="instead of --rate: number of users, each of whom asks, waits for the answer and asks again",
)
THINK = flag(metavar="TIME", help="time between an answer and the user's next question, as in 5s")
SLO = flag(metavar="TARGETS", help="latency targets for ttft, tpot, itl, e2e or queue, as in ttft_p95=1s,tpot_p95=50ms")


class Promise(Flags):
    """A load and a promise: the plan is simulated."""

    rate: float | None = RATE
    users: int | None = USERS
    think: str | None = THINK
    slo: str | None = SLO


class PlanAnswer(Flags):
    """Other questions than the plan, and the form of the answer."""

    check: str | None = flag(
        metavar="CLAIM",
        help='judge a claim, as in "Qwen2.5-72B Q4 on 2xRTX4090, 30-45 tok/s" (docs/planning.md has the other forms)',
    )
    json: bool = flag(False, help="print one JSON object, which weft serve --plan FILE runs")
    html: str | None = flag(
        metavar="FILE", help="also write the plan as an HTML page; - writes only the page, to standard output"
    )


class Source(Flags):
    """The version of the model, and the way to it."""

    model: str = flag("")
    refresh: bool = flag(False, help="ask the hub even about a model in Weft's catalogue")
    revision: str | None = flag()
    hf_token: str | None = flag()


class Export(Flags):
    """Files that run the plan."""

    emit: str | None = flag(
        choices=tuple(TARGETS),
        help="instead of the answer, print files that run the plan; "
        + "; ".join(f"{target}: {what}" for target, what in TARGETS.items()),
    )
    emit_to: str | None = flag(metavar="DIR", help="write the files to this directory instead of standard output")
    force: bool = flag(False, help="overwrite existing files")
    port: int | None = flag(
        parse=values.at_least(1),
        config_default=ServeOptions.port,
        help="port of the first replica; the others get the next ones; 11434 for ollama",
    )
    served_model_name: tuple[str, ...] = flag((), several=True, help="names of the model in the API, instead of MODEL")
    infernet_config: str | None = flag(
        metavar="FILE",
        help="JSON configuration of an Infernet node, as in its code or its documentation: model, names and port "
        "are taken from it, and fields that the node does not read are listed",
    )


class Subject(Bundle):
    """The model, the hardware and the wishes that a plan is made for."""

    source: Annotated[Source, Group("model")]
    hardware: Hardware
    layout: Layout
    counted: Annotated[PlannedEngine, Group("layout")]
    aim: Annotated[Aim, Group("workload")]
    workload: WorkloadFlags


class PlanArguments(Arguments):
    """weft plan [MODEL]."""

    subject: Subject
    promise: Promise
    answer: PlanAnswer
    export: Export


# Groups whose flags a command for a similar question repeats.
REPEATED = (Hardware, Layout, PlannedEngine, Aim, WorkloadFlags, Promise)
