"""Attacks by one hostile body each, and what it is answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial

from scripts.programs.abuse.case import Attack, Served
from scripts.programs.abuse.target import RESET, Target

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
MEGA = 10**6
LOG_BYTES = 4096  # that one request may add to the log
LEAKS = 40
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

Make = Callable[[], bytes]


def completion(**fields: object) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 2} | fields).encode()


def many(start: bytes, item: bytes, number: int, end: bytes) -> bytes:
    return start + b",".join([item] * number) + end


def words(number: int) -> list[str]:
    return [f"zq{index}" for index in range(number)]


async def post(path: str, make: Make, expected: tuple[str, ...], says: str, target: Target) -> None:
    """One body; made in a thread, and sent once it is whole."""
    body = await asyncio.to_thread(make)
    target.record(f"{len(body):,} bytes", await target.post(path, body), expected, says)
    grown = len(target.log())
    target.check(grown <= LOG_BYTES, f"one request added {grown:,} characters to the log")


def body(name: str, finding: str, path: str, make: Make, *expected: str, says: str = "") -> Attack:
    return Attack(name, finding, partial(post, path, make, expected, says))


async def leak(target: Target) -> None:
    """The same server's memory after many unknown names of 7 MB."""
    for number in range(LEAKS):
        key = f"k{number}" + "x" * 7 * MEGA
        target.record("a long unknown name", await target.post(COMPLETIONS, completion(**{key: 1})), ("200",))


async def cut_unknown_names(target: Target) -> None:
    """More unknown names than a line of the log holds."""
    body = completion(**{f"{number}y{'y' * 9000}": 1 for number in range(200)})
    target.record("200 unknown names", await target.post(COMPLETIONS, body), ("200",))
    lines = [line for line in target.log().splitlines() if "unknown request fields" in line]
    if target.server.log_bytes():
        target.check(
            len(lines) == 1 and lines[0].endswith("and 190 more") and len(lines[0]) < 1500,
            f"the log says {[line[:100] for line in lines]}",
        )


async def repeats(target: Target) -> None:
    """A template that makes a text of 10 GB."""
    target.record("a text of 10 GB", await target.post(CHAT, HI), ("400",))


async def nested_loops(target: Target) -> None:
    """A template that would run for hours, and the server's health meanwhile."""
    asking = asyncio.create_task(target.post(CHAT, HI))
    while not asking.done():
        target.record("meanwhile", await target.get("/health/live"), ("200",))
        await asyncio.sleep(0.5)
    target.record("nested loops", await asking, ("400",))


def many_keys(number: int) -> bytes:
    return completion(**{str(index): 1 for index in range(number)})


def call(arguments: str) -> bytes:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}]
    return json.dumps({"messages": messages, "max_tokens": 2}).encode()


MESSAGE = b'{"role":"user","content":"a"}'
STOPS = {"max_tokens": 8000, "ignore_eos": True, "n": 4, "temperature": 1}
ATTACKS = (
    body(
        "stops-99000", "1", COMPLETIONS, lambda: completion(**STOPS, stop=words(99_000)), "400", says='"param":"stop"'
    ),
    body("stops-65", "1", COMPLETIONS, lambda: completion(stop=words(65)), "400", says='"param":"stop"'),
    body("stops-64", "1", COMPLETIONS, lambda: completion(max_tokens=50, stop=words(64), n=16), "200"),
    body("bad-words-100000", "1, 9", COMPLETIONS, lambda: completion(bad_words=words(100_000)), "400"),
    body("bad-words-1000", "1, 9", COMPLETIONS, lambda: completion(max_tokens=50, bad_words=words(1000)), "200"),
    body(
        "logit-bias-90000", "1, 9", COMPLETIONS, lambda: completion(logit_bias=dict.fromkeys(range(90_000), 1)), "400"
    ),
    body("long-name", "2, 3", COMPLETIONS, lambda: completion(**{"k" + "x" * 7 * MEGA: 1}), "200"),
    Attack("long-names-leak", "2", leak),
    Attack("unknown-names", "3", cut_unknown_names),
    body("keys-99000", "3", COMPLETIONS, lambda: many_keys(99_000), "400", says="fields"),
    body("keys-550000", "3", COMPLETIONS, lambda: many_keys(550_000), "400"),
    body("empty-prompts", "9", COMPLETIONS, lambda: many(b'{"prompt":[', b"[]", 7 * MEGA // 3, b"]}"), "400"),
    body("body-31MB", "9, 20", COMPLETIONS, lambda: completion(prompt="x " * 15 * MEGA), "413", RESET),
    body("text-7.9MB", "9", COMPLETIONS, lambda: completion(prompt="x " * 3_900_000), "400"),
    body("messages-200000", "9", CHAT, lambda: many(b'{"messages":[', MESSAGE, 200_000, b"]}"), "400"),
    body("messages-9000", "9", CHAT, lambda: many(b'{"messages":[', MESSAGE, 9000, b"]}"), "400"),
    body("detokenize-1900000", "9", "/detokenize", lambda: many(b'{"tokens":[', b"123", 1_900_000, b"]}"), "400"),
    body("tokenize-7.9MB", "9", "/tokenize", lambda: json.dumps({"prompt": "hello wor " * 790_000}).encode(), "400"),
    body("nested-3000000", "9", COMPLETIONS, lambda: b'{"x":' + b"[" * 3 * MEGA + b"]" * 3 * MEGA + b"}", "400"),
    body("arguments-nested", "13", CHAT, lambda: call("[" * 100_000), "400"),
    body("choices-1280", "16", COMPLETIONS, lambda: completion(n=1280, temperature=1), "429"),
    body("prompts-500", "9", COMPLETIONS, lambda: completion(prompt=["hello wor " * 1600] * 500, max_tokens=1), "200"),
    Attack("template-repeats", "18", repeats, Served(template="{{ 'x' * 10**10 }}")),
    Attack("template-loops", "18", nested_loops, Served(template=NESTED)),
)
