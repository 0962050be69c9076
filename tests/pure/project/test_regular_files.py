"""Files from outside: regular ones of bounded size are read, whatever else lies under a name is refused at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.regular_files import UnfitFileError, open_regular, read_regular, read_regular_text


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)  # a socket's name has at most 107 bytes


@pytest.mark.parametrize(
    ("make", "reason"),
    [(_pipe, "a pipe"), (_device, "a device"), (_socket, "a socket")],
)
def test_only_regular_files_are_opened(
    make: Callable[[Path], None], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a"
    make(path)
    with pytest.raises(UnfitFileError) as refused:
        read_regular(path, 10)
    assert refused.value.code == "not-a-regular-file"
    assert reason in str(refused.value.strerror)


def test_a_directory_is_told_as_the_system_tells_it(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path, 10)


def test_a_pipe_that_takes_the_place_of_a_file_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pipe = tmp_path / "a", tmp_path / "pipe"
    path.write_text("x")
    os.mkfifo(pipe)
    status = path.stat()
    monkeypatch.setattr("weft.regular_files.os.stat", lambda _: status)  # as it was a moment ago
    with pytest.raises(UnfitFileError) as refused:
        open_regular(pipe)
    assert refused.value.code == "not-a-regular-file"


def test_the_number_of_bytes_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(UnfitFileError) as refused:
        read_regular(path, 4)
    assert refused.value.code == "file-too-large"
    with pytest.raises(UnfitFileError) as refused:
        read_regular("/proc/self/maps", 4)  # says that it has no bytes
    assert refused.value.code == "file-too-large"


def test_lines_end_alike_and_what_is_no_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes("é\r\nb\rc\n".encode())
    assert read_regular_text(path, 100) == "é\nb\nc\n"
    path.write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        read_regular_text(path, 100)
    assert read_regular_text(path, 100, errors="replace") == "\ufffd"


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_an_error_of_the_file(name: str) -> None:
    with pytest.raises(OSError):
        read_regular(name, 10)
