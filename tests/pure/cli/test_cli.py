"""The command line: words in, one config out, or one line of advice."""

from __future__ import annotations

import io
import logging
import os
import shlex
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.pure.commands import HERE, parsed, refused_line
from tests.pure.shapes import SMOLLM2
from tests.refusals import refuses
from weft import __version__, logs
from weft.checkpoint.checkpoint import Checkpoint
from weft.cli import docs, main, short_help
from weft.cli.commands import COMMANDS
from weft.cli.flags import values, vllm
from weft.cli.flags.command_flags import RunArguments
from weft.cli.flags.declared import flag_groups, flags_of
from weft.cli.flags.flags import EngineFlags, Sampling, engine_config, sampling_options, serve_options
from weft.cli.parser import UsageError, build_parser
from weft.cli.run import demo, run
from weft.config import EngineConfig, declared_options
from weft.engine.client.arguments import check_vllm_argument
from weft.engine.client.vllm import VLLMArgument, short_forms, vllm_arguments
from weft.engine.core.params import SamplingParams
from weft.errors import Cause, ConfigError, EngineError, ModelError
from weft.http.options import ServeOptions
from weft.machine.hardware.host import Host
from weft.machine.hardware.topology import Gpu
from weft.plan.layout import build_plan


def config(text: str) -> EngineConfig:
    return engine_config(parsed(text))


# --- flags ---


def test_nothing_said_is_the_config_s_defaults() -> None:
    assert config("serve m") == EngineConfig(model="m")
    assert serve_options(parsed("serve m"), {}) == ServeOptions()


def test_every_flag_is_a_field_and_every_field_a_flag() -> None:
    engine_flags = {flag.dest for _, group in flag_groups(EngineFlags) for flag in group}
    assert engine_flags == {f.name for f in fields(EngineConfig)}
    assert {flag.dest for flag in flags_of(ServeOptions)} == set(declared_options(ServeOptions))
    assert {flag.dest for flag in flags_of(Sampling)} <= set(SamplingParams.__struct_fields__)


def test_engine_flags() -> None:
    got = config(
        "serve m -tp 2 -pp 3 --tensor-split 2,1 --pipeline-split 20,5,5 --distributed-executor-backend mp --device cpu "
        "--device-ids 0,1 --gpu-memory-utilization 0.5,0.25 --kv-cache-memory-bytes 4G --block-size 32 --dtype half "
        "--no-enable-prefix-caching --max-model-len 8k --max-num-seqs 4 --max-num-batched-tokens 1 --seed 7"
    )
    assert got == EngineConfig(
        model="m",
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        tensor_split=(2.0, 1.0),
        pipeline_split=(20, 5, 5),
        executor="processes",
        device="cpu",
        device_ids=(0, 1),
        gpu_memory_utilization=(0.5, 0.25),
        kv_cache_memory_bytes=4 * 2**30,
        block_size=32,
        dtype="half",
        enable_prefix_caching=False,
        max_model_len=8000,
        max_num_seqs=4,
        max_num_batched_tokens=1,
        seed=7,
    )


@pytest.mark.parametrize(
    ("backend", "executor"),
    [("mp", "processes"), ("uni", "inline"), ("processes", "processes"), ("inline", "inline")],
)
def test_executors_have_vllm_s_names_too(backend: str, executor: str) -> None:
    assert config(f"serve m --distributed-executor-backend {backend}").executor == executor


def test_underscores_equal_dashes_and_values_keep_theirs() -> None:
    got = parsed("serve m --max_model_len=512 --served_model_name my_name --no-enable_prefix_caching")
    assert engine_config(got).max_model_len == 512
    assert engine_config(got).enable_prefix_caching is False
    assert serve_options(got, {}).served_model_name == ("my_name",)


