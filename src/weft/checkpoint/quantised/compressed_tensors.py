"""compressed-tensors in a quantization_config: groups of layers, each in one of the library's formats ("packings").

Modules of `formats` declare these, for a single group. Source: compressed-tensors, quantization_config.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from msgspec.structs import replace

from weft.checkpoint.architectures.published import PublishedQuantization
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.quantised.format import Format, Predicate
from weft.checkpoint.quantised.name_patterns import NAMES, PREFIX, ModuleList

METHOD = "compressed-tensors"


def group_weights(group: Fields) -> Fields:
    """The description of the weights of a group."""
    return group.nested("weights") or Fields({}, group.where)


def is_floating(weights: Fields) -> bool:
    """Return True for 8-bit floating-point numbers."""
    return weights.text_or("type", "int") == "float" and weights.integer_or("num_bits", None) == 8


def unsupported_features(config: Fields, packings: Mapping[str, Format]) -> Iterator[str]:
    """Describe each feature of a config that Weft does not read; `packings` are the formats that it reads."""
    packing, groups = config.text_or("format", None), list(_config_groups(config))
    if not groups:
        yield f"{METHOD} in the format {packing}, without config_groups"
    for group in groups:
        feature = _unsupported_in_group(group, group.text_or("format", None) or packing, packings)
        if feature is not None:
            yield feature
    bits = {group_weights(group).values.get("num_bits") for group in groups}
    if len(bits) > 1:
        yield f"{METHOD} in {' and '.join(sorted(map(str, bits)))} bits, one here and one there"
    if len({is_floating(group_weights(group)) for group in groups}) > 1:
        yield f"{METHOD} in whole and in floating-point numbers, one here and one there"
    sparsity = config.nested("sparsity_config")
    if sparsity is not None and sparsity.text_or("format", "dense") != "dense":
        yield f"{METHOD} in the format {sparsity.text_or('format', None)}"


def _unsupported_in_group(group: Fields, packing: str | None, packings: Mapping[str, Format]) -> str | None:
    format = packings.get(packing or "")
    if format is None or is_floating(group_weights(group)) != ("fp8" in format.numbers):
        return f"{METHOD} in the format {packing}"
    return format.unsupported(group)


def parse_config(config: Fields, packings: Mapping[str, Format]) -> PublishedQuantization:
    """The quantisation of the first group; `mixed` if others are quantised otherwise."""
    first, *others = _config_groups(config)
    packing = first.text_or("format", None) or config.text_or("format", None)
    own = group_weights(first).values
    mixed = any(group_weights(other).values != own for other in others)
    return replace(packings[packing or ""].parse(first), mixed=mixed)


def quantised_layers(config: Fields) -> Predicate:
    """The layers that groups name, but for the ignored layers."""
    ignored = _module_list(config.names("ignore", NAMES), config)
    names = [target for group in _config_groups(config) for target in group.names("targets", NAMES)]
    targets = _module_list(names, config)
    return lambda name: ("Linear" in names or name in targets) and name not in ignored


def _module_list(entries: Collection[str], config: Fields) -> ModuleList:
    """Modules by compressed-tensors' entries: names, and regular expressions after "re:"."""
    names = [entry for entry in entries if not entry.startswith(PREFIX)]
    patterns = [entry.removeprefix(PREFIX) for entry in entries if entry.startswith(PREFIX)]
    return ModuleList(names, patterns, config.where)


def _config_groups(config: Fields) -> Iterator[Fields]:
    """The config groups: each says how some layers are quantised."""
    groups = config.nested("config_groups")
    if groups is None:
        return
    for name in groups.values:
        group = groups.nested(name)
        if group is not None:
            yield group
