"""The golden answers of a family of models: a server reads them as if its own model had given them.

`continue_token_ids` begins a response with the tokens of a golden answer, and its last event repeats all items. Only
Weft has that field; of other servers the parsers are not judged.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from scripts.programs.conformance.case import Api, Case, check, equal
from scripts.programs.conformance.other_cases import RESPONSES

ANSWERS = Path(__file__).parents[3] / "tests" / "data" / "answers"
FAMILIES = sorted(path.stem for path in ANSWERS.glob("*.json") if path.stem != "tools")


def golden_cases(family: str) -> list[Case]:
    """A case for each answer of a family without reasoning."""
    answers = json.loads((ANSWERS / f"{family}.json").read_text())
    return [
        Case(f"parser: {family}, {answer['name']}", partial(read_golden, answer))
        for answer in answers
        if "reasoning_parser" not in answer and answer["text"]
    ]


async def read_golden(answer: dict[str, Any], api: Api) -> None:
    """The calls and the text of a golden answer, to which the model adds a token."""
    text = {"prompt": answer["text"], "add_special_tokens": False}
    ids = (await api.post("/tokenize", **text)).json["tokens"]
    tools = [{"type": "function", **tool["function"]} for tool in json.loads((ANSWERS / "tools.json").read_text())]
    asked = {"input": "hi", "tools": tools, "continue_token_ids": ids, "max_output_tokens": len(ids) + 1}
    events = (await api.post(RESPONSES, stream=True, **asked)).events
    items = events[-1][1]["response"]["output"]
    calls = [item for item in items if item["type"] == "function_call"]
    equal([call["name"] for call in calls], [call["name"] for call in answer["calls"]], "the calls")
    for call, wanted in zip(calls, answer["calls"], strict=True):
        if "partial" in wanted:
            check(call["arguments"].startswith(wanted["partial"]), f"the arguments are {call['arguments']!r}")
        else:
            equal(json.loads(call["arguments"]), wanted["arguments"], "the arguments")
    said = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    check(said.strip().startswith(answer["content"].strip()), f"the text is {said!r}, not {answer['content']!r}")
