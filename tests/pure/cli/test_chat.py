"""weft chat: its commands, messages of several lines, Ctrl-C, and what a terminal shows of an answer."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.pure.commands import HERE
from tests.refusals import refuses
from weft.cli import terminal
from weft.cli.run import chat
from weft.cli.terminal import WordWrap
from weft.engine.core.params import SamplingParams
from weft.engine.core.token_ids import TokenIds
from weft.engine.frontend.outputs import CompletionOutput, Metrics, RequestOutput
from weft.errors import ConfigError, RequestError, WeftError


class ScriptedLLM:
    """An engine that answers "answer N", or refuses the message "too long"."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.params: list[SamplingParams] = []

    def sampling_params(self, **wanted: Any) -> SamplingParams:
        return SamplingParams(**wanted)

    def stream(self, messages: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        if messages[-1]["content"] == "too long":
            raise RequestError("the prompt is too long", code="prompt-too-long")
        self.asked.append(messages)
        self.params.append(params)
        text = f"answer {len(self.asked)}"
        times = Metrics(arrival_s=1.0, first_token_s=1.5, finished_s=2.5)
        yield RequestOutput(
            "0", None, TokenIds.pack([1]), [CompletionOutput(0, text, [1, 2], finish_reason="stop")], times, True
        )


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a chat over the given lines; a KeyboardInterrupt among them is a Ctrl-C at the prompt."""

    def converse(*lines: str | type[KeyboardInterrupt], system: str | None = None) -> tuple[chat.Chat, ScriptedLLM]:
        coming = iter(lines)

        def type_line(_: str) -> str:
            line = next(coming, None)
            if line is None:
                raise EOFError
            if not isinstance(line, str):
                raise line
            return line

        monkeypatch.setattr("builtins.input", type_line)
        llm = ScriptedLLM()
        conversation = chat.Chat(llm, {"max_tokens": 9}, system=system)  # type: ignore[arg-type]
        chat.converse(conversation, interactive=True)
        return conversation, llm

    return converse


def contents(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages]


def test_an_unknown_command_is_never_sent_to_the_model(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("/foo", "/exitnow", "/foo bar"):
        _, llm = talk(line)
        assert llm.asked == []
        shown = capsys.readouterr().err
        assert line.split()[0] in shown and "/retry" in shown and "/save FILE" in shown


@pytest.mark.parametrize("columns", ["44", "60", "200"])
def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = chat.help_text().splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert all(line.startswith(("  /", '  """', "  \\", " " * chat.HELP_INDENT)) for line in lines)
    assert "demo" in chat.wrapped(chat.WELCOME.format(model="demo"))


@pytest.mark.parametrize("end", ["/exit", "/exit now", "/quit", "/bye"])
def test_the_chat_ends(talk: Any, end: str) -> None:
    _, llm = talk("hi", end, "never sent")
    assert contents(llm.asked[-1]) == ["hi"]


def test_retry_asks_the_last_message_again(talk: Any) -> None:
    conversation, llm = talk("one", "two", "/retry")
    assert contents(llm.asked[2]) == ["one", "answer 1", "two"] == contents(llm.asked[1])
    assert contents(conversation.history) == ["one", "answer 1", "two", "answer 3"]


def test_retry_without_an_answer(talk: Any) -> None:
    conversation, llm = talk()
    with refuses(ConfigError, "no-answer-to-repeat"):
        conversation.retry("")
    assert llm.asked == []


def test_a_message_that_is_refused_changes_nothing(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = talk("one", "too long")
    assert contents(conversation.history) == ["one", "answer 1"]
    assert re.fullmatch(r"weft: error: the prompt is too long; /reset .*\n", capsys.readouterr().err)


def test_system_replaces_the_system_message(talk: Any) -> None:
    _, llm = talk("one", "/system Be brief.", "two", "/system", "three", system="Be kind.")
    assert [contents(asked)[0] for asked in llm.asked] == ["Be kind.", "Be brief.", "one"]


def test_set_changes_the_next_answers(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, llm = talk(
        "one", "/set temperature 0.25", "/set top-p 0.5", "/set stop END", "/set ignore_eos on", "two", "/set"
    )
    before, after = llm.params
    assert (before.temperature, before.top_p) == (1.0, 1.0)
    assert (after.temperature, after.top_p, after.stop, after.ignore_eos) == (0.25, 0.5, ("END",), True)
    assert after.max_tokens == 9
    said = capsys.readouterr().err
    assert said.count("temperature 0.25") == 2, "when it is set, and in the list"
    assert "None" not in said and "()" not in said and "ignore_eos on" in said


@pytest.mark.parametrize(
    ("words", "code", "values"),
    [
        ("temprature 1", "unknown-parameter", ["'temprature'", "did you mean temperature?"]),
        ("temperature", "flag-needs-value", ["temperature"]),
        ("temperature warm", "invalid-flag-value", ["temperature", "'warm'"]),
        ("temperature -1", "invalid-parameter", ["temperature", "-1"]),
        ("ignore_eos maybe", "flag-needs-boolean", ["ignore_eos", "'maybe'"]),
        ("max_tokens 1.5", "invalid-flag-value", ["max_tokens", "'1.5'"]),
    ],
)
def test_a_setting_that_is_refused_changes_nothing(talk: Any, words: str, code: str, values: list[str]) -> None:
    conversation, llm = talk(f"/set {words}", "hi")
    assert llm.params == [SamplingParams(max_tokens=9)]
    with refuses(WeftError, code) as refused:
        conversation.set_sampling(words)
    assert all(value in str(refused.value) for value in values)


def test_save_writes_the_conversation_and_never_over_a_file(
    talk: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.json"
    conversation, _ = talk(
        "häh?", f"/save {file}", f"/save {file}", "/save", f"/save {tmp_path}/no/talk.json", system="S"
    )
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert contents(saved) == ["S", "häh?", "answer 1"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert "3 messages" in capsys.readouterr().err
    for name, code in (
        (str(file), "file-exists"),
        ("", "file-missing"),
        (f"{tmp_path}/no/talk.json", "cannot-write-output"),
    ):
        with refuses(ConfigError, code) as refused:
            conversation.save(name)
        assert name in str(refused.value)


def test_the_words_of_refused_commands(
    talk: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    golden: Callable[[str, str], None],
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "talk.json").touch()
    settings = ("temprature 1", "temperature", "temperature warm", "temperature -1", "ignore_eos maybe", "stop")
    commands = ["/retry", *(f"/set {words}" for words in settings), "/save", "/foo", "too long"]
    commands += [f"/save {tmp_path}/talk.json", f"/save {tmp_path}/no/talk.json"]
    lines = []
    for command in commands:
        talk(command)
        lines += [f"> {command}", capsys.readouterr().err.rstrip()]
    golden("errors/chat.txt", "\n".join(lines).replace(str(tmp_path), "FOLDER") + "\n")


def test_ctrl_c_at_the_prompt_clears_once_and_ends_twice(talk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stop = KeyboardInterrupt
    _, llm = talk(stop, "one", stop, "two", stop, stop, "never sent")
    assert contents(llm.asked[-1]) == ["one", "answer 1", "two"]
    assert capsys.readouterr().err.count("Ctrl-C") == 3


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (['"""first', "second", 'third"""'], "first\nsecond\nthird"),
        (['"""one line"""'], "one line"),
        (['"""', "/exit", '"""'], "/exit"),
        (["first\\", "second\\", "third"], "first\nsecond\nthird"),
        (['"""cut', "short"], "cut\nshort"),
        (["cut\\"], "cut"),
    ],
)
def test_messages_of_several_lines(monkeypatch: pytest.MonkeyPatch, typed: list[str], message: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(typed)))
    assert terminal.input_message(interactive=False) == message


def test_words_are_not_broken_at_the_edge() -> None:
    wrap = WordWrap(12)
    pieces = ["The quick", " brown f", "ox jumps", " over it.\n", "New line"]
    assert "".join(map(wrap.push, pieces)) + wrap.flush() == "The quick\nbrown fox\njumps over\nit.\nNew line"


def test_code_is_left_as_it_is_and_controls_are_dropped() -> None:
    wrap = WordWrap(10)
    code = "```python\nvalue = function(argument)\n```\n"
    assert wrap.push(code) == code
    assert wrap.push("a\x1b[31mb\x07 ") + wrap.flush() == "a[31mb"


WORDS = st.lists(st.text("abc 日本\n", max_size=9), max_size=30)


@given(pieces=WORDS, width=st.integers(2, 20))
def test_wrapping_loses_nothing_and_does_not_depend_on_the_pieces(pieces: list[str], width: int) -> None:
    whole, cut = WordWrap(width), WordWrap(width)
    text = "".join(pieces)
    shown = whole.push(text) + whole.flush()
    assert "".join(map(cut.push, pieces)) + cut.flush() == shown
    assert "".join(shown.split()) == "".join(text.split())
    assert all(cell_len(line.rstrip()) <= width for line in shown.split("\n") if line.strip() and line[0] != " ")


KEYBOARD = """
import sys, time
from weft.cli import terminal
with terminal.silent_keyboard():
    print("answering", flush=True)
    time.sleep(0.5)
print("over", flush=True)
print(repr(sys.stdin.readline()), flush=True)
"""


def test_keys_pressed_during_an_answer_are_neither_shown_nor_kept() -> None:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen([sys.executable, "-c", KEYBOARD], stdin=theirs, stdout=theirs, env=HERE)
        shown = read_until(ours, b"answering")
        os.write(ours, b"pressed too early\n")
        shown += read_until(ours, b"over")
        os.write(ours, b"next\n")
        shown += read_until(ours, b"'next\\n'")
        assert b"early" not in shown
        assert process.wait(30) == 0
        assert termios.tcgetattr(theirs)[3] & termios.ECHO
    finally:
        os.close(ours)
        os.close(theirs)


def read_until(terminal_end: int, wanted: bytes) -> bytes:
    shown = b""
    limit = time.monotonic() + 60
    while wanted not in shown:
        assert time.monotonic() < limit, shown
        shown += os.read(terminal_end, 4096)
    return shown
