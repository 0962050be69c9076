"""`scripts/bench streams`: tokens/s of streams of two `weft serve` behind the gateway and nginx, in turns.

One JSON object on standard output; status 1 if the gateway's median is below SHARE of nginx's. nginx has to be there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from scripts.programs.soak.processes import MODEL, ServerProcess, StartError, free_port, weft_process
from scripts.programs.soak_gateway.requests import read_events

SHARE = 0.95
NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream replicas {{ least_conn; {servers} keepalive 64; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


def main() -> int:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="weft-streams-") as folder:
        report = asyncio.run(measure(arguments, Path(folder)))
    print(json.dumps(report, indent=1))
    return 0 if report["share"] >= SHARE else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench streams", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo", help="model of the replicas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=16, metavar="N", help="of a turn (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="clients (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of an answer (default: %(default)s)")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of weft serve, behind --")
    return parser.parse_args()


async def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Tokens/s of every turn, and the gateway's share. Raises StartError."""
    replicas = [weft_process(f"weft{at}", given.model, given.flags, folder) for at in (0, 1)]
    proxies = [nginx_process([replica.port for replica in replicas], folder), gateway_process(replicas, folder)]
    try:
        await asyncio.gather(*(replica.start() for replica in replicas))
        for proxy in proxies:
            await proxy.start("/v1/models")
            await tokens_per_s(proxy.url, given)  # warms up what is made once
        turns: dict[str, list[float]] = {proxy.name: [] for proxy in proxies}
        for turn in range(given.rounds):
            for proxy in proxies if turn % 2 else reversed(proxies):  # a machine may be getting faster all the while
                turns[proxy.name].append(round(await tokens_per_s(proxy.url, given), 2))
    finally:
        await asyncio.gather(*(process.end() for process in (*proxies, *replicas)))
    share = median(turns["gateway"]) / median(turns["nginx"])
    return {"model": given.model, "tokens_per_s": turns, "share": round(share, 4), "goal": SHARE}


def nginx_process(ports: list[int], folder: Path) -> ServerProcess:
    """nginx before servers of this machine. Raises StartError if it is not installed."""
    program = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if program is None:
        raise StartError("nginx is not installed; install it, as in: apt-get install nginx-light")
    port, file = free_port(), folder / "nginx.conf"
    servers = " ".join(f"server 127.0.0.1:{each};" for each in ports)
    file.write_text(NGINX.format(folder=folder, port=port, servers=servers))
    return ServerProcess("nginx", port, [program, "-c", str(file)], folder / "nginx.out")


def gateway_process(replicas: list[ServerProcess], folder: Path) -> ServerProcess:
    """The gateway before the same servers, with the policy that nginx has."""
    port = free_port()
    words = [word for replica in replicas for word in ("--upstream", replica.url)]
    command = [sys.executable, "-m", "weft", "gateway", "--port", str(port), *words]
    return ServerProcess("gateway", port, command, folder / "gateway.log")


async def tokens_per_s(url: str, given: argparse.Namespace) -> float:
    """Stream chats with answers of a fixed length, and divide their tokens by the time."""
    left = iter(range(given.requests))

    async def one(client: httpx.AsyncClient) -> None:
        for number in left:
            fields = {"max_tokens": given.tokens, "ignore_eos": True, "stream": True, "temperature": 0.0}
            messages = [{"role": "user", "content": f"Count from {number} on."}]
            received = b""
            async with client.stream(
                "POST", "/v1/chat/completions", json={"model": MODEL, "messages": messages, **fields}
            ) as answer:
                async for piece in answer.aiter_raw():
                    received += piece
            _, ends, error = read_events(received)
            if answer.status_code != 200 or ends != 1 or error:
                raise StartError(f"{url} answers {answer.status_code}: {error or received[-300:]!r}")

    began = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=600.0) as client:
        await asyncio.gather(*(one(client) for _ in range(given.concurrency)))
    return float(given.requests * given.tokens / (time.monotonic() - began))


if __name__ == "__main__":
    sys.exit(main())
