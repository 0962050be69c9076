"""humming-kernels 0.1.20 as far as it is called: its names, what it checks, the layouts into which it repacks, and its
numbers in plain torch, computed from what was repacked.

The sources that each part follows are named beside it. A card of compute capability 9.0 and activations of 16 bits are
assumed: other cards have other layouts, which the library chooses itself.
"""

from __future__ import annotations

import functools
import inspect
import json
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.nn.functional as F

from tests.cpu import fake_cuda

TILE = 64  # rows and columns that one warp repacks (kernel/repack_weight.py)
DEPTH = 16  # columns of a row of the repacked weight: 256 / bits of activations
LOCKS = 1024  # the most that a tile schedule of an H200 needs (csrc/launcher/tensor.h, check_tensor_locks)
ALIGNMENT = 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BITS = {"uint4": 4, "uint8": 8, "float4e2m1": 4, "float8e4m3": 8}


@dataclass
class Calls:
    """Counts of what was called: `products`, kinds and heights of the `tiles` that were compiled. `spoil` changes
    results, as kernels that were compiled wrongly would."""

    products: int = 0
    tiles: set[tuple[str, int]] = field(default_factory=set)
    spoil: Callable[[torch.Tensor], torch.Tensor] | None = None


calls = Calls()


def on_card(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same on the stand-in for a card, whose tensors hold others. A graph may hold the calls."""

    @functools.wraps(function)
    def run(*given: Any, **named: Any) -> Any:
        flat = [*given, *named.values()]
        flat += [part for value in flat if isinstance(value, dict) for part in value.values()]
        if not any(isinstance(value, fake_cuda.OnCard) for value in flat):
            return function(*given, **named)

        def compute() -> Any:
            with fake_cuda.card.lock, torch.inference_mode(), fake_cuda.plainly():
                return function(*map(held, given), **{name: held(value) for name, value in named.items()})

        known = set(calls.tiles)
        result = compute()
        if fake_cuda.card.captures():
            if calls.tiles != known:
                raise fake_cuda.CardError("a kernel is compiled inside of a capture")

            def again() -> None:
                with torch.inference_mode():
                    result.copy_(compute())

            fake_cuda.card.record(again, [result])
        fake_cuda.card.launches += 1
        if isinstance(result, dict):
            return {name: fake_cuda.OnCard(part) for name, part in result.items()}
        return fake_cuda.OnCard(result)

    return run


def held(value: Any) -> Any:
    """A value, or what it holds on the card."""
    if isinstance(value, dict):
        return {name: held(part) for name, part in value.items()}
    return value.held if isinstance(value, fake_cuda.OnCard) else value


@dataclass(kw_only=True)
class HummingWeightSchema:
    """schema/humming.py"""

    b_dtype: str
    bs_dtype: str | None = None
    weight_scale_group_size: int = 0
    has_zero_point: bool = False
    is_fp_zero_point: bool = False

    @property
    def bits(self) -> int:
        return BITS[self.b_dtype]


@dataclass(frozen=True)
class Config:
    """A weight, as LayerConfig (config/config.py) describes it."""

    schema: HummingWeightSchema
    shape_n: int
    shape_k: int
    pad_shape_n: int
    pad_shape_k: int
    num_experts: int
    has_bias: bool
    dtype: torch.dtype

    @property
    def bits(self) -> int:
        return self.schema.bits

    @property
    def group(self) -> int:
        return self.schema.weight_scale_group_size or self.shape_k

    @property
    def groups(self) -> int:
        return -(-self.shape_k // self.group)

    @property
    def preprocesses(self) -> bool:
        """transform.py, transform_humming_weight: should_preprocess_for_int2fp."""
        least = 6 if self.schema.has_zero_point else 7
        whole = self.schema.b_dtype.startswith("uint") and not self.schema.is_fp_zero_point
        return whole and self.dtype == torch.bfloat16 and self.bits > least


def prepare_layer_config(
    shape_n: int,
    shape_k: int,
    weight_schema: HummingWeightSchema,
    input_schema: None = None,
    num_experts: int | None = None,
    pad_n_to_multiple: int = 1,
    pad_k_to_multiple: int = 1,
    has_bias: bool = False,
    torch_dtype: torch.dtype | None = None,
    device: int | torch.device | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    allow_inplace: bool = False,
) -> Config:
    """transform.py; what check_shape, check_scale and check_dtype of kernel/humming.py refuse."""
    assert torch_dtype in (torch.bfloat16, torch.float16) and device is not None
    n, k = (-(-size // step) * step for size, step in ((shape_n, pad_n_to_multiple), (shape_k, pad_k_to_multiple)))
    group = weight_schema.weight_scale_group_size
    assert n % TILE == 0 and k % (2 * DEPTH) == 0
    assert (n - shape_n) % 8 == 0 and (k - shape_k) % 8 == 0
    assert group == 0 or (group >= DEPTH and group & (group - 1) == 0 and k % group == 0 and shape_k % group == 0)
    return Config(weight_schema, n, k, n - shape_n, k - shape_k, num_experts or 0, has_bias, torch_dtype)


@on_card
def transform_humming_tensors(
    config: Config, tensors: dict[str, torch.Tensor], already_padded: bool = False, allow_inplace: bool = False
) -> dict[str, torch.Tensor]:
    """transform.py: what HummingWeightSchema.validate_tensors expects, padded, in the order of the kernels."""
    assert not config.num_experts, "Weft repacks one matrix after the other"
    schema, bits = config.schema, config.bits
    n, k = config.shape_n - config.pad_shape_n, config.shape_k - config.pad_shape_k
    groups = k // (schema.weight_scale_group_size or k)
    expected = {"weight": ((n, k * bits // 32), torch.int32), "weight_scale": ((n, groups), scale_dtype(config))}
    if schema.has_zero_point:
        whole = ((n * bits // 32, groups), torch.int32)
        expected["zero_point"] = ((n, groups), config.dtype) if schema.is_fp_zero_point else whole
    if config.has_bias:
        expected["bias"] = ((n,), config.dtype)
    assert tensors.keys() == expected.keys(), (tensors.keys(), expected.keys())
    for name, (shape, dtype) in expected.items():
        given = tensors[name]
        assert tuple(given.shape) == shape and given.dtype == dtype, (name, given.shape, given.dtype)
        assert given.is_contiguous(), name
    numbers = F.pad(unpack(tensors["weight"], bits), (0, config.pad_shape_k, 0, config.pad_shape_n))
    more = config.groups - groups
    scale = pad_bytes(tensors["weight_scale"], more, config.pad_shape_n, 1.0)
    made = {"weight_scale": permute(scale, on_result=not schema.weight_scale_group_size)}
    zero = None
    if schema.has_zero_point and schema.is_fp_zero_point:
        made["zero_point"] = permute(F.pad(tensors["zero_point"], (0, more, 0, config.pad_shape_n)))
    elif schema.has_zero_point:
        zero = unpack(tensors["zero_point"].t().contiguous(), bits).t()
        zero = F.pad(zero, (0, more, 0, config.pad_shape_n))
        made["zero_point"] = pack_zero_points(permute(zero), bits)
    if config.preprocesses:
        numbers = preprocess(numbers, column_zeros(config, zero), bits)
    made["weight"] = repack(numbers, bits)
    if config.has_bias:
        made["bias"] = transform_humming_bias(F.pad(tensors["bias"], (0, config.pad_shape_n)))
    return made


@on_card
def transform_humming_bias(bias: torch.Tensor) -> torch.Tensor:
    assert bias.dim() == 1 and len(bias) % TILE == 0
    return permute(bias.unsqueeze(-1), on_result=True).squeeze(-2)


def scale_dtype(config: Config) -> torch.dtype:
    return torch.float8_e8m0fnu if config.schema.bs_dtype == "float8e8m0" else config.dtype


def pad_bytes(scale: torch.Tensor, more: int, rows: int, value: float) -> torch.Tensor:
    if scale.dtype != torch.float8_e8m0fnu:
        return F.pad(scale, (0, more, 0, rows))
    return F.pad(scale.view(torch.uint8), (0, more, 0, rows), value=127).view(scale.dtype)


def column_zeros(config: Config, zero: torch.Tensor | None) -> torch.Tensor | int:
    """Zero points of each number, or that of all."""
    return 1 << (config.bits - 1) if zero is None else zero.repeat_interleave(config.group, 1)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers [..., n * 32 / bits] of words [..., n], the first in the lowest bits (process.cuh,
    extract_packed_value)."""
    shifts = torch.arange(0, 32, bits)
    return (words.long().unsqueeze(-1) >> shifts & ((1 << bits) - 1)).flatten(-2)


def pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `unpack`."""
    each = 32 // bits
    words = (numbers.unflatten(-1, (-1, each)) << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def interleaved(bits: int) -> torch.Tensor:
    """Place of each number of a word among those of a thread (process.cuh, get_interleaved_index; 16-bit
    activations)."""
    each, stride = 32 // bits, 2
    at = torch.arange(each)
    return at % (each // stride) * stride + at // (each // stride)


def repack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers [n, k] as weight_repack_nk (process.cuh) writes them: [k / 16, n * 16 * bits / 32] int32.

    A warp has a tile of 64 rows and columns; thread t has rows 8 i + t / 4 and columns 8 j + 2 (t % 4) + k.
    """
    rows, cols = numbers.shape
    tiles = numbers.view(rows // TILE, 4, 2, 8, cols // TILE, 4, 2, 4, 2)
    # nb, i / 2, i % 2, t / 4, kb, j / 2, j % 2, t % 4, k -> kb, j / 2, nb, t / 4, t % 4, i / 2, i % 2, j % 2, k
    threads = tiles.permute(4, 5, 0, 3, 7, 1, 2, 6, 8).reshape(cols // DEPTH, rows // TILE, 32, bits, 32 // bits)
    return pack(threads[..., interleaved(bits)], bits).reshape(cols // DEPTH, rows * DEPTH * bits // 32)


def unrepack(words: torch.Tensor, bits: int, rows: int) -> torch.Tensor:
    """The inverse of `repack`."""
    depth = words.shape[0]
    threads = unpack(words.view(depth, rows // TILE, 32, bits, 1), bits)[..., interleaved(bits).argsort()]
    tiles = threads.reshape(depth // 4, 4, rows // TILE, 8, 4, 4, 2, 2, 2)
    return tiles.permute(2, 5, 6, 3, 0, 1, 7, 4, 8).reshape(rows, depth * DEPTH)


def preprocess(numbers: torch.Tensor, zero: torch.Tensor | int, bits: int) -> torch.Tensor:
    """process.cuh, kShouldPreprocessForINT2FP."""
    return torch.where(numbers >= zero, numbers - zero, (1 << bits) - 1 - numbers)


def differences(numbers: torch.Tensor, zero: torch.Tensor | int, bits: int) -> torch.Tensor:
    """Number less zero point, of what `preprocess` has made."""
    top = (1 << bits) - 1
    return torch.where(numbers <= top - zero, numbers, top - numbers - zero)


def permute(values: torch.Tensor, *, on_result: bool = False) -> torch.Tensor:
    """Scales [n, groups] as [groups, n] in the order of threads (transform.py, transform_humming_weight_scale)."""
    return values.t().contiguous().unflatten(-1, (-1, TILE))[..., order(on_result)].flatten(-2)


def unpermute(values: torch.Tensor, *, on_result: bool = False) -> torch.Tensor:
    """The inverse of `permute`."""
    return values.unflatten(-1, (-1, TILE))[..., order(on_result).argsort()].flatten(-2).t()


def order(on_result: bool) -> torch.Tensor:
    if on_result:
        first = torch.tensor([0, 1, 8, 9, 16, 17, 24, 25])
        block = torch.cat([first + 2 * i for i in range(4)])
        return torch.cat([block, block + 32])
    return torch.cat([torch.arange(0, 64, 8) + i for i in range(8)])


def pack_zero_points(zero: torch.Tensor, bits: int) -> torch.Tensor:
    """transform.py, transform_humming_zero_point: [groups, n * bits / 32] int32."""
    return pack(zero, bits)


# tune/__init__.py: the most rows that each height of a tile is for. Not all are powers of two.
TILES: dict[str, Any] = {
    "dense": {16: 16, 48: 48, 1 << 30: 64},
    "indexed": {1: 24, 20: 8, 60: 48, 90: 16, 1 << 30: 32},
}


def get_heuristics_config(
    layer_config: Config,
    shape_m: int | None = None,
    use_f16_accum: bool = False,
    use_batch_invariant: bool = False,
    use_m_major_input_scale: bool = False,
    gemm_type: str = "dense",
    device: int | torch.device | None = None,
) -> dict[str, Any]:
    assert (gemm_type == "indexed") == bool(layer_config.num_experts) and device is not None
    assert shape_m is not None, "for all numbers of rows at once it takes seconds"
    height = next(height for most, height in TILES[gemm_type].items() if shape_m <= most)
    return {"block_shape": (height, 64, 64), "num_sms": 132}


@on_card
def humming_forward(
    config: Config,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    weight_scale_2: torch.Tensor | None = None,
    outputs: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    input_scale_2: torch.Tensor | None = None,
    sorted_ids: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
    num_tokens_padded: torch.Tensor | None = None,
    expert_layout: torch.Tensor | None = None,
    locks: torch.Tensor | None = None,
    top_k: int = 1,
    valid_shape_m: int = 0,
    compute_config: dict[str, Any] | str | None = None,
    tuning_config: dict[str, Any] | list[Any] | str | None = None,
    hadamard_block_size: int | None = None,
    use_pdl: bool | None = None,
) -> torch.Tensor:
    """forward.py, and the checks of csrc/launcher/tensor.h."""
    kind = json.loads(compute_config)["gemm_type"]  # type: ignore[arg-type]
    experts = config.num_experts
    assert (kind == "indexed") == bool(experts)
    cols, rows = config.shape_k - config.pad_shape_k, config.shape_n - config.pad_shape_n
    check(inputs, (len(inputs), cols), config.dtype)
    lead = (experts,) if experts else ()
    check(weight, (*lead, config.shape_k // DEPTH, config.shape_n * DEPTH * config.bits // 32), torch.int32)
    check(weight_scale, (*lead, config.groups, config.shape_n), scale_dtype(config))
    if config.schema.has_zero_point and config.schema.is_fp_zero_point:
        check(zero_point, (*lead, config.groups, config.shape_n), config.dtype)
    elif config.schema.has_zero_point:
        check(zero_point, (*lead, config.groups, config.shape_n * config.bits // 32), torch.int32)
    else:
        assert zero_point is None
    if config.has_bias:
        check(bias, (*lead, config.shape_n), config.dtype)
    assert locks is not None and locks.dtype == torch.int32 and len(locks) >= LOCKS and not locks.any()
    height = tile_height(tuning_config, len(inputs) * top_k)
    calls.products += 1
    calls.tiles.add((kind, height))
    parts = {"weight": weight, "weight_scale": weight_scale, "zero_point": zero_point, "bias": bias}
    if not experts:
        result = multiply(config, inputs, parts)[:, :rows].contiguous()
    else:
        result = inputs.new_full((len(inputs) * top_k, rows), torch.nan)
        blocks = routed_blocks(sorted_ids, expert_ids, num_tokens_padded, height)
        for expert, members in blocks:
            assert 0 <= expert < experts
            assert ((members >= 0) & (members <= len(result))).all(), "padding is the number of all rows"
            members = members[members < len(result)]
            one = {name: None if part is None else part[expert] for name, part in parts.items()}
            result[members] = multiply(config, inputs[members // top_k], one)[:, :rows]
    return calls.spoil(result) if calls.spoil else result


def routed_blocks(
    sorted_ids: torch.Tensor | None, expert_ids: torch.Tensor | None, count: torch.Tensor | None, height: int
) -> list[tuple[int, torch.Tensor]]:
    """include/humming/scheduler.cuh: blocks of `height` rows, as many as `count` rows have."""
    assert sorted_ids is not None and expert_ids is not None and count is not None
    for tensor in (sorted_ids, expert_ids, count):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.dim() == 1
    used = int(count)
    assert used % height == 0 and used <= len(sorted_ids) and used // height <= len(expert_ids)
    return [(int(expert_ids[at // height]), sorted_ids[at : at + height].long()) for at in range(0, used, height)]


def tile_height(tuning_config: Any, rows: int) -> int:
    """csrc/launcher/launcher.cpp, find_kernel_configs_target_index."""
    for low, high, config in json.loads(tuning_config):
        if low < rows <= (high or 1 << 30):
            return int(config["block_shape"][0])
    raise AssertionError("shape_m is not within any range defined in configs.")


def check(tensor: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> None:
    """csrc/launcher/tensor.h, check_tensor_common."""
    assert tensor is not None and tuple(tensor.shape) == tuple(shape), (tensor is not None and tensor.shape, shape)
    assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def multiply(config: Config, x: torch.Tensor, parts: dict[str, Any]) -> torch.Tensor:
    """The product with a repacked matrix. Weights are rounded as in mainloop_arith.cuh, may_apply_bs_and_zp_on_b."""
    total = F.linear(x.float(), dequantise(config, parts).float())
    total = total[:, : config.shape_n]
    if parts.get("bias") is not None:
        total += unpermute(parts["bias"][None], on_result=True)[:, 0].float()
    return total.to(config.dtype)


def dequantise(config: Config, parts: dict[str, Any]) -> torch.Tensor:
    """The weights [n, k unpadded] of a repacked matrix, in the dtype of activations."""
    schema, bits = config.schema, config.bits
    numbers = unrepack(parts["weight"], bits, config.shape_n)
    by_channel = not schema.weight_scale_group_size
    scale = unpermute(parts["weight_scale"], on_result=by_channel).float().to(config.dtype)
    values = decode(config, numbers, parts.get("zero_point"))
    scaled = values * scale.repeat_interleave(config.group, 1)
    return scaled[:, : config.shape_k - config.pad_shape_k]


def decode(config: Config, numbers: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
    """The numbers less their zero points, before they are scaled."""
    schema, bits = config.schema, config.bits
    if schema.b_dtype == "float4e2m1":
        return (E2M1[numbers & 7] * torch.where(numbers >= 8, -1.0, 1.0)).to(config.dtype)
    if schema.b_dtype == "float8e4m3":
        return numbers.to(torch.uint8).view(torch.float8_e4m3fn).float().to(config.dtype)
    if schema.is_fp_zero_point:
        assert zero_point is not None
        return numbers.to(config.dtype) - unpermute(zero_point).repeat_interleave(config.group, 1)
    zero = None
    if zero_point is not None:
        zero = unpermute(unpack(zero_point, bits))
    zeros = column_zeros(config, zero)
    return (differences(numbers, zeros, bits) if config.preprocesses else numbers - zeros).to(config.dtype)


def modules() -> dict[str, types.ModuleType]:
    """The modules that the library's imports return, by name."""
    names: dict[str, list[Any]] = {
        "humming": [],
        "humming.schema": [HummingWeightSchema],
        "humming.transform": [prepare_layer_config, transform_humming_tensors, transform_humming_bias],
        "humming.tune": [get_heuristics_config],
        "humming.forward": [humming_forward],
    }
    made = {}
    for name, parts in names.items():
        made[name] = types.ModuleType(name)
        made[name].__spec__ = ModuleSpec(name, None)
        for part in parts:
            setattr(made[name], part.__name__, part)
    return made


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)
