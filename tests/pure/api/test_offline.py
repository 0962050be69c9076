"""weft batch: rows of files, their answers, what is kept after an end at any time, and the output files."""

from __future__ import annotations

import asyncio
import datetime
import errno
import json
import logging
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tests.log_events import logged
from tests.pure.commands import HERE, parsed, refused_line, weft
from tests.pure.worlds import DEAD, HELLO, FakeEngine, World
from tests.refusals import refuses
from weft.api.batches.results import ResultTable
from weft.api.offline import outputs, rows
from weft.api.offline.answering import AnsweredRow
from weft.api.offline.job import (
    Answer,
    AttemptsOf,
    BatchJob,
    Keep,
    Rows,
    answer_rows,
    journal_path,
    open_job,
    run_job,
    summary,
)
from weft.api.offline.journal import Journal
from weft.cli.run import batch
from weft.config import EngineConfig
from weft.engine.client.arguments import engine_config
from weft.engine.core.request import Output, Request
from weft.engine.replicas.suspects import LOST
from weft.errors import ConfigError, EngineError
from weft.fleet.upstreams.config import make_config
from weft.http.options import ServeOptions
from weft.ray.serve import ServeArguments, build

CHAT: list[Any] = [{"role": "user", "content": "hi"}]


def write(path: Path, values: Iterable[Any]) -> str:
    path.write_text("".join((it if isinstance(it, str) else json.dumps(it)) + "\n" for it in values))
    return str(path)


