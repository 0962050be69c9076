"""Flags of the commands that have few of their own."""

from __future__ import annotations

from weft.cli.flags import values
from weft.cli.flags.flags import Flag

SYSTEM_PROMPT = Flag(name="system-prompt", metavar="TEXT", help="instructions to the model, before the conversation")
PROMPT = (
    Flag(
        name="prompt",
        metavar="TEXT",
        help="the prompt, if it does not follow MODEL; without either, standard input is read",
    ),
    SYSTEM_PROMPT,
    Flag(name="raw", parse=None, help="give the prompt to the model unchanged, without the chat template"),
    Flag(name="json", parse=None, help="print one JSON object with text, token ids, timing, layout and predictions"),
    Flag(name="verbose", parse=None, help="print memory and speed on standard error, each with its prediction"),
    Flag(name="show-layout", parse=None, help="print the part and the memory of each rank on standard error"),
)
CHAT = (SYSTEM_PROMPT,)
LATENCY = (
    Flag(name="input-len", parse=values.at_least(1), default=128, help="prompt tokens"),
    Flag(name="output-len", parse=values.at_least(1), default=128, help="answer tokens"),
    Flag(name="batch-size", parse=values.at_least(1), default=1, help="number of requests in the batch"),
    Flag(name="num-iters", parse=values.at_least(1), default=5, help="measured runs; their median is reported"),
    Flag(name="num-iters-warmup", parse=values.at_least(0), default=2, help="warm-up runs before the measured ones"),
)
THROUGHPUT = (
    Flag(
        name="workload",
        choices=("random", "nano-vllm"),
        default="random",
        help="random: the flags below; nano-vllm: 256 requests of 100 to 1024 tokens in and out, as its benchmark",
    ),
    Flag(name="num-prompts", parse=values.at_least(1), default=32, help="number of requests, all queued at the start"),
    Flag(name="input-len-range", parse=values.span, default="32:256", help="prompt tokens, low:high"),
    Flag(name="output-len", parse=values.at_least(1), default=128, help="answer tokens of each request"),
    Flag(name="num-iters", parse=values.at_least(1), default=3, help="measured runs; their median is reported"),
    Flag(
        name="num-iters-warmup",
        parse=values.at_least(0),
        default=1,
        help="warm-up runs of the random workload before the measured ones",
    ),
)

FOLDER = Flag(name="download-dir", metavar="DIR", help="the hub's cache, instead of HF_HOME's")
TOKEN = Flag(name="hf-token", metavar="TOKEN", help="token of the hub; HF_TOKEN in the environment is safer")
AS_JSON = Flag(name="json", parse=None, help="print one JSON object")
DOCTOR = (
    Flag(
        name="measure",
        parse=None,
        help="measure what is not in the cache yet (default: on); --no-measure measures nothing",
    ),
    Flag(name="security", parse=None, help="list open endpoints, keys, certificates and permissions instead"),
    Flag(name="nodes", parse=None, help="check all machines of a hosts file or of Ray's cluster instead of this one"),
    Flag(
        name="hosts",
        metavar="FILE",
        help="the file that lists the machines of --nodes (default: the Ray cluster at RAY_ADDRESS, else hosts.yaml)",
    ),
    Flag(
        name="json",
        parse=None,
        help="print one JSON object: {ok, checks: [{name, status, value, limit, remedy}]}; with --nodes each check "
        "has its node",
    ),
)
TOP = (
    Flag(
        name="url",
        metavar="URL",
        repeated=True,
        help="server, or gateway, which stands for all its upstreams (default: this user's servers on this machine)",
    ),
    Flag(name="interval", metavar="S", parse=float, default=2.0, help="seconds between two looks"),
    Flag(
        name="format",
        choices=("table", "json", "csv"),
        default="table",
        help="table for a person; json: an object per line; csv: a line per GPU, with nvidia-smi's columns",
    ),
    Flag(name="once", parse=None, help="print one look and end"),
    Flag(name="json", parse=None, help="the same as --format json --once"),
    Flag(
        name="api-key",
        metavar="KEY",
        help="key of the servers named by --url; VLLM_API_KEY in the environment is safer. A gateway's status needs "
        "WEFT_ADMIN_KEY there",
    ),
)
SUPPORT = (
    Flag(
        name="output",
        metavar="FILE",
        help="the archive, which must not be there yet (default: weft-support-DATE-TIME.tar.gz)",
    ),
    Flag(name="log", metavar="FILE", repeated=True, help="a log file, of which the last lines are added"),
    Flag(name="json", parse=None, help="print one JSON object: {file, parts}"),
)
PROFILE = (
    Flag(name="url", metavar="URL", default="http://127.0.0.1:8000", help="the server"),
    Flag(name="steps", parse=values.at_least(1), default=20, help="number of steps to trace"),
    Flag(
        name="output",
        metavar="FILE",
        default="weft-trace.json.gz",
        help="trace of all ranks on one time axis, for chrome://tracing and ui.perfetto.dev",
    ),
    Flag(
        name="timeout",
        metavar="S",
        parse=float,
        default=60.0,
        help="seconds to wait for the steps; then the trace ends with the steps so far",
    ),
    Flag(name="json", parse=None, help="print one JSON object: {files, missing, report, predicted}"),
)
