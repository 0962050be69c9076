"""Jinja environment of chat templates: sandboxed, and bounded in time and in the size of its texts.

A template comes with a checkpoint, from a stranger, and runs in the server. Python cannot stop a thread from outside.
So each construct that multiplies work or text charges a Budget first: loop iterations, calls, operators, concatenation,
and filters and methods whose result may be much longer than their arguments.
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
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from weft.text.limits import LIMITS

ITEM = 8  # characters that an item of a list counts as
WIDE = len(str(LIMITS.template_number))  # digits
# Widths in "%5d" % x and "{:5}".format(x) that have too many digits or are computed.
WIDE_PERCENT = re.compile(rf"%(?:\([^)]*\))?[-#0 +]*(?:\*|\d{{{WIDE},}}|\d*\.(?:\*|\d{{{WIDE},}}))")
WIDE_FIELD = re.compile(rf"\{{[^{{}}]*:[^{{}}]*(?:\{{|\d{{{WIDE},}})")

# Attributes that the sandbox lets templates read of exactly these types, whatever they hold. It must still see the
# methods that make texts of formats, and those that change a dict.
SAFE_ATTRIBUTES: Mapping[type, frozenset[str]] = {
    dict: frozenset({"get", "items", "keys", "values"}),
    str: frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"},
    LoopContext: frozenset({"depth", "depth0", "first", "index", "index0", "last", "length", "revindex", "revindex0"}),
}
DICT_ATTRIBUTES = frozenset(dir(dict))
METHOD_OWNERS = (str, bytes, int)  # whose methods are charged for
IN_TIME = "in time"  # a test that no template can name

WIDTH_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})  # with a width argument
WIDTH_FILTERS = ("batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap")  # likewise


class Budget:
    """Remaining budget of one rendering: time until `deadline`, and characters that it may still create."""

    __slots__ = ("characters", "deadline")

    def __init__(self) -> None:
        self.deadline = time.monotonic() + LIMITS.template_s
        self.characters = LIMITS.template_work

    def check_time(self) -> None:
        """Raise TemplateError after the deadline."""
        if time.monotonic() > self.deadline:
            raise TemplateError(f"it has run for {LIMITS.template_s:g} s, which is the limit")

    def charge(self, characters: int) -> None:
        """Spend `characters`. Raises TemplateError for one text that is too long, and if the budget is exceeded."""
        if characters > LIMITS.template_characters:
            raise TemplateError(
                f"it makes a text or list of {characters:,} characters; the limit is {LIMITS.template_characters:,}"
            )
        self.characters -= characters
        if self.characters < 0:
            raise TemplateError(f"it makes more than {LIMITS.template_work:,} characters in all, which is the limit")
        self.check_time()


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


def current_budget() -> Budget:
    """Budget of the current rendering; a new one at compile time, when Jinja computes constant expressions."""
    return _current.get() or Budget()


def run_within_budget(work: Callable[[], str]) -> str:
    """Run `work` with a new Budget."""
    token = _current.set(Budget())
    try:
        return work()
    finally:
        _current.reset(token)


def text_size(value: object) -> int:
    """Approximate number of characters of a value as text. Repeated occurrences in lists count each time."""
    if type(value) is str or isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, list | tuple | Mapping):
        return 1
    total, pending = 0, [value]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            pending += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            pending += part
        total += len(part) if isinstance(part, str | bytes) else ITEM
        if total > LIMITS.template_characters:
            break
    return total


def join_texts(parts: Iterable[Any], separator: str = "") -> str:
    """`separator.join(parts)`, with every part converted to text, within the budget."""
    listed = list(parts)
    _charge_join(listed, separator)
    return separator.join(map(str, listed))


def _charge_join(parts: list[Any], separator: str) -> None:
    current_budget().charge(sum(map(text_size, parts)) + len(separator) * len(parts))


def in_time(context: Context) -> bool:
    """The test that each iteration of a loop makes."""
    current_budget().check_time()
    return True


class Bounds(NodeTransformer):
    """Adds a test of the time to every loop iteration, and makes `~` a call, which the environment counts."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        # A test is called without the sandbox's checks of calls. Its argument is one that no compiler takes for a
        # constant.
        test = nodes.Test(nodes.ContextReference(), IN_TIME, [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(test, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("join_texts")
        return nodes.Call(joined, [nodes.List(node.nodes)], [], None, None).set_lineno(node.lineno)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Environment with the names and whitespace rules that Transformers has for templates, within the budget."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})
    concat = staticmethod(join_texts)
    join_texts = staticmethod(join_texts)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=_finalize
        )
        self.tests[IN_TIME] = in_time
        self.filters["tojson"] = to_json
        for name in WIDTH_FILTERS:
            self.filters[name] = _limit_widths(name, self.filters[name])
        self.filters["sum"] = _sum_of_numbers(self.filters["sum"])
        self.filters |= {"join": _join, "replace": _replace, "string": _string, "format": _format}
        del self.filters["urlize"], self.globals["lipsum"]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = Bounds().visit(super()._parse(source, name, filename))
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Jinja's, with a short way for what templates read most."""
        kind = type(obj)
        if attribute in SAFE_ATTRIBUTES.get(kind, ()):
            return getattr(obj, attribute)
        if kind is dict and attribute not in DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        current_budget().check_time()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, METHOD_OWNERS):
            args = _check_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            current_budget().charge(len(left) + len(right))
            return left + right
        current_budget().charge(_result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and WIDE_FIELD.search(value.__self__):
            raise TemplateError(f"the format {value.__self__!r:.80} has a width that is too large or computed")
        return wrapped


class Generation(Extension):
    """The tag {% generation %}, which marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter tojson, without the HTML escapes of Jinja's own."""
    current_budget().charge(text_size(value) * (1 + (indent if isinstance(indent, int) else 0)))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _finalize(value: Any) -> Any:
    """Charge for the text of `{{ value }}`."""
    if not isinstance(value, str):
        current_budget().charge(text_size(value))
    return value


def _check_small(number: object) -> None:
    """Raise TemplateError for a number that is too large for a width or a count."""
    limit = LIMITS.template_number
    if isinstance(number, int) and abs(number) > limit:
        raise TemplateError(f"the number {number:.3g} is over the limit of {limit:,} for a width or a count")


def _limit_widths(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `plain` with limits on its width arguments, and on the texts that may replace them."""

    @wraps(plain)
    def limited(*args: Any, **kwargs: Any) -> Any:
        value = next((arg for arg in args if isinstance(arg, str)), "")
        settings = [*(arg for arg in args if arg is not value), *kwargs.values()]
        for setting in settings:
            _check_small(setting)
        if name == "indent":
            current_budget().charge(len(value) + (value.count("\n") + 1) * max(map(_width, settings), default=0))
        elif name == "wordwrap":
            separators = [len(setting) for setting in settings if isinstance(setting, str)]
            current_budget().charge(len(value) * (1 + max(separators, default=1)))
        return plain(*args, **kwargs)

    return limited


def _width(setting: object) -> int:
    """Characters per line that an argument of `indent` adds: a number of spaces, or a text."""
    if isinstance(setting, str):
        return len(setting)
    return abs(setting) if isinstance(setting, int) and not isinstance(setting, bool) else 0


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    return join_texts(value if attribute is None else map(make_attrgetter(environment, attribute), value), str(d))


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(s), str(old), str(new)
    current_budget().charge(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _string(value: Any) -> str:
    return join_texts([value])


def _sum_of_numbers(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `sum` without lists: adding lists takes quadratic time."""

    @wraps(plain)
    def limited(environment: Environment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, int | float):
            raise TemplateError("the filter sum adds numbers only")
        return plain(environment, iterable, attribute, start)

    return limited


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    text, values = str(value), kwargs or args
    current_budget().charge(_result_size("%", text, values))
    return text % values


def _check_method(owner: str | bytes | int, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Charge for a call of a method of a text or a number. Return its arguments, with iterators made lists."""
    if name in WIDTH_METHODS:
        _charge_width_method(owner, args, kwargs)
    elif name == "join" and args and isinstance(owner, str):
        parts = list(args[0])
        _charge_join(parts, owner)
        return (parts, *args[1:])
    elif name == "replace" and len(args) >= 2 and isinstance(owner, str):
        current_budget().charge(len(owner) + owner.count(str(args[0])) * text_size(args[1]))
    elif name == "translate":
        raise TemplateError("str.translate is not available in chat templates")
    return args


def _charge_width_method(owner: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for number in (*args, *kwargs.values()):
        _check_small(number)
    tab_width = next((number for number in args if isinstance(number, int)), 8)
    tabs = owner.count("\t") if isinstance(owner, str) else 0
    current_budget().charge(tabs * tab_width)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Number of characters of an operator's result, before it is computed."""
    if operator == "%":
        return _formatted_size(left, right)
    if operator == "+":
        return _shallow_size(left) + _shallow_size(right)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        _check_small(bits)
        return 1
    if operator == "*" and isinstance(left, int):
        return _shallow_size(right) * max(0, left)
    if operator == "*" and isinstance(right, int):
        return _shallow_size(left) * max(0, right)
    return 1


def _formatted_size(left: Any, right: Any) -> int:
    """Number of characters of `left % right`."""
    if not isinstance(left, str):
        return 1
    if WIDE_PERCENT.search(left):
        raise TemplateError(f"the format {left!r:.80} has a width that is too large or computed")
    return len(left) + text_size(right) * left.count("%")


def _shallow_size(value: Any) -> int:
    """Number of characters of a text, or of a list whose items are not copied."""
    if isinstance(value, str | bytes):
        return len(value)
    return ITEM * len(value) if isinstance(value, list | tuple) else 1
