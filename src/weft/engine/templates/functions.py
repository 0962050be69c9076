"""Filters, tests and methods of chat templates, each charged for what it goes through and for what it makes."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from jinja2 import Environment, TemplateError, pass_environment
from jinja2.filters import make_attrgetter

from weft.engine.templates.budget import (
    CONTAINERS,
    charge_join,
    charge_parts,
    check_bits,
    check_small,
    current_budget,
    join_texts,
    shallow_size,
    text_size,
)

METHOD_OWNERS = (str, bytes, int, list, tuple, dict)  # whose methods are charged for
WIDTH_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})  # with a width argument
WIDTH_FILTERS = ("batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap")  # likewise
# Filters that look at the items of a list one after the other, or at none. All others go through all parts of
# a value that is no text: they spell, compare or hash it.
SHALLOW_FILTERS = frozenset(
    {
        *("attr", "batch", "count", "d", "default", "dictsort", "first", "items", "last", "length", "list", "map"),
        *("reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sum", "tojson", "join"),
    }
)
SHALLOW_TESTS = frozenset({"defined", "undefined", "none", "mapping", "iterable", "sequence", "string", "number"})
# Methods that look for a text from the end, by a quadratic search.
BACKWARD_METHODS = frozenset({"rfind", "rindex", "rsplit", "rpartition"})
BACKWARD_WORK = 2**32  # characters of the text times characters of the other
DIGITS = 4300  # of a text that becomes a number, as Python allows for decimal ones
ENCODINGS = frozenset({"utf-8", "ascii", "iso8859-1", "utf-16", "utf-32"})  # all of them in linear time

Plain = Callable[..., Any]


def limited_filters(filters: Mapping[str, Any], form: Plain) -> dict[str, Any]:
    """The filters within the budget; `form` is the filter format's."""
    own = {"tojson": to_json, "join": _join, "replace": _replace, "string": _string, "format": form, "int": _int}
    limited: dict[str, Any] = {**filters, **own, "sum": _sum_of_numbers(filters["sum"])}
    for name in WIDTH_FILTERS:
        limited[name] = _limit_widths(name, limited[name])
    return {name: _charged(plain, shallow=name in SHALLOW_FILTERS) for name, plain in limited.items()}


def limited_tests(tests: Mapping[str, Any]) -> dict[str, Any]:
    """The tests within the budget."""
    return {name: plain if name in SHALLOW_TESTS else _charged(plain, shallow=False) for name, plain in tests.items()}


def _charged(plain: Plain, *, shallow: bool) -> Plain:
    """A filter or test that is charged for its arguments, unless it is `shallow`, and for its result."""

    @wraps(plain)
    def charged(*args: Any, **kwargs: Any) -> Any:
        if not shallow:
            charge_parts(*args, *kwargs.values())
            check_bits(*args)
        result = plain(*args, **kwargs)
        if isinstance(result, str | list):
            current_budget().charge(shallow_size(result))
        return result

    return charged


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter tojson, without the HTML escapes of Jinja's own."""
    current_budget().charge(text_size(value) * (1 + (indent if isinstance(indent, int) else 0)))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _limit_widths(name: str, plain: Plain) -> Plain:
    """The filter `plain` with limits on its width arguments, and on the texts that may replace them."""

    @wraps(plain)
    def limited(*args: Any, **kwargs: Any) -> Any:
        value = next((arg for arg in args if isinstance(arg, str)), "")
        settings = [*(arg for arg in args if arg is not value), *kwargs.values()]
        for setting in settings:
            check_small(setting)
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


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    if isinstance(value, str | bytes) and len(value) > DIGITS:
        raise TemplateError(f"a text of {len(value):,} characters is to be a number; the limit is {DIGITS:,}")
    try:
        return int(value, base) if isinstance(value, str) else int(value)
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        return int(float(value))  # as Jinja's own: "3.7" is 3
    except (TypeError, ValueError, OverflowError):
        return default


def _sum_of_numbers(plain: Plain) -> Plain:
    """The filter `sum` without lists: adding lists takes quadratic time."""

    @wraps(plain)
    def limited(environment: Environment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, int | float):
            raise TemplateError("the filter sum adds numbers only")
        return plain(environment, iterable, attribute, start)

    return limited


def check_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Charge for a call of a method of a value. Return its arguments, with iterators made lists."""
    if isinstance(owner, CONTAINERS):
        _check_method_of_list(owner, name, args)
        return args
    if name in WIDTH_METHODS:
        _charge_width_method(owner, args, kwargs)
    elif name == "join" and args and isinstance(owner, str | bytes):
        parts = list(args[0])
        charge_join(parts, owner)
        return (parts, *args[1:])
    elif name == "replace" and len(args) >= 2 and isinstance(owner, str | bytes):
        current_budget().charge(len(owner) + _occurrences(owner, args[0]) * text_size(args[1]))
    elif name in ("encode", "decode"):
        _check_encoding(args, kwargs)
    elif name == "translate":
        raise TemplateError(f"{type(owner).__name__}.translate is not available in chat templates")
    elif name in BACKWARD_METHODS:
        _check_search(owner, name, args)
    elif isinstance(owner, int):
        check_bits(owner)
        charge_parts(*args)
        for number in args:
            check_small(shallow_size(number))
    return args


def _check_method_of_list(owner: Any, name: str, args: tuple[Any, ...]) -> None:
    charge_parts(*args)  # hashed or compared
    if not isinstance(owner, dict) and name in ("count", "index"):
        charge_parts(owner)


def _check_search(owner: Any, name: str, args: tuple[Any, ...]) -> None:
    part = args[0] if args else None
    if isinstance(part, str | bytes) and len(owner) * len(part) > BACKWARD_WORK:
        raise TemplateError(f"{name} looks for {len(part):,} characters in {len(owner):,}, which takes too long")


def _occurrences(owner: str | bytes, part: Any) -> int:
    try:
        return owner.count(part)
    except TypeError:  # which the method says itself
        return 0


def _check_encoding(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    given = kwargs.get("encoding", args[0] if args else "utf-8")
    try:
        name = codecs.lookup(given).name
    except (LookupError, TypeError):
        return  # which the method says itself
    if name not in ENCODINGS:
        raise TemplateError(f"the encoding {given!r:.40} is not available in chat templates")


def _charge_width_method(owner: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for number in (*args, *kwargs.values()):
        check_small(number)
    tab_width = next((number for number in args if isinstance(number, int)), 8)
    tabs = owner.count("\t") if isinstance(owner, str) else owner.count(b"\t") if isinstance(owner, bytes) else 0
    current_budget().charge(tabs * tab_width)