def test_server_flags() -> None:
    got = parsed(
        "serve m --host 0.0.0.0 --port 0 --api-key a --api-key b --served-model-name x y --shutdown-timeout 2.5 "
        '--allowed-origins ["http://a","*"] --default-chat-template-kwargs {"enable_thinking":false} '
        "--enable-request-id-headers --disable-log-stats --root-path /llm"
    )
    assert serve_options(got, {"VLLM_API_KEY": "c"}) == ServeOptions(
        host="0.0.0.0",
        port=0,
        api_key=("a", "b"),
        served_model_name=("x", "y"),
        shutdown_timeout=2.5,
        allowed_origins=("http://a", "*"),
        default_chat_template_kwargs={"enable_thinking": False},
        enable_request_id_headers=True,
        disable_log_stats=True,
        root_path="/llm",
    )
    assert serve_options(parsed("serve m"), {"VLLM_API_KEY": "c"}).api_key == ("c",)


def test_the_model_may_be_a_flag() -> None:
    assert config("serve --model m").model == "m"
    assert config("serve n --model m").model == "n"
    with refuses(UsageError, "model-missing"):
        parsed("chat")


def test_sampling_flags() -> None:
    got = sampling_options(
        parsed("run m --prompt p --temperature 0 --top-k -1 --max-tokens auto --stop a --stop b --seed 3")
    )
    assert got == {"temperature": 0.0, "top_k": -1, "max_tokens": None, "stop": ("a", "b"), "seed": 3}
    assert sampling_options(parsed("run m --prompt p"), max_tokens=9) == {"max_tokens": 9}


# --- vLLM's other flags ---


def test_flags_of_vllm_that_we_lack_are_named_and_swallowed(caplog: pytest.LogCaptureFixture) -> None:
    got = parsed(
        "serve --enable-eplb m --kv-sharing-fast-prefill --trust-remote-code --no-enable-prompt-adapter --nnodes 1 "
        "-O3 -dp 1 --compilation-config.mode 3 --cudagraph-capture-sizes 1 2 4 --max_loras 2 --hf-overrides {} --port 9"
    )
    assert (got.model, got.server.port) == ("m", 9)
    warned = [record.message.split(":")[0] for record in caplog.records]
    assert warned == [
        "--enable-eplb",
        "--kv-sharing-fast-prefill",
        "--trust-remote-code",
        "-O3",
        "--compilation-config.mode",
        "--cudagraph-capture-sizes",
        "--max-loras",
    ]
    assert vllm_arguments()["trust-remote-code"].why in caplog.text


def test_no_flag_is_both_ours_and_lacking() -> None:
    # What is only planned may have flags for layouts that the engine does not run yet.
    engine = {flag for _, flags in flag_groups(EngineFlags) for flag in flags}
    planned = set(COMMANDS["plan"].flags) - engine
    ours = {flag.name for command in COMMANDS.values() for flag in command.flags if flag not in planned}
    assert not ours & set(vllm_arguments())
    assert set(short_forms().values()) <= set(vllm_arguments())
    assert all(flag.why for flag in vllm_arguments().values() if flag.refused)
    assert not any(flag.fine for flag in vllm_arguments().values() if not flag.refused)


SWALLOWED = {"--enable-eplb", "--swap-space", "-O2", "-asc"}


@given(st.lists(st.sampled_from(["m", "--port", "1", "--x=1", *sorted(SWALLOWED)]), max_size=8))
def test_stripping_keeps_the_order_and_warns_once_per_flag(argv: list[str]) -> None:
    kept, warnings = vllm.strip_vllm_flags(argv, frozenset({"--port"}))
    assert not SWALLOWED & set(kept)
    rest = iter(argv)
    assert all(word in rest for word in kept)  # a subsequence
    assert len(warnings) <= sum(word in SWALLOWED for word in argv)


@pytest.mark.parametrize(
    "flag", [flag for flag in vllm_arguments().values() if flag.refused], ids=lambda flag: flag.name
)
def test_flags_that_change_what_is_served_are_refused(flag: VLLMArgument, capsys: pytest.CaptureFixture[str]) -> None:
    value = ["17"] if flag.arity else []
    assert main.main(["serve", "m", f"--{flag.name}", *value]) == 2
    told = capsys.readouterr().err
    assert told == f"weft: error: --{flag.name}{' 17' if value else ''}: {flag.why}\n"
    for value in [[same] for same in flag.fine] if flag.arity else []:
        assert vllm.strip_vllm_flags([f"--{flag.name}", *value], frozenset()) == ([], [])
    if not flag.arity:
        assert vllm.strip_vllm_flags([f"--no-{flag.name}"], frozenset()) == ([], [])
    with refuses(ConfigError, "refused-vllm-argument") as refused:
        check_vllm_argument(flag.name.replace("-", "_"), 17 if flag.arity else True, ())
    assert str(refused.value).startswith(f"{flag.name.replace('-', '_')}=")
    check_vllm_argument(flag.name.replace("-", "_"), None if flag.arity else False, ())


