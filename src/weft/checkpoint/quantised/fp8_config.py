"""FP8 in a quantization_config: 8-bit floating-point weights (E4M3), with a scale per tensor, row, or block.

Fields: Transformers' FineGrainedFP8Config (`fp8`, `weight_block_size` as DeepSeek and Qwen publish it), vLLM's `fp8`
without blocks (one scale per tensor), FbgemmFp8Config (`fbgemm_fp8`, one scale per row), and compressed-tensors'
`float-quantized`. Activations are described too: `activation_scheme`, `input_activations`. They are not rounded to the
published scales: a CPU multiplies them as they are, and a GPU's own FP8 product rounds each token to its own scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from weft.checkpoint.architectures.published import ROW, Method, PublishedQuantization
from weft.checkpoint.files.fields import Fields

METHODS: dict[str, Method] = {"fp8": "fp8", "fbgemm_fp8": "fbgemm_fp8"}
COLUMNS = (32, 64, 128, 256, 512)  # columns of a block with one scale, in the schemes that have kernels
BLOCK = [128, 128]  # compressed-tensors' default block
PACKINGS = ("float-quantized", "naive-quantized")  # compressed-tensors' formats; both store numbers and scales alike
ACTIVATIONS = ("dynamic", "static")
# Rows and columns that share a scale, by compressed-tensors' strategy; blocks and groups say theirs.
STRATEGIES = {"tensor": (ROW, ROW), "channel": (1, ROW)}


def unsupported_feature(config: Fields) -> str | None:
    """Description of a feature of an fp8 or fbgemm_fp8 config that Weft does not read; None if it reads all."""
    method = config.text_or("quant_method", None)
    if method != "fp8":
        return None
    kind = config.text_or("fmt", None) or "e4m3"
    if kind.lower() != "e4m3":
        return f"fp8 in the number format {kind}"
    activations = config.text_or("activation_scheme", None) or "dynamic"
    if activations not in ACTIVATIONS:
        return f"fp8 with activation_scheme {activations}"
    return _unsupported_block("fp8", config.values.get("weight_block_size"))


def parse_config(config: Fields) -> PublishedQuantization:
    """Parse an fp8 or fbgemm_fp8 config without unsupported features, without its exceptions."""
    method = METHODS[config.text_or("quant_method", None) or ""]
    if method == "fbgemm_fp8":
        return _published(method, 1, ROW)
    block = config.values.get("weight_block_size")
    rows, columns = block if isinstance(block, list) else (ROW, ROW)
    return _published(method, rows, columns)


def is_floating(weights: Fields) -> bool:
    """Return True if a group of compressed-tensors has 8-bit floating-point weights."""
    return weights.text_or("type", "int") == "float" and weights.integer_or("num_bits", None) == 8


def unsupported_group(group: Fields, packing: str | None) -> Iterator[str]:
    """Describe each feature that Weft does not read of a group whose weights are floating; `packing` is its format."""
    weights = group.nested("weights") or Fields({}, group.where)
    strategy = weights.text_or("strategy", None) or "tensor"
    if packing not in PACKINGS:
        yield f"compressed-tensors in the format {packing}"
    if strategy not in (*STRATEGIES, "block", "group"):
        yield f"compressed-tensors in FP8 with a scale for each {strategy}"
    elif strategy not in STRATEGIES:
        reason = _unsupported_block("compressed-tensors", list(_rows_and_columns(weights)))
        if reason:
            yield reason
    inputs = group.nested("input_activations")
    if inputs is not None and not is_floating(inputs):
        yield (
            f"compressed-tensors in FP8 with activations in {inputs.values.get('num_bits')} bits "
            f"({inputs.text_or('type', 'int')})"
        )


def parse_weights(weights: Fields, *, mixed: bool) -> PublishedQuantization:
    """Parse the weights of a group of compressed-tensors without unsupported features."""
    return _published("compressed-tensors", *_rows_and_columns(weights), mixed=mixed)


def quantised_layer_predicate(config: Fields) -> Callable[[str], bool]:
    """Return a function that tells by the name of a linear layer if the config describes it as quantised.

    Entries of the lists are names of modules, or of the last or the first part of them, as Transformers matches
    `modules_to_not_convert`; vLLM calls the list `ignored_layers`.
    """
    kept = [name for key in ("modules_to_not_convert", "ignored_layers") for name in config.names(key)]

    def is_quantised(name: str) -> bool:
        return not name.endswith("lm_head") and not any(_contains(name, entry) for entry in kept)

    return is_quantised


def _contains(name: str, entry: str) -> bool:
    """Return True if the parts of a module's name contain an entry's parts, side by side."""
    return f".{entry.strip('.')}." in f".{name}."


def _rows_and_columns(weights: Fields) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    strategy = weights.text_or("strategy", None) or "tensor"
    if strategy in STRATEGIES:
        return STRATEGIES[strategy]
    if strategy == "group":
        return 1, weights.integer_or("group_size", None) or BLOCK[1]
    block = weights.values.get("block_structure") or BLOCK
    if not isinstance(block, list) or len(block) != 2:
        raise weights.wrong_value("block_structure", "two numbers")
    return block[0], block[1]


def _unsupported_block(method: str, block: object) -> str | None:
    """Description of a block that Weft has no kernels for; None if Weft has kernels for it, or if there is no block."""
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        return f"{method} in FP8 blocks of {block}"
    rows, columns = block
    if columns not in COLUMNS:
        return f"{method} in FP8 blocks of {rows} x {columns}"
    return None


def _published(method: Method, rows: int, columns: int, *, mixed: bool = False) -> PublishedQuantization:
    return PublishedQuantization(
        method=method, bits=8, group=columns, symmetric=True, floating=True, rows=rows, mixed=mixed
    )
