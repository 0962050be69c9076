"""weft bench serve: requests sent to a server at random times, and the time that each waited."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import cycle, islice
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from weft._version import __version__
from weft.checkpoint import lookup
from weft.cli.flags.bench_flags import LoadArguments, Prompts, SweepArguments, Target
from weft.cli.flags.flags import EngineFlags, flags_of_engine
from weft.cli.main import INTERRUPTED
from weft.cli.parser import UsageError, typed_flags
from weft.engine.client.progress import ProgressBar
from weft.errors import WeftError
from weft.http.options import ServeOptions
from weft.study.bench.arrivals import arrival_times
from weft.study.bench.http import HttpClient, HttpFailure, HttpRefusal, ServerAddress
from weft.study.bench.load import (
    PATHS,
    LoadResult,
    RequestOptions,
    RequestRecord,
    error_text,
    run_open_loop,
    send_request,
)
from weft.study.bench.prompts import BenchPrompt, length_range, random_prompts, read_prompts
from weft.study.bench.summary import PERCENTILES, parse_limits, summarise_load
from weft.study.bench.workload import NANO_IDS

MeasureArguments = LoadArguments | SweepArguments
T = TypeVar("T")

SPARE_FILES = 128  # file descriptors of this process that are not connections


@dataclass(frozen=True)
class BenchTarget:
    """A running server, and the form of its requests."""

    server: ServerAddress
    asking: RequestOptions


@dataclass(frozen=True)
class LoadPoint:
    """One load: the rate and burstiness of the requests, and the limit for unfinished ones."""

    rate: float
    burstiness: float
    max_concurrency: int | None


@dataclass(frozen=True)
class BenchSettings:
    """Settings that all loads of a command share, checked before any server is started.

    `draw` takes the number of a load and a count, and gives that many prompts. Each load gets other prompts, so that no
    load finds KV blocks of another.
    """

    draw: Callable[[int, int], list[BenchPrompt]]
    count: int
    warmups: int
    limits_s: dict[str, float]
    percents: tuple[float, ...]
    seed: int


def main(arguments: LoadArguments) -> int:
    """Send the load and print the report; return 1 if no request was answered, 130 if Ctrl-C ended the load early."""
    settings = check_settings(arguments)
    point = LoadPoint(arguments.load.request_rate, arguments.load.burstiness, arguments.load.max_concurrency)
    with open_target(arguments) as target:
        result = measure_load(settings, target, point)
    save_result(arguments, result)
    if arguments.report.json:
        print(json.dumps(result))
    else:
        from weft.cli.bench.view import print_load

        print_load(result, arguments.report.percentile_metrics)
    return exit_status([result])


def exit_status(results: Sequence[Mapping[str, Any]]) -> int:
    """The exit status of a command with these results."""
    if any(result["interrupted"] for result in results):
        return INTERRUPTED
    return 0 if all(result["completed"] for result in results) else 1


def check_settings(arguments: MeasureArguments) -> BenchSettings:
    """The settings of the flags. Raises UsageError and ConfigError before any request is sent."""
    prompts, report = arguments.prompts, arguments.report
    _check_server_flags(arguments.server, arguments.model)
    _check_dataset_flags(prompts)
    if path := result_path(arguments):
        folder = path.absolute().parent
        if not folder.is_dir():
            raise UsageError(f"--save-result {path}: the directory {folder} does not exist", code="folder-missing")
    return BenchSettings(
        draw=prompt_source(arguments),
        count=prompts.num_prompts,
        warmups=prompts.num_warmups,
        limits_s=parse_limits(report.goodput),
        percents=tuple(sorted({*PERCENTILES, *report.metric_percentiles})),
        seed=arguments.engine.checkpoint.seed,
    )


def _check_server_flags(server: Target, model: str) -> None:
    if not server_url(server) and not model:
        raise UsageError(
            "which server? Give a MODEL to serve, or --base-url of a running server", code="server-missing"
        )
    if server.base_url and not (server.host is None and server.port is None):
        raise UsageError(
            "--base-url and --host or --port both give the server's address; give one of them",
            code="server-address-twice",
        )


def _check_dataset_flags(prompts: Prompts) -> None:
    name, path = prompts.dataset_name, prompts.dataset_path
    if name not in (None, "random") and path is None:
        raise UsageError(
            f"--dataset-name {name} needs a file; name it with --dataset-path",
            code="dataset-path-missing",
        )
    if name == "random" and path is not None:
        raise UsageError(
            "--dataset-name random draws prompts at random; leave --dataset-path out", code="dataset-path-unused"
        )


def server_url(server: Target) -> str | None:
    """The address of a running server from the flags, without /v1; None if they give none."""
    host, port, url = server.host, server.port, server.base_url
    if host is not None or port is not None:
        host = ServeOptions.host if host is None else host
        return f"http://{f'[{host}]' if ':' in host else host}:{port or ServeOptions.port}"
    return url and url.rstrip("/").removesuffix("/v1")


def prompt_source(arguments: MeasureArguments) -> Callable[[int, int], list[BenchPrompt]]:
    """A function from a load's number and a count to its prompts: random ones, or the next ones of a file."""
    flags, backend, seed = arguments.prompts, arguments.server.backend, arguments.engine.checkpoint.seed
    if flags.dataset_path:
        prompts = read_prompts(flags.dataset_path, output_len=flags.output_len)
        _check_api(prompts, flags.dataset_path, backend)
        return lambda number, count: list(islice(cycle(prompts), number * count, (number + 1) * count))
    ratio, ids = flags.random_range_ratio, None if backend == "openai-chat" else vocabulary_size(arguments)

    def draw(number: int, count: int) -> list[BenchPrompt]:
        return random_prompts(
            f"{seed} {number}",
            count=count,
            vocab=ids,
            input_len=length_range(flags.input_len, ratio),
            output_len=length_range(flags.output_len, ratio),
            prefix_len=flags.random_prefix_len,
        )

    return draw


