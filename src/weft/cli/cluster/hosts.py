"""weft cluster up, down and pull: an engine on the machines of a hosts.yaml, through ssh."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from weft.cli import hints
from weft.cli.commands import COMMANDS
from weft.cli.flags.cluster_flags import ClusterPullArguments, UpArguments
from weft.cli.flags.declared import Arguments
from weft.cli.flags.flags import engine_config
from weft.cli.parser import UsageError, full_spelling, parse_command, typed_flags
from weft.engine.cluster import remote
from weft.engine.cluster.hosts import HostsFile, check_model, read_hosts
from weft.engine.cluster.remote import ClusterLaunch
from weft.errors import ConfigError, printable

# Flags that weft cluster up gives itself, and flags whose value `ps` would show to everybody.
OURS = ("nnodes", "node-rank", "headless", "cluster-key-file", "cluster-cert-file", "config", "model")
FOLDER = "--download-dir="
SECRETS = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}


def _check_positional(command: str, positional: Sequence[str]) -> None:
    """Raise UsageError unless there is one hosts file; `cluster pull` takes a model in its place, or none."""
    pulls = command == "cluster pull"
    if len(positional) > 1 or not (positional or pulls):
        raise UsageError(
            f"weft {command} takes one {'model' if pulls else 'hosts file'}; for example: {COMMANDS[command].example}",
            code="hosts-missing",
        )


def main(arguments: Arguments) -> int:
    """Run one of the commands."""
    positional = arguments.argument
    _check_positional(arguments.command, positional)
    match arguments:
        case UpArguments():
            return up(read_hosts(positional[0]), arguments, positional[0])
        case ClusterPullArguments():
            return pull(arguments.hosts, *positional)
    return 0 if remote.bring_down(read_hosts(positional[0]), say) else 1


def pull(path: str, model: str = "") -> int:
    """Fetch a model, or the file's, on every machine of a file."""
    hosts = read_hosts(path)
    launch = create_pull(hosts, model or hosts.model, path, os.environ)
    return 0 if remote.pull_everywhere(hosts, launch, say) else 1


def say(line: str) -> None:
    print(printable(line), flush=True)


def up(hosts: HostsFile, arguments: UpArguments, path: str) -> int:
    """Start the engine, or print the commands."""
    launch = create_launch(hosts, arguments.model, path, os.environ)
    if arguments.dry_run:
        for line in remote.dry_run(hosts, launch):
            say(line)
        return 0
    url = remote.bring_up(hosts, launch, say)
    say(f"{launch.model} is served at {url}; weft cluster down {path} ends it")
    return 0


def create_launch(hosts: HostsFile, model: str, path: str, environment: Mapping[str, str]) -> ClusterLaunch:
    """The model and flags of a file, checked as weft serve checks them. Raises UsageError and ConfigError."""
    model = model or hosts.model
    if not model:
        raise ConfigError(f"{path} names no model; add model: NAME, or give --model", code="model-missing")
    flags = serve_flags(hosts, path)
    config = engine_config(parse_command(COMMANDS["serve"], [check_model(model), *flags]))
    if config.executor not in (None, "processes") and len(hosts.hosts) > 1:
        raise ConfigError(
            f"{path}: distributed-executor-backend is {config.executor}; several machines through ssh run processes",
            code="backend-with-hosts",
        )
    return ClusterLaunch(model=model, flags=tuple(flags), variables=passed_on(hosts, path, environment))


def create_pull(hosts: HostsFile, model: str, path: str, environment: Mapping[str, str]) -> ClusterLaunch:
    """The model to fetch, to where the file's engine looks for it. Raises as `create_launch`."""
    flags = [word for word in serve_flags(hosts, path) if word.startswith(FOLDER)]
    return ClusterLaunch(model=check_model(model), flags=tuple(flags), variables=passed_on(hosts, path, environment))


def passed_on(hosts: HostsFile, path: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a file passes on. Raises ConfigError for a variable that is not set."""
    missing = next((name for name in hosts.variables if name not in environment), None)
    if missing:
        raise ConfigError(f"{path} passes on {missing}, which is not set here; export it", code="variable-not-set")
    return {name: environment[name] for name in hosts.variables}


def serve_flags(hosts: HostsFile, path: str) -> list[str]:
    """The arguments of weft serve that the flags of a file make. Raises UsageError."""
    command = COMMANDS["serve"]
    flags = {flag.name: flag for flag in command.flags}
    argv: list[str] = []
    for key, value in hosts.serve.items():
        option = full_spelling(f"--{key}")
        name = option.removeprefix("--")
        if name in OURS:
            raise UsageError(
                f"{path}: serve has {key!r}, which weft cluster up sets itself: leave it out", code="flag-of-up"
            )
        if name in SECRETS:
            raise UsageError(
                f"{path}: serve has {key!r}, which ps would show there; set {SECRETS[name]} here instead, and list it "
                "under variables:",
                code="secret-in-flags",
            )
        flag = flags.get(name)
        if flag is None:
            raise UsageError(f"{path}: unknown flag {key!r}{hints.unknown_flag(command, option)}", code="unknown-flag")
        if value is not None:
            argv += typed_flags(flag, value, path)
    return argv
