"""Flags as data, and the structs of parsed arguments, whose fields declare them.

A group of flags is a struct whose fields are declared with `flag`: name, type, default and flag of a value stand in one
place. A bundle holds groups, and may have flags of its own; the arguments of a command are a bundle. Types are
evaluated when a command's flags are needed, which is never for most commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache, reduce
from inspect import get_annotations
from operator import or_
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

import msgspec

from weft.cli.flags import values
from weft.config import DeviceIds, DeviceMap, EngineConfig, MaxMemory, Option, OptionGroup

T = TypeVar("T")

# Parsers of a flag's text by the type of its value; None is a switch.
PARSERS: dict[Any, Callable[[str], Any] | None] = {
    bool: None,
    int: values.size,
    float: float,
    str: str,
    str | bool: str,  # True is the value of a flag that is given without one
    tuple[int, ...]: values.integers,
    tuple[float, ...]: values.decimals,
    DeviceIds: values.device_ids,
    tuple[str, ...]: values.words,
    dict[str, Any]: values.mapping,
    DeviceMap: values.device_map,
    MaxMemory: values.max_memory,
}


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """`--name VALUE`, or if `parse` is None, the pair `--name` and `--no-name`.

    `field` is the field of the value if it differs from the name. A flag with `several` takes one or more values; a
    flag with `repeated` may be given several times; both give a tuple. `default` is the value if the flag is not given,
    and `bare` the value if it is given without one. `config_default` is the default that the help shows instead.
    """

    name: str
    help: str
    parse: Callable[[str], Any] | None = str
    field: str = ""
    short: str = ""
    choices: tuple[str, ...] = ()
    metavar: str = ""
    several: bool = False
    repeated: bool = False
    default: Any = None
    bare: Any = None
    config_default: Any = None

    @property
    def long(self) -> str:
        return "--" + self.name

    @property
    def dest(self) -> str:
        return self.field or self.name.replace("-", "_")


class Declaration(msgspec.Struct, frozen=True):
    """The flag of a struct's field before it is needed: its default, and its other fields as in `Flag`.

    The name is the field's; parser and choices may be left to the field's type, and the choices to a function. Without
    any of them, it is the flag of the engine's option of this name.
    """

    default: Any
    about: dict[str, Any]


def flag(default: Any = None, **about: Any) -> Any:
    """Declare a field of a struct by `Declaration(default, about)`. The help shows no default of a switch."""
    return Declaration(default, about)


class FlagsMeta(msgspec.StructMeta):
    """Takes the declared flags off the fields of a struct, and leaves their defaults there."""

    declared: dict[str, Declaration]

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: bool) -> FlagsMeta:
        declared = {field: value for field, value in namespace.items() if isinstance(value, Declaration)}
        defaults = {field: value.default for field, value in declared.items()}
        made = super().__new__(mcls, name, bases, {**namespace, **defaults}, frozen=True, kw_only=True)
        inherited = (base.declared for base in bases if isinstance(base, FlagsMeta))
        made.declared = reduce(or_, inherited, {}) | declared
        return made


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Flags(msgspec.Struct, metaclass=FlagsMeta, frozen=True):
    """Base of groups of flags. A flag that sets another field is declared as a class variable."""


class Group(msgspec.Struct, frozen=True):
    """The annotation of a group in a bundle: its title in the help, if it is not the field's name, and the names of the
    flags that the command has, if these are not all."""

    title: str = ""
    only: tuple[str, ...] = ()


class Bundle(Flags):
    """Base of structs that hold groups of flags; `title` is the title of their own flags in the help.

    `model` is the name of the model, "" if there is none. `given` are the fields whose flags were given.
    """

    title: ClassVar[str] = ""
    model: str = ""
    given: frozenset[str] = frozenset()

    def with_model(self, name: str) -> Self:
        """The same for another model."""
        parts = ((field, getattr(self, field)) for field in groups_by_field(type(self)))
        bundles = {field: part.with_model(name) for field, part in parts if isinstance(part, Bundle)}
        return msgspec.structs.replace(self, model=name, **bundles)

    def values(self) -> dict[str, Any]:
        """The value of each flag, by its field."""
        by_field = {name: getattr(self, name) for name in type(self).declared}
        for part in (getattr(self, name) for name in groups_by_field(type(self))):
            by_field |= part.values() if isinstance(part, Bundle) else group_values(part)
        return by_field

    def given_values(self) -> dict[str, Any]:
        """The value of each flag that was given, by its field."""
        return {name: value for name, value in self.values().items() if name in self.given}


class Arguments(Bundle):
    """Base of the arguments of a command. `argument` are the words that are no flags, except a model and a prompt."""

    command: str
    argument: tuple[str, ...] = ()
    config: str | None = None


def field_types(kind: type[object]) -> dict[str, Any]:
    """The types of a class's fields, and of its bases'; much faster than `get_type_hints` the first time."""
    of_bases = (get_annotations(base, eval_str=True) for base in reversed(kind.__mro__))
    return reduce(or_, of_bases, {})


def group_values(group: Flags | OptionGroup) -> dict[str, Any]:
    """The values of a group, by field."""
    kind: Any = type(group)
    return {flag.dest: getattr(group, flag.dest) for flag in flags_of(kind)}


@cache
def groups_by_field(bundle: type[Bundle]) -> dict[str, tuple[Any, Group]]:
    """The groups of a bundle and its inner bundles, by field."""
    groups: dict[str, tuple[Any, Group]] = {}
    for name, hint in field_types(bundle).items():
        kind, *about = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if isinstance(kind, type) and issubclass(kind, (Flags, OptionGroup)):
            groups[name] = kind, *(about or [Group()])
    return groups


@cache
def flag_groups(bundle: type[Bundle]) -> tuple[tuple[str, tuple[Flag, ...]], ...]:
    """The flags of a bundle under the titles of their groups: its own ones, and then in the order of the fields."""
    titled = {bundle.title: tuple(_struct_flags(bundle))} if bundle.declared else {}
    for name, (kind, about) in groups_by_field(bundle).items():
        if issubclass(kind, Bundle):
            titled |= dict(flag_groups(kind))
            continue
        flags = tuple(flag for flag in flags_of(kind) if not about.only or flag.name in about.only)
        title = about.title or name.replace("_", " ")
        titled[title] = titled.get(title, ()) + flags
    return tuple(titled.items())


@cache
def flags_of(group: type[Flags | OptionGroup]) -> tuple[Flag, ...]:
    """The flags of a group, in the order of its fields."""
    return tuple(_struct_flags(group)) if issubclass(group, Flags) else option_flags(group)


def _struct_flags(struct: type[Flags]) -> Iterator[Flag]:
    types, options = field_types(struct), {field.name: field for field in fields(EngineConfig)}
    for name, declaration in struct.declared.items():
        default, about = declaration.default, declaration.about
        if not about:
            yield option_flag(options[name], types[name])
            continue
        kind = _without_none(types[name])
        given = {
            "name": name.replace("_", "-"),
            "field": name,
            "default": None if isinstance(default, bool) else default,
            "choices": get_args(kind) if get_origin(kind) is Literal else (),
            **about,
        }
        if about.keys().isdisjoint(("parse", "several", "repeated")):
            given["parse"] = type_parser(kind)
        if callable(given["choices"]):
            given["choices"] = given["choices"]()
        yield Flag(**given)


def option_flags(config: type[OptionGroup]) -> tuple[Flag, ...]:
    """The flags of a config's options, in the order of its fields."""
    types = field_types(config)
    return tuple(option_flag(field, types[field.name]) for field in fields(config) if "option" in field.metadata)


