"""`weft cluster up`, `down` and `pull` on the machines of a hosts.yaml: all nodes at once, each through its agent."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from queue import SimpleQueue

import msgspec

from weft.engine.cluster.agent import write_private
from weft.engine.cluster.agent_messages import (
    AnyTask,
    Ended,
    Fetched,
    Leave,
    ProgressLine,
    Pull,
    Ready,
    Reply,
    Start,
    Started,
    Stop,
    Stopped,
    TaskFailed,
)
from weft.engine.cluster.hosts import HostsFile
from weft.engine.cluster.ssh import Conversation, Gone, SshNode
from weft.engine.processes.keys import load_key, make_key
from weft.engine.processes.tls import load_certificate
from weft.errors import ConfigError, WeftError, error_reason

GRACE_S = 10.0  # seconds for a node to end by itself after the head
TERM_S = 40.0  # seconds for a server to end its requests
KEY_FILE = "KEYFILE"  # in commands that are only printed
Say = Callable[[str], None]
Talk = Iterator[tuple[SshNode, Reply | Gone]]


class RemoteError(WeftError):
    """A node on which a command could not be done."""


class ClusterLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """A model, the flags of weft serve or weft pull, and variables for its environment on all nodes."""

    model: str
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = {}


def nodes_of(hosts: HostsFile) -> list[SshNode]:
    return [SshNode(number, machine) for number, machine in enumerate(hosts.hosts)]


def serve_arguments(hosts: HostsFile, launch: ClusterLaunch, node: int) -> tuple[str, ...]:
    """Words after `weft serve` for a node, without the file of the key."""
    argv = [launch.model, *launch.flags]
    if len(hosts.hosts) == 1:
        return tuple(argv)
    argv += ["--nnodes", str(len(hosts.hosts)), "--node-rank", str(node)]
    if not any(flag.startswith("--master-addr=") for flag in launch.flags):
        argv += ["--master-addr", hosts.hosts[0].host]
    return (*argv, "--headless") if node else tuple(argv)


def start_task(hosts: HostsFile, launch: ClusterLaunch, node: SshNode, key: str, certificate: str = "") -> Start:
    gpus = node.machine.visible_gpus
    return Start(
        name=hosts.name,
        node=node.number,
        argv=serve_arguments(hosts, launch, node.number),
        key=key,
        certificate=certificate,
        environment=launch.variables | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}),
    )


def dry_run(hosts: HostsFile, launch: ClusterLaunch) -> list[str]:
    """The commands of `bring_up` as lines for a shell, without any secret."""
    lines = []
    for node in nodes_of(hosts):
        gpus = node.machine.visible_gpus
        argv = [node.machine.python, "-P", "-m", "weft", "serve", *serve_arguments(hosts, launch, node.number)]
        if len(hosts.hosts) > 1:
            argv += ["--cluster-key-file", KEY_FILE]
        if hosts.certificates:
            argv += ["--cluster-cert-file", "CERTIFICATE"]
        shown = [f"{name}=..." for name in launch.variables]  # a value may be a secret
        shown += [] if gpus is None else [f"CUDA_VISIBLE_DEVICES={gpus}"]
        lines += [f"# {node.label}:", shlex.join(node.command()), "# which starts there:"]
        lines.append(" ".join([*shown, shlex.join(argv)]))
    return lines


def own_key(hosts: HostsFile) -> str:
    """The cluster key of a file's engine: read from its key file, which is made with mode 0600 if it is missing.

    "" for one node. Raises ConfigError.
    """
    if len(hosts.hosts) == 1:
        return ""
    path = Path(hosts.key_file)
    try:
        write_private(path, make_key() + "\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(
            f"cannot write the cluster key {path}: {error_reason(error)}; set key_file in the hosts file",
            code="cannot-write-cluster-key",
        ) from None
    return load_key(str(path), {}, len(hosts.hosts)).decode()


def node_certificate(hosts: HostsFile, node: int) -> str:
    """The text of a node's certificate and key, "" without certificates. Raises ConfigError."""
    if not hosts.certificates:
        return ""
    return load_certificate(str(Path(hosts.certificates) / f"node{node}.pem"))


def bring_up(hosts: HostsFile, launch: ClusterLaunch, say: Say) -> str:
    """Start the engine on all nodes, and wait until it answers requests; return its URL.

    Engines that run already are left alone and reported. If a node fails, or runs an engine of other flags under this
    name, the engines that have been started are ended again. Raises RemoteError and ConfigError.
    """
    key = own_key(hosts)
    tasks = {
        node: start_task(hosts, launch, node, key, node_certificate(hosts, node.number)) for node in nodes_of(hosts)
    }
    with conversations(tasks) as (talks, replies):
        url = _await_ready(replies, say, len(tasks))
        for talk in talks:
            talk.send(Leave())
    return url