def test_the_parallel_sizes_as_sglang_writes_them(tmp_path: Path) -> None:
    got = config("serve m --tp 2 --pp=3 --dp 1")
    assert (got.tensor_parallel_size, got.pipeline_parallel_size) == (2, 3)
    assert parsed("plan m --dp 4 --ep").subject.layout.data_parallel_size == 4
    (tmp_path / "c.yaml").write_text("tp: 2\n")
    assert config(f"serve m --config {tmp_path / 'c.yaml'}").tensor_parallel_size == 2


# --- --config ---


# The content of a file, the code of the error, and the values that its message names.
WRONG_CONFIGS = [
    (b"max-modell-len: 4", "unknown-flag", "'max-modell-len' --max-model-len?"),
    (b"enable-lora: true", "refused-vllm-argument", "--enable-lora"),
    (b"- a", "config-not-mapping", "max-model-len"),
    (b"a: [", "config-not-yaml", "c.yaml"),
    (b"seed: 1\nseed: 2", "config-not-yaml", "'seed'"),
    (b"max-model-len: 8\nmax_model_len: 9", "flag-twice-in-config", "'max-model-len' 'max_model_len'"),
    (b"enable-prefix-caching: 3", "flag-needs-boolean", "enable-prefix-caching 3"),
    (b"port: true", "flag-needs-value", "port True"),
    (b"port: many", "invalid-flag-value", "--port"),
    (b"\xff\xfe\xfa", "cannot-read-config", "c.yaml"),
]


def test_config_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: m\nmax_model_len: 4096\ntensor-parallel-size: 2\nenable-prefix-caching: false\n"
        "served-model-name: [a, b]\napi_key: [k]\n"
        "tensor-split: [2, 1]\ndtype: null\ndefault-chat-template-kwargs: {x: true}\nhost: -h\n"
    )
    got = parsed(f"serve --config {file} -tp 4 --api-key other")
    engine_said, server_said = engine_config(got), serve_options(got, {})
    assert (engine_said.model, engine_said.max_model_len, engine_said.tensor_parallel_size) == ("m", 4096, 4)
    assert engine_said.enable_prefix_caching is False and engine_said.tensor_split == (2.0, 1.0)
    assert engine_said.dtype == "auto"
    assert (server_said.served_model_name, server_said.api_key, server_said.host) == (("a", "b"), ("other",), "-h")
    assert server_said.default_chat_template_kwargs == {"x": True}
    assert config(f"serve other --config={file} --enable-prefix-caching") == EngineConfig(
        model="other", max_model_len=4096, tensor_parallel_size=2, tensor_split=(2.0, 1.0)
    )


@pytest.mark.parametrize(("content", "code", "named"), WRONG_CONFIGS, ids=repr)
def test_config_files_that_are_wrong(tmp_path: Path, content: bytes, code: str, named: str) -> None:
    (tmp_path / "c.yaml").write_bytes(content)
    refused_line(f"serve m --config {tmp_path}/c.yaml", 2, code, named)


def test_the_words_of_config_files_that_are_wrong(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    entries = [refused_line(f"serve m --config {tmp_path}/none.yaml", 2, "cannot-read-config", "none.yaml")]
    for content, code, named in WRONG_CONFIGS:
        (tmp_path / "c.yaml").write_bytes(content)
        entries += [f"{content!r}\n", refused_line(f"serve m --config {tmp_path}/c.yaml", 2, code, named)]
    golden("errors/config.txt", "".join(entries).replace(str(tmp_path), "FOLDER"))


def test_a_vllm_flag_in_a_config_file_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "c.yaml").write_text("enable-lora: false\nmax_loras: 4\nenable-eplb: true\n")
    assert config(f"serve m --config {tmp_path / 'c.yaml'}") == EngineConfig(model="m")
    assert "--enable-eplb" in caplog.text and "--max-loras" in caplog.text and "--enable-lora" not in caplog.text


