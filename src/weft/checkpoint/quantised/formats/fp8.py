"""FP8 (E4M3) with a scale per tensor, row or block, by the fields of Transformers' and vLLM's `fp8` and `fbgemm_fp8`.

Fields: FineGrainedFP8Config (`weight_block_size` as DeepSeek and Qwen publish it), vLLM's `fp8` without blocks (one
scale per tensor) and FbgemmFp8Config (one scale per row). Tensors: `layouts.byte_numbers`; sources: Transformers,
integrations/finegrained_fp8 and integrations/fbgemm_fp8.
"""

from __future__ import annotations

from weft.checkpoint.architectures.published import ROW, PublishedQuantization
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.quantised.format import Format, Predicate
from weft.checkpoint.quantised.layouts.byte_numbers import join_fp8
from weft.checkpoint.quantised.schemes import FP8_COLUMNS

BY_ROW = "fbgemm_fp8"
ACTIVATIONS = ("dynamic", "static")


def _unsupported(config: Fields) -> str | None:
    if config.text_or("quant_method", None) == BY_ROW:
        return None
    kind = config.text_or("fmt", None) or "e4m3"
    if kind.lower() != "e4m3":
        return f"fp8 in the number format {kind}"
    activations = config.text_or("activation_scheme", None) or "dynamic"
    if activations not in ACTIVATIONS:
        return f"fp8 with activation_scheme {activations}"
    return unsupported_block("fp8", config.values.get("weight_block_size"))


def unsupported_block(method: str, block: object) -> str | None:
    """Description of a block that Weft has no kernels for; None if Weft has kernels for it, or if there is no block."""
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        return f"{method} in FP8 blocks of {block}"
    rows, columns = block
    return None if columns in FP8_COLUMNS else f"{method} in FP8 blocks of {rows} x {columns}"


def _parse(config: Fields) -> PublishedQuantization:
    method, block = config.text_or("quant_method", None) or "", config.values.get("weight_block_size")
    if method == BY_ROW:
        rows, columns = 1, ROW
    else:
        rows, columns = block if isinstance(block, list) else (ROW, ROW)
    return PublishedQuantization(method=method, bits=8, group=columns, symmetric=True, floating=True, rows=rows)


def _quantised_layers(config: Fields) -> Predicate:
    """The layers outside the lists of the config.

    Entries of the lists are names of modules, or of the last or the first part of them, as Transformers matches
    `modules_to_not_convert`; vLLM calls the list `ignored_layers`.
    """
    kept = [name for key in ("modules_to_not_convert", "ignored_layers") for name in config.names(key)]

    def is_quantised(name: str) -> bool:
        return not name.endswith("lm_head") and not any(f".{entry.strip('.')}." in f".{name}." for entry in kept)

    return is_quantised


FORMAT = Format(
    methods=("fp8", BY_ROW),
    numbers=("fp8",),
    listed="fp8, fbgemm_fp8",
    unsupported=_unsupported,
    parse=_parse,
    quantised_layers=_quantised_layers,
    join=join_fp8,
    copies={"fp8": "fp8", "fp8-dynamic": "fp8", "fp8-kv": "fp8"},
)
