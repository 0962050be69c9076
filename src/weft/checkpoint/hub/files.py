"""Files of a repository on the hub: fetched in parallel with progress, room on the disk and hashes checked.

The library huggingface_hub speaks with the hub, continues a file after a connection broke, and keeps it in its cache.
This module adds what the library does not do. It continues a download of an earlier start, refuses a download for which
the disk has no room, shows the progress of every file and of the whole, and compares the files with the hub's hashes.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Any, BinaryIO
from urllib.parse import urlsplit

import msgspec

from weft.checkpoint.hub.fetch_progress import FetchProgress
from weft.errors import ModelError
from weft.formatting import format_bytes

logger = logging.getLogger("weft")

CONNECTIONS = 8
WAIT_S = 0.1  # seconds between two looks at a file that another process fetches
PARTIAL = ".weft-partial"  # suffix of a file that has come in part
PIECE = 1 << 22  # bytes of a file that are hashed at once
SHA256 = re.compile("[0-9a-f]{64}")
GIT_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # of a commit or a file
FILE_NAME = re.compile(r"(?s)(?!.*(^|/)\.{0,2}(/|$))[^\\\0]{1,1000}")  # no part is empty, "." or ".."
ETAG = re.compile("[0-9A-Za-z][0-9A-Za-z._-]{0,127}")  # a hash on the hub itself; its name in the cache


class HubFile(msgspec.Struct, frozen=True):
    """A file of one commit of a repository: its size in bytes, and its SHA-256, or the hash that git has for it."""

    name: str
    size: int
    sha256: str | None
    git_hash: str | None

    @property
    def content(self) -> str | None:
        """Name of the file's content in the hub's cache: its hash."""
        return self.sha256 or self.git_hash


class Commit(msgspec.Struct, frozen=True):
    """One commit of a repository, and its files that are wanted and not here yet."""

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

    The progress that `create_progress` makes of these files gets their bytes.
    Does nothing if the hub cannot be asked. Raises ModelError for a full disk and for a wrong hash, whose file is
    removed; and the library's errors for files that do not come.
    """
    guard_library()
    try:
        commit = _list_missing(name, revision, token, folder, patterns, ignored)
    except ModelError:
        raise
    except Exception:
        return  # the library says why, or has all files here
    if not commit.files:
        return
    _check_room(commit, folder)
    with create_progress(commit) as progress, _threads(progress) as pool:
        jobs = [pool.submit(_fetch_file, commit, file, token, folder, progress) for file in commit.files]
        for job in as_completed(jobs):
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
    sha = checked(info.sha, GIT_HASH, f"the commit of {name}")
    files = []
    for entry in info.siblings or ():
        wanted = any(filter_repo_objects([entry.rfilename], allow_patterns=patterns, ignore_patterns=ignored))
        if not wanted:
            continue
        checked(entry.rfilename, FILE_NAME, f"a file of {name}")
        if isinstance(try_to_load_from_cache(name, entry.rfilename, folder, sha), str):
            continue
        hash = f"the hash of {entry.rfilename:.80}"
        sha256 = checked(entry.lfs.sha256, SHA256, hash) if entry.lfs else None
        git_hash = checked(entry.blob_id, GIT_HASH, hash) if entry.blob_id and not entry.lfs else None
        files.append(HubFile(entry.rfilename, _size(entry.size), sha256, git_hash))
    return Commit(name, sha, files)


