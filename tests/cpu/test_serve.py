"""`weft serve` as a process of its own, with the OpenAI client and with clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cpu import tiny
from tests.cpu.families import command_line
from tests.log_events import logged_json
from tests.pure.letters import TEMPLATE
from weft.checkpoint.hub import demo
from weft.errors import ModelError

HI: list[Any] = [{"role": "user", "content": "hi"}]
# The tiny model makes 500 tokens in 50 ms, too few to do anything meanwhile; 64 times as many take a second.
LONG: dict[str, Any] = {"n": 64, "max_tokens": 500, "extra_body": {"ignore_eos": True}}
ADMIN_KEY = "secret"
PATIENCE_S = 60.0  # for what must happen some time


@contextmanager
def bound_to(cores: Iterable[int]) -> Iterator[None]:
    """Bind this thread, and processes that it starts meanwhile, to these cores; none: leave it as it is.

    subprocess's preexec_fn needs a real fork, for which a worker of pytest with much reserved memory may be too large.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores) or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Server:
    """A running `weft serve`. `url` is known once it says so; `lines` are what it has printed."""

    program: tuple[str, ...] = ("-m", "weft", "serve")

    def __init__(self, *words: str, wait: bool = True, cores: Iterable[int] = ()) -> None:
        """`cores` are those that it may use, though this process may be bound to others."""
        with bound_to(cores):
            self.process = subprocess.Popen(
                [sys.executable, *self.program, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                # Two threads that wait for each other are slow on a machine that is busy with other tests.
                env={**os.environ, "OMP_NUM_THREADS": "1", "WEFT_ADMIN_KEY": ADMIN_KEY},
            )
        self.lines: list[str] = []
        self.url = ""
        self._said = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        if wait and not (self._said.wait(PATIENCE_S) and self.url):
            self.__exit__()
            raise AssertionError("\n".join(self.lines))

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            for line in pipe:
                self.lines.append(line.rstrip())
                if found := re.search(r" at (http://\S+)", line):
                    self.url = found[1]
                    self._said.set()
        self._said.set()

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def family(self) -> list[psutil.Process]:
        """The processes that it has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        page = httpx.get(f"{self.url}/metrics", verify=False).text
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples if s.name == name]
        assert samples, f"no metric {name}"
        return sum(sample.value for sample in samples)

    def at_rest(self) -> bool:
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(self.metric(f"vllm:{gauge}") for gauge in gauges)

    def ended(self) -> int:
        """Its exit status, once it and all that it had started are gone."""
        status = self.process.wait(PATIENCE_S)
        self._listener.join(PATIENCE_S)
        return status

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        self.process.kill()
        self.ended()
        if kind is not None:  # a failed test shows what the server said
            print("\n".join(self.lines))


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def words(model: str) -> list[str]:
    said = "--load-format dummy --dtype float32 --max-model-len 512 --kv-cache-memory-bytes 16M --port 0"
    template = "{% if tools %}<tool_call>{{ tools[0].function.name }}{% endif %}" + TEMPLATE  # hermes, and short
    return [
        model,
        *said.split(),
        "--served-model-name",
        "tiny",
        "--shutdown-timeout",
        "300",
        "--chat-template",
        template,
    ]


@pytest.fixture(scope="module")
def server(words: list[str]) -> Iterator[Server]:
    with Server(*words) as made:
        yield made


@pytest.mark.parametrize(
    ("api", "asked"), [("completions", {"prompt": [7] * 40}), ("chat/completions", {"messages": HI})]
)
def test_only_prompts_of_one_salt_share_cached_blocks(server: Server, api: str, asked: dict[str, Any]) -> None:
    def cached(salt: str | None) -> int:
        body = {"max_tokens": 1, **asked, "cache_salt": salt}
        usage = httpx.post(f"{server.url}/v1/{api}", json=body).raise_for_status().json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    salts = ["first", "first", "second", "second", None, None]
    assert [bool(cached(salt)) for salt in salts] == [False, True] * 3


def test_the_openai_client_chats(server: Server) -> None:
    client = server.client
    assert [row.id for row in client.models.list()] == ["tiny"]
    answer = client.chat.completions.create(model="tiny", messages=HI, max_tokens=8, temperature=0)
    choice = answer.choices[0]
    assert choice.finish_reason in ("length", "stop") and choice.message.role == "assistant"
    assert answer.usage is not None and answer.usage.total_tokens == answer.usage.prompt_tokens + (
        answer.usage.completion_tokens
    )
    with client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == choice.message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_the_openai_client_completes(server: Server) -> None:
    client = server.client
    answer = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=4, seed=1, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs and logprobs.top_logprobs
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    again = client.completions.create(model="tiny", prompt="a", n=2, max_tokens=4, seed=1)
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices[:2]]
    with client.completions.create(model="tiny", prompt="a", n=2, max_tokens=4, seed=1, stream=True) as stream:
        texts = {0: "", 1: ""}
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [choice.text for choice in again.choices]


def test_the_openai_client_calls_tools(server: Server) -> None:
    """The model is random, so that only the grammar can make calls of what it says."""
    client = server.client
    parameters = {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}, "place": {"enum": ["here", "there"]}},
        "required": ["days", "place"],
        "additionalProperties": False,
    }
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": HI,
        "max_tokens": 200,
        "seed": 3,
        "tools": [{"type": "function", "function": {"name": "forecast", "parameters": parameters}}],
        "tool_choice": {"type": "function", "function": {"name": "forecast"}},
    }
    with client:
        check_calls(client, asked)


def check_calls(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "stop" and choice.message.tool_calls and choice.message.content is None
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "forecast" and 1 <= arguments["days"] <= 9 and arguments["place"] in ("here", "there")
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0].message
    assert final.tool_calls and final.tool_calls[0].function.arguments == call.function.arguments
    required = client.chat.completions.create(**{**asked, "tool_choice": "required", "parallel_tool_calls": False})
    assert required.choices[0].finish_reason == "tool_calls"


def test_the_openai_client_gets_what_a_schema_says(server: Server) -> None:
    number: dict[str, Any] = {"type": "integer", "minimum": 7, "maximum": 12}
    schema = {
        "type": "object",
        "properties": {"word": {"type": "string", "maxLength": 4}, "number": number},
        "required": ["word", "number"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema, "strict": True}}
    asked: dict[str, Any] = {"model": "tiny", "messages": HI, "response_format": wanted}
    with server.client as client:
        answer = client.chat.completions.create(**asked, max_tokens=200, n=3, seed=1)
        number["type"] = "numeral"
        with pytest.raises(openai.BadRequestError, match=r"at \$.properties.number: "):
            client.chat.completions.create(**asked)
    for choice in answer.choices:
        made = json.loads(choice.message.content or "")
        assert choice.finish_reason == "stop" and made.keys() == {"word", "number"}
        assert len(made["word"]) <= 4 and 7 <= made["number"] <= 12


def test_the_openai_client_understands_refusals(server: Server) -> None:
    client = server.client
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HI)
    assert missing.value.code == "model_not_found"
    for bad in ({"temperature": -1}, {"top_p": 2}, {"n": 0}, {"messages": [{"role": "robot", "content": "x"}]}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{"model": "tiny", "messages": HI, **bad})  # type: ignore[call-overload]
        assert refused.value.param == next(iter(bad)) and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="x" * 600)
    assert refused.value.param == "prompt" and "512" in str(refused.value)


def test_64_streams_at_once(server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, at: int) -> tuple[str, str | None]:
        text, reason = "", None
        stream = await client.completions.create(
            model="tiny", prompt=f"prompt {at}", max_tokens=24, seed=at, stream=True, extra_body={"ignore_eos": True}
        )
        async for chunk in stream:
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason
        return text, reason

    async def all_of_them() -> list[tuple[str, str | None]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(one(client, at) for at in range(64)))

    answers = asyncio.run(all_of_them())
    assert all(text and reason == "length" for text, reason in answers)
    # What a stream says depends on its own seed, and not on who else is there.
    alone = server.client.completions.create(
        model="tiny", prompt="prompt 7", max_tokens=24, seed=7, extra_body={"ignore_eos": True}
    )
    assert alone.choices[0].text == answers[7][0]
    eventually(server.at_rest)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(server: Server, stream: bool) -> None:
    eventually(server.at_rest)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": stream, "n": 64}
    before = server.metric("vllm:generation_tokens_total")
    with socket.create_connection(httpx.URL(server.url).netloc.decode().split(":")) as wire:  # type: ignore[arg-type]
        raw = httpx.Request("POST", f"{server.url}/v1/completions", json=body)
        lines = [b"POST /v1/completions HTTP/1.1", *(b": ".join(header) for header in raw.headers.raw), b"", b""]
        wire.sendall(b"\r\n".join(lines) + raw.content)
        eventually(lambda: server.metric("vllm:generation_tokens_total") > before + 8)
        assert not server.at_rest()
    eventually(server.at_rest)
    assert server.metric("vllm:generation_tokens_total") < before + 64 * 500


def test_no_torch_but_in_the_ranks(server: Server) -> None:
    def has_torch(pid: int) -> bool:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()

    family = {process.pid: command_line(process) for process in server.family()}
    cores = [pid for pid, line in family.items() if "weft.engine.replicas.process" in line]
    ranks = [pid for pid, line in family.items() if "weft.worker.process" in line]
    assert len(cores) == len(ranks) == 1, family
    assert not has_torch(server.process.pid) and not has_torch(cores[0])
    assert has_torch(ranks[0])


def test_the_engine_sleeps_and_wakes_by_http(server: Server) -> None:
    def tokens() -> list[str]:
        body = {"prompt": "a", "max_tokens": 16, "temperature": 0, "logprobs": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
        return answer["choices"][0]["logprobs"]["tokens"]

    def command(method: str, path: str) -> httpx.Response:
        key = {"Authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.request(method, server.url + path, headers=key, timeout=PATIENCE_S)

    want = tokens()
    (row,) = command("GET", "/layout").json()
    assert row["rank"] == 0 and row["allocated_bytes"] > row["kv_bytes"]
    for level in (1, 2):
        assert command("POST", f"/sleep?level={level}").status_code == 200
        assert command("GET", "/is_sleeping").json() == {"is_sleeping": True}
        assert command("POST", "/sleep").status_code == 400
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(tokens)
            eventually(lambda: server.metric("vllm:num_requests_waiting") == 1)
            assert command("POST", "/wake_up").status_code == 200
            assert waiting.result(PATIENCE_S) == tokens() == want
    assert command("POST", "/reset_prefix_cache").status_code == 200 and tokens() == want
    assert httpx.post(f"{server.url}/sleep").status_code == 401


def switches(pid: int) -> int:
    """Number of times that the threads of a process have gone to sleep."""
    status = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(line.split()[1]) for text in status for line in text.splitlines() if line.startswith("voluntary"))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the kernel does not tell")
def test_without_requests_nobody_wakes(words: list[str]) -> None:
    with Server(*words, "--tensor-parallel-size", "2", "--disable-log-stats") as server:
        pids = [server.process.pid, *(child.pid for child in server.family())]
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "hi", "max_tokens": 4})
        assert answer.is_success and answer.headers["date"].endswith("GMT")

        def asleep() -> bool:
            before = [switches(pid) for pid in pids]
            time.sleep(1)
            return [switches(pid) for pid in pids] == before

        eventually(asleep)


def test_the_log_lines_of_the_cache(server: Server) -> None:
    text = "\n".join(server.lines)
    assert re.search(r"CPU KV cache size: [\d,]+ tokens", text)
    assert re.search(r"Maximum concurrency for 512 tokens per request: [\d.]+x", text)


def test_predictions_are_told_beside_measurements(server: Server) -> None:
    server.client.completions.create(model="tiny", prompt="a", max_tokens=40, extra_body={"ignore_eos": True})

    def line(start: str) -> str:
        return next((line for line in server.lines if start in line), "")

    eventually(lambda: bool(line("one request of ")))
    memory = line("memory: ")
    # Before anybody can ask.
    assert server.lines.index(memory) < server.lines.index(line("serving tiny at "))
    assert memory.count(", ratio 1.00)") >= 2
    assert re.search(r"tokens/s \(predicted [\d.,]+, ratio [\d.]+\)", line("one request of "))


def test_a_taken_port_is_one_line_before_anything_is_loaded(server: Server) -> None:
    with Server("no/such/model", "--port", server.url.rpartition(":")[2], wait=False) as other:
        assert other.ended() == 1
        assert len(other.lines) == 1 and re.search(rf"\b{server.process.pid}\b", other.lines[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_lets_requests_end(words: list[str], number: signal.Signals) -> None:
    body = {"prompt": "a", "stream": True, "n": 32, "max_tokens": 500, "ignore_eos": True}
    with Server(*words) as server:
        # Without OpenAI's client, which takes ten seconds for so many chunks.
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(number)
            eventually(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503)
            # A kept error would keep its connection open.
            with pytest.raises(openai.InternalServerError, check=lambda error: error.code == "shutting_down"):
                server.client.completions.create(model="tiny", prompt="a")
            *_, last, done = [line for line in lines if line]
            assert done == "data: [DONE]"
            assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.ended() == 0, "\n".join(server.lines)


def test_requests_that_take_too_long_are_cut_off_visibly(words: list[str]) -> None:
    with Server(*words, "--shutdown-timeout", "0", "--log-format", "json") as server:
        with server.client.completions.create(model="tiny", prompt="a", stream=True, **LONG) as stream:
            chunks = iter(stream)
            next(chunks)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, check=lambda error: error.code == "shutting_down"):
                list(chunks)
        assert server.ended() == 0, "\n".join(server.lines)
        assert [event["requests"] for event in logged_json(server.lines, "requests-cut-off")] == [1]


def test_a_second_signal_ends_at_once(words: list[str]) -> None:
    with Server(*words) as server:
        family = server.family()
        with server.client.completions.create(model="tiny", prompt="a", stream=True, **LONG) as stream:
            chunks = iter(stream)
            next(chunks)
            server.process.send_signal(signal.SIGINT)
            eventually(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503)
            server.process.send_signal(signal.SIGINT)
            assert server.ended() == 130
            with pytest.raises(openai.APIError):
                list(chunks)
        eventually(lambda: not any(process.is_running() for process in family))


def test_a_killed_rank_fails_the_requests_with_the_cause_and_the_engine_starts_again(words: list[str]) -> None:
    with Server(*words, "--tensor-parallel-size", "2") as server:
        ranks = [process for process in server.family() if "weft.worker.process" in command_line(process)]
        assert len(ranks) == 2
        with server.client.completions.create(model="tiny", prompt="a", stream=True, **LONG) as stream:
            chunks = iter(stream)
            next(chunks)
            os.kill(ranks[1].pid, signal.SIGKILL)
            with pytest.raises(openai.APIError, match="SIGKILL", check=lambda error: error.code == "engine_restarts"):
                list(chunks)
        assert server.client.completions.create(model="tiny", prompt="a", max_tokens=2).choices[0].text
        assert any(re.search(r"rank 1 .*\bstep\b.*SIGKILL", line) for line in server.lines), server.lines
        assert not any(process.is_running() for process in ranks)


def replica_answers(server: Server, number: int) -> list[str]:
    """The texts of a request's choices: streamed or whole, greedy or sampled, one or two."""
    body: dict[str, Any] = {"prompt": [7 + number] * 20, "max_tokens": 100 + number, "seed": number}
    body |= {"temperature": number % 2, "n": 1 + number % 3 // 2, "extra_body": {"ignore_eos": True}}
    texts = [""] * body["n"]
    if number % 4 == 0:
        return [choice.text for choice in server.client.completions.create(model="tiny", **body).choices]
    for chunk in server.client.completions.create(model="tiny", stream=True, **body):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    return texts


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two replicas need two cores")
def test_no_client_of_two_replicas_notices_that_a_rank_is_killed(server: Server, words: list[str]) -> None:
    def ranks() -> list[psutil.Process]:
        return [member for member in two.family() if "weft.worker.process" in command_line(member)]

    def layout() -> list[tuple[int, int]]:
        answer = httpx.get(f"{two.url}/layout", headers={"x-api-key": ADMIN_KEY}).raise_for_status()
        return [(row["rank"], row["replica"]) for row in answer.json()]

    with Server(*words, "--data-parallel-size", "2", cores=(0, 1)) as two, ThreadPoolExecutor(24) as pool:
        assert layout() == [(0, 0), (1, 1)]
        assert {tuple(rank.cpu_affinity()) for rank in ranks()} == {(0,), (1,)}
        alone = [replica_answers(server, number) for number in range(24)]
        asked = [pool.submit(replica_answers, two, number) for number in range(24)]
        eventually(lambda: two.metric("vllm:generation_tokens_total") > 200)
        killed = ranks()[0]
        killed.kill()
        assert [answer.result() for answer in asked] == alone
        # Until another rank is there, the server may not have noticed the end of this one.
        eventually(lambda: len({rank.pid for rank in ranks()} - {killed.pid}) == 2)
        eventually(lambda: two.metric("weft:replica_up") == 2)
        assert layout() == [(0, 0), (1, 1)]
        assert two.metric("vllm:request_success_total") == sum(map(len, alone))
        assert httpx.get(f"{two.url}/health").status_code == 200
        eventually(two.at_rest)
        family = two.family()
        two.process.kill()
        eventually(lambda: not any(member.is_running() for member in family))


def test_the_demo_answers() -> None:
    try:
        demo.fetch_demo()
    except ModelError as error:
        pytest.skip(f"the demo model cannot be had: {error}")
    asked: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    with (
        Server("demo", "--port", "0", "-tp", "2", "--max-model-len", "512") as server,
        server.client.chat.completions.create(
            model="demo", messages=asked, temperature=0, max_tokens=16, stream=True
        ) as stream,
    ):
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "Paris" in text
