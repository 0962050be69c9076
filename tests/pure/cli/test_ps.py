"""weft ps: the models of servers, by their answers to /api/ps."""

from __future__ import annotations

import msgspec
import pytest

from weft.api.ollama.details import NEVER, timestamp
from weft.cli.serve import ps
from weft.cli.serve.ps import ServedModel, device_share, grouped, served_models

SOON_S = 1_900_000_000


def row(name: str, expires: str = NEVER, on_gpus: int = 0) -> ps._Row:
    return ps._Row(name=name, size=100, size_vram=on_gpus, expires_at=expires)


def test_a_set_shows_who_is_awake_and_until_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.serve.ps.time.time", lambda: SOON_S - 60.0)
    models = served_models(["a", "b:8b", "c", "d"], [row("a:latest", timestamp(SOON_S)), row("b:8b", on_gpus=100)])
    assert models == [
        ServedModel(name="a", state="awake", bytes=100, device="CPU", until=SOON_S),
        ServedModel(name="b:8b", state="awake", bytes=100, device="GPU", until=None),
        ServedModel(name="c", state="asleep"),
        ServedModel(name="d", state="asleep"),
    ]
    assert [model.name for model in grouped(models, one_model=False)] == ["a", "b:8b", "c, d"]
    assert msgspec.to_builtins(models[2])["bytes"] is None


def test_the_names_of_one_model_share_a_row() -> None:
    models = served_models(["a", "b"], [row("a:latest"), row("b:latest")])
    assert [model.name for model in grouped(models, one_model=True)] == ["a, b"]
    assert [model.name for model in grouped(models, one_model=False)] == ["a", "b"]


def test_models_that_were_fetched_since_the_start_are_shown_too() -> None:
    assert [model.name for model in served_models([], [row("new:latest")])] == ["new:latest"]


@pytest.mark.parametrize(
    ("nbytes", "on_gpus", "shown"),
    [(0, 0, "CPU"), (10, 0, "CPU"), (10, 10, "GPU"), (10, 7, "70 % GPU, 30 % CPU")],
)
def test_devices(nbytes: int, on_gpus: int, shown: str) -> None:
    assert device_share(nbytes, on_gpus) == shown
