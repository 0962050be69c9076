"""YAML: a strict reader, and a writer of documents that look as if people wrote them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

WIDTH = 120
# Texts to PyYAML (YAML 1.1) that are numbers to Go's parsers, which Kubernetes and Compose use.
NUMBER = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)(e[-+]?\d+)?|0o[0-7]+|0x[0-9a-f]+|[-+]?\.inf|\.nan", re.IGNORECASE)


class YamlBlock(str):
    """A text of several lines, written as a block ("|")."""

    __slots__ = ()


def load_yaml(text: str, *, quote: bool = True) -> Any:
    """Parse a document. Raises ValueError, in one line, if it is no YAML, is nested too deeply, or repeats a field.

    PyYAML itself would take the last value of a repeated field. An error quotes the faulty line; without `quote`, for
    documents that hold keys, it has no word of the document, only the place.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a field that is there twice."""

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
        raise ValueError(" ".join(str(error).split()) if quote else _place(error)) from None
    except RecursionError:
        raise ValueError("its lists are nested too deeply") from None
    except ValueError as error:  # of a value that only looks like a number or a date
        raise ValueError(str(error) if quote else "a value cannot be read; put it in quotes") from None


def _place(error: Exception) -> str:
    """The place of an error, without the document's text, which PyYAML's own words may hold too."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return "it holds a character that YAML forbids"
    return f"line {mark.line + 1}, column {mark.column + 1} (not shown here: it may hold a key); put keys in quotes"


def dump_yaml(value: object) -> str:
    """Write `value` as a document; fields keep their order."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Indents lists, writes `YamlBlock` texts as blocks, and never writes aliases."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

        def ignore_aliases(self, data: object) -> bool:
            return True

    def block(dumper: yaml.SafeDumper, text: YamlBlock) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")

    def plain(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if NUMBER.fullmatch(text) else None)

    Dumper.add_representer(YamlBlock, block)
    Dumper.add_representer(str, plain)
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, width=WIDTH, allow_unicode=True))
