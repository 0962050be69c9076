"""Attacks by a model's chat template: one that is quick for most chats, and without an end for some."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from scripts.programs.abuse.bodies import CHAT
from scripts.programs.abuse.case import Attack, Served
from scripts.programs.abuse.stops import SHUT, life
from scripts.programs.abuse.target import CLOSED, RESET, Target

NEST = (
    "{% set ns = namespace(a=[1], b=[1]) %}"
    "{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
HASH = "{% set ns = namespace(a=(1,)) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% endfor %}"
# Letters are variables, since what is constant is computed when the template is compiled, for every chat.
LETTERS = "{% set x = 'x' %}{% set f = 'f' %}{% set tab = '\\t' %}{% set word = 'a ' %}"
BIG = "{% set big = x * 30000000 %}"
DIGITS = "{% set a = (f * 20000000) | int(0, 16) %}{% set b = (f * 10000000) | int(0, 16) %}"  # division is quadratic
# By the text of the chat that gets it. 2^60 elements are in two lists of 60 levels.
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "upper": NEST + "{{ ns.a | upper }}",
    "escape": NEST + "{{ ns.a | e | length }}",
    "replace": NEST + "{{ ns.a | replace('1', '2') }}",
    "format": NEST + "{{ '{}'.format(ns.a) | length }}",
    "percent": NEST + "{{ '%s' | format(ns.a) | length }}",
    "pprint": NEST + "{{ ns.a | pprint | length }}",
    "urlencode": NEST + "{{ ns.a | urlencode | length }}",
    "equal": NEST + "{{ ns.a == ns.b }}",
    "in": NEST + "{{ ns.a in [ns.b] }}",
    "sort": NEST + "{{ [ns.a, ns.b] | sort | length }}",
    "max": NEST + "{{ [ns.a, ns.b] | max | length }}",
    "key": HASH + "{{ {ns.a: 1} | length }}",
    "unique": HASH + "{{ [ns.a] | unique | list | length }}",
    "raise": NEST + "{{ raise_exception(ns.a) }}",
    "quotient": DIGITS + "{{ (a // b) is odd }}",
    "remainder": DIGITS + "{{ (a % b) is odd }}",
    "divisible": DIGITS + "{{ a is divisibleby(b) }}",
    "map": BIG + "{{ ([big] * 100000) | map('upper') | map('length') | sum }}",
    "find": "{% set h = x * 16000000 %}{% set n = f ~ (x * 8000000) %}{{ h.rfind(n) }}",
}
# Texts whose size passes by what is counted.
LARGE = {
    "forty": BIG + "{% set t = '{0}' * 40 %}{{ t.format(big) | length }}",
    "thousand": BIG + "{% set t = '{0}' * 1000 %}{{ t.format(big) | length }}",
    "map-of-formats": BIG + "{% set t = '{a}' * 1000 %}{{ t.format_map({'a': big}) | length }}",
    "bytes": "{% set b = x.encode() * 30000000 %}{{ b.replace(x.encode(), (f * 1000).encode()) | length }}",
    "tabs": "{{ (tab.encode() * 30000000).expandtabs(9999) | length }}",
    "encoded": BIG
    + "{% set ns = namespace(l=[]) %}{% for i in range(200) %}{% set ns.l = ns.l + [big.encode('utf-32')] %}"
    + "{% endfor %}{{ ns.l | length }}",
    "split": "{% set ns = namespace(l=[]) %}"
    + "{% for i in range(200) %}{% set ns.l = ns.l + [(word * 5000000).split()] %}{% endfor %}{{ ns.l | length }}",
    "letters": "{% set ns = namespace(l=[]) %}"
    + "{% for i in range(99) %}{% set ns.l = ns.l + [(word * 15000000) | list] %}{% endfor %}{{ ns.l | length }}",
}
BUSY = ("503 overloaded", "503 request_too_slow")  # where others have all places


def template(kinds: dict[str, str]) -> str:
    """A template that does what the last message names, and is harmless otherwise."""
    (first, source), *others = kinds.items()
    branches = f"{{% if said == {first!r} %}}{source}" + "".join(
        f"{{% elif said == {kind!r} %}}{other}" for kind, other in others
    )
    return LETTERS + "{% set said = messages[-1].content %}" + branches + "{% endif %}{{ said }}"


async def chat(target: Target, said: str, *expected: str) -> None:
    messages = [{"role": "user", "content": said}]
    target.record(said, await target.post(CHAT, {"messages": messages, "max_tokens": 2}), expected)


async def beside(kinds: tuple[str, ...], target: Target) -> None:
    """Hostile chats, each after three quick ones and while others are quick; those are all answered."""
    for kind in kinds:
        for _ in range(3):
            await chat(target, "hi", "200")
        asking = asyncio.create_task(chat(target, kind, "400"))
        while not asking.done():
            await chat(target, "hi", "200")
            target.record("meanwhile", await target.get("/health/live"), ("200",))
            await asyncio.sleep(0.2)
        await asking


async def together(target: Target) -> None:
    """All of them at once, more than there are places for; a quick one meanwhile waits or is told to come again."""
    asking = asyncio.gather(*(chat(target, kind, "400", *BUSY) for kind in KINDS))
    while not asking.done():
        await chat(target, "hi", "200", *BUSY)
        target.record("meanwhile", await target.get("/health/live"), ("200",))
        await asyncio.sleep(0.2)
    await asking
    await chat(target, "hi", "200")


async def load(target: Target) -> None:
    """Chats that would be rendered for years."""

    async def ask(kind: str) -> None:
        with contextlib.suppress(OSError):  # nobody is there any more
            await chat(target, "hi", "200", SHUT, *BUSY, CLOSED, RESET)
            await chat(target, kind, "400", SHUT, *BUSY, CLOSED, RESET)

    await asyncio.gather(*(ask(kind) for kind in KINDS))


KINDS = ENDLESS | LARGE
TEMPLATE = template(KINDS)
SERVED = Served(template=TEMPLATE)
GROUPS = {
    "spelled": ("loops", "upper", "escape", "replace", "format", "percent", "pprint", "urlencode", "raise"),
    "compared": ("equal", "in", "sort", "max", "key", "unique"),
    "numbers": ("quotient", "remainder", "divisible", "map", "find"),
    "large": tuple(LARGE),
}
ATTACKS = (
    *(Attack(f"template-{name}", "templates", partial(beside, kinds), SERVED) for name, kinds in GROUPS.items()),
    Attack("template-together", "templates", together, SERVED),
)
LIVES = (life("model-template", "templates", load, more=("--chat-template", TEMPLATE)),)
