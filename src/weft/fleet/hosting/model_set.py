"""ModelSet: the models that one address serves, as the user's file or the cache of fetched models gives them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from weft.checkpoint.hub.model_names import find_tagged, tagged
from weft.config import EngineConfig
from weft.errors import ConfigError


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a set.

    - `names`: its names in requests; messages use the first.
    - `config`: the engine's options; `flags` give `weft serve` these options, and the settings of its answers.
    - `keep_alive_s`: seconds that it stays awake after its last request; infinity: it must stay awake.
    - `priority`: models with larger numbers sleep first to free memory.
    - `always`: it is loaded with the set, and not at its first request.
    """

    names: tuple[str, ...]
    config: EngineConfig
    flags: tuple[str, ...] = ()
    keep_alive_s: float = math.inf
    priority: int = 0
    always: bool = True

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def must_be_awake(self) -> bool:
        """True if it never sleeps to free memory for another model."""
        return math.isinf(self.keep_alive_s)


class ModelSet(msgspec.Struct, frozen=True, kw_only=True):
    """The models of one address. `source` is the file that names them, `port` the port in that file, if any.

    `warnings` are lines about settings of the file without effect. With `grows`, models that are fetched later are
    added, and stay awake for `keep_alive_s` after their last request. `equal_shares`: the models get equal numbers of
    GPUs if all fit, like the servers of a node's file.
    """

    entries: tuple[ModelEntry, ...]
    source: str
    port: int | None = None
    warnings: tuple[str, ...] = ()
    grows: bool = False
    equal_shares: bool = False
    keep_alive_s: float = math.inf

    def find(self, name: str) -> ModelEntry | None:
        """The model of a name, with or without the tag `latest`."""
        return next((entry for entry in self.entries if find_tagged(name, entry.names) is not None), None)


def check_model_set(models: ModelSet) -> None:
    """Raise ConfigError for a set without a model, for two models of one name, and for a device that is named twice."""
    if not models.entries:
        raise ConfigError(
            f"{models.source} has no model; give one, as in models: [{{name: small, model: demo}}]", code="no-models"
        )
    seen: dict[str, int] = {}
    for number, entry in enumerate(models.entries, 1):
        for name in entry.names:
            first = seen.setdefault(tagged(name), number)
            if first != number:
                raise ConfigError(
                    f"{models.source}: models {first} and {number} are both called {name!r}; give each a name of its "
                    "own",
                    code="duplicate-model-name",
                )
        _check_devices(entry, models.source)


def _check_devices(entry: ModelEntry, source: str) -> None:
    ids = entry.config.device_ids or ()
    twice = next((device for device in ids if ids.count(device) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{source}: device-ids of {entry.name!r} are {','.join(map(str, ids))}, with {twice} twice; name each once",
            code="device-twice",
        )


def must_be_awake(entries: Sequence[ModelEntry]) -> Iterator[ModelEntry]:
    """The models that are awake as long as the set runs."""
    return (entry for entry in entries if entry.must_be_awake)