def _await_ready(replies: Talk, say: Say, count: int) -> str:
    """The head's URL, once every node's server runs and the head's is ready."""
    running, url = 0, ""
    for node, reply in replies:
        match reply:
            case Started():
                running += 1
                _say_started(node, reply, say)
            case ProgressLine(line):
                say(f"{node.label}: {line}")
            case Ready():
                url = reply.url
            case Ended(line):
                raise RemoteError(f"{node.label}: the server has ended: {line}", code="node-ended")
            case _:
                raise failure(node, reply)
        if url and running == count:
            return url
    raise AssertionError("the replies end with Gone")


def _say_started(node: SshNode, reply: Started, say: Say) -> None:
    if not reply.was_running:
        say(f"{node.label}: started, process {reply.pid}, log {reply.log}")
        return
    if not reply.same:
        raise RemoteError(
            f"{node.label}: runs another engine under this name, with other flags or variables, as process "
            f"{reply.pid}, log {reply.log}; weft cluster down ends it, or give the hosts file another name:",
            code="other-engine",
        )
    say(f"{node.label}: runs already, process {reply.pid}, log {reply.log}")


def bring_down(hosts: HostsFile, say: Say) -> bool:
    """End the engine on all nodes, the head first; return False if that has failed on one. Raises ConfigError."""
    done = True
    nodes = nodes_of(hosts)
    for some, grace_s in ((nodes[:1], 0.0), (nodes[1:], GRACE_S)):
        tasks = {node: Stop(name=hosts.name, node=node.number, grace_s=grace_s, term_s=TERM_S) for node in some}
        done &= _run_each(tasks, say, _stopped_line)
    return done


def _stopped_line(reply: Reply) -> str:
    match reply:
        case Stopped(None):
            return "nothing runs"
        case Stopped(pid, killed):
            return f"stopped process {pid}" + (", which had to be killed" if killed else "")
    return ""


def pull_everywhere(hosts: HostsFile, launch: ClusterLaunch, say: Say) -> bool:
    """Fetch a model on all nodes, with lines of progress; return False if that has failed on one."""
    pull = Pull(model=launch.model, flags=launch.flags, environment=launch.variables)
    tasks = dict.fromkeys(nodes_of(hosts), pull)
    return _run_each(tasks, say, lambda reply: f"fetched: {reply.path}" if isinstance(reply, Fetched) else "")


def _run_each(tasks: Mapping[SshNode, AnyTask], say: Say, describe: Callable[[Reply], str]) -> bool:
    """Run a task on each node until its end; return False if one has failed.

    `describe` returns a line for the reply that ends the task, and "" for any other.
    """
    waiting, done = set(tasks), True
    with conversations(tasks) as (_, replies):
        while waiting:
            node, reply = next(replies)
            if node not in waiting:
                continue
            if isinstance(reply, ProgressLine):
                say(f"{node.label}: {reply.line}")
                continue
            waiting.discard(node)
            line = "" if isinstance(reply, Gone) else describe(reply)
            done &= bool(line)
            say(f"{node.label}: {line}" if line else str(failure(node, reply)))
    return done


def failure(node: SshNode, reply: Reply | Gone) -> RemoteError:
    """The error for an answer with which a task has not been done."""
    match reply:
        case Gone():
            return RemoteError(f"{node.label}: {node.reason(reply)}", code="node-unreachable")
        case TaskFailed(reason):
            return RemoteError(f"{node.label}: {reason}", code="node-failed")
    return RemoteError(f"{node.label}: unexpected answer {type(reply).__name__}", code="node-failed")


@contextmanager
def conversations(tasks: Mapping[SshNode, AnyTask]) -> Iterator[tuple[Sequence[Conversation], Talk]]:
    """Conversations with all nodes at once, and their replies as they come. On leaving, all are ended."""
    came: SimpleQueue[tuple[SshNode, Reply | Gone]] = SimpleQueue()
    with ExitStack() as open_talks:
        talks = [
            open_talks.enter_context(closing(Conversation(node, task, lambda *reply: came.put(reply))))
            for node, task in tasks.items()
        ]
        # Left in the order in which it was entered last: all inputs end before the first is waited for.
        for talk in talks:
            open_talks.callback(talk.end_input)
        yield talks, iter(came.get, None)
