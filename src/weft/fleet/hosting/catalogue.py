"""Catalogue: the models of an address by name, planned when they are first needed, and their rows in lists."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.api.ollama.details import NEVER, family_of, figures_of, local_row, size_label, timestamp
from weft.api.ollama.types import ModelDetails, ModelRow, RunningRow, ShowAnswer
from weft.checkpoint import lookup
from weft.checkpoint.architectures.model import Model
from weft.checkpoint.files import gguf, gguf_types
from weft.checkpoint.hub import local_models
from weft.checkpoint.hub.model_names import tagged
from weft.config import EngineConfig
from weft.errors import ModelError
from weft.fleet.hosting.hosted import Hosted
from weft.fleet.hosting.keeper import Keeper
from weft.fleet.hosting.model_set import ModelEntry, ModelSet
from weft.fleet.hosting.residency import State
from weft.fleet.hosting.set_plan import HOST, ModelPlan, SetPlan, plan_model
from weft.fleet.upstreams.fleet import Fleet, unknown_model
from weft.http.errors import HttpError
from weft.machine.hardware.cluster import Cluster

RELIST_S = 1.0  # seconds between two scans of the cache of fetched models
FETCHED_SHARERS = 2  # number of fetched models that share a CPU's memory for KV: so a model fits while another sleeps


def look_up_entry(entry: ModelEntry) -> Model:
    """The facts of a model of a set. Raises ModelError."""
    config = entry.config
    return lookup.look_up(config.model, revision=config.revision, hf_token=config.hf_token)


def fetched_models(keep_alive_s: float) -> ModelSet:
    """The models that `weft pull` has fetched, each loaded at its first request."""
    entries = tuple(
        ModelEntry(names=(model.name,), config=EngineConfig(model=model.name), keep_alive_s=keep_alive_s, always=False)
        for model in local_models.list_models()
    )
    return ModelSet(entries=entries, source="the models on this machine", grows=True, keep_alive_s=keep_alive_s)


class SetFleet(Fleet):
    """The processes of the models; fetched models have none before their first request."""

    catalogue: Catalogue

    def knows_model(self, model: str) -> bool:
        """Return True for a model of the set, whatever its state."""
        return self.catalogue.find(model) is not None


class Catalogue:
    """The models of an address. Models of a file are planned already; fetched ones with their first request."""

    def __init__(
        self,
        models: ModelSet,
        keeper: Keeper,
        cluster: Cluster,
        look_up: Callable[[ModelEntry], Model] = look_up_entry,
    ) -> None:
        self.models, self.keeper, self._cluster = models, keeper, cluster
        self._look_up = look_up
        self._facts: dict[str, Model] = {}
        self._planning = asyncio.Lock()
        self._listed_s = time.monotonic()
        self.created = int(time.time())

    def take_plan(self, plan: SetPlan) -> None:
        """Register the planned models of a file."""
        for model in plan.models:
            self.keeper.add(model)

    # Names

    def find(self, name: str) -> ModelEntry | None:
        """The model of a name; None for an unknown name."""
        entry = self.models.find(name)
        if entry is not None or not self.models.grows:
            return entry
        self.relist()
        entry = self.models.find(name)
        if entry is not None:
            return entry
        try:
            local = local_models.find_model(name)
        except ModelError:
            return None
        return self.models.find(local.name) if local is not None else None

    def relist(self) -> None:
        """Look for models that have been fetched or removed, at most once in RELIST_S."""
        now = time.monotonic()
        if self.models.grows and now - self._listed_s >= RELIST_S:
            self._listed_s = now
            self.models = fetched_models(self.models.keep_alive_s)

    def own_name(self, name: str) -> str:
        """The name of the model's process. Raises HttpError 404."""
        entry = self.find(name)
        if entry is None:
            raise unknown_model(name)
        return next((own for own in entry.names if tagged(own) == tagged(name)), entry.name)

    def only_name(self) -> str:
        """The name of the only model. Raises HttpError 400 if there are several."""
        if len(self.models.entries) != 1:
            raise HttpError(
                400, "several models are served here; name one: GET /v1/models lists them", code="model-missing"
            )
        return self.models.entries[0].name

    async def planned(self, name: str) -> Hosted:
        """The model, planned now if it was not. Raises HttpError 404, PlanError and ModelError."""
        entry = self.find(name)
        if entry is None:
            raise unknown_model(name)
        async with self._planning:
            if entry.name not in self.keeper.models:
                plan = await asyncio.to_thread(self._plan, entry)
                self.keeper.add(plan)
        return self.keeper.models[entry.name]

    def _plan(self, entry: ModelEntry) -> ModelPlan:
        """The plan of a fetched model, given the awake models."""
        tenants = self.keeper.residency.tenants
        taken = {
            device
            for name, hosted in tuple(self.keeper.models.items())
            if tenants[name].state not in (State.UNLOADED, State.ASLEEP)
            for device in hosted.plan.devices
        }
        return plan_model(entry, self.facts(entry), self._cluster, taken, sharers=FETCHED_SHARERS)

    def facts(self, entry: ModelEntry) -> Model:
        """The facts of a model, read once. Raises ModelError."""
        if entry.name not in self._facts:
            self._facts[entry.name] = self._look_up(entry)
        return self._facts[entry.name]

    def listed(self) -> list[tuple[str, ModelEntry]]:
        """Every name of every model that can answer, with its model."""
        self.relist()
        down = {name for name, hosted in self.keeper.models.items() if hosted.down}
        return [(name, entry) for entry in self.models.entries if entry.name not in down for name in entry.names]

    # Rows

    def model_row(self, name: str, entry: ModelEntry) -> dict[str, Any]:
        """One row of /v1/models: the row of the model's own server, if that has run."""
        hosted = self.keeper.models.get(entry.name)
        own = (hosted.member.replica.listed or {}).get(name) if hosted is not None else None
        row = {"object": "model", "created": self.created, "owned_by": "weft", "root": entry.config.model}
        return {"id": name, **(own or row)}

    def admin_row(self, entry: ModelEntry) -> dict[str, Any]:
        """One row of GET /admin/models: the state of a model, and its plan."""
        hosted = self.keeper.models.get(entry.name)
        if hosted is None:
            return {"names": list(entry.names), "model": entry.config.model, "state": State.UNLOADED.value}
        tenant, now = self.keeper.residency.tenants[entry.name], self.keeper.clock()
        plan = hosted.plan
        left_s = tenant.expires_s - now
        return {
            "names": list(entry.names),
            "model": entry.config.model,
            "state": tenant.state.value,
            "running": tenant.running,
            "waiting": len(hosted.waiters),
            "devices": list(plan.devices),
            "awake_bytes": dict(plan.need.awake),
            "asleep_bytes": dict(plan.need.asleep),
            "weight_bytes": plan.weight_bytes,
            "kv_bytes": plan.kv_bytes,
            "expires_in_s": round(left_s, 1) if math.isfinite(left_s) else None,
            "priority": entry.priority,
            "pid": hosted.member.pid,
            "load_s": hosted.load_s,
            "wake_s": hosted.wake_s,
            "failures": hosted.failures,
            "fault": str(hosted.fault) if hosted.fault is not None and hosted.failures else hosted.engine_fault or None,
        }

    def tag_rows(self) -> list[ModelRow]:
        """The rows of /api/tags."""
        if self.models.grows:
            return [local_row(model) for model in local_models.list_models()]
        return [self._tag_row(name, entry) for name, entry in self.listed()]

    def _tag_row(self, name: str, entry: ModelEntry) -> ModelRow:
        return ModelRow(
            name=tagged(name),
            model=tagged(name),
            modified_at=timestamp(self.created),
            size=self.keeper.models[entry.name].plan.weight_bytes,
            digest=_digest(entry),
            details=self.details(entry),
        )

    def details(self, entry: ModelEntry) -> ModelDetails:
        """Ollama's facts of a model. Raises ModelError."""
        model = self.facts(entry)
        family = family_of(model.shape)
        return ModelDetails(
            format="gguf" if _is_gguf(model) else "safetensors",
            family=family,
            families=[family],
            parameter_size=size_label(model.params),
            quantization_level=model.precision.upper(),
        )

    def running_rows(self) -> list[RunningRow]:
        """The rows of /api/ps: the models that are awake, and until when."""
        rows = []
        for name, entry in self.listed():
            hosted = self.keeper.models.get(entry.name)
            if hosted is not None and self.keeper.residency.tenants[entry.name].state is State.AWAKE:
                rows.append(self._running_row(name, entry, hosted))
        return rows

    def _running_row(self, name: str, entry: ModelEntry, hosted: Hosted) -> RunningRow:
        tenant, now = self.keeper.residency.tenants[entry.name], self.keeper.clock()
        stays_s = entry.keep_alive_s if tenant.stays_s is None else tenant.stays_s
        left_s = stays_s if tenant.running else tenant.expires_s - now
        awake = hosted.plan.need.awake
        listed = (hosted.member.replica.listed or {}).get(name, {})
        return RunningRow(
            name=tagged(name),
            model=tagged(name),
            size=sum(awake.values()),
            digest=_digest(entry),
            details=self.details(entry),
            expires_at=timestamp(time.time() + left_s) if math.isfinite(left_s) else NEVER,
            size_vram=sum(size for device, size in awake.items() if device != HOST),
            context_length=listed.get("max_model_len") or self.facts(entry).shape.longest,
        )

    def show(self, name: str) -> ShowAnswer:
        """The answer of /api/show, without waking the model. Raises HttpError 404 and ModelError."""
        entry = self.find(name)
        if entry is None:
            raise unknown_model(name)
        model = self.facts(entry)
        return ShowAnswer(
            modelfile=f"# served by Weft\nFROM {tagged(name)}\n",
            parameters="",
            template="",
            details=self.details(entry),
            model_info=figures_of(model.shape),
            capabilities=["completion"],
            modified_at=timestamp(self.created),
        )


def _digest(entry: ModelEntry) -> str:
    """A hash by which clients tell models apart; the files themselves are not hashed."""
    return hashlib.sha256(f"{entry.config.model}:{entry.flags}".encode()).hexdigest()


def _is_gguf(model: Model) -> bool:
    """Return True for a model of a GGUF file, also if it is given as a folder or a name without a suffix."""
    path = Path(model.source)
    return model.precision in gguf_types.MIXES or (path.is_file() and gguf.is_gguf(path))