# --- values ---


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("2M", 2**21), ("3g", 3 * 10**9), ("-1", -1)],
)
def test_sizes(text: str, value: int) -> None:
    assert values.size(text) == value


@pytest.mark.parametrize("text", ["", "k", "x", "1.5", "1.0005k", "infk", "nank", "1e400k", "4GB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        values.size(text)


def test_other_values() -> None:
    assert values.length("auto") is None and values.length("-1") is None and values.length("7") == 7
    assert values.span("32:256") == (32, 256) and values.span("7") == (7, 7)
    assert values.words("a, b") == ("a", "b") and values.words('["a", "b"]') == ("a", "b")
    for read, text in [
        (values.span, "5:4"),
        (values.span, "0:4"),
        (values.span, "a"),
        (values.words, "[1]"),
        (values.words, "["),
        (values.mapping, "[1]"),
        (values.mapping, "{"),
        (values.integers, "1,"),
        (values.decimals, "a"),
    ]:
        with pytest.raises(ArgumentTypeError) as caught:
            read(text)
        assert repr(text) in str(caught.value)


# --- main ---


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for said in ("--version", "-V", "-v"):
        assert main.main([said]) == 0
        assert capsys.readouterr().out == f"weft {__version__}\n"
    assert main.main(["--help-all"]) == 0
    told = capsys.readouterr().out
    assert all(f"weft {name}" in told for name in COMMANDS)
    for words, status in ((["--help"], 0), (["help"], 0), ([], 2)):
        assert main.main(words) == status
        told = capsys.readouterr().out
        assert all(name.split()[0] in told for name in COMMANDS)
        assert told.count("\n") <= short_help.LINES


def test_help_for_commands_of_two_words(capsys: pytest.CaptureFixture[str]) -> None:
    for said in (["bench", "--help"], ["bench", "-h"], ["help", "bench"]):
        assert main.main(said) == 0
        told = capsys.readouterr().out
        assert "weft bench compare" in told and "weft serve " not in told


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([*name.split(), "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told.count("\n") <= short_help.LINES
    assert max(map(len, told.splitlines())) <= 120
    with pytest.raises(SystemExit) as ended:
        main.main([*name.split(), "--help-all"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for flag in COMMANDS[name].flags:
        if flag.name != "model" or COMMANDS[name].argument == "MODEL":
            assert flag.long in told
    # Every flag given in its own words is taken.
    build_parser(COMMANDS[name])


# Commands whose examples need neither a model's files, another machine nor a server, and take no minutes.
LOOKING = ("plan", "cost", "ls")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_the_help_are_right(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a fresh installation: without the packages of extras."""
    words = shlex.split(COMMANDS[name].example)
    assert words[0] == "weft"
    parsed(words[1:])
    if name not in LOOKING:
        return
    for package in ("genai_prices", "matplotlib", "ray", "limits"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert main.main(words[1:]) == 0, capsys.readouterr().err


def test_help_loads_nothing_heavy() -> None:
    heavy = ("torch", "rich", "yaml", "starlette", "uvicorn", "tokenizers", "jinja2", "numpy", "huggingface_hub")
    code = (
        "import sys; from weft.cli.main import main\ntry: main(['serve', '--help'])\nexcept SystemExit: pass\n"
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=HERE)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("error", "status", "parts"),
    [
        (ModelError("no such model:\n  x", code="no-such-model"), 1, ["no such model: x\n"]),
        (EngineError(Cause(rank=0, phase="load", code="cut-off", cause="cut off")), 1, ["rank 0 ", " load: cut off\n"]),
        (UsageError("which model?", code="model-missing"), 2, ["which model?\n"]),
        (ZeroDivisionError("by zero"), 1, ["ZeroDivisionError: by zero", f"{logs.VARIABLE}=DEBUG\n"]),
    ],
)
def test_failures_are_one_line(
    error: Exception,
    status: int,
    parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: RunArguments) -> int:
        raise error

    monkeypatch.setattr(run, "main", fail)
    assert main.main(["run", "m", "--prompt", "p"]) == status
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("weft: error: ") and captured.err.count("\n") == 1
    assert all(part in captured.err for part in parts)


def test_ctrl_c_ends_a_command_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(arguments: RunArguments) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "main", interrupt)
    assert main.main(["run", "m", "--prompt", "p"]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize(
    "words", [["--help"], ["plan", "--help"], ["plan", "Qwen3-8B", "--gpus", "1xH100"]], ids=" ".join
)
def test_a_reader_that_has_left(words: list[str]) -> None:
    code = f"from weft.cli.main import main; import sys; sys.exit(main({words}))"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, env=HERE)
    os.close(writing)
    assert done.stderr == "" and done.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_were_closed_are_there(closed: str) -> None:
    """And their numbers are not given to whatever is opened next."""
    code = (
        "from weft.cli.main import main; import os, sys; main(['--version']); sys.stdin.read(); "
        "print('x', file=sys.stderr); sys.exit(os.dup(0) < 3)"
    )
    done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], env=HERE, timeout=60)
    assert done.returncode == 0


def test_a_terminal_without_the_sign_gets_a_question_mark() -> None:
    code = "from weft.cli.main import main; main(['--version']); print('é!')"
    environment = {**HERE, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == f"weft {__version__}\n?!\n" and done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_output_that_finds_no_room() -> None:
    code = "from weft.cli.main import main; import sys; sys.exit(main(['--version']))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, env=HERE)
    assert (done.stderr, done.returncode) == ("weft: error: No space left on device\n", 1)


def test_the_plan_s_table_fits_a_terminal() -> None:
    card = Gpu(index=0, name="H", uuid="GPU-0", total_bytes=24 * 10**9, free_bytes=20 * 10**9, capability=(9, 0))
    cards = (card, replace(card, index=1, uuid="GPU-1"))
    here = Host(hostname="here", cores=(0, 1), memory_total_bytes=10**10, memory_free_bytes=10**10, gpus=cards)
    checkpoint = Checkpoint(model="[/m]", path="/m", format="safetensors", shape=SMOLLM2, generation={})
    out = io.StringIO()
    demo.print_plan(build_plan(config("run [/m] -tp 2"), checkpoint, here), out)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].endswith("tensor parallel 2")
    assert [line.split()[:5] for line in lines[-3:-1]] == [
        ["0", "cuda:0", "0-29", "6", "2"],
        ["1", "cuda:1", "0-29", "3", "1"],
    ]


def test_help_for_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for said in (["help", "run"], ["run", "--help"]):
        with pytest.raises(SystemExit):
            main.main(said)
        assert capsys.readouterr().out.startswith("usage: weft run MODEL [PROMPT] [flags]")


def test_only_a_server_tells_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("weft.cli.serve.serve.main", lambda _: seen.append(logging.getLogger("weft").level) or 0)
    monkeypatch.setattr(run, "main", lambda _: seen.append(logging.getLogger("weft").level) or 0)
    assert main.main(["serve", "m"]) == 0
    monkeypatch.setenv(logs.VARIABLE, "")
    assert main.main(["run", "m", "--prompt", "p"]) == 0
    assert seen == [logging.INFO, logging.WARNING]


@pytest.mark.parametrize(("said", "level"), [("", "WARNING"), ("debug", "DEBUG"), ("nonsense", "WARNING")])
def test_logging_level(monkeypatch: pytest.MonkeyPatch, said: str, level: str) -> None:
    monkeypatch.setenv(logs.VARIABLE, said)
    logs.configure()
    assert logging.getLogger("weft").level == getattr(logging, level)
    assert os.environ[logs.VARIABLE] == level


def test_the_page_is_what_the_parser_says() -> None:
    assert docs.PAGE.read_text(encoding="utf-8") == docs.page(), "run python -m weft.cli.docs"


def test_a_model_of_blanks_is_shown_in_quotes() -> None:
    """A line that ends with a backslash, a blank and a comment, as guides have it, makes such a word."""
    refused_line(["serve", "--model", "demo", "--tensor-parallel-size", "8", " "], 2, "blank-model", "' ' --model demo")
    refused_line(["serve", " "], 2, "blank-model", "' '")
