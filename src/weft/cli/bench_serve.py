"""weft bench serve: requests to a server as they arrive in life, and how long each waited."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import cycle, islice
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from weft import __version__
from weft.bench.arrivals import arrival_times
from weft.bench.http import HttpClient, HttpFailure, HttpRefusal, ServerAddress
from weft.bench.load import PATHS, LoadResult, RequestOptions, RequestRecord, error_text, run_open_loop, send_request
from weft.bench.prompts import Prompt, length_range, random_prompts, read_prompts
from weft.bench.summary import PERCENTILES, parse_limits, summarise_load
from weft.bench.workload import NANO_IDS
from weft.cli.flags import ENGINE
from weft.cli.main import INTERRUPTED
from weft.cli.parser import UsageError, words_of
from weft.client.progress import Progress
from weft.errors import WeftError
from weft.formats import lookup

T = TypeVar("T")

SPARE_FILES = 128  # descriptors of this process beside its connections


@dataclass(frozen=True)
class Target:
    """A server that answers, and how it is asked."""

    server: ServerAddress
    asking: RequestOptions


@dataclass(frozen=True)
class Point:
    """One load: how requests arrive, and how many may be under way at once."""

    rate: float
    burstiness: float
    max_concurrency: int | None


@dataclass(frozen=True)
class Plan:
    """What all loads of a command have in common, checked before any server is started. `draw` gives so many prompts
    for the load of that number: no load finds another's KV blocks."""

    draw: Callable[[int, int], list[Prompt]]
    count: int
    warmups: int
    limits_s: dict[str, float]
    percents: tuple[float, ...]
    seed: int


def main(arguments: Namespace) -> int:
    """Send the load and print the report; status 1 if no request was answered, 130 if Ctrl-C ended the load early."""
    plan = prepare(arguments)
    point = Point(arguments.request_rate, arguments.burstiness, getattr(arguments, "max_concurrency", None))
    with target(arguments) as there:
        result = measure(plan, there, point)
    save(arguments, result)
    if getattr(arguments, "json", False):
        print(json.dumps(result))
    else:
        from weft.cli.bench_view import print_load

        print_load(result)
    return exit_status([result])


def exit_status(results: Sequence[Mapping[str, Any]]) -> int:
    """The status of a command that measured these loads."""
    if any(result["interrupted"] for result in results):
        return INTERRUPTED
    return 0 if all(result["completed"] for result in results) else 1


def prepare(arguments: Namespace) -> Plan:
    """Everything that can be wrong before a server is asked. Raises UsageError, ConfigError."""
    said = vars(arguments)
    if not address(said) and not said.get("model"):
        raise UsageError("which server? Give a MODEL to be served, or --base-url of a server that runs")
    if said.get("base_url") and ("host" in said or "port" in said):
        raise UsageError("--base-url and --host or --port both say where the server is; give one of them")
    if said.get("dataset_name", "random") != "random" and "dataset_path" not in said:
        raise UsageError(f"--dataset-name {said['dataset_name']} is a file: name it with --dataset-path")
    if said.get("dataset_name") == "random" and "dataset_path" in said:
        raise UsageError("--dataset-name random draws its prompts; leave --dataset-path out")
    if (path := said.get("save_result")) and not Path(path).absolute().parent.is_dir():
        raise UsageError(f"--save-result {path}: there is no directory {Path(path).absolute().parent}")
    limits = parse_limits(said.get("goodput", []))
    percents = tuple(sorted({*PERCENTILES, *arguments.metric_percentiles}))
    return Plan(drawing(arguments), arguments.num_prompts, arguments.num_warmups, limits, percents, said.get("seed", 0))


def address(said: dict[str, Any]) -> str | None:
    """Where the server is that the user names."""
    if "host" in said or "port" in said:
        host = said.get("host", "127.0.0.1")
        return f"http://{f'[{host}]' if ':' in host else host}:{said.get('port', 8000)}"
    url: str | None = said.get("base_url")
    return url and url.rstrip("/").removesuffix("/v1")


def drawing(arguments: Namespace) -> Callable[[int, int], list[Prompt]]:
    """From the file that was named, where it goes on after the load before, or at random."""
    said = vars(arguments)
    if said.get("dataset_path"):
        found = read_prompts(arguments.dataset_path, output_len=arguments.output_len)
        _check_api(found, arguments)
        return lambda number, count: list(islice(cycle(found), number * count, (number + 1) * count))
    ratio, ids = arguments.random_range_ratio, None if arguments.backend == "openai-chat" else vocab(said)

    def draw(number: int, count: int) -> list[Prompt]:
        return random_prompts(
            f"{said.get('seed', 0)} {number}",
            count=count,
            vocab=ids,
            input_len=length_range(arguments.input_len, ratio),
            output_len=length_range(arguments.output_len, ratio),
            prefix_len=arguments.random_prefix_len,
        )

    return draw


def _check_api(prompts: list[Prompt], arguments: Namespace) -> None:
    ids = any(isinstance(p.content, list) and type(p.content[0]) is int for p in prompts)
    talks = any(isinstance(p.content, list) and isinstance(p.content[0], dict) for p in prompts)
    if talks and arguments.backend == "openai":
        raise UsageError(f"{arguments.dataset_path} holds messages; those go to --backend openai-chat")
    if ids and arguments.backend == "openai-chat":
        raise UsageError(f"{arguments.dataset_path} holds token ids; those go to --backend openai")


