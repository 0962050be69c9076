"""Tokenizers of Hugging Face directories."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from weft.checkpoint.files import limits
from weft.checkpoint.files.model_file import file_error, read_model_file
from weft.engine.text import gguf_tokenizer, spm, tiktoken_file
from weft.engine.text.byte_level import build_byte_level
from weft.engine.text.cache import load_cached
from weft.engine.text.panics import damaged_tokenizer
from weft.engine.text.pretokenizers import GPT2
from weft.engine.text.settings import TokenizerSettings
from weft.engine.text.tokenizer_json import read_tokenizer_json
from weft.errors import ModelError
from weft.logs import event_fields
from weft.regular_files import read_regular

log = logging.getLogger("weft.text.folder")

PATTERNS = "tokenizer.json, tiktoken.model, tokenizer.model, vocab.json, *.tiktoken, *.gguf"
KIMI_FILE = "tiktoken.model"
MERGES = "merges.txt"  # next to vocab.json, in GPT-2's form
# A folder of further templates by name, and the name of that for requests with tools, as Transformers has them.
TEMPLATES, TOOL_USE = "additional_chat_templates", "tool_use"
MAX_WARNINGS = 10  # about tokens that are left out
NOT_LEGACY = ("LlamaTokenizer", "LlamaTokenizerFast")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_folder(path: Path) -> tuple[Tokenizer, TokenizerSettings]:
    """Read the vocabulary in the file or directory `path`, and the settings in the files next to it."""
    folder = path if path.is_dir() else path.parent
    file = _vocabulary_file(path)
    hf_tokenizer, settings = _vocabulary(file)
    config = _json(folder / "tokenizer_config.json")
    if file.name != "tokenizer.json":  # which has its own
        config = _with_added_tokens(folder, config)
    if file.suffix == ".model" and not _is_legacy(config):
        spm.prefix_first_only(hf_tokenizer)
    if file.name == KIMI_FILE:
        tiktoken_file.reserve_tokens(hf_tokenizer, _listed_names(config))
    _add_tokens(hf_tokenizer, config)
    tokens = settings.tokens | _named_tokens(hf_tokenizer, folder, config)
    # A named token is special even if no list of added tokens says so; one without an embedding stays text.
    _make_special(hf_tokenizer, tokens.values())
    eos = hf_tokenizer.token_to_id(tokens.get("eos_token", ""))
    templates = _chat_templates(folder, config)
    return hf_tokenizer, msgspec.structs.replace(
        settings,
        tokens=tokens,
        add_bos=_flag(config, "add_bos_token", settings.add_bos),
        add_eos=_flag(config, "add_eos_token", settings.add_eos),
        end_ids=tuple(dict.fromkeys((*settings.end_ids, *(() if eos is None else (eos,))))),
        chat_template=templates.get("default") or next(iter(templates.values()), settings.chat_template),
        tool_template=templates.get(TOOL_USE),
    )


def vocab_size(hf_tokenizer: Tokenizer) -> int:
    """Highest token id plus one."""
    return max(
        hf_tokenizer.get_vocab_size(with_added_tokens=False),
        1 + max(hf_tokenizer.get_added_tokens_decoder(), default=-1),
    )


def _vocabulary(file: Path) -> tuple[Tokenizer, TokenizerSettings]:
    """Read one vocabulary file; its name tells its format."""
    if file.name == "vocab.json":
        return _read_gpt2(file), TokenizerSettings(add_bos=False, add_eos=False)
    if file.suffix == ".json":
        hf_tokenizer = read_tokenizer_json(file)
        # The file may hold the truncation and padding of the training; a prompt must be neither cut nor padded.
        hf_tokenizer.no_truncation()
        hf_tokenizer.no_padding()
        return hf_tokenizer, TokenizerSettings()
    if file.name == KIMI_FILE:
        return load_cached(file, tiktoken_file.read_kimi)
    if file.suffix == ".model":
        return load_cached(file, spm.read_sentencepiece)
    if file.suffix == ".tiktoken":
        return load_cached(file, tiktoken_file.read_tiktoken)
    return load_cached(file, gguf_tokenizer.read_gguf_tokenizer)


def _read_gpt2(file: Path) -> Tokenizer:
    """A byte-level BPE of GPT-2's form: ids in vocab.json, merges in the file next to it, best first."""
    names, ranked = (_read_vocabulary_file(path) for path in (file, file.parent / MERGES))
    try:
        vocabulary = msgspec.json.decode(names, type=dict[str, int])
        lines = ranked.decode().replace("\r\n", "\n").split("\n")
        pairs = (line.split(" ") for line in lines if line and not line.startswith("#version"))
        merges = [(left, right) for left, right in pairs]
        limits.check_vocabulary(len(vocabulary), len(merges))
        return build_byte_level(vocabulary, merges, GPT2.create_pre_tokenizer(), whole_words=False)
    except Exception as error:  # the library has no exception class of its own
        raise damaged_tokenizer(f"{file} and {MERGES}", error) from error


def _read_vocabulary_file(file: Path) -> bytes:
    return read_model_file(file, limits.TOKENIZER_BYTES, code="cannot-read-tokenizer")


def _vocabulary_file(path: Path) -> Path:
    if path.is_file():
        return path
    for pattern in PATTERNS.split(", "):
        for file in sorted(path.glob(pattern)):
            return file
    raise ModelError(
        f"{path} has no tokenizer (looked for {PATTERNS}); give another's folder with --tokenizer",
        code="no-tokenizer-in-folder",
    )