def _size(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _check_room(commit: Commit, folder: str | None) -> None:
    """Raise ModelError if the files do not fit the disk of the cache."""
    blobs = _blobs(commit, folder)
    need = sum(_missing_bytes(blobs, *content) for content in {(file.content, file.size) for file in commit.files})
    disk = next(path for path in blobs.parents if path.exists())
    free = shutil.disk_usage(disk).free
    if need > free:
        raise ModelError(
            f"{commit.repository} takes {format_bytes(need)} more, and the disk of {disk} has {format_bytes(free)} "
            "free; make room, or give --download-dir or HF_HOME",
            code="disk-full",
        )


def _missing_bytes(blobs: Path, content: str | None, size: int) -> int:
    """Bytes of a file that are not here yet; its content may be, from another commit or an earlier start."""
    if content is None:
        return size
    if (blobs / content).exists():
        return 0
    partial = blobs / (content + PARTIAL)
    return max(0, size - partial.stat().st_size) if partial.exists() else size


class _NoLocksError(Exception):
    """The file system has no locks, as Lustre and NFS on some systems."""


def _fetch_file(commit: Commit, file: HubFile, token: str | None, folder: str | None, progress: FetchProgress) -> None:
    from huggingface_hub import hf_hub_download

    # Older versions of the library show bars of their own.
    shown = "tqdm_class" in inspect.signature(hf_hub_download).parameters
    bar: dict[str, Any] = {"tqdm_class": progress.bar_of(file.name)} if shown else {}
    try:
        is_checked = file.sha256 is not None and _continue_file(commit, file, token, folder, progress, bar)
    except _NoLocksError:
        is_checked = False  # the library has another kind of lock
    path = hf_hub_download(commit.repository, file.name, revision=commit.sha, token=token, cache_dir=folder, **bar)
    progress.finish(file.name)
    if not is_checked:
        _check_hash(commit, file, Path(path))


def _continue_file(
    commit: Commit, file: HubFile, token: str | None, folder: str | None, progress: FetchProgress, bar: dict[str, Any]
) -> bool:
    """Fetch a large file to the place that the library looks in first, from the byte on that an earlier start ended at.

    Newer versions of the library keep nothing of a file whose download has ended in the middle. Does nothing for a file
    that the hub has in pieces (Xet), which the library fetches otherwise. Waits while another process fetches the same.
    Returns True if the file was fetched, and has the right hash: no file with a wrong one gets to that place.
    """
    from huggingface_hub import errors, file_download, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers

    assert file.sha256 is not None
    url = hf_hub_url(commit.repository, file.name, revision=commit.sha)
    try:
        about = get_hf_file_metadata(url, token=token)
    except errors.HfHubHTTPError:
        return False  # the library asks again, or says why
    blob = _blobs(commit, folder) / file.sha256
    if blob.exists() or getattr(about, "xet_file_data", None) is not None:
        return False
    headers = build_hf_headers(token=token)
    if urlsplit(about.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is not for the store that the hub redirects to
    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(blob.name + PARTIAL)
    with _locked_file(partial, file, progress) as begun:
        at = begun.seek(0, os.SEEK_END)
        if blob.exists():  # another process has fetched it by now
            if at == 0:
                partial.unlink()
            return False
        if at < file.size:
            file_download.http_get(
                about.location, begun, resume_size=at, headers=headers, expected_size=file.size, **bar
            )
        begun.flush()
        _check_hash(commit, file, partial)
        os.replace(partial, blob)
    return True


@contextlib.contextmanager
def _locked_file(path: Path, file: HubFile, progress: FetchProgress) -> Iterator[BinaryIO]:
    """A file that is open to be continued, locked against other processes. Waits while another process has it
    locked."""
    is_waiting = False
    while True:
        with path.open("ab") as begun:
            if _lock(begun) and _is_at(path, begun):
                yield begun
                return
        if not is_waiting:
            logger.info("%s: another process fetches it; waiting for that", file.name)
            is_waiting = True
        progress.add(file.name, 0)  # raises an error if all is to end
        time.sleep(WAIT_S)


def _lock(file: IO[bytes]) -> bool:
    """Lock a file; return False if another process has it locked. Raises _NoLocksError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _NoLocksError from error
    return True


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Return True if an open file is still the file at `path`: another process may have moved or removed it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


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


def checked(value: object, form: re.Pattern[str], what: str) -> str:
    """A text of an answer. Raises ModelError unless it has the form."""
    if isinstance(value, str) and form.fullmatch(value):
        return value
    from huggingface_hub import constants

    raise ModelError(
        f"{constants.ENDPOINT} gives {what} as {value!r:.80}, which is none; check HF_ENDPOINT", code="wrong-hub-answer"
    )


@functools.cache
def guard_library() -> None:
    """Let the library take only ETags and commits that are names: it makes paths of them as they come."""
    from huggingface_hub import file_download

    ask = file_download.get_hf_file_metadata

    @functools.wraps(ask)
    def ask_and_check(*arguments: Any, **options: Any) -> Any:
        about = ask(*arguments, **options)
        if about.etag is not None:
            checked(about.etag, ETAG, "an ETag")
        if about.commit_hash is not None:
            checked(about.commit_hash, ETAG, "a commit")
        return about

    file_download.get_hf_file_metadata = ask_and_check
