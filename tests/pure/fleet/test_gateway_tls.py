"""Certificates of the gateway, and upstreams found in DNS."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.pure.gateways import gateway, upstream
from tests.pure.servers import PATIENCE_S, Exchange
from tests.pure.worlds import World
from tests.refusals import refuses
from weft.api.server.server import ServingServer
from weft.errors import ConfigError
from weft.fleet.upstreams.watches import DnsWatch
from weft.http import certificate as certificate_files
from weft.http import listen
from weft.http.admission import ConnectionLimits
from weft.http.certificate import validity_fault
from weft.http.options import ServeOptions

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")


def certificate(folder: Path, name: str, *dates: str) -> tuple[str, str]:
    """Files of a new certificate for localhost and its key; `dates` are its first and last."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key)]
    subprocess.run([*command, "-out", str(cert), "-days", "2"], check=True, capture_output=True)
    if dates:  # `req` knows no dates in the past
        request = folder / f"{name}.csr"
        subprocess.run(
            ["openssl", "req", "-new", "-key", str(key), "-subj", f"/CN={name}", "-out", str(request)], check=True
        )
        database, serial = folder / "index", folder / "serial"
        database.write_text("")
        serial.write_text("01")
        config = folder / "ca.cnf"
        config.write_text(
            f"[ca]\ndefault_ca=d\n[d]\ndatabase={database}\nserial={serial}\nnew_certs_dir={folder}\n"
            "default_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n"
        )
        command = ["openssl", "ca", "-batch", "-selfsign", "-config", str(config), "-in", str(request)]
        command += ["-keyfile", str(key), "-out", str(cert), "-notext", "-startdate", dates[0], "-enddate", dates[1]]
        subprocess.run(command, check=True, capture_output=True)
    return str(cert), str(key)


@needs_openssl
def test_the_dates_of_a_certificate(tmp_path: Path) -> None:
    assert validity_fault(*certificate(tmp_path, "good")) == ""
    expired = certificate(tmp_path, "old", "20200101000000Z", "20210101000000Z")
    assert validity_fault(*expired) == "has expired"
    early = certificate(tmp_path, "early", "20990101000000Z", "20991231000000Z")
    assert validity_fault(*early) == "is not valid yet"
    with refuses(ConfigError, "ssl-certificate-dates", expired[0], "expired"):
        listen.check_tls(ServeOptions(ssl_certfile=expired[0], ssl_keyfile=expired[1]))


@needs_openssl
async def test_a_new_certificate_while_streams_run(tmp_path: Path) -> None:
    files = certificate(tmp_path, "first")
    go_on = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        exchange.stream()
        exchange.event({"number": 0})
        await exchange.writer.drain()
        await go_on.wait()
        exchange.event(b"[DONE]")
        exchange.end()

    async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return await asyncio.open_connection("127.0.0.1", port, ssl=context)

    def shown(writer: asyncio.StreamWriter) -> str:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return ssl.DER_cert_to_PEM_cert(der).strip()

    async with upstream() as one, gateway(one.url, ssl_certfile=files[0], ssl_keyfile=files[1]) as live:
        one.answer = slow
        request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
        streams = [await connect(live.address[1]) for _ in range(20)]
        first = shown(streams[0][1])
        for reader, writer in streams:
            writer.write(request)
            await asyncio.wait_for(reader.readuntil(b"data: "), PATIENCE_S)

        def replace(text: str) -> None:
            for path, content in zip(files, (text, text), strict=True):
                Path(path).write_text(content)
                os.utime(path, ns=(len(text), len(text)))

        replace("not a certificate")
        live.server.reload_certificate()
        reader, writer = await connect(live.address[1])
        assert shown(writer) == first
        writer.close()
        second = certificate(tmp_path, "second")
        for old, new in zip(files, second, strict=True):
            shutil.copy(new, old)
        live.server.reload_certificate()
        reader, writer = await connect(live.address[1])
        assert shown(writer) == Path(second[0]).read_text().strip() != first
        writer.close()
        go_on.set()
        for reader, writer in streams:
            rest = await asyncio.wait_for(reader.read(), PATIENCE_S)
            assert b"data: [DONE]" in rest
            writer.close()
        live.assert_idle()


@needs_openssl
async def test_a_server_s_certificate_is_renewed_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_files, "RENEW_S", 0.01)
    for refresh in (True, False):
        files, other = certificate(tmp_path, "first"), certificate(tmp_path, "other")
        world = World(ssl_certfile=files[0], ssl_keyfile=files[1], enable_ssl_refresh=refresh)
        with listen.bind(ServeOptions(port=0)) as listener:
            server = ServingServer(world.service, listener, asyncio.Event().wait, ConnectionLimits())
            listen.start_listening(listener, world.service.options)
            running = asyncio.create_task(server.until_ended())
            address = listener.getsockname()[:2]
            first = await asyncio.to_thread(ssl.get_server_certificate, address)
            for old, new in zip(files, other, strict=True):
                shutil.copy(new, old)
            await asyncio.sleep(0.2)
            now = await asyncio.to_thread(ssl.get_server_certificate, address)
            server.leave()
            await running
        assert (now.strip() == Path(other[0]).read_text().strip() != first.strip()) == refresh


async def test_upstreams_are_the_addresses_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: list[str] = []

    async def getaddrinfo(host: str, port: int, **how: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    async with gateway(discover={"dns": "http://replicas.example:8000/base"}) as live:
        watch, fleet = live.proxy.watch, live.proxy.fleet
        assert isinstance(watch, DnsWatch) and not fleet.replicas
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        addresses[:] = ["10.0.0.2", "10.0.0.1", "10.0.0.1"]
        await watch.look()
        assert list(fleet.replicas) == ["http://10.0.0.1:8000/base", "http://10.0.0.2:8000/base"]
        kept = fleet.replicas["http://10.0.0.2:8000/base"]
        addresses[:] = ["10.0.0.2", "fd00::1"]
        await watch.look()
        assert list(fleet.replicas) == ["http://10.0.0.2:8000/base", "http://[fd00::1]:8000/base"]
        addresses.clear()
        await watch.look()  # no answer changes nothing
        assert fleet.replicas["http://10.0.0.2:8000/base"] is kept and len(fleet.replicas) == 2


async def test_dns_of_https_is_refused() -> None:
    with refuses(ConfigError, "dns-not-http"):
        async with gateway(discover={"dns": "https://replicas.example"}):
            pass
