"""The subject of a claim: its model and its hardware, or the nearest ones that exist, with a remark that says so."""

from __future__ import annotations

import re

from weft.checkpoint import lookup
from weft.checkpoint.architectures.model import Model
from weft.checkpoint.names import catalogue
from weft.checkpoint.quantised.precision import canonical
from weft.errors import ConfigError, ModelError
from weft.machine.hardware.cluster import Cluster, parse_cluster
from weft.machine.hardware.gpus import GpuSpec, find_gpu, generic_gpu, nearest_gpu

_PARAMETERS = re.compile(r"\d+(?:\.\d+)?b\b", re.IGNORECASE)


class Subject:
    """Finds models and cards by the names of a claim; `remarks` lists what was taken for something else."""

    def __init__(self, hf_token: str | None) -> None:
        self._token = hf_token
        self.remarks: list[str] = []

    def find_model(self, name: str) -> Model:
        """The model of a name, or one of the same size and nearly the same name. Raises ModelError, and ConfigError for
        a name that ends in an unknown precision."""
        try:
            return lookup.look_up(name, hf_token=self._token)
        except ModelError as error:
            if error.code != "unknown-model":
                raise
            model, _, last = name.rpartition(" ")
            if model and catalogue.find_known(model) is not None:
                canonical(last)  # raises
            near = self._nearest_model(name)
            if near is None:
                raise
            self.remarks.append(f"there is no {name}: judged as {near.name}")
            return near

    def _nearest_model(self, name: str) -> Model | None:
        size = {match.lower() for match in _PARAMETERS.findall(name)}
        alike = (
            near for near in catalogue.nearest(name) if size and size == {*map(str.lower, _PARAMETERS.findall(near))}
        )
        nearest = next(alike, None)
        return catalogue.find(nearest) if nearest else None

    def find_cluster(self, gpus: str) -> Cluster:
        """The cluster of a description in which a card may be a size of memory. Raises ConfigError."""
        return parse_cluster(gpus, find=self.find_gpu)

    def find_gpu(self, name: str) -> GpuSpec:
        """The card of a name, of a memory, or the nearest one with the memory that a name has. Raises ConfigError."""
        try:
            return generic_gpu(name) or find_gpu(name)
        except ConfigError as error:
            near = nearest_gpu(name)
            if near is None or error.code not in ("unknown-gpu", "gpu-of-other-size"):
                raise
            remark = f"there is no {name}: judged as {near.name}"
            if remark not in self.remarks:
                self.remarks.append(remark)
            return near
