"""Arguments of the commands that have few flags of their own."""

from __future__ import annotations

from typing import ClassVar, Literal

from weft.cli.flags import values
from weft.cli.flags.declared import Arguments, flag
from weft.cli.flags.flags import EngineFlags, Sampling, ShardFlags
from weft.http.options import ServeOptions

SYSTEM_PROMPT = flag(metavar="TEXT", help="instructions to the model, before the conversation")
FOLDER = flag(metavar="DIR", help="the hub's cache, instead of HF_HOME's")
TOKEN = flag(metavar="TOKEN", help="token of the hub; HF_TOKEN in the environment is safer")
AS_JSON = flag(False, help="print one JSON object")


class ServeArguments(Arguments):
    """weft serve [MODEL]."""

    engine: EngineFlags
    server: ServeOptions


class RunArguments(Arguments):
    """weft run MODEL [PROMPT]."""

    title: ClassVar = "prompt"
    prompt_words: tuple[str, ...] = ()
    prompt: str | None = flag(
        metavar="TEXT", help="the prompt, if it does not follow MODEL; without either, standard input is read"
    )
    system_prompt: str | None = SYSTEM_PROMPT
    raw: bool = flag(False, help="give the prompt to the model unchanged, without the chat template")
    json: bool = flag(False, help="print one JSON object with text, token ids, timing, layout and predictions")
    verbose: bool = flag(False, help="print memory and speed on standard error, each with its prediction")
    show_layout: bool = flag(False, help="print the part and the memory of each rank on standard error")
    sampling: Sampling
    engine: EngineFlags


class ChatArguments(Arguments):
    """weft chat MODEL."""

    title: ClassVar = "conversation"
    system_prompt: str | None = SYSTEM_PROMPT
    sampling: Sampling
    engine: EngineFlags


class DemoArguments(Arguments):
    """weft demo [PROMPT]."""

    sampling: Sampling
    engine: EngineFlags


class ShardArguments(Arguments):
    """weft shard MODEL DIRECTORY."""

    engine: ShardFlags


class LatencyArguments(Arguments):
    """weft bench latency MODEL."""

    title: ClassVar = "workload"
    input_len: int = flag(128, parse=values.at_least(1), help="prompt tokens")
    output_len: int = flag(128, parse=values.at_least(1), help="answer tokens")
    batch_size: int = flag(1, parse=values.at_least(1), help="number of requests in the batch")
    num_iters: int = flag(5, parse=values.at_least(1), help="measured runs; their median is reported")
    num_iters_warmup: int = flag(2, parse=values.at_least(0), help="warm-up runs before the measured ones")
    engine: EngineFlags


class ThroughputArguments(Arguments):
    """weft bench throughput MODEL."""

    title: ClassVar = "workload"
    workload: Literal["random", "nano-vllm"] = flag(
        "random",
        help="random: the flags below; nano-vllm: 256 requests of 100 to 1024 tokens in and out, as its benchmark",
    )
    num_prompts: int = flag(32, parse=values.at_least(1), help="number of requests, all queued at the start")
    input_len_range: tuple[int, int] = flag(
        (32, 256), parse=values.span, config_default="32:256", help="prompt tokens, low:high"
    )
    output_len: int = flag(128, parse=values.at_least(1), help="answer tokens of each request")
    num_iters: int = flag(3, parse=values.at_least(1), help="measured runs; their median is reported")
    num_iters_warmup: int = flag(
        1, parse=values.at_least(0), help="warm-up runs of the random workload before the measured ones"
    )
    engine: EngineFlags


class DoctorArguments(Arguments):
    """weft doctor."""

    title: ClassVar = "checks"
    measure: bool = flag(True, help="measure what is not in the cache yet (default: on); --no-measure measures nothing")
    security: bool = flag(False, help="list open endpoints, keys, certificates and permissions instead")
    nodes: bool = flag(False, help="check all machines of a hosts file or of Ray's cluster instead of this one")
    hosts: str | None = flag(
        metavar="FILE",
        help="the file that lists the machines of --nodes (default: the Ray cluster at RAY_ADDRESS, else hosts.yaml)",
    )
    json: bool = flag(
        False,
        help="print one JSON object: {ok, checks: [{name, status, value, limit, remedy}]}; with --nodes each check "
        "has its node",
    )


class TopArguments(Arguments):
    """weft top."""

    title: ClassVar = "view"
    url: tuple[str, ...] = flag(
        (),
        metavar="URL",
        repeated=True,
        help="server, or gateway, which stands for all its upstreams (default: this user's servers on this machine)",
    )
    interval: float = flag(2.0, metavar="S", help="seconds between two looks")
    format: Literal["table", "json", "csv"] = flag(
        "table",
        help="table for a person; json: an object per line; csv: a line per GPU, with nvidia-smi's columns",
    )
    once: bool = flag(False, help="print one look and end")
    json: bool = flag(False, help="the same as --format json --once")
    api_key: str | None = flag(
        metavar="KEY",
        help="key of the servers named by --url; VLLM_API_KEY in the environment is safer. A gateway's status "
        "needs WEFT_ADMIN_KEY there",
    )


class SupportArguments(Arguments):
    """weft support-bundle."""

    title: ClassVar = "bundle"
    output: str | None = flag(
        metavar="FILE", help="the archive, which must not be there yet (default: weft-support-DATE-TIME.tar.gz)"
    )
    log: tuple[str, ...] = flag((), metavar="FILE", repeated=True, help="a log file, of which the last lines are added")
    json: bool = flag(False, help="print one JSON object: {file, parts}")


class ProfileArguments(Arguments):
    """weft profile."""

    title: ClassVar = "profile"
    url: str = flag("http://127.0.0.1:8000", metavar="URL", help="the server")
    steps: int = flag(20, parse=values.at_least(1), help="number of steps to trace")
    output: str = flag(
        "weft-trace.json.gz",
        metavar="FILE",
        help="trace of all ranks on one time axis, for chrome://tracing and ui.perfetto.dev",
    )
    timeout: float = flag(
        60.0, metavar="S", help="seconds to wait for the steps; then the trace ends with the steps so far"
    )
    json: bool = flag(False, help="print one JSON object: {files, missing, report, predicted}")


class PullArguments(Arguments):
    """weft pull NAME."""

    title: ClassVar = "download"
    hf_token: str | None = TOKEN
    download_dir: str | None = FOLDER


class ListArguments(Arguments):
    """weft ls."""

    title: ClassVar = "models"
    download_dir: str | None = FOLDER
    json: bool = AS_JSON


class RemoveArguments(Arguments):
    """weft rm NAME."""

    title: ClassVar = "models"
    download_dir: str | None = FOLDER


class PsArguments(Arguments):
    """weft ps."""

    title: ClassVar = "servers"
    json: bool = AS_JSON
