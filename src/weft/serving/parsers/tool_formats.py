"""Tool calls in JSON between marks: hermes, llama3_json, mistral, deepseek_v3, deepseek_v31 and kimi_k2.

The formats are those of the models' published chat templates.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.serving.parsers.between import Between
from weft.serving.parsers.json_text import CallReader
from weft.serving.parsers.reader import Reader, Steps
from weft.serving.parsers.schemas import ToolSchemas

ToolParser = Callable[[Reader, ToolSchemas], Steps[None]]


def hermes(reader: Reader, tools: ToolSchemas) -> Steps[None]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""
    between = Between(reader)
    while (yield from reader.until(("<tool_call>",), between.say)) is not None:
        reader.record()
        yield from reader.skip()
        if (yield from CallReader(reader).read()):
            reader.recorded()
            between.call()
            yield from reader.text_until("</tool_call>")
        else:
            between.say("<tool_call>" + reader.recorded())
    between.end()
