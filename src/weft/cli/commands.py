"""The commands as data: the summary, arguments, flags and module of each."""

from __future__ import annotations

import msgspec

from weft.cli.flags import cluster_flags, command_flags
from weft.cli.flags.batch_flags import BatchArguments
from weft.cli.flags.bench_flags import CalibrateArguments, CompareArguments, LoadArguments, SweepArguments
from weft.cli.flags.cost_flags import CostArguments
from weft.cli.flags.declared import Arguments, Flag, flag_groups
from weft.cli.flags.gateway_flags import GatewayArguments
from weft.cli.flags.hardware_flags import HardwareArguments, TopologyArguments
from weft.cli.flags.plan_flags import PlanArguments
from weft.cli.flags.simulate_flags import SimulateArguments


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """`weft NAME ARGUMENT [flags]`.

    `argument` is MODEL, another word that `about` explains, or empty. `arguments` is the struct that declares the flags
    and holds what is parsed; `module` has `main(arguments) -> exit status`. If `takes_prompt`, the words after MODEL
    are in `arguments.prompt_words`. If `own_config`, the file of --config has more than flags, and `module` reads it;
    if `takes_set`, it may hold several models. If `model_flag`, the model is the flag --model.
    """

    name: str
    summary: str
    module: str
    arguments: type[Arguments]
    argument: str = "MODEL"
    about: str = "the prompt"  # help for an argument that is not a model
    needs_model: bool = True
    takes_prompt: bool = False
    own_config: bool = False
    model_flag: bool = False
    takes_set: bool = False
    log_level: str = "WARNING"
    example: str = ""

    @property
    def usage(self) -> str:
        prompt = " [PROMPT]" if self.takes_prompt else ""
        return f"weft {self.name} {self.argument}{prompt}".rstrip()

    @property
    def groups(self) -> tuple[tuple[str, tuple[Flag, ...]], ...]:
        """The flags under the titles of their groups."""
        return flag_groups(self.arguments)

    @property
    def flags(self) -> tuple[Flag, ...]:
        return tuple(flag for _, group in self.groups for flag in group)


