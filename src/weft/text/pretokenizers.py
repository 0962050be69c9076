"""Pre-tokenizers of byte-level vocabularies: cut a text into words before merging, by their names in GGUF.

The patterns belong to the models: each must be the one that the vocabulary's merges were learned with.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_QWEN2 = (_LLAMA3[0].replace("{1,3}", ""),)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# o200k's, of GPT-4o and gpt-oss.
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")


@dataclass(frozen=True)
class PreTokenizerSpec:
    """Rules that cut a text into words.

    `splits`: patterns that are applied one after the other. `digits`: then cut out each digit. `gpt2`: then cut by
    GPT-2's own pattern. `whole`: a word that is in the vocabulary is one token, without merging. `bos`: models of this
    kind begin with BOS unless their files say otherwise.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    whole: bool = False
    bos: bool = False

    def create_pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Create the pre-tokenizer of the tokenizers library."""
        cuts: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.splits
        ]
        if self.digits:
            cuts.append(pre_tokenizers.Digits(individual_digits=True))
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)])


GPT2 = PreTokenizerSpec(gpt2=True)
QWEN = PreTokenizerSpec(_QWEN2)
_SINGLE_DIGITS = PreTokenizerSpec(digits=True, gpt2=True)
_LLAMA = PreTokenizerSpec(_LLAMA3, whole=True, bos=True)

# By tokenizer.ggml.pre.
PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2", "olmo", "mpt", "phi-2", "exaone4"), GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizerSpec(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), QWEN),
    "gpt-4o": PreTokenizerSpec(_GPT4O, whole=True),
    "tekken": PreTokenizerSpec(_TEKKEN, whole=True, bos=True),
    "deepseek-coder": PreTokenizerSpec(_DEEPSEEK_CODER, digits=True),
}
