"""YAML: as people write it, in the order that it was put together."""

from __future__ import annotations

from typing import Any

WIDTH = 120


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

    Dumper.add_representer(Block, block)
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, width=WIDTH, allow_unicode=True))
