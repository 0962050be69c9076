"""Documents of what users and their programs rely on, which a later version is compared with.

A document is a tree of JSON. `lost_parts` names what an old one has and a new one has not: keys, members of lists and
values may come, but none that was there goes or changes. Sentences may be worded anew, and figures that the planner
predicts are compared only by their names: both have a type that stays.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from tests.pure.commands import weft_json
from tests.pure.gateways import gateway, upstream
from tests.pure.worlds import World
from weft.cli import main
from weft.engine.processes.keys import MESSAGES

SOURCES = Path(__file__).parents[2] / "src/weft"
CODE = re.compile(r'\bcode="([a-z0-9_-]+)"')
# Of the words that a help has for a flag: its names, and the choices for its value.
NAME, CHOICES = re.compile(r"(?<!\S)--?[\w-]+"), re.compile(r"\{([^}]*)\}")
DEFAULT = re.compile(r"\(default: ([^()]*)\)")
PREDICTED = {"predicted", "gains_when_doubled", "output_tok_s_per_gpu", "provenance", "band"}
MODELS = (
    "Llama-3.1-8B", "Llama-3.1-70B-Instruct", "Qwen3-0.6B", "Qwen3-30B-A3B", "Qwen3-32B", "gpt-oss-120b",
    "DeepSeek-V2-Lite", "Mixtral-8x7B-Instruct-v0.1", "gemma-3-27b-it", "Qwen2.5-7B-Instruct-AWQ",
)  # fmt: skip
MACHINES = ("1xRTX4090", "2xRTX4090", "RTX4090,RTX3090", "8xH100", "3xL40S")


async def documents() -> dict[str, Any]:
    """All documents, by name."""
    return {
        "commands": commands(),
        "openapi": (await World().client.get("/openapi.json")).json(),
        "metrics": await metrics(),
        "plans": plans(),
        "error_codes": error_codes(),
        "messages": {"between_nodes": MESSAGES},
    }


def commands() -> dict[str, Any]:
    """By command its flags, as its help has them."""
    names = re.findall(r"^  weft ([a-z-]+(?: [a-z]+)?)  ", help_text(), re.MULTILINE)
    assert len(names) > 20
    return {name: flags(help_text(*name.split())) for name in names}


def help_text(*words: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out), suppress(SystemExit):  # argparse's, after a help
        main.main([*words, "--help-all"])
    return out.getvalue()


def flags(text: str) -> dict[str, Any]:
    """By flag its other names, its value and the choices for it."""
    found = {}
    for match in re.finditer(r"^  (-\S.*)$", text, re.MULTILINE):
        words = re.split(r"\s{2,}", match[1])[0]
        described = re.split(r"^  -", text[match.end() :], maxsplit=1, flags=re.MULTILINE)[0]
        default = DEFAULT.search(" ".join([match[1], *described.split()]))
        names = NAME.findall(CHOICES.sub("", words))
        choices = CHOICES.search(words)
        found[next((name for name in names if name.startswith("--")), names[0])] = {
            "names": names,
            "choices": choices[1].split(",") if choices else [],
            "default": default[1] if default else None,
            "value": bool(NAME.sub("", words).strip(", ")),
        }
    return found


async def metrics() -> dict[str, Any]:
    """By page its metrics with their types, and the labels of those that have samples."""
    async with upstream() as one, gateway(one.url) as live:
        assert (await live.chat()).status_code == 200
        pages = {"gateway": (await live.client.get("/metrics")).text}
    world = World()
    assert (await world.complete()).status_code == 200
    pages["server"] = (await world.client.get("/metrics")).text
    return {name: described(page) for name, page in pages.items()}


def described(page: str) -> dict[str, Any]:
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    labels: dict[str, set[str]] = {}
    for name, inside in re.findall(r"^([a-z_:]+)\{([^}]*)\}", page, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', inside))
    return {"types": types, "labels": {name: sorted(found) for name, found in labels.items()}}


def plans() -> dict[str, Any]:
    """By words of `weft plan`, its status and its JSON."""
    return {
        words: dict(zip(("status", "plan"), weft_json("plan", *words.split()), strict=True))
        for words in (f"{model} --gpus {machine}" for model in MODELS for machine in MACHINES)
    }


def error_codes() -> list[str]:
    return sorted({code for path in SOURCES.rglob("*.py") for code in CODE.findall(path.read_text())})


def lost_parts(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Places where `new` lacks what `old` has."""
    if isinstance(old, Mapping):
        if not isinstance(new, Mapping):
            yield f"{path}: {type(new).__name__}, was an object"
            return
        yield from (f"{path}/{key}: gone" for key in old if key not in new)
        for key in old.keys() & new.keys() - PREDICTED:
            yield from lost_parts(old[key], new[key], f"{path}/{key}")
    elif isinstance(old, list):
        yield from lost_members(old, new, path)
    elif not stands_for(new, old):
        yield f"{path}: {new!r:.80}, was {old!r:.80}"


def stands_for(new: Any, old: Any) -> bool:
    """Return True if a value may take the place of an old one."""
    if old is None:
        return True
    if isinstance(old, str) and " " in old:
        return isinstance(new, str)
    if isinstance(old, float):
        return isinstance(new, int | float) and not isinstance(new, bool)
    return (type(new), new) == (type(old), old)


def lost_members(old: list[Any], new: Any, path: str) -> Iterator[str]:
    """The same for a list: of names each is still there, of others each in its place."""
    if not isinstance(new, list):
        yield f"{path}: {type(new).__name__}, was a list"
    elif all(isinstance(each, str) and " " not in each for each in old):
        yield from (f"{path}: {each!r} gone" for each in old if each not in new)
    elif len(new) < len(old):
        yield f"{path}: {len(new)} members, were {len(old)}"
    else:
        for at, (before, after) in enumerate(zip(old, new, strict=False)):
            yield from lost_parts(before, after, f"{path}[{at}]")