def vocab(said: dict[str, Any]) -> int:
    """Ids are drawn below this: the model's own size where it is known, else what every model has."""
    if not said.get("model"):
        return NANO_IDS
    try:
        return lookup.look_up(said["model"], revision=said.get("revision"), hf_token=said.get("hf_token")).shape.vocab
    except WeftError:
        if address(said):  # it need not be known here
            return NANO_IDS
        raise


@contextmanager
def target(arguments: Namespace) -> Iterator[Target]:
    """The server that was named, or one that is started here and ended afterwards."""
    said = vars(arguments)
    raise_file_limit(arguments.num_prompts)
    key = said.get("api_key") or os.environ.get("VLLM_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    headers |= dict(said.get("header", []))
    if url := address(said):
        yield connect(ServerAddress(url, headers), arguments)
        return
    from weft.bench.server import ServeProcess

    words = [said["model"], *engine_words(arguments)]
    print(f"starting weft serve {' '.join(words)}", file=sys.stderr)
    with ServeProcess(words) as served:
        print(f"ready after {served.seconds:.1f} s at {served.url}", file=sys.stderr)
        yield connect(ServerAddress(served.url, headers), arguments)


def connect(server: ServerAddress, arguments: Namespace) -> Target:
    """Ask which models are there. Raises WeftError where nobody answers."""
    said = vars(arguments)
    name = said.get("served_model_name")

    async def models() -> bytes:
        client = HttpClient(server)
        try:
            return await client.get("/v1/models")
        finally:
            client.close()

    try:
        listed = json.loads(run(models()))["data"]
        name = name or listed[0]["id"]
    except HttpRefusal as error:
        if error.status in (401, 403):
            raise WeftError(
                f"{server.url} wants another key ({error_text(error.body)}); give it with --api-key"
            ) from None
        if not (name := name or said.get("model")):
            raise WeftError(f"{server.url} does not tell its models ({error}); name one: --served-model-name") from None
    except HttpFailure as error:
        raise WeftError(f"{error}; is the server there?") from None
    except (ValueError, LookupError, TypeError):
        if not (name := name or said.get("model")):
            raise WeftError(f"{server.url} names no model; name one: --served-model-name") from None
    asking = RequestOptions(
        api=arguments.backend,
        path=said.get("endpoint"),
        model=name,
        ignore_eos=said.get("ignore_eos", "dataset_path" not in said),
        temperature=arguments.temperature,
        extra=said.get("extra_body", {}),
        timeout_s=arguments.request_timeout,
    )
    return Target(server, asking)


def measure(plan: Plan, there: Target, point: Point, number: int = 0) -> dict[str, Any]:
    """One load on one server, as JSON has it. Raises WeftError where not even the first request is answered."""
    due = arrival_times(f"{plan.seed} {number}", count=plan.count, rate=point.rate, burstiness=point.burstiness)
    with Progress(plan.count, True) as bar:
        load = run(_measure(plan, there, due, point.max_concurrency, number, bar.advance))
    return {
        "task": "serve",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "weft": __version__,
        "model_id": there.asking.model,
        "endpoint": there.asking.path or PATHS[there.asking.api],
        "num_prompts": plan.count,
        "request_rate": point.rate if point.rate < inf else "inf",
        "offered_rate": round(plan.count / due[-1], 4) if due[-1] else None,
        "burstiness": point.burstiness,
        "max_concurrency": point.max_concurrency,
        "seed": plan.seed,
        "goodput_limits_ms": {name: round(1000 * limit, 3) for name, limit in plan.limits_s.items()},
        "percentiles": list(plan.percents),
        **summarise_load(load, plan.limits_s, plan.percents),
    }


async def _measure(
    plan: Plan, there: Target, due: list[float], max_concurrency: int | None, number: int, advance: Callable[[], None]
) -> LoadResult:
    client, prompts = HttpClient(there.server), plan.draw(number, plan.warmups + plan.count)
    try:
        for prompt in prompts[: plan.warmups]:
            first = RequestRecord(due_s=0.0, requested_tokens=prompt.output_len)
            await send_request(client, there.asking, first, there.asking.body(prompt))
            if first.error is not None:
                raise WeftError(f"{there.server.url} does not answer: {first.error}")
        return await run_open_loop(
            client,
            there.asking,
            prompts[plan.warmups :],
            due,
            max_concurrency=max_concurrency,
            on_end=lambda _: advance(),
        )
    finally:
        client.close()


def engine_words(arguments: Namespace) -> list[str]:
    """The engine's flags as they would be typed for `weft serve`."""
    words: list[str] = []
    for flag in (flag for _, group in ENGINE for flag in group if flag.name != "model"):
        if hasattr(arguments, flag.dest):
            value = getattr(arguments, flag.dest)
            value = "auto" if value is None else list(value) if isinstance(value, tuple) else value
            words += words_of(flag, value, "")
    return words


def raise_file_limit(requests: int) -> None:
    """Every request under way has a connection of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = requests + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def save(arguments: Namespace, result: dict[str, Any]) -> None:
    """Write the result to the file that was named, if any."""
    if path := getattr(arguments, "save_result", None):
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run(work: Coroutine[Any, Any, T]) -> T:
    """On uvloop where it is there: the client must not be what is measured."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)
