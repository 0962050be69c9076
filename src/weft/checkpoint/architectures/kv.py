"""KV cache: what each layer remembers, which layers share a block table, and the bytes and blocks that a text takes."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from weft.checkpoint.architectures.place import Place, whole
from weft.checkpoint.architectures.shape import LatentAttention, Mixer, ModelShape
from weft.errors import ConfigError

# Bytes per number. FP8 caches of both kinds have one scale per tensor, which is too small to count.
BYTES = {"bf16": 2, "fp16": 2, "bfloat16": 2, "float16": 2, "auto": 2, "fp32": 4, "float32": 4}
BYTES |= {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}

MAX_KV_GROUPS = 8  # groups, each with a block table in every step; more only if a model has more kinds of layers
LONG = 8  # a text is taken to be this many windows long when layers are divided into groups
STATES = 2  # states per running sequence: a step reads one and may write another; the rest are snapshots


def number_bytes(dtype: str) -> int:
    """Bytes of one number in a KV cache of `dtype`. Raises ConfigError for an unknown dtype."""
    if dtype not in BYTES:
        raise ConfigError(f"unknown KV cache dtype {dtype!r}; known: {', '.join(BYTES)}", code="unknown-kv-cache-dtype")
    return BYTES[dtype]


class KVSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a layer for a text.

    - `kind`: "heads": a key and a value of each KV head for every token; "latent": one vector for every token, which
      all heads share; "state": as much for any number of tokens, `bytes_per_sequence`.
    - `window`: a token reads the last `window` tokens, its own included; None for all of them.
    """

    kind: Literal["heads", "latent", "state"]
    bytes_per_token: int = 0
    window: int | None = None
    bytes_per_sequence: int = 0

    def __post_init__(self) -> None:
        assert self.window is None or self.window > 0, self
        if self.kind == "state":
            assert self.window is None and not self.bytes_per_token, self
        else:
            assert not self.bytes_per_sequence, self

    def text_bytes(self, tokens: int) -> int:
        """Bytes of a text of `tokens` tokens, of which at most the window is kept."""
        return self.bytes_per_sequence + min(tokens, self.window or tokens) * self.bytes_per_token


def kv_specs(shape: ModelShape, dtype: str = "bf16", place: Place | None = None) -> dict[int, KVSpec]:
    """Specs of a rank's layers (default: of the whole model), by their numbers.

    Latent attention caches one vector that all heads share. Every tensor-parallel rank holds a copy of that vector.
    """
    place = place or whole(shape)
    specs = {mixer: mixer_spec(mixer, place, dtype) for mixer in shape.mixers}
    return {layer: specs[shape.layers[layer].mixer] for layer in range(place.layers.start, place.layers.stop)}


def mixer_spec(mixer: Mixer, place: Place, dtype: str = "bf16") -> KVSpec:
    """The spec of a layer with this mixer on a rank."""
    size = number_bytes(dtype)
    if isinstance(mixer, LatentAttention):
        return KVSpec(kind="latent", bytes_per_token=mixer.latent_dim * size)
    heads = len(place.heads_of(mixer.head_counts).kv)
    return KVSpec(kind="heads", bytes_per_token=2 * heads * mixer.head_dim * size, window=mixer.window)


def kv_bytes_per_token(shape: ModelShape, dtype: str = "bf16", place: Place | None = None) -> int:
    """Bytes of one token in all layers of a rank (default: of the whole model); sliding windows are ignored."""
    return sum(spec.bytes_per_token for spec in kv_specs(shape, dtype, place).values())


def kv_bytes(shape: ModelShape, tokens: int, dtype: str = "bf16", place: Place | None = None) -> int:
    """Bytes of one sequence of `tokens` tokens on a rank; a layer with a sliding window keeps at most its window."""
    return sum(spec.text_bytes(tokens) for spec in kv_specs(shape, dtype, place).values())


