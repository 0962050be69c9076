"""systemd: a service for each replica, and the socket that clients connect to."""

from __future__ import annotations

import re
from collections.abc import Mapping

from weft.study.export import hosts, weft_serve
from weft.study.export.deployment import Deployment, ReplicaServer
from weft.study.export.files import ExportFile
from weft.study.export.header import TargetRemarks, header_comment
from weft.study.export.shell import Value, flag_words

PROGRAM = "/opt/weft/.venv/bin/weft"
SETTINGS = "/etc/weft/weft.env"
MODEL = "${MODEL}"  # of the settings; systemd makes one word of it
STOP_S = 60  # the server gives running requests 30 seconds
# A user that exists while the service runs, who owns nothing but the cache of models and compiled kernels.
SANDBOX = """\
DynamicUser=yes
User=weft
CacheDirectory=weft
CacheDirectoryMode=0700
WorkingDirectory=%C/weft
Environment=HOME=%C/weft"""
RESTARTS = f"""\
KillMode=mixed
TimeoutStopSec={STOP_S}
Restart=on-failure
RestartSec=5
LimitNOFILE=65536
LimitMEMLOCK=infinity"""
PLAIN = re.compile(r"[\w./:@+,=-]+")


def systemd_files(deployment: Deployment) -> list[ExportFile]:
    """A service and a socket for each server."""
    remarks = TargetRemarks(
        weft_serve.omitted_options(deployment), deployment.checkpoint.placeholders, next_steps(deployment)
    )
    header = header_comment("systemd", deployment, remarks)
    files = []
    for server in deployment.servers:
        name = unit_name(deployment, server)
        files += [
            ExportFile(f"{name}.service", f"{header}\n\n{service_unit(deployment, server)}\n"),
            ExportFile(f"{name}.socket", f"{header}\n\n{socket_unit(deployment, server)}\n"),
        ]
    return files


def service_unit(deployment: Deployment, server: ReplicaServer) -> str:
    """The service of a server, whose address is its socket's."""
    name = unit_name(deployment, server)
    variables = hosts.visible_gpus(deployment, server, server.node)
    lines = [
        "[Unit]",
        f"Description=Weft, {title(deployment)}",
        f"Requires={name}.socket",
        f"After={name}.socket network-online.target",
        "Wants=network-online.target",
        "StartLimitIntervalSec=600",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=exec",
        *SANDBOX.splitlines(),
        *(f"Environment={quote(f'{key}={value}')}" for key, value in variables.items()),
        f"EnvironmentFile=-{SETTINGS}",
        f"ExecStart={start_command(deployment, server)}",
        *RESTARTS.splitlines(),
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines)


def socket_unit(deployment: Deployment, server: ReplicaServer) -> str:
    """The socket, which systemd opens before the service starts and keeps while it starts again."""
    host = "127.0.0.1" if len(deployment.nodes) == 1 else "0.0.0.0"
    lines = [
        "[Unit]",
        f"Description=Address of Weft, {title(deployment)}",
        "",
        "[Socket]",
        f"ListenStream={host}:{server.port}",
        "Backlog=2048",
        "",
        "[Install]",
        "WantedBy=sockets.target",
    ]
    return "\n".join(lines)


def start_command(deployment: Deployment, server: ReplicaServer) -> str:
    """Command line of a server with each flag on a line of its own."""
    names: Mapping[str, Value] = {"served-model-name": deployment.names}
    checkpoint = deployment.checkpoint
    model = quote(checkpoint.name) if checkpoint.name else MODEL
    flags = flag_words({**weft_serve.engine_flags(deployment, server), **names})
    return " \\\n    ".join([f"{PROGRAM} serve {model}", *(" ".join(map(quote, words)) for words in flags)])


def quote(word: str) -> str:
    """Quote a word so that systemd reads it unchanged (systemd.service(5), "Command lines")."""
    plain = word.replace("%", "%%").replace("$", "$$")
    if PLAIN.fullmatch(plain):
        return plain
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def title(deployment: Deployment) -> str:
    """The model's name in a description, in which % begins a variable."""
    return deployment.checkpoint.title.replace("%", "%%")


def unit_name(deployment: Deployment, server: ReplicaServer) -> str:
    """Name of a server's units, without .service and .socket."""
    return "weft" if len(deployment.servers) == 1 else f"weft-{server.number}"


def next_steps(deployment: Deployment) -> list[str]:
    """Next steps, in words."""
    names = [unit_name(deployment, server) for server in deployment.servers]
    steps = [
        f"{SETTINGS} (mode 600, root's) holds secrets as NAME=VALUE lines: VLLM_API_KEY, WEFT_ADMIN_KEY, HF_TOKEN, and "
        "the variables above",
        f"if weft is not {PROGRAM}, change ExecStart; the user weft exists only while the service runs, and has to be "
        "able to read that folder",
        "copy the units to /etc/systemd/system, then\n"
        f"systemctl daemon-reload\nsystemctl enable --now {' '.join(names)}",
        f"journalctl -u {names[0]} shows the log; clients that connect while the model loads wait",
    ]
    if len(deployment.nodes) > 1:
        homes = ", ".join(
            f"{name} on node {server.node}" for name, server in zip(names, deployment.servers, strict=True)
        )
        steps.append(f"each unit runs on its own node: {homes}")
    if len(names) > 1:
        steps.append("weft plan --emit nginx balances the ports")
    return steps