def option_flag(field: Field[Any], kind: Any) -> Flag:
    """The flag of a config's field that declares an option; `kind` is its type."""
    option: Option = field.metadata["option"]
    return Flag(
        name=option.flag or field.name.replace("_", "-"),
        field=field.name,
        parse=option_parser(option, kind),
        choices=(*option.synonyms, *option.choices),
        config_default=None if field.default is MISSING else field.default,
        help=option.help,
        short=option.short,
        metavar=option.metavar,
        several=option.several,
        repeated=option.repeated,
    )


def option_parser(option: Option, kind: Any) -> Callable[[str], Any] | None:
    """The parser of a flag's text, or None for a switch; `kind` is the type of the option's field."""
    if option.auto:
        return values.length
    return str if option.several or option.repeated else type_parser(kind)


def type_parser(kind: Any) -> Callable[[str], Any] | None:
    """The parser of a text for a value of this type or None; None for a switch."""
    kind = _without_none(kind)
    return str if get_origin(kind) is Literal else PARSERS[kind]


def _without_none(kind: Any) -> Any:
    if get_origin(kind) not in (Union, UnionType):
        return kind
    return reduce(or_, (part for part in get_args(kind) if part is not NoneType))


def fill(kind: type[T], parsed: Mapping[str, Any], given: frozenset[str]) -> T:
    """A bundle, or a group of it, with the parsed values by field; a value that is not among them has its default."""
    made: T
    struct: Any = kind
    if not issubclass(kind, Bundle):
        made = struct(**{flag.dest: parsed[flag.dest] for flag in flags_of(struct) if flag.dest in parsed})
        return made
    groups = groups_by_field(struct)
    own = {name: parsed[name] for name in struct.__struct_fields__ if name in parsed and name not in groups}
    parts = {name: fill(group, parsed, given) for name, (group, _) in groups.items()}
    made = struct(**own, **parts, given=given)
    return made
