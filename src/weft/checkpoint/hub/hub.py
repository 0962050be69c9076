"""Checkpoints from the Hugging Face hub, as files in its local cache."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

from weft.checkpoint.files import limits
from weft.checkpoint.hub import files as hub_files
from weft.checkpoint.hub.files import CreateProgress, show_progress
from weft.checkpoint.names import catalogue
from weft.checkpoint.names.gguf_reference import GgufReference, choose_files
from weft.errors import ModelError
from weft.regular_files import read_regular_text

TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
WEIGHT_FILES = ["*.safetensors"]
# Copies of the same weights in other formats.
COPIES = ["consolidated*", "original/*", "onnx/*"]
FILES = (".gguf", ".json", ".safetensors")  # suffixes of files: a name with such a suffix is no repository
PATIENCE = 2.0  # seconds to wait for the hub's description of a model
_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_COMMIT = re.compile("[0-9A-Za-z]{1,64}")  # a name that becomes a part of a path
WAYS_OUT = "give a directory, a .gguf file, or the model `demo`"


def fetch_repository(
    name: str,
    *,
    revision: str | None,
    token: str | None,
    folder: str | None,
    weights: bool,
    create_progress: CreateProgress = show_progress,
) -> Path:
    """Fetch the repository `name`, with `weights` or without, and return its directory in the hub's cache.

    Files that are there already are not fetched again, and one that came in part is continued. The library honours
    HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. Raises ModelError.
    """
    from huggingface_hub import snapshot_download

    patterns = TEXT_FILES + (WEIGHT_FILES if weights else [])
    try:
        hub_files.fetch_files(
            name,
            revision=revision,
            token=token,
            folder=folder,
            patterns=patterns,
            ignored=COPIES,
            create_progress=create_progress,
        )
        return Path(
            snapshot_download(
                name,
                revision=revision,
                token=token,
                cache_dir=folder,
                allow_patterns=patterns,
                ignore_patterns=COPIES,
                tqdm_class=_silent_bars(),
            )
        )
    except ModelError:
        raise
    except Exception as error:  # of many classes from several libraries; all mean that the model cannot be had
        # Without the libraries' own errors: they are a hundred lines, and ours has all their facts.
        raise _failure(name, revision, error) from None


def fetch_gguf(
    reference: GgufReference,
    *,
    revision: str | None = None,
    token: str | None = None,
    folder: str | None = None,
    create_progress: CreateProgress = show_progress,
) -> Path:
    """Fetch one quantisation of a repository with GGUF files; return its file, or the first of its parts.

    As `fetch_repository`. `create_progress` is as in `hub_files.fetch_files`. Raises ModelError.
    """
    from huggingface_hub import snapshot_download

    name = reference.repository
    try:
        cached = cached_gguf(reference, folder) if revision is None else None
        if cached is not None:
            return cached
        wanted = choose_files(hub_files.list_files(name, revision, token), reference)
        hub_files.fetch_files(
            name,
            revision=revision,
            token=token,
            folder=folder,
            patterns=wanted,
            ignored=[],
            create_progress=create_progress,
        )
        here = snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=folder,
            allow_patterns=wanted,
            tqdm_class=_silent_bars(),
        )
        return Path(here) / wanted[0]
    except ModelError:
        raise
    except Exception as error:
        raise _failure(name, revision, error) from None


def cached_gguf(reference: GgufReference, folder: str | None = None) -> Path | None:
    """The file of a reference, or the first of its parts, if all of it is in the hub's cache; else None."""
    directory = cached_repository(reference.repository, folder)
    if directory is None:
        return None
    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*.gguf") if path.exists()]
    try:
        return directory / choose_files(names, reference)[0]
    except ModelError:
        return None


def cached_repository(name: str, folder: str | None = None) -> Path | None:
    """Directory of a repository's main revision in the hub's cache; None if it is not there."""
    if not is_name(name):
        return None
    from huggingface_hub import constants

    repository = Path(folder or constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    try:
        commit = read_regular_text(repository / "refs" / "main", limits.CONFIG_BYTES).strip()
        if not _COMMIT.fullmatch(commit):
            return None
        directory = repository / "snapshots" / commit
        whole = (directory / "config.json").is_file() or any(directory.rglob("*.gguf"))
        return directory if whole else None
    except (OSError, UnicodeDecodeError):
        return None


def _silent_bars() -> Any:
    """A class of bars that are not shown: all files are here when the library looks for them."""
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    return Silent


def _failure(name: str, revision: str | None, error: Exception) -> ModelError:
    from huggingface_hub import constants, errors

    cause = error.__cause__
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(cause, errors.HfHubHTTPError):
        error = cause  # the hub has answered, and the library has looked for a copy of the model here
    where = f"{name} at revision {revision}" if revision else name
    known = _known_failure(name, revision, where, error)
    if known is not None:
        return known
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return _refusal(name, status, error)
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return ModelError(
        f"cannot fetch {where} from {constants.ENDPOINT}: {reason}; run this again to continue, or {WAYS_OUT}",
        code="cannot-fetch-model",
    )


def _known_failure(name: str, revision: str | None, where: str, error: Exception) -> ModelError | None:
    """The refusal for an error of the hub's library or of the disk that has a way out of its own; else None."""
    from huggingface_hub import constants, errors

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
    return None


def _refusal(name: str, status: int, error: Any) -> ModelError:
    """The error for a status of the hub that none of the library's own errors stands for."""
    from huggingface_hub import constants

    match status:
        case 401:
            return ModelError(
                f"{constants.ENDPOINT} does not accept the token for {name}; give a valid one with --hf-token or "
                f"HF_TOKEN ({constants.ENDPOINT}/settings/tokens), or none",
                code="hub-token-refused",
            )
        case 403:
            return ModelError(
                f"{name} is not open to this token: look at {constants.ENDPOINT}/{name}, and give one that may read it "
                "with --hf-token or HF_TOKEN",
                code="hub-forbidden",
            )
        case 429:
            seconds = error.response.headers.get("Retry-After", "")
            when = f"in {seconds} s" if seconds.isdigit() else "later"
            return ModelError(
                f"{constants.ENDPOINT} limits requests; run this again {when}: it continues (a token in HF_TOKEN has a "
                "higher limit)",
                code="hub-limits-requests",
            )
    return ModelError(
        f"cannot fetch {name}: {constants.ENDPOINT} answers {status}; run this again later, or {WAYS_OUT}",
        code="hub-status",
    )


def ways_out(name: str) -> str:
    """Advice for a name that leads nowhere: the nearest known names, or the other ways to give a model."""
    known = name == catalogue.full_name(name)
    return WAYS_OUT if known else catalogue.did_you_mean(name) or WAYS_OUT


def is_name(model: str) -> bool:
    """Return True if a user's text can be a name on the hub: `name` or `owner/name`, and not a file's name."""
    return _NAME.fullmatch(model) is not None and not model.endswith(FILES)
