"""The commands as data: what each is for, its arguments and flags, and the module that carries it out."""

from __future__ import annotations

from dataclasses import dataclass

from weft.cli import values
from weft.cli.bench_flags import CALIBRATE, COMPARE, SERVE, SWEEP
from weft.cli.cost_flags import COST
from weft.cli.flags import ENGINE, SAMPLING, SERVER, Flag
from weft.cli.hardware_flags import FLAGS as HARDWARE
from weft.cli.plan_flags import PLAN
from weft.cli.simulate_flags import SIMULATE

Group = tuple[str, tuple[Flag, ...]]


@dataclass(frozen=True, kw_only=True)
class Command:
    """`weft NAME ARGUMENT [flags]`; `argument` is MODEL, or words that `about` tells, or none. `module` has
    `main(arguments) -> exit status`. With `takes_prompt` the words after MODEL are `arguments.prompt_words`."""

    name: str
    summary: str
    module: str
    groups: tuple[Group, ...]
    argument: str = "MODEL"
    about: str = "what to ask"  # an argument that is no model
    needs_model: bool = True
    takes_prompt: bool = False
    log_level: str = "WARNING"
    example: str = ""

    @property
    def usage(self) -> str:
        prompt = " [PROMPT]" if self.takes_prompt else ""
        return f"weft {self.name} {self.argument}{prompt}".rstrip()

    @property
    def flags(self) -> tuple[Flag, ...]:
        return tuple(flag for _, group in self.groups for flag in group)


PROMPT = (
    Flag(
        name="prompt",
        metavar="TEXT",
        help="the prompt, if it is not given after MODEL; without either, standard input is read",
    ),
    Flag(name="system-prompt", metavar="TEXT", help="what the model is told before"),
    Flag(name="raw", parse=None, help="give the prompt to the model as it is, without the chat template"),
    Flag(name="json", parse=None, help="print one JSON object with text, token ids, timing, layout and predictions"),
    Flag(name="verbose", parse=None, help="tell memory and speed on standard error, beside what was predicted"),
)
CHAT = (Flag(name="system-prompt", metavar="TEXT", help="what the model is told before"),)
LATENCY = (
    Flag(name="input-len", parse=values.at_least(1), default=128, help="prompt tokens"),
    Flag(name="output-len", parse=values.at_least(1), default=128, help="answer tokens"),
    Flag(name="batch-size", parse=values.at_least(1), default=1, help="requests at once"),
    Flag(name="num-iters", parse=values.at_least(1), default=5, help="measured runs, of which the median counts"),
    Flag(name="num-iters-warmup", parse=values.at_least(0), default=2, help="runs before those"),
)
THROUGHPUT = (
    Flag(
        name="workload",
        choices=("random", "nano-vllm"),
        default="random",
        help="random: the flags below; nano-vllm: 256 requests of 100 to 1024 tokens in and out, as its benchmark",
    ),
    Flag(name="num-prompts", parse=values.at_least(1), default=32, help="requests, all there at the start"),
    Flag(name="input-len-range", parse=values.span, default="32:256", help="prompt tokens, low:high"),
    Flag(name="output-len", parse=values.at_least(1), default=128, help="answer tokens of each"),
    Flag(name="num-iters", parse=values.at_least(1), default=3, help="measured runs, of which the median counts"),
    Flag(name="num-iters-warmup", parse=values.at_least(0), default=1, help="runs of the random workload before those"),
)

COMMANDS = {
    command.name: command
    for command in (
        Command(
            name="serve",
            summary="Serve a model over HTTP, as OpenAI's API does.",
            module="weft.cli.serve",
            groups=(*ENGINE, ("server", SERVER)),
            log_level="INFO",
            example="weft serve demo --tensor-parallel-size 2",
        ),
        Command(
            name="run",
            summary="Answer one prompt and end.",
            module="weft.cli.run",
            groups=(("prompt", PROMPT), ("sampling", SAMPLING), *ENGINE),
            takes_prompt=True,
            example='weft run demo "Why is the sky blue?" --json',
        ),
        Command(
            name="chat",
            summary="Talk with a model; /help lists what can be typed.",
            module="weft.cli.chat",
            groups=(("conversation", CHAT), ("sampling", SAMPLING), *ENGINE),
            example="weft chat demo",
        ),
        Command(
            name="plan",
            summary="Show whether a model fits on GPUs, the best layout, its speed, and why; without MODEL: what fits.",
            module="weft.cli.plan",
            groups=PLAN,
            needs_model=False,
            example="weft plan Llama-3.1-70B-Instruct --gpus 4xA100",
        ),
        Command(
            name="cost",
            summary="Compare the cost of own GPUs with APIs, and divide a load between them.",
            module="weft.cli.cost",
            groups=(("cost", COST), *(group for group in PLAN if group[0] not in ("promise", "answer", "export"))),
            example="weft cost Llama-3.3-70B-Instruct --gpus 4xH100 --price 2.49 --demand 1,1,4,9,4",
        ),
        Command(
            name="simulate",
            summary="Show how long requests wait under a load, and how many GPUs keep a latency target (SLO).",
            module="weft.cli.simulate",
            groups=SIMULATE,
            example="weft simulate Llama-3.1-8B --gpus 8xL40S --rate 20 --slo ttft_p95=1s,tpot_p95=50ms",
        ),
        Command(
            name="hardware",
            summary="Show this machine's GPUs and CPU, their links, speed, and which processes use the memory.",
            module="weft.cli.hardware",
            groups=HARDWARE,
            argument="",
            example="weft hardware --yaml",
        ),
        Command(
            name="bench latency",
            summary="Measure one batch: time to first token, then tokens per second.",
            module="weft.cli.bench",
            groups=(("workload", LATENCY), *ENGINE),
            example="weft bench latency demo",
        ),
        Command(
            name="bench throughput",
            summary="Measure many requests at once: output tokens per second.",
            module="weft.cli.bench",
            groups=(("workload", THROUGHPUT), *ENGINE),
            example="weft bench throughput demo --num-prompts 64",
        ),
        Command(
            name="bench serve",
            summary="Send requests to a server at random times, like real users, and report how long each waited.",
            module="weft.cli.bench_serve",
            groups=(*SERVE, *ENGINE),
            needs_model=False,
            example="weft bench serve demo --request-rate 4 --goodput ttft:500 tpot:50",
        ),
        Command(
            name="bench sweep",
            summary="The same at several rates or concurrencies: one table, and a plot.",
            module="weft.cli.bench_sweep",
            groups=(*SWEEP, *ENGINE),
            needs_model=False,
            example="weft bench sweep demo --request-rate 1,2,4,8",
        ),
        Command(
            name="bench calibrate",
            summary="Measure this machine so that plans fit it; on a GPU, with MODEL, also tune the attention kernels.",
            module="weft.cli.bench_calibrate",
            groups=(*CALIBRATE, *ENGINE),
            needs_model=False,
            example="weft bench calibrate",
        ),
        Command(
            name="bench compare",
            summary="Compare two results that were saved; exit status 1 where the new one is worse.",
            module="weft.cli.bench_compare",
            groups=COMPARE,
            argument="OLD NEW",
            about="files with JSON, as --save-result and scripts/bench write it",
            example="weft bench compare before.json after.json",
        ),
        Command(
            name="demo",
            summary="Fetch a small model, cut it across two ranks and let it answer.",
            module="weft.cli.demo",
            groups=(("sampling", SAMPLING), *ENGINE),
            argument="PROMPT",
            example='weft demo "Why is the sky blue?"',
        ),
    )
}
