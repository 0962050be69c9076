"""Files of a repository on the hub: fetched beside each other with progress, room on the disk and hashes checked.

The library huggingface_hub speaks with the hub, continues a file after a connection broke, and keeps it in its cache.
This module adds what the library does not do: to continue what an earlier start has begun, to refuse before it begins
what the disk has no room for, to show every file and the whole, and to compare what came with the hub's hashes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from weft.errors import ModelError
from weft.formats.fetch_progress import FetchProgress
from weft.formatting import format_bytes

CONNECTIONS = 8
PARTIAL = ".weft-partial"  # suffix of a file that has come in part
PIECE = 1 << 22  # bytes of a file that are hashed at once


class HubFile(msgspec.Struct, frozen=True):
    """A file of one commit of a repository: its size in bytes, and its SHA-256, or the hash that git has for it."""

    name: str
    size: int
    sha256: str | None
    git_hash: str | None


class Commit(msgspec.Struct, frozen=True):
    """One commit of a repository, and those of its files that are wanted and not here yet."""

    repository: str
    sha: str
    files: Sequence[HubFile]


CreateProgress = Callable[[Commit], FetchProgress]


def show_progress(commit: Commit) -> FetchProgress:
    """Bars on a terminal, else lines of the log."""
    return FetchProgress(commit.repository, {file.name: file.size for file in commit.files})


def fetch_files(
    name: str,
    *,
    revision: str | None,
    token: str | None,
    folder: str | None,
    patterns: list[str],
    ignored: list[str],
    create_progress: CreateProgress = show_progress,
) -> None:
    """Fetch the files of a repository that match `patterns` and are not in the hub's cache yet.

    What `create_progress` makes of these files is told of their bytes.
    Does nothing if the hub cannot be asked. Raises ModelError for a full disk and for a wrong hash, whose file is
    removed; and the library's errors for files that do not come.
    """
    try:
        commit = _list_missing(name, revision, token, folder, patterns, ignored)
    except Exception:
        return  # the library says why, or has all files here
    if not commit.files:
        return
    _check_room(commit, folder)
    with create_progress(commit) as progress, _threads(progress) as pool:
        jobs = [pool.submit(_fetch_file, commit, file, token, folder, progress) for file in commit.files]
        for job in jobs:
            job.result()


def list_files(name: str, revision: str | None, token: str | None) -> list[str]:
    """Names of all files of a repository on the hub. Raises the library's errors."""
    from huggingface_hub import HfApi

    info = HfApi(token=token).model_info(name, revision=revision)
    return [entry.rfilename for entry in info.siblings or ()]


@contextlib.contextmanager
def _threads(progress: FetchProgress) -> Iterator[ThreadPoolExecutor]:
    """Threads that all end soon, in the middle of their files, once one has failed or after Ctrl-C."""
    pool = ThreadPoolExecutor(CONNECTIONS, "weft-fetch")
    try:
        yield pool
    except BaseException:
        progress.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _list_missing(
    name: str, revision: str | None, token: str | None, folder: str | None, patterns: list[str], ignored: list[str]
) -> Commit:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.utils._paths import filter_repo_objects

    info = HfApi(token=token).model_info(name, revision=revision, files_metadata=True)
    assert info.sha is not None
    files = []
    for entry in info.siblings or ():
        wanted = any(filter_repo_objects([entry.rfilename], allow_patterns=patterns, ignore_patterns=ignored))
        if not wanted or isinstance(try_to_load_from_cache(name, entry.rfilename, folder, info.sha), str):
            continue
        sha256 = entry.lfs.sha256 if entry.lfs else None
        files.append(HubFile(entry.rfilename, entry.size or 0, sha256, None if sha256 else entry.blob_id))
    return Commit(name, info.sha, files)


def _check_room(commit: Commit, folder: str | None) -> None:
    """Raise ModelError if the files do not fit the disk of the cache."""
    blobs = _blobs(commit, folder)
    begun = sum(path.stat().st_size for path in blobs.glob(f"*{PARTIAL}"))
    need = sum(file.size for file in commit.files) - begun
    disk = next(path for path in blobs.parents if path.exists())
    free = shutil.disk_usage(disk).free
    if need > free:
        raise ModelError(
            f"{commit.repository} takes {format_bytes(need)} more, and the disk of {disk} has {format_bytes(free)} "
            "free; make room, or give --download-dir or HF_HOME",
            code="disk-full",
        )


def _fetch_file(commit: Commit, file: HubFile, token: str | None, folder: str | None, progress: FetchProgress) -> None:
    from huggingface_hub import hf_hub_download

    # Older versions of the library show bars of their own.
    shown = "tqdm_class" in inspect.signature(hf_hub_download).parameters
    bar: dict[str, Any] = {"tqdm_class": progress.bar_of(file.name)} if shown else {}
    if file.sha256 is not None:
        _continue_file(commit, file.name, file.sha256, file.size, token, folder, bar)
    path = hf_hub_download(commit.repository, file.name, revision=commit.sha, token=token, cache_dir=folder, **bar)
    progress.finish(file.name)
    _check_hash(commit, file, Path(path))


def _continue_file(
    commit: Commit, file: str, sha256: str, size: int, token: str | None, folder: str | None, bar: dict[str, Any]
) -> None:
    """Fetch a large file to the place that the library looks in first, from the byte on that an earlier start ended at.

    Newer versions of the library keep nothing of a file whose download has ended in the middle. Does nothing for a file
    that the hub has in pieces (Xet), which the library fetches otherwise, and while another process fetches the same.
    """
    from huggingface_hub import errors, file_download, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers

    url = hf_hub_url(commit.repository, file, revision=commit.sha)
    try:
        about = get_hf_file_metadata(url, token=token)
    except errors.HfHubHTTPError:
        return  # the library asks again, or says why
    blob = _blobs(commit, folder) / sha256
    if blob.exists() or getattr(about, "xet_file_data", None) is not None:
        return
    headers = build_hf_headers(token=token)
    if urlsplit(about.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is not for the store that the hub redirects to
    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(sha256 + PARTIAL)
    with partial.open("ab") as begun:
        try:
            fcntl.flock(begun, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        file_download.http_get(
            about.location, begun, resume_size=begun.tell(), headers=headers, expected_size=size, **bar
        )
    os.replace(partial, blob)


def _blobs(commit: Commit, folder: str | None) -> Path:
    """Directory of the hub's cache with the contents of a repository's files."""
    from huggingface_hub import constants, file_download

    cache = Path(folder or constants.HF_HUB_CACHE).expanduser().absolute()
    return cache / file_download.repo_folder_name(repo_id=commit.repository, repo_type="model") / "blobs"


def _check_hash(commit: Commit, file: HubFile, path: Path) -> None:
    """Remove a file and raise ModelError if it does not have the hash that the hub gives."""
    if file.sha256 is not None:
        actual, wanted = _hash_file(hashlib.sha256(), path), file.sha256
    elif file.git_hash is not None:
        actual = _hash_file(hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False), path)
        wanted = file.git_hash
    else:
        return
    if actual == wanted:
        return
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    raise ModelError(
        f"{file.name} of {commit.repository} came with the hash {actual[:12]}, and the hub says {wanted[:12]}: it was "
        "changed on its way and is removed; run this again, and if that does not help, check HF_ENDPOINT and proxies",
        code="wrong-hash",
    )


def _hash_file(state: Any, path: Path) -> str:
    """Hash of `state` and a file's bytes, as hexadecimal digits."""
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            state.update(piece)
    digits: str = state.hexdigest()
    return digits
