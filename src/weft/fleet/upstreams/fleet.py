"""Fleet: the replicas of a gateway, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from weft.errors import ConfigError
from weft.fleet.upstreams.config import UpstreamConfig, parse_url
from weft.fleet.upstreams.policy import Fingerprint, Policy, ReplicaViews
from weft.fleet.upstreams.replica import UpstreamReplica
from weft.http.errors import HttpError


class Fleet:
    """The replicas by name. `clock` reads monotonic seconds."""

    def __init__(self, upstreams: Collection[UpstreamConfig], policy: Policy, clock: Callable[[], float]) -> None:
        self.replicas: dict[str, UpstreamReplica] = {}
        self.policy = policy
        self.clock = clock
        for upstream in upstreams:
            self.add(upstream)

    def add(self, upstream: UpstreamConfig) -> UpstreamReplica:
        """Add a replica. A replica that drains and has the same configuration gets requests again.

        Raises ConfigError if it is already there.
        """
        name = str(parse_url(upstream.url))
        known = self.replicas.get(name)
        if known is not None and known.draining and known.config == upstream:
            known.draining = False
            return known
        if known is not None:
            raise ConfigError(f"upstream {name} is already there; remove it first", code="duplicate-upstream")
        self.replicas[name] = replica = UpstreamReplica(upstream)
        return replica

    def find(self, url: str) -> UpstreamReplica:
        """The replica at a URL. Raises ConfigError."""
        name = str(parse_url(url))
        if name not in self.replicas:
            raise ConfigError(
                f"there is no upstream {name}; there are {', '.join(self.replicas) or 'none'}", code="unknown-upstream"
            )
        return self.replicas[name]

    def remove(self, replica: UpstreamReplica) -> None:
        """Forget a replica; its running requests go on."""
        replica.draining = True
        if self.replicas.get(replica.name) is replica:  # another replica may have its name by now
            del self.replicas[replica.name]
        replica.close()

    def candidates(self, model: str, tried: Collection[UpstreamReplica]) -> list[UpstreamReplica]:
        """The replicas that may get a request for `model` now, without the replicas in `tried`.

        An unhealthy replica gets only checks until a check succeeds.
        """
        return [
            replica
            for replica in self.replicas.values()
            if not replica.draining and replica.breaker.closed and replica.serves(model) and replica not in tried
        ]

    def covered_models(self) -> set[str] | None:
        """The models that healthy replicas serve; None if a healthy replica may serve any model."""
        covered: set[str] = set()
        for replica in self.replicas.values():
            if replica.draining or not replica.breaker.closed:
                continue
            if replica.models is None:
                return None
            covered |= replica.models.keys()
        return covered

    def continuing(self, model: str) -> list[UpstreamReplica]:
        """The replicas that continue answers of `model`, or may do so before their first check, healthy or not."""
        return [
            replica
            for replica in self.replicas.values()
            if (replica.is_weft or not replica.asked) and not replica.draining and replica.serves(model)
        ]

    def knows_model(self, model: str) -> bool:
        """Return True if a replica serves the model, or may serve it, whatever its health."""
        for replica in self.replicas.values():  # noqa: SIM110 - any() takes twice as long, for every request
            if replica.serves(model):
                return True
        return False

    def choose_replica(self, fingerprint: Fingerprint, candidates: list[UpstreamReplica]) -> UpstreamReplica:
        """The policy's choice among at least one candidate."""
        now = self.clock()
        weights = [replica.weight * replica.breaker.share(now) for replica in candidates]
        if len(set(weights)) == 1:
            weights = []  # equal weights: policies then take a faster way
        views = ReplicaViews(
            [replica.connections for replica in candidates], weights, [replica.name for replica in candidates]
        )
        return candidates[self.policy.choose_replica(fingerprint, views)]

    def model_rows(self) -> list[dict[str, Any]]:
        """The rows of /v1/models: the models of all replicas that do not drain, each once, in order of name."""
        rows: dict[str, dict[str, Any]] = {}
        for replica in self.replicas.values():
            if replica.draining:
                continue
            for name in replica.models or ():
                row = (replica.listed or {}).get(replica.own_name(name)) or {"object": "model", "owned_by": "upstream"}
                rows.setdefault(name, {**row, "id": name})
        return [rows[name] for name in sorted(rows)]

    def close(self) -> None:
        """Close all idle connections."""
        for replica in self.replicas.values():
            replica.close()


def unknown_model(name: str) -> HttpError:
    """The error for a model that no upstream serves."""
    return HttpError(
        404,
        f"the model {name!r:.200} does not exist; GET /v1/models lists those that do",
        code="model-not-found",
        param="model",
    )
