"""SocketFolder: the Unix sockets of a set's processes, which no other user of this machine can reach."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

from weft.errors import ConfigError, error_reason

PREFIX = "weft-set-"
LONGEST = 107  # bytes of a socket's path, see unix(7)
YOUNG_S = 60.0  # a younger folder may not be locked yet by its owner


class SocketFolder:
    """A folder that only this user may enter, in the folder for temporary files.

    While the set runs the folder is locked, so that systemd-tmpfiles(8) does not remove it. The folder of a set that
    was killed is removed by the next set of this user. Raises ConfigError.
    """

    def __init__(self) -> None:
        try:
            base = Path(tempfile.gettempdir())
            _remove_left_over(base)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # with mode 0700
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise ConfigError(
                f"no folder for sockets can be made among the temporary files: {error_reason(error)}; set TMPDIR to a "
                "folder that can be written",
                code="no-socket-folder",
            ) from None
        if len(os.fsencode(self.new_path())) > LONGEST:
            self.close()
            raise ConfigError(
                f"TMPDIR is {base}, and paths of sockets have at most {LONGEST} bytes; set it to a shorter one",
                code="no-socket-folder",
            )

    def new_path(self) -> Path:
        """An unused path in the folder."""
        return self.path / f"{secrets.token_hex(4)}.sock"

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_left_over(base: Path) -> None:
    """Remove the folders of this user's sets that have ended."""
    for path in base.glob(f"{PREFIX}*"):
        try:
            if path.lstat().st_uid != os.getuid() or time.time() - path.lstat().st_mtime < YOUNG_S:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # it was removed, or is no folder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # its set runs
        finally:
            os.close(descriptor)
