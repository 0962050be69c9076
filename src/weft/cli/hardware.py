"""weft hardware: what this machine has, how it is joined, how fast it is, and who holds its memory."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from typing import Any

import msgspec

from weft.cli.parser import UsageError
from weft.errors import ConfigError
from weft.hardware import hardware_file, host
from weft.hardware.cluster import Cluster
from weft.hardware.host import Host
from weft.probes import links, speeds
from weft.probes.machine import host_cluster
from weft.probes.speeds import Speeds

logger = logging.getLogger("weft.cli")


def main(arguments: Namespace) -> int:
    """Print what there is, or what the flags describe, as tables, JSON or a hardware file."""
    said = vars(arguments)
    as_json, as_yaml = said.get("json", False), said.get("yaml", False)
    if as_json and as_yaml:
        raise UsageError("--json and --yaml are two forms of one answer; give one of them")
    described = any(name in said for name in ("gpus", "nodes", "network"))
    measure, refresh = said.get("measure", True), said.get("refresh_hardware", False)
    if refresh and (described or not measure):
        other = "--gpus and --nodes describe another" if described else "--no-measure measures nothing"
        raise UsageError(f"--refresh-hardware measures this machine, {other}; give one of them")
    if described:
        from weft.cli.plan import hardware

        there = hardware(said)
        if as_json:
            print(json.dumps(hardware_file.cluster_fields(there)))
        else:
            print(hardware_file.hardware_yaml(there), end="")
        return 0
    here = host.probe_host()
    found = known(here, measure=measure, refresh=refresh)
    if as_json:
        print(json.dumps(as_told(here, found)))
    elif as_yaml:
        print(hardware_file.hardware_yaml(cluster(here, found)), end="")
    else:
        from weft.cli.hardware_view import print_machine

        print_machine(here, found)
    return 0


def known(here: Host, *, measure: bool, refresh: bool) -> Speeds:
    """What the cache knows, and what it lacks or (`refresh`) all of it measured now. A measurement that is not possible
    is told, and left out."""
    found = speeds.load_speeds(here)
    if not measure:
        return found
    try:
        found = msgspec.structs.replace(found, cpu=speeds.known_cpu_speed(here, refresh=refresh))
        if here.gpus and (refresh or len(found.gpus) < len(here.gpus)):
            logger.warning("trying out how the GPUs copy; a minute at most, longer where a link hangs")
            gpus, pairs = links.measure_links(here)
            found = msgspec.structs.replace(found, gpus=gpus, pairs=pairs)
            speeds.store_speeds(here, msgspec.structs.replace(speeds.load_speeds(here), gpus=gpus, pairs=pairs))
    except ConfigError as error:
        logger.warning("%s", error)
    return found


def cluster(here: Host, found: Speeds) -> Cluster:
    """What `weft plan` plans for here. Raises ConfigError where the CPU was not measured."""
    if not here.gpus and found.cpu is None:
        raise ConfigError("the CPU's speed is not known; leave --no-measure out")
    return host_cluster(here, found)


def as_told(here: Host, found: Speeds) -> dict[str, Any]:
    """All that was found; sizes are bytes, speeds bytes per second, `hardware` is as in the file, None where it is not
    known well enough."""
    planned = None
    if here.gpus or found.cpu:
        try:
            planned = hardware_file.cluster_fields(cluster(here, found))
        except ConfigError as error:
            logger.warning("weft plan cannot plan for this machine: %s", error)
    return {
        "host": msgspec.to_builtins(here),
        "speeds": msgspec.to_builtins(found),
        "hardware": planned,
    }
