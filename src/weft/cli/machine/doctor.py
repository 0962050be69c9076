"""weft doctor: check this machine before something fails."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from weft.cli.flags.command_flags import DoctorArguments
from weft.cli.machine.hardware import machine_speeds
from weft.cli.tables import console
from weft.machine.check import Check, checks_json
from weft.machine.hardware import host, nvml
from weft.machine.hardware.gpu_figures import GpuFigures, GpuSampler
from weft.machine.hardware.host import Host
from weft.monitor.gpu_checks import check_gpus
from weft.monitor.machine_checks import check_machine
from weft.monitor.processes import own_processes
from weft.monitor.security_checks import check_security

if TYPE_CHECKING:
    from weft.engine.cluster.examination import NodeCheck

AnyCheck: TypeAlias = "Check | NodeCheck"

MARKS = {"ok": "ok     ", "warn": "warning", "fail": "FAILED ", "skipped": "skipped"}

STYLES = {"ok": "green", "warn": "bold yellow", "fail": "bold red", "skipped": "grey62"}


def main(arguments: DoctorArguments) -> int:
    """Print the checks; return 1 if one fails."""
    checks: tuple[AnyCheck, ...]
    if arguments.nodes or arguments.hosts is not None:
        checks = nodes_checks(arguments.hosts, security=arguments.security, measure=arguments.measure)
    else:
        checks = tuple(security_checks() if arguments.security else all_checks(measure=arguments.measure))
    answer = checks_json(checks)
    if arguments.json:
        print(json.dumps(answer))
    else:
        from rich.text import Text

        out = console()
        for line in check_lines(checks):
            text = Text(line)
            for status, mark in MARKS.items():
                text.highlight_regex(f"^{mark.strip()}", STYLES[status])
            out.print(text, soft_wrap=True)
    return 0 if answer["ok"] else 1


def all_checks(*, measure: bool) -> Iterator[Check]:
    """Every check except the security checks. With `measure`, speeds that are not in the cache are measured."""
    here = host.probe_host()
    figures, cuda = driver_figures(here)
    yield from check_machine(here, tuple(own_processes()))
    yield from check_gpus(here, machine_speeds(here, measure=measure, refresh=False), figures, cuda)


def security_checks() -> Iterator[Check]:
    """The checks of security."""
    yield from check_security(tuple(own_processes()))


def nodes_checks(hosts: str | None, *, security: bool, measure: bool) -> tuple[NodeCheck, ...]:
    """The checks of every machine of a hosts file; without one, of the Ray cluster at RAY_ADDRESS, or of hosts.yaml.

    Raises ConfigError.
    """
    from weft.engine.cluster.examination import node_checks, visit_hosts, visit_ray
    from weft.engine.cluster.hosts import read_hosts

    flags = [flag for flag, given in (("--security", security), ("--no-measure", not measure)) if given]
    if hosts is None and os.environ.get("RAY_ADDRESS"):
        return tuple(node_checks(visit_ray(os.environ, flags)))
    return tuple(node_checks(visit_hosts(read_hosts(hosts or "hosts.yaml"), flags)))


def driver_figures(here: Host) -> tuple[Sequence[GpuFigures], str | None]:
    """Live figures of the GPUs, and the highest CUDA version of the driver, such as "12.8"."""
    with nvml.open_nvml() as driver:
        if driver is None or not here.gpus:
            return (), None
        version = nvml.ask_driver(driver, driver.nvmlSystemGetCudaDriverVersion_v2, default=0)
        supported = f"{version // 1000}.{version % 1000 // 10}" if version else None
        return GpuSampler(driver, here.gpus).sample(), supported


def check_lines(checks: Iterable[AnyCheck]) -> Iterator[str]:
    """A line for each check, and a second one with the remedy; each node's name comes before its checks."""
    before = None
    for check in checks:
        node = getattr(check, "node", None)
        if node != before:
            before = node
            yield f"{node}:"
        limit = f" (limit: {check.limit})" if check.limit and check.status in ("warn", "fail") else ""
        yield f"{MARKS[check.status]}  {check.name}: {check.value}{limit}"
        if check.remedy:
            yield f"         {check.remedy}"
