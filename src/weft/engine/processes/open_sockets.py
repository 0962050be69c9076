"""The sockets between our processes that are open here."""

from __future__ import annotations

import os
import socket
import weakref

# Sockets between our processes. A fork made by somebody else must not hold them open: the other end would never see
# the end of the stream.
open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_fork() -> None:
    for end in open_sockets:
        end.close()


os.register_at_fork(after_in_child=_close_in_fork)
