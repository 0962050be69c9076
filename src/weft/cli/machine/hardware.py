"""weft hardware: this machine's GPUs and CPU, their links and speeds, and the processes that use GPU memory."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec

from weft.cli.flags.hardware_flags import HardwareArguments
from weft.cli.flags.plan_flags import DescribedHardware, Hardware
from weft.cli.parser import UsageError
from weft.errors import ConfigError
from weft.machine.hardware import hardware_file, host
from weft.machine.hardware.cluster import Cluster
from weft.machine.hardware.host import Host
from weft.probes import stored_speeds
from weft.probes.machine import host_cluster
from weft.probes.stored_speeds import Speeds
from weft.study.measure import links

logger = logging.getLogger("weft.cli")


def main(arguments: HardwareArguments) -> int:
    """Print this machine, or the hardware of the flags, as tables, JSON or a hardware file."""
    described = arguments.described
    check_hardware_flags(arguments)
    if is_described(described):
        from weft.cli.plan_question import described_cluster

        cluster = described_cluster(Hardware(**msgspec.structs.asdict(described)))
        if arguments.json:
            print(json.dumps(hardware_file.cluster_fields(cluster)))
        else:
            print(hardware_file.hardware_yaml(cluster), end="")
        return 0
    here = host.probe_host()
    measured = machine_speeds(here, measure=arguments.measure, refresh=arguments.refresh_hardware)
    if arguments.json:
        print(json.dumps(machine_json(here, measured)))
    elif arguments.yaml:
        print(hardware_file.hardware_yaml(planned_machine(here, measured)), end="")
    else:
        from weft.cli.machine.hardware_view import print_machine

        print_machine(here, measured)
    return 0


def check_hardware_flags(arguments: HardwareArguments) -> None:
    """Raise UsageError for flags that contradict each other."""
    if arguments.json and arguments.yaml:
        raise UsageError("--json and --yaml are two formats of the same answer; give one of them", code="json-and-yaml")
    if not arguments.refresh_hardware:
        return
    if is_described(arguments.described):
        raise UsageError(
            "--refresh-hardware measures this machine, but --gpus and --nodes describe other hardware",
            code="refresh-of-other-hardware",
        )
    if not arguments.measure:
        raise UsageError(
            "--refresh-hardware measures this machine, but --no-measure measures nothing",
            code="refresh-without-measuring",
        )


def is_described(hardware: DescribedHardware) -> bool:
    """Return True if the flags describe hardware other than this machine."""
    return hardware != DescribedHardware()


def machine_speeds(here: Host, *, measure: bool, refresh: bool) -> Speeds:
    """Speeds from the cache; with `measure`, missing ones are measured now, and with `refresh` all.

    A measurement that is not possible is logged and left out.
    """
    measured = stored_speeds.load_speeds(here)
    if not measure:
        return measured
    try:
        measured = msgspec.structs.replace(measured, cpu=stored_speeds.cpu_speed_of(here, refresh=refresh))
        if here.gpus and (refresh or len(measured.gpus) < len(here.gpus)):
            logger.warning("measuring copies between the GPUs; this takes up to a minute, or longer if a link hangs")
            gpus, pairs = links.measure_links(here)
            measured = msgspec.structs.replace(measured, gpus=gpus, pairs=pairs)
            stored = stored_speeds.load_speeds(here)
            stored_speeds.store_speeds(here, msgspec.structs.replace(stored, gpus=gpus, pairs=pairs))
    except ConfigError as error:
        logger.warning("%s", error)
    return measured


def planned_machine(here: Host, measured: Speeds) -> Cluster:
    """This machine as `weft plan` sees it. Raises ConfigError if there is no GPU and the CPU was not measured."""
    if not here.gpus and measured.cpu is None:
        raise ConfigError("the CPU's speed is not known; leave --no-measure out", code="cpu-speed-unknown")
    return host_cluster(here, measured)


def machine_json(here: Host, measured: Speeds) -> dict[str, Any]:
    """The machine as JSON: sizes in bytes, speeds in bytes per second.

    `hardware` has the format of a hardware file; it is None if too little is known.
    """
    planned = None
    if here.gpus or measured.cpu:
        try:
            planned = hardware_file.cluster_fields(planned_machine(here, measured))
        except ConfigError as error:
            logger.warning("weft plan cannot plan for this machine: %s", error)
    return {
        "host": msgspec.to_builtins(here),
        "speeds": msgspec.to_builtins(measured),
        "hardware": planned,
    }
