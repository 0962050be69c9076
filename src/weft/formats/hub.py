"""Checkpoints from the Hugging Face hub, as files in its local cache."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from weft.errors import ModelError
from weft.formats import catalogue

TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
WEIGHT_FILES = ["*.safetensors"]
# Copies of the same weights in other formats.
COPIES = ["consolidated*", "original/*", "onnx/*"]
FILES = (".gguf", ".json", ".safetensors")  # suffixes of files: a name with one is no repository
PATIENCE = 2.0  # seconds to wait for the hub's description of a model
_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
WAYS_OUT = "give a directory, a .gguf file, or the model `demo`"


def fetch_repository(name: str, *, revision: str | None, token: str | None, folder: str | None, weights: bool) -> Path:
    """Fetch the repository `name`, with `weights` or without, and return its directory in the hub's cache.

    Files that are there already are not fetched again. The library honours HF_HOME, HF_TOKEN, HF_ENDPOINT and
    HF_HUB_OFFLINE. Raises ModelError.
    """
    from huggingface_hub import snapshot_download

    patterns = TEXT_FILES + (WEIGHT_FILES if weights else [])
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                token=token,
                cache_dir=folder,
                allow_patterns=patterns,
                ignore_patterns=COPIES,
            )
        )
    except Exception as error:  # of many classes from several libraries; all mean that the model cannot be had
        # Without the libraries' own errors: they are a hundred lines, and ours has all their facts.
        raise _failure(name, revision, error) from None


def cached_repository(name: str, folder: str | None = None) -> Path | None:
    """Directory of a repository's main revision in the hub's cache; None if it is not there."""
    if not is_name(name):
        return None
    from huggingface_hub import constants

    repository = Path(folder or constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    try:
        directory = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
        whole = (directory / "config.json").is_file() or any(directory.glob("*.gguf"))
        return directory if whole else None
    except OSError:
        return None


def _failure(name: str, revision: str | None, error: Exception) -> ModelError:
    from huggingface_hub import constants, errors

    where = f"{name} at revision {revision}" if revision else name
    match error:
        case errors.GatedRepoError():
            return ModelError(
                f"{name} is gated: accept its terms at {constants.ENDPOINT}/{name} and give --hf-token or HF_TOKEN",
                code="gated-model",
            )
        case errors.RevisionNotFoundError():
            return ModelError(
                f"{name} has no revision {revision!r} on {constants.ENDPOINT}; check --revision",
                code="no-such-revision",
            )
        case errors.RepositoryNotFoundError():
            return ModelError(
                f"there is no model {name!r}: neither a file or directory here nor on {constants.ENDPOINT} (a private "
                f"one needs --hf-token or HF_TOKEN); {ways_out(name)}",
                code="no-such-model",
            )
        case errors.HFValidationError():
            return ModelError(
                f"{name!r} is neither a file or directory here nor a name on the hub; {ways_out(name)}",
                code="not-a-model-name",
            )
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} is not reachable"
            return ModelError(
                f"cannot find the model {where}: no such file, not downloaded, and {offline}; {ways_out(name)}",
                code="model-not-downloaded",
            )
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ModelError(
                f"the disk is full while {name} is fetched; make room, or give --download-dir or HF_HOME",
                code="disk-full",
            )
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return ModelError(
        f"cannot fetch {where} from {constants.ENDPOINT}: {reason}; {WAYS_OUT}", code="cannot-fetch-model"
    )


def ways_out(name: str) -> str:
    """Advice for a name that leads nowhere: the nearest known names, or the other ways to give a model."""
    known = name == catalogue.full_name(name)
    return WAYS_OUT if known else catalogue.did_you_mean(name) or WAYS_OUT


def is_name(model: str) -> bool:
    """Return True if a user's text can be a name on the hub: `name` or `owner/name`, and not a file's name."""
    return _NAME.fullmatch(model) is not None and not model.endswith(FILES)
