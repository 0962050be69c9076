"""YAML: as people write it, in the order that it was put together."""

from __future__ import annotations

import re
from typing import Any

WIDTH = 120
# What is a text to PyYAML (YAML 1.1) and a number to the parsers of Go, which Kubernetes and Compose have.
NUMBER = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)(e[-+]?\d+)?|0o[0-7]+|0x[0-9a-f]+|[-+]?\.inf|\.nan", re.IGNORECASE)


class Block(str):
    """A text of several lines, which keeps them."""

    __slots__ = ()


def dump(value: object) -> str:
    """`value` as a document."""
    import yaml  # type: ignore[import-untyped]

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """With lists set in, and blocks."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
            return super().increase_indent(flow, False)

        def ignore_aliases(self, data: object) -> bool:
            return True

    def block(dumper: Any, text: Block) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")

    def text(dumper: Any, told: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", told, style="'" if NUMBER.fullmatch(told) else None)

    Dumper.add_representer(Block, block)
    Dumper.add_representer(str, text)
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, width=WIDTH, allow_unicode=True))