COMMANDS = {
    command.name: command
    for command in (
        Command(
            name="serve",
            summary="Serve a model, or several, over HTTP with the APIs of OpenAI, Anthropic and Ollama.",
            module="weft.cli.serve.serve",
            arguments=command_flags.ServeArguments,
            needs_model=False,
            takes_set=True,
            log_level="INFO",
            example="weft serve demo --tensor-parallel-size 2",
        ),
        Command(
            name="run",
            summary="Answer one prompt and exit.",
            module="weft.cli.run.run",
            arguments=command_flags.RunArguments,
            takes_prompt=True,
            example='weft run demo "Why is the sky blue?" --json',
        ),
        Command(
            name="chat",
            summary="Talk with a model; /help lists what can be typed.",
            module="weft.cli.run.chat",
            arguments=command_flags.ChatArguments,
            example="weft chat demo",
        ),
        Command(
            name="plan",
            summary="Show if a model fits on GPUs, the best layout, its speed, and why; without MODEL, list what fits.",
            module="weft.cli.plan.plan",
            arguments=PlanArguments,
            needs_model=False,
            takes_set=True,
            example="weft plan Llama-3.1-70B-Instruct --gpus 4xA100",
        ),
        Command(
            name="cost",
            summary="Compare the cost of own GPUs with APIs, and divide a load between them.",
            module="weft.cli.plan.cost",
            arguments=CostArguments,
            example="weft cost Llama-3.3-70B-Instruct --gpus 4xH100 --price 2.49 --api-price 0.60/0.80",
        ),
        Command(
            name="simulate",
            summary="Show how long requests wait under a load, and how many GPUs keep a latency target (SLO).",
            module="weft.cli.simulate.simulate",
            arguments=SimulateArguments,
            example="weft simulate Llama-3.1-8B --gpus 8xL40S --rate 20 --slo ttft_p95=1s,tpot_p95=50ms",
        ),
        Command(
            name="hardware",
            summary="Show this machine's GPUs and CPU, their links, speed, and which processes use the memory.",
            module="weft.cli.machine.hardware",
            arguments=HardwareArguments,
            argument="",
            example="weft hardware --yaml",
        ),
        Command(
            name="topo",
            summary="Show the links between this machine's GPUs, and what they cost tensor and pipeline parallelism.",
            module="weft.cli.machine.topo",
            arguments=TopologyArguments,
            argument="",
            example="weft topo --json",
        ),
        Command(
            name="top",
            summary="Watch GPUs, models, ranks and what is wrong with them; q or Ctrl-C ends it.",
            module="weft.cli.top.top",
            arguments=command_flags.TopArguments,
            argument="",
            example="weft top --url http://127.0.0.1:8000",
        ),
        Command(
            name="profile",
            summary="Trace steps of a server that works; its admin key is WEFT_ADMIN_KEY in the environment.",
            module="weft.cli.machine.profile",
            arguments=command_flags.ProfileArguments,
            argument="",
            example="weft profile --url http://127.0.0.1:8000 --steps 20",
        ),
        Command(
            name="doctor",
            summary="Check this machine: driver, links, memory, limits, leftovers; exit status 1 if a check fails.",
            module="weft.cli.machine.doctor",
            arguments=command_flags.DoctorArguments,
            argument="",
            example="weft doctor --security",
        ),
        Command(
            name="support-bundle",
            summary="Write what a report of a fault needs into a file, without keys: versions, checks, servers, logs.",
            module="weft.cli.machine.support_bundle",
            arguments=command_flags.SupportArguments,
            argument="",
            needs_model=False,
            example="weft support-bundle --log weft.log",
        ),
        Command(
            name="batch",
            summary="Answer the rows of a JSONL or Parquet file; after a kill the same command goes on.",
            module="weft.cli.run.batch",
            arguments=BatchArguments,
            argument="IN OUT",
            about="a file of rows with prompt or messages, or of OpenAI's batch requests; the file of answers, which "
            "must not be there yet. Failed rows go to OUT with .failed.jsonl for its suffix",
            needs_model=False,
            model_flag=True,
            log_level="WARNING",
            example="weft batch rows.jsonl answers.jsonl --model demo --max-tokens 100",
        ),
        Command(
            name="gateway",
            summary="Serve several servers at one address: balance requests, and try again elsewhere if one fails.",
            module="weft.cli.serve.gateway",
            arguments=GatewayArguments,
            argument="",
            own_config=True,
            log_level="INFO",
            example="weft gateway --upstream http://10.0.1.10:8000 --upstream http://10.0.1.11:8000",
        ),
        Command(
            name="cluster status",
            summary="Show the Ray cluster's nodes, or this machine: devices, links, who runs what, and what is free.",
            module="weft.cli.cluster.cluster",
            arguments=cluster_flags.StatusArguments,
            argument="",
            example="weft cluster status --json",
        ),
        Command(
            name="cluster up",
            summary="Start one engine on several machines through ssh, and wait until it answers requests.",
            module="weft.cli.cluster.hosts",
            arguments=cluster_flags.UpArguments,
            argument="HOSTS",
            about="a YAML file with the machines, the model and the flags of weft serve (docs/several-machines.md)",
            needs_model=False,
            example="weft cluster up hosts.yaml --dry-run",
        ),
        Command(
            name="cluster down",
            summary="End the engine that weft cluster up has started.",
            module="weft.cli.cluster.hosts",
            arguments=Arguments,
            argument="HOSTS",
            about="the file that weft cluster up was given",
            needs_model=False,
            example="weft cluster down hosts.yaml",
        ),
        Command(
            name="cluster pull",
            summary="Fetch a model on every machine of a hosts file.",
            module="weft.cli.cluster.hosts",
            arguments=cluster_flags.ClusterPullArguments,
            argument="NAME",
            about="the model, as for weft pull; without it, the file's",
            needs_model=False,
            example="weft cluster pull Qwen/Qwen3-8B --hosts hosts.yaml",
        ),
        Command(
            name="cluster cert",
            summary="Make certificates for the connections between nodes, or new ones before they expire.",
            module="weft.cli.cluster.certificate",
            arguments=cluster_flags.CertArguments,
            argument="HOSTS",
            about="a hosts file, whose machines get certificates; or give --nodes",
            needs_model=False,
            example="weft cluster cert --nodes 2",
        ),
        Command(
            name="bench latency",
            summary="Measure one batch: time to first token, then tokens per second.",
            module="weft.cli.bench.bench",
            arguments=command_flags.LatencyArguments,
            example="weft bench latency demo",
        ),
        Command(
            name="bench throughput",
            summary="Measure many requests at once: output tokens per second.",
            module="weft.cli.bench.bench",
            arguments=command_flags.ThroughputArguments,
            example="weft bench throughput demo --num-prompts 64",
        ),
        Command(
            name="bench serve",
            summary="Send requests to a server at random times, like real users, and report how long each waited.",
            module="weft.cli.bench.serve",
            arguments=LoadArguments,
            needs_model=False,
            example="weft bench serve demo --request-rate 4 --goodput ttft:500 tpot:50",
        ),
        Command(
            name="bench sweep",
            summary="Run bench serve at several rates or concurrency limits; print one table and a plot.",
            module="weft.cli.bench.sweep",
            arguments=SweepArguments,
            needs_model=False,
            example="weft bench sweep demo --request-rate 1,2,4,8",
        ),
        Command(
            name="bench calibrate",
            summary="Measure this machine so that plans fit it; on a GPU, with MODEL, also tune the attention kernels.",
            module="weft.cli.bench.calibrate",
            arguments=CalibrateArguments,
            needs_model=False,
            example="weft bench calibrate",
        ),
        Command(
            name="bench compare",
            summary="Compare two saved results; exit status 1 if the new one is worse.",
            module="weft.cli.bench.compare",
            arguments=CompareArguments,
            argument="OLD NEW",
            about="JSON files, as --save-result and scripts/bench write them",
            example="weft bench compare before.json after.json",
        ),
        Command(
            name="shard",
            summary="Cut a checkpoint for the ranks of a layout: each reads only its own file at the next start.",
            module="weft.cli.run.shard",
            arguments=command_flags.ShardArguments,
            argument="MODEL DIRECTORY",
            about="the model, and a new directory for the files",
            log_level="INFO",
            example="weft shard demo shards --tensor-parallel-size 2",
        ),
        Command(
            name="pull",
            summary="Fetch a model from the hub, so that serving it needs no network.",
            module="weft.cli.serve.local_models",
            arguments=command_flags.PullArguments,
            argument="NAME",
            about="an id on the hub, hf.co/OWNER/REPO:QUANT for a GGUF file, one of Ollama's tags, or demo",
            needs_model=False,
            log_level="INFO",
            example="weft pull hf.co/Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
        ),
        Command(
            name="ls",
            summary="List the models on this machine.",
            module="weft.cli.serve.local_models",
            arguments=command_flags.ListArguments,
            argument="",
            needs_model=False,
            example="weft ls",
        ),
        Command(
            name="rm",
            summary="Remove models from this machine.",
            module="weft.cli.serve.local_models",
            arguments=command_flags.RemoveArguments,
            argument="NAME",
            about="names of models, as weft ls shows them",
            needs_model=False,
            example="weft rm hf.co/Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
        ),
        Command(
            name="ps",
            summary="List the servers that run on this machine, and the state, size and devices of their models.",
            module="weft.cli.serve.ps",
            arguments=command_flags.PsArguments,
            argument="",
            needs_model=False,
            example="weft ps",
        ),
        Command(
            name="stop",
            summary="Stop the server of a model on this machine, after its running requests.",
            module="weft.cli.serve.local_models",
            arguments=Arguments,
            argument="NAME",
            about="the model, as weft ps shows it",
            needs_model=False,
            example="weft stop demo",
        ),
        Command(
            name="demo",
            summary="Fetch a small model, split it over two ranks and answer a prompt.",
            module="weft.cli.run.demo",
            arguments=command_flags.DemoArguments,
            argument="PROMPT",
            example='weft demo "Why is the sky blue?"',
        ),
    )
}
