"""The process of one model of a set, as its front ends it."""

from __future__ import annotations

import socket

import pytest

from weft.cli.serve import member


def test_a_second_signal_ends_it_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front sends SIGTERM to drain, and again for its end."""

    def serve(words: list[str]) -> None:
        raise KeyboardInterrupt

    front, own = socket.socketpair()
    made = socket.socket(fileno=own.detach())
    with front, made:
        front.sendall(b'["demo"]\n')
        monkeypatch.setattr("sys.argv", ["member", str(made.fileno()), "demo"])
        monkeypatch.setattr("weft.cli.serve.member.socket.socket", lambda fileno: made)  # which closes it
        monkeypatch.setattr(member, "die_with", lambda fd: None)
        monkeypatch.setattr(member, "serve_model", serve)
        assert member.main() == 130
