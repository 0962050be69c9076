"""YAML: read so that nothing in it is passed over, and written as people write it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

WIDTH = 120
# What is a text to PyYAML (YAML 1.1) and a number to the parsers of Go, which Kubernetes and Compose have.
NUMBER = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)(e[-+]?\d+)?|0o[0-7]+|0x[0-9a-f]+|[-+]?\.inf|\.nan", re.IGNORECASE)


class Block(str):
    """A text of several lines, which keeps them."""

    __slots__ = ()


def load_yaml(text: str) -> Any:
    """What a document says. Raises ValueError, in one line, where it is no YAML, is nested too deeply, or has a field
    twice, of which YAML's reader would take the last."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Each field once."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            names = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in names:
                        raise yaml.composer.ComposerError(None, None, f"{key.value!r} is there twice", key.start_mark)
                    names.add(key.value)
            return node

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None


def dump_yaml(value: object) -> str:
    """`value` as a document, in the order that it was put together."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """With lists set in, and blocks."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

        def ignore_aliases(self, data: object) -> bool:
            return True

    def block(dumper: yaml.SafeDumper, text: Block) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")

    def text(dumper: yaml.SafeDumper, told: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", told, style="'" if NUMBER.fullmatch(told) else None)

    Dumper.add_representer(Block, block)
    Dumper.add_representer(str, text)
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, width=WIDTH, allow_unicode=True))