class KVGroup(msgspec.Struct, frozen=True):
    """Layers, by their numbers in the model, that remember the same tokens and so share a block table."""

    spec: KVSpec
    layers: tuple[int, ...]


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of a model's KV in our engine: in blocks of `block_size` tokens, one block table for each group.

    All groups take their blocks from one pool. A block has room for `block_size` tokens in as many layers as the
    largest group has on a rank: the i-th layers of all groups share memory. So a block that one group frees serves any
    other. States are slots of their own.

    `chunk` is the most tokens of one request in a step.
    """

    groups: tuple[KVGroup, ...]
    block_size: int
    chunk: int

    @property
    def paged(self) -> tuple[KVGroup, ...]:
        """The groups that take blocks; every model has one at least."""
        return tuple(group for group in self.groups if group.spec.kind != "state")

    @property
    def has_windows(self) -> bool:
        """True if a group frees blocks behind a window."""
        return any(group.spec.window is not None for group in self.groups)

    def group_of(self, layer: int) -> int:
        """Number of a layer's group."""
        return next(number for number, group in enumerate(self.groups) if layer in group.layers)

    def group_blocks(self, group: KVGroup, tokens: int, chunk: int | None = None) -> int:
        """Number of blocks that a text of `tokens` tokens holds at most at once in a group, if a step has `chunk` of
        them at most."""
        blocks, window = -(-tokens // self.block_size), group.spec.window
        if group.spec.kind == "state":
            return 0
        # The first token of a chunk reads the window before it, the last one is the chunk's end: these tokens lie in
        # one more block than they would fill.
        reach = (window or 0) + (chunk or self.chunk) - 2
        return blocks if window is None else min(blocks, -(-reach // self.block_size) + 1)

    def blocks(self, tokens: int, chunk: int | None = None) -> int:
        """Number of blocks that a text of `tokens` tokens holds at most at once, in all groups."""
        return sum(self.group_blocks(group, tokens, chunk) for group in self.groups)

    def requests(self, num_blocks: int, tokens: int) -> float:
        """Number of texts of `tokens` tokens that `num_blocks` blocks hold, one of which is still being prefilled."""
        first, others = self.blocks(tokens), self.blocks(tokens, chunk=1)
        if num_blocks <= first or first == others:
            return num_blocks / first
        return 1 + (num_blocks - first) / others

    def tokens(self, num_blocks: int, length: int) -> int:
        """Number of tokens that `num_blocks` blocks hold in texts of `length` tokens, whose last blocks are full."""
        columns, first = -(-length // self.block_size), self.blocks(length)
        if first == self.blocks(length, chunk=1):
            return num_blocks * columns * self.block_size // first
        return int(self.requests(num_blocks, length) * columns * self.block_size)

    @property
    def blocks_per_token(self) -> float:
        """Number of blocks that each further token of a text takes that is longer than all windows."""
        return sum(group.spec.window is None for group in self.paged) / self.block_size

    def longest(self, num_blocks: int, most: int) -> int:
        """Tokens of the longest text, at most `most`, that `num_blocks` blocks hold: whole blocks, unless it is
        `most`."""
        lengths = range(self.block_size, most + self.block_size, self.block_size)
        held = bisect_right(lengths, num_blocks, key=self.blocks)
        return min(most, held * self.block_size)

    def block_bytes(self, specs: Mapping[int, KVSpec]) -> int:
        """Bytes of one block on a rank whose layers have these `specs`, by number."""
        # Layers of different kinds or sizes cannot share memory.
        layers: dict[tuple[str, int], int] = defaultdict(int)
        for group in self.paged:
            own = (specs[layer] for layer in group.layers if layer in specs)
            for kind, count in Counter((spec.kind, spec.bytes_per_token) for spec in own).items():
                layers[kind] = max(layers[kind], count)
        return self.block_size * sum(size * count for (_, size), count in layers.items())


def kv_groups(specs: Sequence[KVSpec]) -> tuple[KVGroup, ...]:
    """Divide layers with these specs into groups.

    Layers with one spec are a group, unless there are several specs that take blocks. Then groups have about equally
    many layers, since a block has room for the largest group's layers. A spec's layers are dealt out over several
    groups in turn, so that each stage of a pipeline has about equally many of each group as well.
    """
    layers: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers.setdefault(spec, []).append(layer)
    width = _group_width({spec: len(members) for spec, members in layers.items() if spec.kind != "state"})
    groups = []
    for spec, members in layers.items():
        parts = 1 if spec.kind == "state" else -(-len(members) // width)
        groups += [KVGroup(spec, tuple(members[part::parts])) for part in range(parts)]
    return tuple(groups)


def _group_width(counts: dict[KVSpec, int]) -> int:
    """Number of layers that a block has room for: the number that wastes the least memory for a text of LONG windows.

    `counts` are the numbers of layers by spec.
    """

    def groups(width: int, spec: KVSpec) -> int:
        return -(-counts[spec] // width)

    def cost(width: int) -> tuple[int, int]:
        room = sum(groups(width, spec) * (1 if spec.window else LONG) for spec in counts)
        return width * room, sum(groups(width, spec) for spec in counts)

    most = max(MAX_KV_GROUPS, len(counts))
    widths = range(1, max(counts.values()) + 1)
    return min((width for width in widths if cost(width)[1] <= most), key=cost)


def kv_layout(shape: ModelShape, *, block_size: int, chunk: int, window_cache: bool = True) -> KVLayout:
    """The layout of a model's KV. Without `window_cache` layers with a window keep all tokens."""
    specs: Iterable[KVSpec] = kv_specs(shape).values()
    if not window_cache:
        specs = (msgspec.structs.replace(spec, window=None) for spec in specs)
    return KVLayout(groups=kv_groups(list(specs)), block_size=block_size, chunk=chunk)
