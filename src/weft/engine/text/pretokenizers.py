"""Pre-tokenizers of byte-level vocabularies: cut a text into words before merging, by their names in GGUF.

The patterns belong to the models: each must be the pattern that the vocabulary's merges were learned with.
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
# Letters of DeepSeek V2, from alphabets with capitals: runs of code points.
_CASED = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
    "1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 "
    "2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b "
    "2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 "
    "fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943"
)
_LETTERS = "".join("-".join(rf"\x{{{point}}}" for point in run.split("-")) for run in _CASED.split())
_DEEPSEEK = (r"[\r\n]", rf"\s?[{_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Kimi-K2's: Chinese characters by themselves, other words as in GPT-4o.
_KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
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
KIMI = PreTokenizerSpec(_KIMI, whole=True)
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
    "deepseek-llm": PreTokenizerSpec(_DEEPSEEK, digits=True),
    "deepseek-v3": PreTokenizerSpec(_DEEPSEEK3),
    "kimi-k2": KIMI,
    "deepseek-coder": PreTokenizerSpec(_DEEPSEEK_CODER, digits=True),
}
