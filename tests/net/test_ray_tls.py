"""Ray actors whose connections to the driver are inside TLS, and strangers at the driver's port."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.net.head import answers
from tests.net.test_ray import alone, cluster, model, on_ray
from weft.engine.cluster.certificates import make_certificates
from weft.engine.executors import ray as ray_executor

pytest.importorskip("ray", reason="needs the extra weft-llm[ray]")
pytest.importorskip("cryptography", reason="needs the extra weft-llm[tls]")

LIBRARY_WARNINGS = ("ResourceWarning", "DeprecationWarning", "FutureWarning")
pytestmark = [
    pytest.mark.long,
    *(pytest.mark.filterwarnings(f"ignore::{name}") for name in LIBRARY_WARNINGS),
]
__all__ = ["alone", "cluster", "model"]


def test_actors_join_inside_tls_beside_a_silent_stranger(
    cluster: Any, model: str, alone: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, _ = make_certificates(tmp_path, 2, 1)
    strangers: list[socket.socket] = []
    start = ray_executor.RayExecutor._start_actors

    def knock(self: Any, plan: Any, port: int) -> None:
        strangers.extend(socket.create_connection((self._nodes.address, port)) for _ in range(3))
        start(self, plan, port)

    monkeypatch.setattr(ray_executor.RayExecutor, "_start_actors", knock)
    with on_ray(model, pipeline_parallel_size=2, cluster_cert_file=str(bundle)) as llm:
        assert answers(llm) == alone
    assert len(strangers) == 3
    for stranger in strangers:
        stranger.close()
