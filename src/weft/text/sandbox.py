"""The Jinja environment of chat templates: sandboxed, and bounded in time and in the size of what it makes.

A template comes with a checkpoint, from a stranger, and runs in the server. Python cannot end a thread from outside, so
each construct that multiplies work or text charges a Budget before it does so: passes of loops, calls, operators,
concatenation, and those filters and methods whose result may be much longer than what they are given.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, nodes, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from weft.text.limits import LIMITS

ITEM = 8  # an item of a list counts as so many characters
WIDE = len(str(LIMITS.template_number))  # digits
# Widths of "%5d" % x and "{:5}".format(x) with too many digits, or that are computed.
WIDE_PERCENT = re.compile(rf"%(?:\([^)]*\))?[-#0 +]*(?:\*|\d{{{WIDE},}}|\d*\.(?:\*|\d{{{WIDE},}}))")
WIDE_FIELD = re.compile(rf"\{{[^{{}}]*:[^{{}}]*(?:\{{|\d{{{WIDE},}})")

PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})  # methods with a width
NUMBERED = ("batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap")  # filters with one


class Budget:
    """The rest of one rendering: the time until `deadline`, and the characters that it may still make."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + LIMITS.template_s
        self.characters = LIMITS.template_work

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise TemplateError(f"it has run for {LIMITS.template_s:g} s, which is the limit")

    def charge(self, characters: int) -> None:
        """Take from what is left. Raises TemplateError for one text that is too long, and at the end of all."""
        if characters > LIMITS.template_characters:
            raise TemplateError(
                f"it makes a text or list of {characters:,} characters; the limit is {LIMITS.template_characters:,}"
            )
        self.characters -= characters
        if self.characters < 0:
            raise TemplateError(f"it makes more than {LIMITS.template_work:,} characters in all, which is the limit")
        self.check_time()


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


def budget() -> Budget:
    """The rendering's; a fresh one at compile time, when constant expressions are computed."""
    return _current.get() or Budget()


def bounded(work: Callable[[], str]) -> str:
    """The result of `work` under a Budget of its own."""
    token = _current.set(Budget())
    try:
        return work()
    finally:
        _current.reset(token)


def size(value: object) -> int:
    """Characters that a value takes as text, about; lists that hold others many times count each time."""
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, list | tuple | Mapping):
        return 1
    total, rest = 0, [value]
    while rest:
        part = rest.pop()
        if isinstance(part, Mapping):
            rest += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            rest += part
        total += len(part) if isinstance(part, str | bytes) else ITEM
        if total > LIMITS.template_characters:
            break
    return total


def joined(parts: Iterable[Any], separator: str = "") -> str:
    """`separator.join(parts)`, anything as text."""
    known = list(parts)
    budget().charge(sum(map(size, known)) + len(separator) * len(known))
    return separator.join(map(str, known))


class Bounds(NodeTransformer):
    """A template's tree, with a call in every pass of a loop, and `~` as a call too: calls are counted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("passed", []), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", [nodes.List(node.nodes)]).set_lineno(node.lineno)


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The names and the whitespace rules that Transformers has for templates, within bounds."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})
    concat = staticmethod(joined)
    joined = staticmethod(joined)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=_finalize
        )
        self.filters["tojson"] = to_json
        for name in NUMBERED:
            self.filters[name] = _with_small_numbers(name, self.filters[name])
        self.filters["sum"] = _of_numbers(self.filters["sum"])
        self.filters |= {"join": _join, "replace": _replace, "string": _string, "format": _format}
        del self.filters["urlize"], self.globals["lipsum"]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = Bounds().visit(super()._parse(source, name, filename))
        return tree

    def passed(self) -> None:
        """One pass of a loop."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget().check_time()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes | int):
            args = _checked_method(owner, name, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget().charge(_result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and WIDE_FIELD.search(value.__self__):
            raise TemplateError(f"the format {value.__self__!r:.80} has a width that is too large or computed")
        return wrapped


class Generation(Extension):
    """{% generation %} marks the assistant's words for training; here its body is all there is to it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own escapes what HTML needs escaped."""
    budget().charge(size(value) * (1 + (indent if isinstance(indent, int) else 0)))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _finalize(value: Any) -> Any:
    """What `{{ value }}` shows."""
    if not isinstance(value, str):
        budget().charge(size(value))
    return value


def _small(number: object) -> None:
    limit = LIMITS.template_number
    if isinstance(number, int) and abs(number) > limit:
        raise TemplateError(f"the number {number:.3g} is over the limit of {limit:,} for a width or a count")


def _with_small_numbers(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose widths, and texts in their place, are small for each line that it makes."""

    @wraps(plain)
    def checked(*args: Any, **kwargs: Any) -> Any:
        value = next((arg for arg in args if isinstance(arg, str)), "")
        settings = [*(arg for arg in args if arg is not value), *kwargs.values()]
        widths = [0]
        for setting in settings:
            _small(setting)
            if isinstance(setting, int | str) and not isinstance(setting, bool):
                widths.append(len(setting) if isinstance(setting, str) else abs(setting))
        if name == "indent":
            budget().charge(len(value) + (value.count("\n") + 1) * max(widths))
        elif name == "wordwrap":
            budget().charge(len(value) * (1 + max(map(len, (s for s in settings if isinstance(s, str))), default=1)))
        return plain(*args, **kwargs)

    return checked


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    return joined(value if attribute is None else map(make_attrgetter(environment, attribute), value), str(d))


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(s), str(old), str(new)
    budget().charge(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _string(value: Any) -> str:
    return joined([value])


def _of_numbers(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `sum` without lists, whose sum takes quadratic time."""

    @wraps(plain)
    def checked(environment: Environment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, int | float):
            raise TemplateError("the filter sum adds numbers only")
        return plain(environment, iterable, attribute, start)

    return checked


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    text, inserted = str(value), kwargs or args
    budget().charge(_result_size("%", text, inserted))
    return text % inserted


def _checked_method(owner: str | bytes | int, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The arguments of a method of a text or a number, once its result is known to be affordable."""
    if name in PADDING:
        for number in (*args, *kwargs.values()):
            _small(number)
        factor = next((number for number in args if isinstance(number, int)), 8)
        tabs = owner.count("\t") if isinstance(owner, str) else 0
        budget().charge(tabs * factor)
    elif name == "join" and args and isinstance(owner, str):
        parts = list(args[0])
        budget().charge(sum(map(size, parts)) + len(owner) * len(parts))
        return (parts, *args[1:])
    elif name == "replace" and len(args) >= 2 and isinstance(owner, str):
        budget().charge(len(owner) + owner.count(str(args[0])) * size(args[1]))
    elif name == "translate":
        raise TemplateError("str.translate is not available in chat templates")
    return args


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Characters of the result, before it is computed."""
    if operator == "%":
        if isinstance(left, str) and WIDE_PERCENT.search(left):
            raise TemplateError(f"the format {left!r:.80} has a width that is too large or computed")
        return len(left) + size(right) * left.count("%") if isinstance(left, str) else 1
    if operator == "+":
        return _flat(left) + _flat(right)
    numbers = isinstance(left, int), isinstance(right, int)
    if all(numbers):
        digits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        _small(digits)
        return 1
    if operator == "*" and any(numbers):
        times, part = (left, right) if numbers[0] else (right, left)
        return _flat(part) * max(0, int(times))
    return 1


def _flat(value: Any) -> int:
    """Characters of a text, or of a list that does not copy what it holds."""
    if isinstance(value, str | bytes):
        return len(value)
    return ITEM * len(value) if isinstance(value, list | tuple) else 1
