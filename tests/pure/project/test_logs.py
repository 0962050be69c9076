"""Log lines as JSON, ids of requests, and prompts that are in no line unless asked for."""

from __future__ import annotations

import json
import logging

import pytest

from tests.pure.worlds import World
from weft.logs import JsonLines

SECRET = "sesame"


async def ask(caplog: pytest.LogCaptureFixture, headers: dict[str, str], **options: object) -> str:
    """The X-Request-Id of an answer."""
    world = World(**options)
    messages = [{"role": "user", "content": SECRET}]
    logging.getLogger("weft").propagate = True
    with caplog.at_level(logging.INFO, "weft"):
        answer = await world.post("/v1/chat/completions", {"model": "tiny", "messages": messages}, headers=headers)
    assert answer.status_code == 200
    return str(answer.headers.get("X-Request-Id", ""))


async def test_a_request_is_a_line_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    assert await ask(caplog, {"X-Request-Id": "mine"}, log_format="json") == "mine"
    assert SECRET not in caplog.text
    (line,) = [row for row in map(json.loads, map(JsonLines().format, caplog.records)) if "path" in row]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert line["level"] == "INFO" and isinstance(line["seconds"], float)


async def test_ids_that_no_log_should_have_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    for given in ("x" * 300, ""):
        id = await ask(caplog, {"X-Request-Id": given}, enable_request_id_headers=True)
        assert len(id) == 32
    assert await ask(caplog, {}) == ""


async def test_prompts_are_logged_if_asked_for_with_the_id(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("weft")
    logger.addHandler(handler)
    try:
        await ask(caplog, {"X-Request-Id": "mine"}, log_format="json", enable_log_requests=True)
    finally:
        logger.removeHandler(handler)
    rows = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {row["request_id"] for row in rows} == {"mine"} and any(SECRET in str(row["message"]) for row in rows)