def read(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def job_of(source: str, out: Path | str, **defaults: Any) -> BatchJob:
    opened, model = open_job(source, str(out), "tiny")
    return BatchJob(opened, str(out), EngineConfig(model=model), ServeOptions(), defaults)


def answering(world: World, stop_after: int | None = None) -> Answer:
    """Answer with a World's engine; Ctrl-C comes once `stop_after` rows are kept."""

    def answer(job: BatchJob, pending: Rows, keep: Keep, attempts: AttemptsOf) -> None:
        kept: list[int] = []

        def count(answered: AnsweredRow) -> None:
            keep(answered)
            kept.append(answered.number)
            if len(kept) == stop_after:
                raise KeyboardInterrupt

        asyncio.run(answer_rows(world.service, job.kind, pending, count, attempts))

    return answer


@pytest.mark.parametrize(
    ("row", "flags", "clips"),
    [
        ({"prompt": "a"}, "--max-tokens 500", True),
        ({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}, "", False),
    ],
    ids=["plain", "request"],
)
def test_a_length_of_all_plain_rows_is_a_limit(
    row: Any, flags: str, clips: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[BatchJob] = []

    def note(job: BatchJob, answer: Answer) -> tuple[int, int]:
        jobs.append(job)
        return 1, 0

    monkeypatch.setattr("weft.api.offline.job.run_job", note)
    source = write(tmp_path / "in.jsonl", [row])
    assert batch.main(parsed(f"batch {source} {tmp_path / 'out.jsonl'} --model demo {flags}")) == 0
    assert jobs[0].options.clip_max_tokens is clips


def test_plain_rows(tmp_path: Path) -> None:
    """Completions and chats beside each other; fields that nobody knows stay; flags stand in for missing fields."""
    source = write(
        tmp_path / "in.jsonl",
        [
            {"id": 17, "prompt": "a", "max_tokens": 3, "answer": "gold", "generated_text": "old"},
            "",
            {"messages": CHAT, "n": 2},
            "not json",
            {"prompt": "a", "max_tokens": -4},
            {"id": 5},
            {"prompt": "a", "messages": CHAT},
            [1],
            {"prompt": "a", "stream": True},
        ],
    )
    out = tmp_path / "out.jsonl"
    world = World()
    job = job_of(source, out, max_tokens=4)
    assert run_job(job, answering(world)) == (2, 6)
    first, second = read(out)
    assert first == {
        "id": 17,
        "prompt": "a",
        "max_tokens": 3,
        "answer": "gold",
        "generated_text": "hel",
        "finish_reason": "length",
        "prompt_tokens": first["prompt_tokens"],
        "completion_tokens": 3,
    }
    assert second["generated_text"] == ["hell", "hell"] and second["messages"] == CHAT
    failed = read(tmp_path / "out.failed.jsonl")
    assert [row.get("row") for row in failed] == ["not json", None, None, None, "[1]", None]
    assert [row["error"]["code"] for row in failed][:2] == ["invalid_json_line", "invalid_value"]
    assert failed[2]["id"] == 5 and all(row["error"]["message"] for row in failed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.failed.jsonl", "out.jsonl"]
    assert "2 of 8 rows" in summary(job, (2, 6)) and "6 failed" in summary(job, (2, 6))


def request_line(name: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": CHAT} | fields
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_a_row_s_own_fields_are_no_cause_to_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    source = write(tmp_path / "in.jsonl", [{"id": 17, "prompt": "a", "gold": 1}, {"id": 18, "messages": CHAT}])
    run_job(job_of(source, tmp_path / "out.jsonl"), answering(World()))
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == [17, 18] and not logged(caplog, "unknown-fields")


def test_requests_as_in_openai_s_batches(tmp_path: Path) -> None:
    lines = [
        request_line("a"),
        request_line("b", model="other"),
        request_line("c") | {"method": "GET"},
        request_line("d") | {"url": "/v1/embed"},
        {"prompt": "a"},
        {"custom_id": "e", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}},
    ]
    out = tmp_path / "out.jsonl"
    assert run_job(job_of(write(tmp_path / "in.jsonl", lines), out), answering(World())) == (2, 4)
    good = read(out)
    assert [row["custom_id"] for row in good] == ["a", "e"] and good[0].keys() == {
        "id",
        "custom_id",
        "response",
        "error",
    }
    assert good[0]["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert good[1]["response"]["body"]["choices"][0]["text"] == "he"
    failed = {row["custom_id"]: row for row in read(tmp_path / "out.failed.jsonl")}
    assert failed["b"]["response"]["status_code"] == 404
    assert [failed[name]["error"]["code"] for name in "cd"] == ["invalid_method", "invalid_url"]
    assert failed[""]["response"] is None and "custom_id" in failed[""]["error"]["message"]


def test_it_goes_on_after_any_end(tmp_path: Path) -> None:
    """Ctrl-C, an engine that dies, an end just before the files are written: no row is asked twice, none is lost."""
    source = write(tmp_path / "in.jsonl", [{"prompt": "a" * (number + 1), "number": number} for number in range(20)])
    out = tmp_path / "out.jsonl"
    asked: list[int] = []

    def noting(request: Request) -> Iterable[Output]:
        asked.append(len(request.prompt))
        return HELLO(request)

    def dies(request: Request) -> Iterable[Output]:
        raise DEAD

    def one_at_a_time(script: Callable[[Request], Iterable[Output]]) -> World:
        world = World(FakeEngine(script))
        world.service.capacity = 1
        return world

    with pytest.raises(KeyboardInterrupt):
        run_job(job_of(source, out), answering(one_at_a_time(noting), stop_after=7))
    assert not out.exists() and len(asked) == 7
    broken = one_at_a_time(dies)
    broken.engine.failure = DEAD
    with pytest.raises(EngineError) as raised:
        run_job(job_of(source, out), answering(broken))
    assert raised.value is DEAD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.api.offline.job.write_outputs", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_job(job_of(source, out), answering(World(FakeEngine(noting))))
    assert sorted(asked) == sorted(set(asked)) and len(asked) == 20

    def nobody(job: BatchJob, pending: Rows, keep: Keep, attempts: AttemptsOf) -> None:
        raise AssertionError("all rows have answers")

    assert run_job(job_of(source, out), nobody) == (20, 0)
    assert [row["number"] for row in read(out)] == list(range(20))
    assert not journal_path(str(out)).exists()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), outputs.whole_file(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_text() == "before" and [it.name for it in tmp_path.iterdir()] == ["out"]


def test_answers_of_another_batch_are_not_mixed(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "out.jsonl"
    job = job_of(source, out)
    with pytest.raises(KeyboardInterrupt):
        run_job(job, answering(World(), stop_after=1))
    with refuses(ConfigError, "other-batch", "sampling", "max_tokens"):
        run_job(job_of(source, out, max_tokens=2), answering(World()))
    write(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "c"}])
    with refuses(ConfigError, "other-batch", "input"):
        run_job(job_of(source, out), answering(World()))
    journal = Journal(journal_path(str(out)), {})
    with refuses(ConfigError, "batch-in-use", "out.jsonl.progress"):
        run_job(job, answering(World()))
    journal.close()
    journal_path(str(out)).write_text("no database, and longer than the header of one" * 100)
    with refuses(ConfigError, "cannot-keep", "out.jsonl.progress"):
        run_job(job, answering(World()))


def test_a_full_disk_is_a_line_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the journal, before a row and after its answer, and under the output: the same command goes on."""
    source, out = write(tmp_path / "in.jsonl", [{"prompt": "a" * (1 + at)} for at in range(9)]), tmp_path / "out.jsonl"
    job = job_of(source, out)
    for kept in (3, 6):
        write_changes = ResultTable.write_changes

        def full(*given: Any, write: Any = write_changes, left: list[int] = [0] * kept) -> None:
            if not left:
                raise sqlite3.OperationalError("database or disk is full")
            left.pop()
            write(*given)

        with monkeypatch.context() as patch:
            patch.setattr(ResultTable, "write_changes", full)
            with refuses(ConfigError, "cannot-keep", "out.jsonl.progress", "disk is full"):
                run_job(job, answering(World()))
    with monkeypatch.context() as patch:

        def no_room(*given: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr("weft.api.offline.outputs.os.fsync", no_room)
        with refuses(ConfigError, "cannot-write-output", "out.jsonl", "No space left"):
            run_job(job, answering(World()))
    assert not out.exists()

    def nobody(job: BatchJob, pending: Rows, keep: Keep, attempts: AttemptsOf) -> None:
        raise AssertionError("all rows have answers")

    assert run_job(job, nobody) == (9, 0) and len(read(out)) == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def killing(world: World, prompts: list[int], kill: Callable[[], None]) -> Callable[[Request], Iterable[Output]]:
    """Say hello, but kill for the prompt "killer"; `prompts` gets the number of others beside it each time."""

    def script(request: Request) -> Iterable[Output]:
        if b"killer" in bytes(token for token in request.prompt if token < 256):
            prompts.append(len(world.engine.open) - 1)
            kill()
        return HELLO(request)

    return script


def test_a_row_that_kills_engines_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.batches.answers.RETRY_S", 0)
    source = write(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in [*"abc", "killer", *"def"]])
    world, beside = World(), list[int]()

    def die() -> None:
        raise DEAD

    world.engine.script = killing(world, beside, die)
    job = job_of(source, tmp_path / "out.jsonl")
    assert run_job(job, answering(world)) == (6, 1)
    (failed,) = read(tmp_path / "out.failed.jsonl")
    assert (failed["prompt"], failed["error"]["code"]) == ("killer", "request_ends_engines")
    assert len(beside) == LOST + 1 and beside[-1] == 0


KILLER = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.pure.api.test_offline import answering, job_of, killing
from tests.pure.worlds import World
from weft.api.offline.job import run_job

world, beside = World(), []
world.engine.script = killing(world, beside, lambda: os.kill(os.getpid(), signal.SIGKILL))
print(run_job(job_of(sys.argv[1], Path(sys.argv[2])), answering(world)))
"""


def test_a_row_that_kills_the_command_is_an_error_at_last(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in [*"abc", "killer", *"def"]])
    command = [sys.executable, "-c", KILLER, source, str(tmp_path / "out.jsonl")]
    runs = [subprocess.run(command, env=HERE, capture_output=True, text=True, timeout=60) for _ in range(LOST + 2)]
    assert [run.returncode for run in runs] == [-9] * (LOST + 1) + [0], runs[-1].stderr
    assert runs[-1].stdout.strip() == "(6, 1)"
    assert [row["prompt"] for row in read(tmp_path / "out.failed.jsonl")] == ["killer"]


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b"\xef\xbb\xbf\n", b"\n\n"])
def test_a_byte_order_mark_is_skipped(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "in.jsonl").write_bytes(start + b'{"prompt": "a"}\n{"prompt": "b"}\n')
    out = tmp_path / "out.jsonl"
    assert run_job(job_of(str(tmp_path / "in.jsonl"), out), answering(World())) == (2, 0)
    assert [row["prompt"] for row in read(out)] == ["a", "b"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_other_encodings_are_refused_in_a_line(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "in.jsonl").write_bytes('{"prompt": "a"}\n'.encode(encoding))
    with refuses(ConfigError, "cannot-read-batch", "in.jsonl", "UTF-16"):
        job_of(str(tmp_path / "in.jsonl"), tmp_path / "out.jsonl")


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet"])
def test_a_pipe_is_no_input(tmp_path: Path, name: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    os.mkfifo(tmp_path / name)
    with refuses(ConfigError, "cannot-read-batch", name, "pipe"):
        job_of(str(tmp_path / name), tmp_path / "out.jsonl")


def test_a_batch_without_an_answer_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(job: BatchJob, pending: Rows, keep: Keep, attempts: AttemptsOf) -> None:
        answering(World(served_model_name=("demo",)))(job, pending, keep, attempts)

    monkeypatch.setattr("weft.api.offline.job.answer_here", here)
    for number, (good, status) in enumerate(((0, 1), (1, 0))):
        source = write(tmp_path / "in.jsonl", [{}] * 3 + [{"prompt": "a"}] * good)
        got, out, _ = weft("batch", source, str(tmp_path / f"{number}.jsonl"), "--model", "demo")
        assert got == status and f"{good} of {3 + good} rows" in out


def test_an_input_that_is_changed_meanwhile(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "out.jsonl"
    job = job_of(source, out)
    write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    with refuses(ConfigError, "rows-missing", "1 of the 2 rows"):
        run_job(job, answering(World()))


def test_refusals(tmp_path: Path, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    write(tmp_path / "empty.jsonl", ["", " "])
    (tmp_path / "there.jsonl").write_text("")
    (tmp_path / "notes.failed.jsonl").write_text("notes")
    write(tmp_path / "rows.failed.jsonl", [{"prompt": "a"}])
    cases = [
        ("batch in.jsonl", 2, "batch-arguments"),
        ("batch absent.jsonl out.jsonl --model demo", 1, "cannot-read-batch"),
        ("batch empty.jsonl out.jsonl --model demo", 1, "empty-batch"),
        ("batch in.jsonl out.jsonl", 1, "batch-without-model"),
        ("batch in.jsonl there.jsonl --model demo", 1, "output-exists"),
        ("batch in.jsonl ./in.jsonl --model demo", 1, "output-is-input"),
        ("batch rows.failed.jsonl rows.jsonl --model demo", 1, "output-is-input"),
        ("batch in.jsonl notes.jsonl --model demo", 1, "output-exists"),
        ("batch in.jsonl no/out.jsonl --model demo", 1, "no-output-directory"),
    ]
    lines = [refused_line(words, status, code) for words, status, code in cases]
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    lines += [
        refused_line("batch in.jsonl out.parquet --model demo", 1, "no-pyarrow"),
        refused_line("batch in.parquet out.jsonl --model demo", 1, "no-pyarrow"),
    ]
    golden("errors/batch.txt", "".join(lines))


# --- Parquet ---


@pytest.fixture
def parquet() -> Any:
    return pytest.importorskip("pyarrow.parquet", reason="needs the extra weft-llm[parquet]")


def test_parquet_keeps_the_types_of_its_columns(tmp_path: Path, parquet: Any) -> None:
    import pyarrow

    days = [datetime.date(2026, 1, day + 1) for day in range(3)]
    table = pyarrow.table(
        {
            "messages": [CHAT, None, CHAT],
            "prompt": [None, "a", None],
            "max_tokens": pyarrow.array([2, None, -1], pyarrow.int32()),
            "day": days,
            "generated_text": [1, 2, 3],
        }
    )
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    out = tmp_path / "out.parquet"
    assert run_job(job_of(str(tmp_path / "in.parquet"), out), answering(World())) == (2, 1)
    written = parquet.read_table(out)
    assert written.schema.field("max_tokens").type == pyarrow.int32()
    assert written.schema.field("messages").type == table.schema.field("messages").type
    assert written["day"].to_pylist() == days[:2] and written["prompt"].to_pylist() == [None, "a"]
    assert written["generated_text"].to_pylist() == ["he", "hello"]
    assert written["completion_tokens"].to_pylist()[0] == 2
    (failed,) = read(tmp_path / "out.failed.jsonl")
    assert failed["day"] == "2026-01-03" and "max_tokens" in failed["error"]["message"]


def test_between_parquet_and_jsonl(tmp_path: Path, parquet: Any) -> None:
    lines = [{"messages": CHAT, "n": 2, "x": 1}, {"prompt": "a", "x": 0.5, "flag": True, "tools": None}]
    source, middle = write(tmp_path / "in.jsonl", lines), tmp_path / "out.pq"
    assert run_job(job_of(source, middle), answering(World())) == (2, 0)
    table = parquet.read_table(middle).to_pylist()
    assert [row["x"] for row in table] == [1.0, 0.5] and [row["flag"] for row in table] == [None, True]
    assert json.loads(table[0]["messages"]) == CHAT and json.loads(table[0]["generated_text"]) == ["hello", "hello"]
    assert run_job(job_of(write(tmp_path / "r.jsonl", [request_line("a")]), tmp_path / "r.parquet"), answering(World()))
    (row,) = parquet.read_table(tmp_path / "r.parquet").to_pylist()
    assert row["custom_id"] == "a" and row["error"] is None
    assert json.loads(row["response"])["body"]["choices"][0]["message"]["content"] == "hello"
    requests = tmp_path / "requests.parquet"
    parquet.write_table(_requests_table(), requests)
    assert run_job(job_of(str(requests), tmp_path / "back.jsonl"), answering(World())) == (2, 0)
    back = read(tmp_path / "back.jsonl")
    assert [row["custom_id"] for row in back] == ["a", "b"] and back[1]["response"]["body"]["usage"][
        "completion_tokens"
    ] == 1


def _requests_table() -> Any:
    """OpenAI's requests with bodies as JSON text."""
    import pyarrow

    lines = [request_line("a"), request_line("b", max_tokens=1)]
    return pyarrow.Table.from_pylist([line | {"body": json.dumps(line["body"])} for line in lines])


def test_no_answers_at_all_still_make_a_file(tmp_path: Path, parquet: Any) -> None:
    source, out = write(tmp_path / "in.jsonl", [{"id": 1}]), tmp_path / "out.parquet"
    assert run_job(job_of(source, out), answering(World())) == (0, 1)
    assert parquet.read_table(out).num_rows == 0
    with refuses(ConfigError, "not-parquet"):
        (tmp_path / "x.parquet").write_bytes(b"not at all")
        rows.open_rows(str(tmp_path / "x.parquet"))


# --- docs/ray.md and docs/containers.md ---

DOCS = Path(__file__).parents[3] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """Code of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_rows_of_the_page_are_answered(tmp_path: Path) -> None:
    (text,) = blocks("ray.md", "json")
    *plain, request = [json.loads(line) for line in text.splitlines()]
    assert run_job(job_of(write(tmp_path / "plain.jsonl", plain), tmp_path / "a.jsonl"), answering(World())) == (2, 0)
    assert read(tmp_path / "a.jsonl")[0]["id"] == 17
    own = answering(World(served_model_name=("demo",)))
    assert run_job(job_of(write(tmp_path / "r.jsonl", [request]), tmp_path / "b.jsonl"), own) == (1, 0)


def test_the_configurations_of_the_page_are_read() -> None:
    application, discovery = (yaml.safe_load(text) for text in blocks("ray.md", "yaml"))
    (described,) = application["applications"]
    arguments = msgspec.convert(described["args"], ServeArguments)
    assert engine_config(arguments.model, arguments.engine).max_model_len == 2048
    assert msgspec.convert(arguments.server, ServeOptions).served_model_name == ("demo",)
    assert described["import_path"] == f"{build.__module__}:{build.__name__}"
    assert make_config(discovery).discover is not None


def test_the_commands_of_the_pages() -> None:
    """Plans are run; a batch is only read, since it needs a model or a cluster."""
    seen = set()
    for line in [
        line for page in ("ray.md", "containers.md") for text in blocks(page, "sh") for line in text.splitlines()
    ]:
        words = [word for word in shlex.split(line, comments=True) if not word.startswith("RAY_ADDRESS=")]
        assert words.pop(0) == "weft"
        seen.add(words[0])
        if words[0] == "plan":
            status, out, err = weft(*words)
            assert status == 0 and "weft" in out, err
        else:
            parsed(words)
    assert seen == {"batch", "plan"}
