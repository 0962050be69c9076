"""GGUF files on the hub: `hf.co/OWNER/REPO:QUANT`, and the repositories that Ollama's tags mean."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import msgspec

from weft.checkpoint.names import catalogue
from weft.errors import ModelError

QUANTIZATION = "Q4_K_M"  # if a name says none, as with Ollama
HOSTS = ("hf.co/", "huggingface.co/")
FORM = "hf.co/OWNER/REPO:QUANT"
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_QUANTIZATION = re.compile(r"[A-Za-z]\w*", re.ASCII)
# A tag of Ollama's: a size, active parameters, a kind of tuning, which all repositories here have, and a quantisation.
_TAG = re.compile(
    r"(?P<size>(\d+x)?[\d.]+[bm])(-a[\d.]+b)?(-(instruct|chat|it|text)(-v[\d.]+)?)?(-(?P<quantization>[a-z]\w+))?",
    re.ASCII | re.IGNORECASE,
)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class GgufReference(msgspec.Struct, frozen=True):
    """One quantisation, such as "Q4_K_M", of a repository with GGUF files."""

    repository: str
    quantization: str

    def __str__(self) -> str:
        return f"{HOSTS[0]}{self.repository}:{self.quantization}"


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of data/gguf.toml, whose head explains the fields."""

    tag: str
    name: str
    latest: bool = False
    quantization: str = QUANTIZATION
    model: str = ""


@cache
def listed() -> tuple[Listed, ...]:
    """The repositories that tags stand for."""
    content = tomllib.loads((files("weft.checkpoint") / "data/gguf.toml").read_text("utf-8"))
    return msgspec.convert(content["repository"], tuple[Listed, ...])


def parse_address(name: str) -> GgufReference | None:
    """The reference for `hf.co/OWNER/REPO[:QUANT]`; None for a name that does not begin like it.

    Raises ModelError for the rest in another form.
    """
    host = next((host for host in HOSTS if name.lower().startswith(host)), None)
    if host is None:
        return None
    repository, _, quantization = name[len(host) :].partition(":")
    quantization = _default(quantization, QUANTIZATION)
    if not _REPOSITORY.fullmatch(repository) or not _QUANTIZATION.fullmatch(quantization):
        raise ModelError(f"{name!r:.200} is not of the form {FORM}", code="not-a-gguf-address")
    return GgufReference(repository, quantization.upper())


def parse_tag(name: str) -> GgufReference | None:
    """The reference for a tag of Ollama's, such as `qwen2.5:14b` or `llama3:8b-instruct-q8_0`; None if unknown."""
    family, _, tag = name.lower().removeprefix("library/").partition(":")
    rows = [row for row in listed() if row.tag.partition(":")[0] == family]
    if tag in ("", "latest"):
        return _latest_of(rows)
    match = _TAG.fullmatch(tag)
    if match is None:
        return None
    row = next((row for row in rows if row.tag == f"{family}:{match['size']}"), None)
    if row is None:
        return None
    return GgufReference(row.name, _default(match["quantization"], row.quantization).upper())


def parse_name(name: str) -> GgufReference | None:
    """The reference that an address or a tag means; None for another name. Raises ModelError."""
    return parse_address(name) or parse_tag(name)


def require(name: str) -> GgufReference:
    """`parse_name`, but ModelError, with the way out, for a name that means no GGUF file."""
    reference = parse_name(name)
    if reference is None:
        catalogue.check_kind(name)
        whole = catalogue.full_name(name)
        raise ModelError(
            f"Weft knows no GGUF repository for {name!r:.200}; give {FORM}, as in {HOSTS[0]}{listed()[0].name}:"
            f"{QUANTIZATION}{f'; unquantised it is {whole}' if whole else ''}",
            code="unknown-tag",
        )
    return reference


def short_name(reference: GgufReference) -> str:
    """The tag that means a reference, or else its address."""
    row = row_of(reference)
    if row is None:
        return str(reference)
    return row.tag if row.quantization == reference.quantization else f"{row.tag}-{reference.quantization.lower()}"


def row_of(reference: GgufReference) -> Listed | None:
    """The row of data/gguf.toml with a reference's repository."""
    return next((row for row in listed() if row.name == reference.repository), None)


def precision_of(reference: GgufReference) -> str:
    """The precision that a quantisation is called by in plans: Q4_K_M is q4_k_m."""
    return "mxfp4_moe" if reference.quantization == "MXFP4" else reference.quantization.lower()


def _latest_of(rows: Sequence[Listed]) -> GgufReference | None:
    row = next((row for row in rows if row.latest), None)
    return None if row is None else GgufReference(row.name, row.quantization)


def choose_files(names: Sequence[str], reference: GgufReference) -> list[str]:
    """The GGUF file of a reference among a repository's, or all parts of it, in order. Raises ModelError."""
    matching = sorted(name for name in names if reference.quantization in quantizations(name))
    whole = [name for name in matching if not _PART.search(name)]
    if whole:
        return [min(whole, key=len)]
    if not matching:
        raise _no_such_file(names, reference)
    if len(matching) != int(_PART.search(matching[0])[2]):  # type: ignore[index]
        raise ModelError(
            f"{reference.repository} has {len(matching)} of the parts of {reference.quantization}: {matching[0]}; give "
            "another quantisation",
            code="gguf-parts-missing",
        )
    return matching


def _no_such_file(names: Sequence[str], reference: GgufReference) -> ModelError:
    others = sorted({max(quantizations(name), key=len) for name in names if quantizations(name)})
    offered = f"it has {', '.join(others)}" if others else "it has no GGUF files"
    return ModelError(
        f"{reference.repository} has no file in {reference.quantization}; {offered}", code="no-such-quantization"
    )


def quantizations(file: str) -> set[str]:
    """Names of quantisations that a file's name may mean, in capitals; none if it is no file of weights.

    A name ends in it: `Qwen3-8B-Q4_K_M.gguf`, `llama-2-7b.Q4_K_M.gguf`, `x-q8_0-00001-of-00002.gguf`.
    """
    name = file.rpartition("/")[2]
    if not name.endswith(".gguf") or name.lower().startswith(("mmproj", "imatrix")):
        return set()
    stem = _PART.sub(".gguf", name).removesuffix(".gguf")
    last = re.split(r"[-.]", stem)[-1].upper()
    return {last} if re.fullmatch(r"(I?Q\d\w*|TQ\d\w*|B?F16|F32|FP16|MXFP4\w*)", last) else set()


def _default(given: str | None, default: str) -> str:
    return default if not given or given.lower() == "latest" else given