def _with_added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with what only added_tokens.json and special_tokens_map.json list, as in older folders."""
    listed = _listed_tokens(config)
    names = set(_listed_names(config).values())
    for text, id in _json(folder / "added_tokens.json").items():
        if isinstance(id, int) and id not in listed and text not in names:
            listed[id] = {"content": text}  # special only if another file names it
    named = _json(folder / "special_tokens_map.json")
    return {**named, **config, "added_tokens_decoder": {str(id): token for id, token in listed.items()}}


def _is_legacy(config: Mapping[str, Any]) -> bool:
    """Return True unless Transformers puts a space only before the beginning of a text.

    Its class for Llama does so unless it is told otherwise, the others if they are told.
    """
    flag = _flag(config, "legacy", None)
    return flag if flag is not None else config.get("tokenizer_class") not in NOT_LEGACY


def _add_tokens(hf_tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json lists, under the ids that it gives them."""
    tokens = _listed_tokens(config)
    missing = sorted(tokens.keys() - hf_tokenizer.get_added_tokens_decoder().keys())
    limits.check_vocabulary(len(missing))
    # One call for all: each call builds the library's automaton of all added tokens again.
    hf_tokenizer.add_tokens(list(_addable_tokens(hf_tokenizer, {id: tokens[id] for id in missing})))
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens")
    _make_special(hf_tokenizer, map(_token_text, extra if isinstance(extra, list) else ()))


def _addable_tokens(hf_tokenizer: Tokenizer, tokens: Mapping[int, object]) -> Iterator[AddedToken]:
    """Tokens of added_tokens_decoder, without tokens whose ids the vocabulary's ids contradict."""
    added: dict[str, int] = {}
    next_id, left_out = vocab_size(hf_tokenizer), 0
    for id, token in tokens.items():
        text = _token_text(token)
        if text is None or not isinstance(token, dict):
            continue
        present_id = added.get(text, hf_tokenizer.token_to_id(text))
        if id != (next_id if present_id is None else present_id):
            left_out += 1
            if left_out <= MAX_WARNINGS:
                log.warning(
                    "token %.80r is left out: tokenizer_config.json gives it id %d, the vocabulary has none there",
                    text,
                    id,
                    extra=event_fields("token-left-out", token=text, id=id),
                )
            continue
        if present_id is None:
            added[text] = id
            next_id = id + 1
        yield AddedToken(text, **{name: bool(token.get(name)) for name in TOKEN_FLAGS})
    if left_out > MAX_WARNINGS:
        log.warning("%d more tokens of tokenizer_config.json are left out likewise", left_out - MAX_WARNINGS)


def _listed_tokens(config: Mapping[str, Any]) -> dict[int, object]:
    """Tokens that tokenizer_config.json lists, by id."""
    listed = config.get("added_tokens_decoder")
    return {int(id): token for id, token in listed.items() if id.isdecimal()} if isinstance(listed, dict) else {}


def _listed_names(config: Mapping[str, Any]) -> dict[int, str]:
    """Texts of tokens that tokenizer_config.json lists, by id."""
    texts = {id: _token_text(token) for id, token in _listed_tokens(config).items()}
    return {id: text for id, text in texts.items() if text is not None}


def _make_special(hf_tokenizer: Tokenizer, texts: Iterable[str | None]) -> None:
    """Make some tokens special, as far as the vocabulary has them."""
    present = [text for text in dict.fromkeys(texts) if text is not None and hf_tokenizer.token_to_id(text) is not None]
    hf_tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in present])


def _named_tokens(hf_tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Texts of the named tokens ("bos_token": "<s>"); BOS and EOS also from the ids in config.json."""
    listed = _json(folder / "special_tokens_map.json") | config
    texts = {name: _token_text(token) for name, token in listed.items() if name.endswith("_token")}
    named = {name: text for name, text in texts.items() if text}
    ids = _json(folder / "config.json")
    for name in ("bos_token", "eos_token"):
        id = ids.get(f"{name}_id")
        text = hf_tokenizer.id_to_token(id) if name not in listed and isinstance(id, int) else None
        if text:
            named[name] = text
    return named


def _token_text(token: object) -> str | None:
    """Text of a token, which a file writes as its text or as an object with the text as `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _flag(config: Mapping[str, Any], name: str, default: bool | None) -> bool | None:
    value = config.get(name)
    return value if isinstance(value, bool) else default


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name: in files of their own, as one text, or a list; "tool_use" is that with tools."""
    source = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    listed = source if isinstance(source, list) else [{"name": "default", "template": source}]
    named = {
        entry["name"]: entry["template"]
        for entry in listed
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    for text in named.values():
        limits.check_template(text, str(folder))
    files = {"default": folder / "chat_template.jinja", TOOL_USE: folder / TEMPLATES / f"{TOOL_USE}.jinja"}
    for name, file in files.items():
        if file.is_file():
            data = read_model_file(file, limits.TEMPLATE_BYTES, code="cannot-read-tokenizer")
            named[name] = data.decode(errors="replace")
    return named


def _json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if the file does not exist."""
    try:
        value = json.loads(read_regular(file, limits.CONFIG_BYTES))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise file_error(file, error, "cannot-read-tokenizer") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error!s:.200}", code="cannot-read-tokenizer") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no JSON object; fetch it again", code="tokenizer-not-json-object")
    return value