def _check_api(prompts: list[BenchPrompt], path: str, backend: str) -> None:
    """Raise UsageError if the backend does not take the prompts of the file."""
    first_items = [prompt.content[0] for prompt in prompts if isinstance(prompt.content, list)]
    messages = any(isinstance(item, dict) for item in first_items)
    ids = any(type(item) is int for item in first_items)
    if messages and backend == "openai":
        raise UsageError(f"{path} holds messages, which need --backend openai-chat", code="dataset-needs-chat")
    if ids and backend == "openai-chat":
        raise UsageError(f"{path} holds token ids, which need --backend openai", code="dataset-needs-completions")


def vocabulary_size(arguments: MeasureArguments) -> int:
    """Limit of random token ids: the model's vocabulary, or if it is not known, a size that every model has."""
    if not arguments.model:
        return NANO_IDS
    options = arguments.engine.checkpoint
    try:
        model = lookup.look_up(arguments.model, revision=options.revision, hf_token=options.hf_token)
    except WeftError:
        if server_url(arguments.server):  # a running server may have a model that is not known here
            return NANO_IDS
        raise
    return model.shape.vocab


@contextmanager
def open_target(arguments: MeasureArguments) -> Iterator[BenchTarget]:
    """The server of the flags, or one that is started now and stopped at the end."""
    server = arguments.server
    raise_file_limit(arguments.prompts.num_prompts)
    key = server.api_key or os.environ.get("VLLM_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    headers |= dict(server.header)
    if url := server_url(server):
        yield connect(ServerAddress(url, headers), arguments)
        return
    from weft.study.bench.server import ServeProcess

    flags = [arguments.model, *engine_flags(arguments.engine)]
    print(f"starting weft serve {' '.join(flags)}", file=sys.stderr)
    with ServeProcess(flags) as served:
        print(f"ready after {served.seconds:.1f} s at {served.url}", file=sys.stderr)
        yield connect(ServerAddress(served.url, headers), arguments)


def connect(server: ServerAddress, arguments: MeasureArguments) -> BenchTarget:
    """The server as a target, after it has listed its models. Raises WeftError if it does not answer."""
    flags, prompts = arguments.server, arguments.prompts
    asking = RequestOptions(
        api=flags.backend,
        path=flags.endpoint,
        model=served_model(server, flags.served_model_name, arguments.model),
        ignore_eos=prompts.dataset_path is None if prompts.ignore_eos is None else prompts.ignore_eos,
        temperature=prompts.temperature,
        extra=flags.extra_body or {},
        timeout_s=flags.request_timeout,
    )
    return BenchTarget(server, asking)


def served_model(server: ServerAddress, name: str | None, model: str) -> str:
    """The model's name in requests: --served-model-name, or the first that the server lists, or MODEL.

    Raises WeftError if the server does not answer, refuses the key, or lists no model and the flags give no name.
    """
    fallback = name or model
    try:
        listed = json.loads(run_async(_list_models(server)))["data"]
        first: str = listed[0]["id"]
    except HttpRefusal as error:
        if error.status in (401, 403):
            raise WeftError(
                f"{server.url} needs another key ({error_text(error.body)}); give it with --api-key",
                code="api-key-refused",
            ) from None
        if not fallback:
            raise WeftError(
                f"{server.url} does not list its models ({error}); name one with --served-model-name",
                code="models-not-listed",
            ) from None
        return fallback
    except HttpFailure as error:
        raise WeftError(f"{error}; is the server running?", code="server-unreachable") from None
    except (ValueError, LookupError, TypeError):
        if not fallback:
            raise WeftError(
                f"{server.url} lists no model; name one with --served-model-name", code="no-model-listed"
            ) from None
        return fallback
    return name or first


async def _list_models(server: ServerAddress) -> bytes:
    client = HttpClient(server)
    try:
        return await client.get("/v1/models")
    finally:
        client.close()


def measure_load(settings: BenchSettings, target: BenchTarget, point: LoadPoint, number: int = 0) -> dict[str, Any]:
    """Send one load and return the result as JSON. Raises WeftError if not even a warm-up request is answered."""
    due = arrival_times(f"{settings.seed} {number}", count=settings.count, rate=point.rate, burstiness=point.burstiness)
    with ProgressBar(settings.count, True) as bar:
        load = run_async(_send_load(settings, target, due, point.max_concurrency, number, bar.advance))
    return {
        "task": "serve",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "weft": __version__,
        "model_id": target.asking.model,
        "endpoint": target.asking.path or PATHS[target.asking.api],
        "num_prompts": settings.count,
        "request_rate": point.rate if point.rate < inf else "inf",
        "offered_rate": round(settings.count / due[-1], 4) if due[-1] else None,
        "burstiness": point.burstiness,
        "max_concurrency": point.max_concurrency,
        "seed": settings.seed,
        "goodput_limits_ms": {name: round(1000 * limit, 3) for name, limit in settings.limits_s.items()},
        "percentiles": list(settings.percents),
        **summarise_load(load, settings.limits_s, settings.percents),
    }


async def _send_load(
    settings: BenchSettings,
    target: BenchTarget,
    due: list[float],
    max_concurrency: int | None,
    number: int,
    advance: Callable[[], None],
) -> LoadResult:
    client, prompts = HttpClient(target.server), settings.draw(number, settings.warmups + settings.count)
    try:
        for prompt in prompts[: settings.warmups]:
            first = RequestRecord(due_s=0.0, requested_tokens=prompt.output_len)
            await send_request(client, target.asking, first, target.asking.body(prompt))
            if first.error is not None:
                raise WeftError(f"{target.server.url} does not answer: {first.error}", code="server-not-answering")
        return await run_open_loop(
            client,
            target.asking,
            prompts[settings.warmups :],
            due,
            max_concurrency=max_concurrency,
            on_end=lambda _: advance(),
        )
    finally:
        client.close()


def engine_flags(engine: EngineFlags) -> list[str]:
    """The engine's flags as words of the `weft serve` command line."""
    flags: list[str] = []
    values = engine.values()
    for flag in flags_of_engine().values():
        if flag.dest in engine.given:
            value = values[flag.dest]
            value = "auto" if value is None else list(value) if isinstance(value, tuple) else value
            flags += typed_flags(flag, value, "")
    return flags


def raise_file_limit(requests: int) -> None:
    """Raise the limit of open files: every unfinished request has its own connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = requests + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def result_path(arguments: MeasureArguments) -> Path | None:
    """The file of --save-result, which may be a switch, as vLLM's is; None without the flag.

    Raises UsageError for a folder or a name that says nothing.
    """
    report = arguments.report
    path, folder, name = report.save_result, report.result_dir, report.result_filename
    if path is None:
        unused = "--result-dir" if folder is not None else "--result-filename" if name is not None else ""
        if unused:
            raise UsageError(f"{unused} names the file of --save-result; give that too", code="result-not-saved")
        return None
    if isinstance(path, str):
        return Path(folder or "", path)
    rate = f"{arguments.load.request_rate:g}" if isinstance(arguments, LoadArguments) else "sweep"
    model = (arguments.model or arguments.server.served_model_name or "server").rpartition("/")[2]
    usual = f"weft-{rate}qps-{model}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    return Path(folder or "", name or re.sub(r"[^\w.+-]", "-", usual))


def save_result(arguments: MeasureArguments, result: dict[str, Any]) -> None:
    """Write the result to the file of --save-result, if it is given."""
    if path := result_path(arguments):
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, on uvloop if it is installed: the client itself must not limit the measurement."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)
