"""Checks of all nodes of a cluster by `weft doctor` on each, and of what has to be alike on them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from weft.engine.cluster.agent import decode_doctor
from weft.engine.cluster.agent_messages import Examine, Examined, ProgressLine, TaskFailed
from weft.engine.cluster.hosts import HostsFile
from weft.engine.cluster.preflight import MAX_SKEW_S
from weft.engine.cluster.ray_cluster import connect, head_address
from weft.engine.cluster.ray_facts import way_out
from weft.engine.cluster.remote import conversations, failure, nodes_of
from weft.engine.cluster.ssh import SshNode
from weft.engine.executors.ray_calls import call_watched
from weft.engine.executors.ray_nodes import NODE_LABEL
from weft.machine.check import Check, Status

DOCTOR_S = 120.0  # seconds for the doctor of a Ray node, which may measure
VISIT_S = DOCTOR_S + 60  # for all nodes of Ray, at once; a machine that is busy takes long to start a task


class NodeCheck(msgspec.Struct, frozen=True):
    """A check of one node; the other fields are as in `Check`."""

    node: str
    name: str
    status: Status
    value: str
    limit: str = ""
    remedy: str = ""


class Visit(msgspec.Struct, frozen=True):
    """A node's answer. Its clock was read while ours went from `began_s` to `ended_s`."""

    examined: Examined
    began_s: float
    ended_s: float

    @property
    def skew_s(self) -> float:
        """Seconds by which the node's clock is ahead of ours, at least; below 0 if it is behind."""
        clock_s = self.examined.clock_s
        return min(0.0, clock_s - self.began_s) + max(0.0, clock_s - self.ended_s)


# By the node's name: its answer, or the check that failed because there is none.
Visits = Mapping[str, Visit | Check]


def visit_hosts(hosts: HostsFile, flags: Sequence[str]) -> Visits:
    """Visit the machines of a file through ssh, all at once, under the names that the file has for them.

    `flags` are extra arguments for `weft doctor`. Raises ConfigError without ssh.
    """
    nodes, began_s = nodes_of(hosts), time.time()
    visits: dict[SshNode, Visit | Check] = {}
    with conversations(dict.fromkeys(nodes, Examine(flags=tuple(flags)))) as (_, replies):
        while len(visits) < len(nodes):
            node, reply = next(replies)
            if node in visits or isinstance(reply, ProgressLine):
                continue
            if isinstance(reply, Examined):
                visits[node] = Visit(reply, began_s, time.time())
            else:
                visits[node] = _unreachable(str(failure(node, reply)).removeprefix(f"{node.label}: "))
    return {node.machine.host: visits[node] for node in nodes}


def visit_ray(environment: Mapping[str, str], flags: Sequence[str]) -> Visits:
    """Visit the nodes of the Ray cluster at RAY_ADDRESS, by a task on each, under their hosts' names.

    Raises ConfigError if no cluster answers.
    """
    ray = connect(environment, may_start=False)
    return call_watched(lambda: _visit_nodes(ray, flags), head_address(ray), VISIT_S)


def _visit_nodes(ray: Any, flags: Sequence[str]) -> Visits:
    task, began_s = ray.remote(_report_doctor), time.time()
    nodes = {f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})": node for node in ray.nodes() if node["Alive"]}
    answers = {
        name: task.options(num_cpus=0, max_retries=0, label_selector={NODE_LABEL: node["NodeID"]}).remote([*flags])
        for name, node in nodes.items()
    }
    return {name: _ray_visit(ray, answer, began_s) for name, answer in answers.items()}


def _ray_visit(ray: Any, answer: Any, began_s: float) -> Visit | Check:
    try:
        reply = msgspec.json.decode(ray.get(answer, timeout=DOCTOR_S), type=Examined | TaskFailed)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError, msgspec.DecodeError) as error:
        lines = str(error).strip().splitlines() or [f"no answer within {DOCTOR_S:g} s"]
        return _unreachable(f"{lines[-1]}; {way_out(error)}")
    return Visit(reply, began_s, time.time()) if isinstance(reply, Examined) else _unreachable(reply.reason)


def _report_doctor(flags: list[str]) -> bytes:
    """The answer of the node on which this task runs, as JSON."""
    argv = [sys.executable, "-P", "-m", "weft", "doctor", "--json", *flags]
    ran = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=DOCTOR_S)
    complaints = ran.stderr.decode("utf-8", "replace").strip().splitlines()
    return msgspec.json.encode(decode_doctor(ran.returncode, ran.stdout, complaints))


def _unreachable(reason: str) -> Check:
    """The failed check of a node without an answer. `reason` has the form "what; remedy"."""
    what, _, remedy = reason.partition("; ")
    return Check("reachable", "fail", what, "an answer of Weft there", remedy)


def node_checks(visits: Visits) -> Iterator[NodeCheck]:
    """All checks of all nodes; a node that has not answered has one, which fails with the reason."""
    answered = {node: visit for node, visit in visits.items() if isinstance(visit, Visit)}
    for node, visit in visits.items():
        if isinstance(visit, Check):
            checks = [visit]
        else:
            checks = [Check("reachable", "ok", "Weft answers"), *alike(visit, answered), *visit.examined.checks]
        for check in checks:
            yield NodeCheck(node, check.name, check.status, check.value, check.limit, check.remedy)


def alike(visit: Visit, answered: Mapping[str, Visit]) -> Iterator[Check]:
    """Checks of torch, compared with the first node that answered, and of the clock, compared with this machine."""
    first, wanted = next(iter(answered.items()))
    torch, other = visit.examined.torch, wanted.examined.torch
    if torch == other:
        yield Check("same-torch", "ok", torch or "not installed")
    else:
        remedy = f"pip install torch=={other} there" if other else f"pip install torch=={torch} on {first}"
        yield Check("same-torch", "fail", torch or "not installed", f"{other or 'none'} on {first}", remedy)
    skew_s, limit = visit.skew_s, f"{MAX_SKEW_S:.0f} s"
    value = f"{abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} this machine" if skew_s else "as here"
    if abs(skew_s) > MAX_SKEW_S:
        yield Check("clock", "fail", value, limit, "set it there: timedatectl set-ntp true")
    else:
        yield Check("clock", "ok", value, limit)
