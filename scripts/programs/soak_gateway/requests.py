"""Requests of a soak, and the verdict on each answer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import httpx

from scripts.programs.soak.processes import MODEL
from scripts.programs.soak_gateway.stub import answer_of

PATIENCE_S = 180.0
VENDOR_ROUNDS = 3
SUBJECTS = ["sea", "sky", "rain", "snow", "fire", "stone", "river", "bird", "fish", "tree", "sun", "moon"]
# Whole answers, by whoever gives them; or broken ones, which only servers that are not ours may leave.
COMPLETE, BROKEN, WRONG = "complete", "broken", "wrong"


class Asked(NamedTuple):
    """One kind of request."""

    prompt: str
    tokens: int
    temperature: float

    def body(self, *, stream: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {"temperature": self.temperature, "seed": 7, "max_tokens": self.tokens}
        return {"model": MODEL, "messages": [{"role": "user", "content": self.prompt}], "stream": stream, **fields}


Expected = Mapping[Asked, Mapping[str, Sequence[str]]]  # texts, by who says them


class Verdict(NamedTuple):
    """`outcome` is one of the constants above; `by`: who answered; `why`: of those that are wrong."""

    outcome: str
    by: str = ""
    why: str = ""


def kinds(tokens: int) -> list[Asked]:
    """The kinds of requests: greedy ones, and drawn ones with a seed."""
    return [
        Asked(f"Say something about the {subject}.", tokens + at % 5, float(at % 2))
        for at, subject in enumerate(SUBJECTS)
    ]


class Load:
    """Sends requests to a gateway. Each ends with one verdict.

    `expected`: for each kind, who may say what. `others`: URLs of servers that are not ours.
    """

    def __init__(self, url: str, expected: Expected, seed: int, others: Sequence[str] = ()) -> None:
        self._url, self._expected, self._others = url, expected, others
        self._random = Random(seed)
        self.verdicts: list[Verdict] = []

    async def send(self, count: int, at_once: int, pause_s: float) -> None:
        """`count` requests by `at_once` clients, which wait about `pause_s` between two."""
        left = iter(range(count))
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S, limits=limits) as client:

            async def one() -> None:
                for _ in left:
                    await asyncio.sleep(self._random.random() * 2 * pause_s)
                    asked = self._random.choice(list(self._expected))
                    self.verdicts.append(await self._ask(client, asked, stream=self._random.random() < 0.7))

            await asyncio.gather(*(one() for _ in range(at_once)))

    async def _ask(self, client: httpx.AsyncClient, asked: Asked, *, stream: bool) -> Verdict:
        received = b""
        try:
            request = client.build_request("POST", "/v1/chat/completions", json=asked.body(stream=stream))
            answer = await client.send(request, stream=True)
            try:
                async for piece in answer.aiter_raw():
                    received += piece
            finally:
                await answer.aclose()
        except httpx.HTTPError as error:
            return self._broken(asked, received, f"{type(error).__name__}: {error}")
        if answer.status_code != 200:
            return Verdict(WRONG, why=f"status {answer.status_code}: {received[:300].decode(errors='replace')}")
        return self._judge_stream(asked, received) if stream else self._judge_whole(asked, received)

    def _judge_whole(self, asked: Asked, received: bytes) -> Verdict:
        text = json.loads(received)["choices"][0]["message"]["content"]
        return self._complete(asked, text)

    def _judge_stream(self, asked: Asked, received: bytes) -> Verdict:
        text, ends, error = read_events(received)
        if error and not ends:
            return self._broken(asked, received, error)
        if error or ends != 1 or not received.endswith(b"data: [DONE]\n\n"):
            return Verdict(WRONG, why=f"{ends} end marks, and error {error!r}")
        return self._complete(asked, text)

    def _complete(self, asked: Asked, text: str) -> Verdict:
        by = next((name for name, expected in self._expected[asked].items() if text in expected), "")
        return Verdict(COMPLETE, by) if by else Verdict(WRONG, why=f"{asked}: nobody says {text!r:.200}")

    def _broken(self, asked: Asked, received: bytes, why: str) -> Verdict:
        """An answer that ended visibly: right only if a server that is not ours had begun it."""
        text = read_events(received)[0]
        if not text and any(url in why for url in self._others):  # its head had come, and none of its text
            return Verdict(BROKEN, "another server", why)
        expected = self._expected[asked].items()
        begun = [name for name, texts in expected if text and any(each.startswith(text) for each in texts)]
        if begun and begun[0] != "weft":
            return Verdict(BROKEN, begun[0], why)
        return Verdict(WRONG, why=f"broken after {text!r:.100}: {why}")


def read_events(received: bytes) -> tuple[str, int, str]:
    """Text, number of end marks, and the message of an error, of a stream that may have been cut off."""
    text, ends, error = "", 0, ""
    for event in received.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        ends += data == b"[DONE]"
        try:
            chunk = json.loads(data)
        except ValueError:
            continue
        if "error" in chunk:
            error = chunk["error"]["message"]
        for choice in chunk.get("choices") or ():
            text += (choice.get("delta") or {}).get("content") or ""
    return text, ends, error


async def expected_answers(
    ours: Sequence[str], vendors: Sequence[str], asked_kinds: list[Asked], stubs: Sequence[str]
) -> Expected:
    """For each kind, what Weft, each server of other vendors (by URL) and each stub say, undisturbed and alone.

    Raises ValueError if two servers of ours do not agree. Another vendor's may round otherwise when it reuses a prompt:
    whatever it says in several rounds counts.
    """
    expected: dict[Asked, dict[str, list[str]]] = {}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:

        async def answer_text(url: str, asked: Asked) -> str:
            answer = await client.post(f"{url}/v1/chat/completions", json=asked.body(stream=False))
            return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])

        for asked in asked_kinds:
            texts = {await answer_text(url, asked) for url in ours}
            if len(texts) != 1:
                raise ValueError(f"{asked}: the replicas say {sorted(texts)}")
            said = {name: ["".join(answer_of(name, asked.prompt, asked.tokens))] for name in stubs}
            expected[asked] = {"weft": [texts.pop()], **said}
        for _ in range(VENDOR_ROUNDS):
            for url in vendors:
                for asked in asked_kinds:
                    expected[asked].setdefault(url, []).append(await answer_text(url, asked))
    return expected


def count_outcomes(verdicts: list[Verdict]) -> dict[str, dict[str, int]]:
    """Numbers of verdicts by outcome and server."""
    counts: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        counts.setdefault(verdict.outcome, Counter())[verdict.by or "nobody"] += 1
    return {outcome: dict(sorted(by.items())) for outcome, by in sorted(counts.items())}
