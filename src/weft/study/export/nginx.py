"""nginx: a load balancer in front of the replicas, with TLS."""

from __future__ import annotations

from collections.abc import Sequence

from weft.study.export.deployment import Deployment
from weft.study.export.files import ExportFile
from weft.study.export.header import TargetRemarks, header_comment
from weft.study.export.hosts import node_address
from weft.study.export.pages import render_template
from weft.study.export.shell import Placeholder

READ_S = 600  # seconds without a byte: a response that is not streamed has none until it is complete
BODY_MIB = 32  # the default of ServeOptions.max_body_bytes for two million tokens; replicas refuse less
PLACEHOLDERS = (
    Placeholder("SERVER_NAME", "the name that clients call, as in llm.example.org"),
    Placeholder("CERTIFICATE", "path of the certificate with its chain"),
    Placeholder("CERTIFICATE_KEY", "path of its key"),
)


def nginx_files(deployment: Deployment) -> list[ExportFile]:
    """nginx's configuration, one file for conf.d."""
    several = len(deployment.question.cluster.nodes) > 1
    nodes = dict.fromkeys(server.node for server in deployment.servers)
    replace = [*PLACEHOLDERS, *(node_address(node) for node in nodes if several)]
    remarks = TargetRemarks(
        omitted_options(deployment), replace, ["put it into /etc/nginx/conf.d, then nginx -t and nginx -s reload"]
    )
    ends = [
        f"{node_address(server.node).name if several else '127.0.0.1'}:{server.port}" for server in deployment.servers
    ]
    return [ExportFile("nginx.conf", nginx_site(header_comment("nginx", deployment, remarks), ends))]


def nginx_site(heading: str, ends: Sequence[str], *, tls: bool = True) -> str:
    """The configuration for the replicas at `ends`; without `tls` it listens on port 80."""
    return render_template("nginx.conf.j2", heading=heading, ends=ends, tls=tls, read_s=READ_S, body_mib=BODY_MIB)


def omitted_options(deployment: Deployment) -> list[str]:
    """Limits of the balancer, in words."""
    omissions = [
        "retries of a request that a replica has received: a POST goes to the next replica only if no connection could "
        "be made, so that nothing runs twice; the client sees a broken stream as broken",
        "health checks: nginx notices a dead replica when it calls it, and then leaves it out for a while",
        "API keys: the Authorization header is passed on, and the replicas check it",
    ]
    if deployment.question.engine not in ("weft", "vllm"):
        omissions.append(f"the commands that start {deployment.question.engine}: the plan's ports are assumed")
    return omissions
