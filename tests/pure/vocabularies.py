"""Small vocabularies of every kind, trained on the spot, with the libraries that invented them as oracles."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from weft.engine.text.byte_level import ALPHABET, token_to_bytes

TEXTS = (
    "The weft is the thread that ties the warps together; it's woven, and we'll weave 1234 of them in 2025.",
    "Weft runs one large language model across the GPUs a person really has: 2 x 24 GB, 3 x 80 GB.",
    "def split(total, weights):\n\tif not weights:\n\t\treturn []\n\n    # whole groups\r\n    return total // 17",
    "Die Kette hält, der Schuss läuft: größer, schöner, weiter. Où est le fil? À gauche. Ça va déjà.",
    "织布机上的纬线把经线连在一起。機械学習の文章です。안녕하세요 세계",
    "Ткань держится на утке. المتن العربي هنا. שלום עולם",
    "café naïve résumé e\u0301 A\u030a ﬁne ½ ² Ⅷ …",
    "🙂👍🏽 👩‍👩‍👧‍👦 🇩🇪 emoji 🙂🙂",
    "  leading, double  and trailing spaces  ",
    "\n\n\tHELLO World's DON'T iPhone3G x=1;y=22;z=333;w=4444 http://a.b/c?d=e&f=g",
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@cache
def byte_level_json(pre_tokenizer: str | None = None) -> str:
    """tokenizer.json of a byte-level BPE with SPECIALS first, trained with GPT-2's words or those given as JSON."""
    hf_tokenizer = Tokenizer(models.BPE())
    words: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre_tokenizer is not None:
        words = Tokenizer.from_str(
            json.dumps(json.loads(hf_tokenizer.to_str()) | {"pre_tokenizer": json.loads(pre_tokenizer)})
        )
        words = words.pre_tokenizer
    hf_tokenizer.pre_tokenizer = words
    hf_tokenizer.decoder = decoders.ByteLevel()
    hf_tokenizer.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(
            vocab_size=600, special_tokens=list(SPECIALS), initial_alphabet=list(ALPHABET), show_progress=False
        ),
    )
    return hf_tokenizer.to_str()


def byte_level(pre_tokenizer: str | None = None) -> Tokenizer:
    return Tokenizer.from_str(byte_level_json(pre_tokenizer))


@cache
def sentencepiece_model(**options: Any) -> bytes:
    """A SentencePiece model file; as Llama's were made, unless `options` say otherwise."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_writer=model,
        minloglevel=2,
        **{
            "vocab_size": 500,
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "allow_whitespace_only_pieces": True,
            "split_digits": True,
            "character_coverage": 0.98,
            **options,
        },
    )
    return model.getvalue()


def write_folder(path: Path, hf_tokenizer: Tokenizer, **config: Any) -> Path:
    """A Hugging Face directory with `hf_tokenizer` and `config` as its tokenizer_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    hf_tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def write_tiktoken(path: Path, hf_tokenizer: Tokenizer) -> dict[bytes, int]:
    """The tokens of a byte-level BPE as a .tiktoken file; returns the ranks in it."""
    normal = [token for token in hf_tokenizer.get_vocab() if token not in SPECIALS]
    # Single bytes in their order of value first: no text depends on it, so nothing may rely on it.
    order = sorted(normal, key=lambda token: hf_tokenizer.token_to_id(token))
    ranks = {token_to_bytes(token): rank for rank, token in enumerate(order)}
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return ranks


def write_gguf(path: Path, **fields: Any) -> Path:
    """A GGUF file of one tensor with `tokenizer.ggml.<name>` fields (and chat_template...) as given."""
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        key = f"tokenizer.{name}" if name.startswith("chat_template") else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((2, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_fields(hf_tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """GGUF's fields for a byte-level BPE, as llama.cpp's converter writes them."""
    model = json.loads(hf_tokenizer.to_str())["model"]
    tokens = sorted(hf_tokenizer.get_vocab(), key=lambda token: hf_tokenizer.token_to_id(token))
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def sentencepiece_fields(model: bytes) -> dict[str, Any]:
    """GGUF's fields for a SentencePiece BPE, as llama.cpp's converter writes them."""
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(oracle.get_piece_size())
    kinds = ((oracle.is_unknown, 2), (oracle.is_control, 3), (oracle.is_unused, 5), (oracle.is_byte, 6))
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [oracle.id_to_piece(id) for id in ids],
        "scores": [float(oracle.get_score(id)) for id in ids],
        "token_type": [next((kind for is_kind, kind in kinds if is_kind(id)), 1) for id in ids],
        "bos_token_id": oracle.bos_id(),
        "eos_token_id": oracle.eos_id(),
        "unknown_token_id": oracle.unk_id(),
    }


def word_level(words: Sequence[str]) -> Tokenizer:
    """One token per word and no decoder: ids and their texts are known by heart."""
    hf_tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[0]))
    hf_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf_tokenizer


def metaspace() -> Tokenizer:
    """A BPE as Transformers builds SentencePiece's: the first token loses its space in the decoder."""
    hf_tokenizer = Tokenizer(models.BPE())
    hf_tokenizer.normalizer = normalizers.NFC()
    hf_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    hf_tokenizer.decoder = decoders.Metaspace()
    hf_tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=list(SPECIALS), show_progress=False)
    )
    hf_tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return hf_tokenizer
