"""The tokenizer of a Hugging Face directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from weft.errors import ModelError
from weft.formats import limits
from weft.text import gguf_tokenizer, spm, tiktoken_file
from weft.text.cache import load_cached
from weft.text.settings import TokenizerSettings

log = logging.getLogger(__name__)

LOOKED_FOR = "tokenizer.json, tokenizer.model, *.tiktoken, *.gguf"


def read_folder(path: Path) -> tuple[Tokenizer, TokenizerSettings]:
    """The vocabulary in the file `path`, or in the directory, and what the files beside it say of it."""
    folder = path if path.is_dir() else path.parent
    rust, settings = _vocabulary(_source(path))
    config = _json(folder / "tokenizer_config.json")
    _add_tokens(rust, config)
    tokens = settings.tokens | _named_tokens(rust, folder, config)
    for text in tokens.values():
        # Special even where no list of added tokens says so; one without an embedding stays text.
        if rust.token_to_id(text) is not None:
            rust.add_special_tokens([AddedToken(text, normalized=False, special=True)])
    eos = rust.token_to_id(tokens.get("eos_token", ""))
    return rust, msgspec.structs.replace(
        settings,
        tokens=tokens,
        add_bos=_flag(config, "add_bos_token", settings.add_bos),
        add_eos=_flag(config, "add_eos_token", settings.add_eos),
        end_ids=settings.end_ids or (() if eos is None else (eos,)),
        chat_template=_chat_template(folder, config) or settings.chat_template,
    )


def _vocabulary(file: Path) -> tuple[Tokenizer, TokenizerSettings]:
    """The vocabulary in one file, by what its name says it is."""
    limits.check_file(file, limits.TOKENIZER_BYTES)
    if file.suffix == ".json":
        try:
            rust = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers has no error of its own
            raise ModelError(f"{file} is no tokenizer, or a damaged one: {error}") from error
        # What it was trained with is nothing to us: a prompt is never cut or filled up.
        rust.no_truncation()
        rust.no_padding()
        return rust, TokenizerSettings()
    if file.suffix == ".model":
        return load_cached(file, spm.read_sentencepiece)
    if file.suffix == ".tiktoken":
        return load_cached(file, tiktoken_file.read_tiktoken)
    return load_cached(file, gguf_tokenizer.read_gguf_tokenizer)


def _source(path: Path) -> Path:
    if path.is_file():
        return path
    for pattern in LOOKED_FOR.split(", "):
        for found in sorted(path.glob(pattern)):
            return found
    raise ModelError(f"{path} has no tokenizer (looked for {LOOKED_FOR}); give another's folder with --tokenizer")


def _add_tokens(rust: Tokenizer, config: Mapping[str, Any]) -> None:
    """The tokens that only tokenizer_config.json knows, under the ids that it gives them."""
    listed = config.get("added_tokens_decoder")
    tokens = {int(id): token for id, token in listed.items() if id.isdecimal()} if isinstance(listed, dict) else {}
    known = rust.get_added_tokens_decoder()
    for id in sorted(tokens.keys() - known.keys()):
        token = tokens[id]
        text = _text(token)
        if text is None or not isinstance(token, dict):
            continue
        place = rust.token_to_id(text)
        if id != (vocab_size(rust) if place is None else place):
            log.warning(
                "token %r is left out: tokenizer_config.json gives it id %d, the vocabulary has none there", text, id
            )
            continue
        flags = {name: bool(token.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        rust.add_tokens([AddedToken(text, **flags)])
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    for text in map(_text, extra) if isinstance(extra, list) else ():
        if text is not None and rust.token_to_id(text) is not None:
            rust.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def vocab_size(rust: Tokenizer) -> int:
    """One more than the highest id."""
    return max(rust.get_vocab_size(with_added_tokens=False), 1 + max(rust.get_added_tokens_decoder(), default=-1))


def _named_tokens(rust: Tokenizer, folder: Path, config: dict[str, Any]) -> dict[str, str]:
    said = _json(folder / "special_tokens_map.json") | config
    named = {name: text for name, token in said.items() if name.endswith("_token") and (text := _text(token))}
    ids = _json(folder / "config.json")
    for name in ("bos_token", "eos_token"):
        id = ids.get(f"{name}_id")
        if name not in said and isinstance(id, int) and (text := rust.id_to_token(id)):
            named[name] = text
    return named


def _text(token: object) -> str | None:
    """A token is written as its text, or as an object that has it as content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _flag(config: Mapping[str, Any], name: str, default: bool | None) -> bool | None:
    value = config.get(name)
    return value if isinstance(value, bool) else default


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Its own file, or one text, or several by name, of which "default" is for a chat without tools."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    source = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source if isinstance(entry, dict) and "name" in entry}
        source = named.get("default") or next(iter(named.values()), None)
    return source if isinstance(source, str) else None


def _json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no such file."""
    try:
        limits.check_file(file, limits.CONFIG_BYTES)
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no JSON object; fetch it again")
    return value
