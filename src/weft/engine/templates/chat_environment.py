"""Jinja environment of chat templates: sandboxed, and within a budget of time and of characters.

Loops, operators, comparisons and calls are charged here, filters and methods in `functions`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from weft.engine.templates.budget import (
    CONTAINERS,
    charge_parts,
    check_bits,
    check_small,
    current_budget,
    join_texts,
    shallow_size,
    text_size,
)
from weft.engine.templates.functions import METHOD_OWNERS, check_method, limited_filters, limited_tests
from weft.engine.templates.limits import LIMITS

WIDE = len(str(LIMITS.template_number))  # digits
# Widths in "%5d" % x and "{:5}".format(x) that have too many digits or are computed.
WIDE_PERCENT = re.compile(rf"%(?:\([^)]*\))?[-#0 +]*(?:\*|\d{{{WIDE},}}|\d*\.(?:\*|\d{{{WIDE},}}))")
WIDE_FIELD = re.compile(rf"\{{[^{{}}]*:[^{{}}]*(?:\{{|\d{{{WIDE},}})")
TIME_FORMAT = 200  # characters of a format of the date; each may become a width

# Attributes that the sandbox lets templates read of exactly these types, whatever they hold. It must still see the
# methods that make texts of formats, and the methods that change a dict.
SAFE_ATTRIBUTES: Mapping[type, frozenset[str]] = {
    dict: frozenset({"get", "items", "keys", "values"}),
    str: frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"},
    LoopContext: frozenset({"depth", "depth0", "first", "index", "index0", "last", "length", "revindex", "revindex0"}),
}
DICT_ATTRIBUTES = frozenset(dir(dict))
IN_TIME = "in time"  # a test that no template can name
ARITHMETIC = frozenset({"-", "/", "//"})


def in_time(context: Context) -> bool:
    """The test that each iteration of a loop makes."""
    current_budget().check_time()
    return True


def all_charged(value: Any) -> Any:
    """Charge for all parts of a value, and return it."""
    if isinstance(value, CONTAINERS):
        charge_parts(value)
    return value


class Bounds(NodeTransformer):
    """Adds a test of the time to every loop iteration, makes `~` a call, and charges for what is compared or hashed."""

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

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) == 1 and any(isinstance(part, nodes.Const) for part in (node.expr, node.ops[0].expr)):
            return node  # no parts of a value are compared with a constant's
        node.expr = self._charged(node.expr)
        for operand in node.ops:
            operand.expr = self._charged(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = self._charged(node.key)
        return node

    def _charged(self, node: nodes.Expr) -> nodes.Expr:
        """The expression with a charge for its value, unless it can be no list."""
        if isinstance(node, nodes.Const | nodes.TemplateData):
            return node
        charged = nodes.Filter(node, ALL_CHARGED, [], [], None, None)
        charged.set_lineno(node.lineno)
        return charged


ALL_CHARGED = "all charged"  # a filter that no template can name


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Environment with the names and whitespace rules that Transformers has for templates, within the budget."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    concat = staticmethod(join_texts)
    join_texts = staticmethod(join_texts)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=_finalize
        )
        del self.filters["urlize"], self.globals["lipsum"]
        self.filters = limited_filters(self.filters, _format) | {ALL_CHARGED: all_charged}
        self.tests = limited_tests(self.tests) | {IN_TIME: in_time}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _format_time

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

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Jinja's, which makes a text of any other argument, with a short way for what templates read most."""
        if type(argument) is str and type(obj) is dict and argument in obj:
            return obj[argument]
        if isinstance(argument, CONTAINERS):
            charge_parts(argument)
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = current_budget()
        budget.check_time()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, METHOD_OWNERS):
            args = check_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
            result = super().call(__context, __obj, *args, **kwargs)
            budget.charge(shallow_size(result))
            return result
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            current_budget().charge(len(left) + len(right))
            return left + right
        current_budget().charge(_result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        form = value.__self__
        if WIDE_FIELD.search(form):
            raise TemplateError(f"the format {form!r:.80} has a width that is too large or computed")

        def limited(*args: Any, **kwargs: Any) -> str:
            # Each field may be the longest of the values.
            longest = max(map(text_size, (*args, *kwargs.values())), default=0)
            current_budget().charge(len(form) + form.count("{") * longest)
            return wrapped(*args, **kwargs)

        return limited


class Generation(Extension):
    """The tag {% generation %}, which marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise(message: object) -> NoReturn:
    charge_parts(message)
    raise TemplateError(str(message))


def _format_time(form: str) -> str:
    if len(form) > TIME_FORMAT:
        raise TemplateError(f"the format of the date has {len(form):,} characters; the limit is {TIME_FORMAT}")
    return datetime.now().strftime(form)


def _finalize(value: Any) -> Any:
    """Charge for the text of `{{ value }}`."""
    if not isinstance(value, str):
        current_budget().charge(text_size(value))
    return value


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    text, values = str(value), kwargs or args
    current_budget().charge(_result_size("%", text, values))
    return text % values


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Number of characters of an operator's result, before it is computed."""
    if operator == "%" and isinstance(left, str):
        return _formatted_size(left, right)
    if operator == "+":
        return shallow_size(left) + shallow_size(right)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        check_small(bits)
        return 1
    check_bits(left, right)
    if operator == "*" and isinstance(left, int):
        return shallow_size(right) * max(0, left)
    if operator == "*" and isinstance(right, int):
        return shallow_size(left) * max(0, right)
    return 1


def _formatted_size(left: str, right: Any) -> int:
    """Number of characters of `left % right`."""
    if WIDE_PERCENT.search(left):
        raise TemplateError(f"the format {left!r:.80} has a width that is too large or computed")
    return len(left) + text_size(right) * left.count("%")
