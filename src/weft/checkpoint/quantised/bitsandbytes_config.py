"""bitsandbytes in a quantization_config, by the fields of Transformers' BitsAndBytesConfig.

`llm_int8_threshold` says which activations are multiplied in 16 bits; Weft multiplies all so, which is more exact.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.checkpoint.architectures.published import ROW, PublishedQuantization, Wide
from weft.checkpoint.files.fields import Fields

METHOD = "bitsandbytes"
BLOCK = 64  # numbers that share a scale, unless a matrix says otherwise


def unsupported_feature(config: Fields) -> str | None:
    """Description of a feature of a bitsandbytes config that Weft does not read; None if it reads all."""
    bits = _bits(config)
    if bits is None:
        return "bitsandbytes with neither load_in_4bit nor load_in_8bit"
    kind = config.text_or("bnb_4bit_quant_type", None) or "fp4"
    return f"bitsandbytes in the number format {kind}" if bits == 4 and kind not in ("nf4", "fp4") else None


def parse_config(config: Fields) -> PublishedQuantization:
    """Parse a bitsandbytes config without unsupported features, without its exceptions."""
    if _bits(config) == 8:
        return PublishedQuantization(method="bitsandbytes", bits=8, group=ROW, symmetric=True, wide="signed")
    wide: Wide = "nf4" if config.text_or("bnb_4bit_quant_type", None) == "nf4" else "fp4"
    nested = config.flag("bnb_4bit_use_double_quant")
    return PublishedQuantization(method="bitsandbytes", bits=4, group=BLOCK, symmetric=True, wide=wide, nested=nested)


def _bits(config: Fields) -> int | None:
    for bits in (4, 8):
        if config.flag(f"load_in_{bits}bit") or config.flag(f"_load_in_{bits}bit"):
            return bits
    return None


def quantised_layer_predicate(config: Fields) -> Callable[[str], bool]:
    """Return a function that tells by the name of a linear layer if the config describes it as quantised.

    Entries of `llm_int8_skip_modules` match as in Transformers' `should_convert_module`: at the beginning of a name, or
    at its end. Without that list the head stays in 16 bits.
    """
    key = "llm_int8_skip_modules"
    skipped = ["lm_head"] if config.values.get(key) is None else config.names(key)

    def is_quantised(name: str) -> bool:
        return not any(name.endswith(entry) or f"{name}.".startswith(f"{entry}.") for entry in skipped)

    return is_quantised
