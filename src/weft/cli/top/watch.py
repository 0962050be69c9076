"""Sources of `weft top`: the servers behind the URLs and gateways that it is given, and this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from weft.api.service.run_files import running_servers
from weft.errors import ConfigError
from weft.machine.hardware import host, nvml
from weft.machine.hardware.gpu_figures import GpuSampler
from weft.machine.hardware.host import Host
from weft.monitor.figures import describe_gpu
from weft.monitor.gpus import sample_moments
from weft.study.bench.http import HttpClient, HttpFailure, HttpRefusal, ServerAddress

PATIENCE_S = 5.0  # for one answer; the next snapshot tries again
KEY_MISSING = "invalid_api_key"
ADMIN_KEY_MISSING = ("invalid_admin_key", "admin_key_unset")

Kind = Literal["gateway", "server"]


class TopSnapshot(NamedTuple):
    """Figures of each server and of this machine, their sum as JSON, and a line for each URL without figures."""

    servers: list[tuple[str, dict[str, Any]]]
    figures: dict[str, Any]
    problems: list[str]
    cores: dict[int, float]


class Target:
    """A server or gateway at a URL. Keys are sent to URLs that the user gave only, the admin key to gateways only."""

    def __init__(self, url: str, api_key: str | None = None, admin_key: str | None = None) -> None:
        self.url = url
        self._clients = {False: self._client(api_key), True: self._client(admin_key)}
        self._admin_key = admin_key
        self._kind: Kind | None = None

    def _client(self, key: str | None) -> HttpClient:
        return HttpClient(ServerAddress(self.url, {"Authorization": f"Bearer {key}"} if key else None))

    async def upstreams(self) -> list[str] | None:
        """The upstreams of a gateway; None for a server. Raises HttpFailure."""
        if self._kind == "server":
            return None
        try:
            status = json.loads(await self._get("/gateway/status"))
        except HttpRefusal as error:
            code = refusal_code(error)
            if code in ADMIN_KEY_MISSING:
                if not self._admin_key:
                    raise HttpFailure("a gateway that needs WEFT_ADMIN_KEY", code="admin-key-missing") from None
                status = json.loads(await self._get("/gateway/status", admin=True))
            else:
                self._kind = "server" if error.status == 404 else None
                return None
        except ValueError:
            return None
        self._kind = "gateway"
        return [row["url"] for row in status["upstreams"]]

    async def figures(self) -> dict[str, Any]:
        """The figures of a server. Raises HttpFailure."""
        try:
            figures = json.loads(await self._get("/monitor"))
        except HttpRefusal as error:
            if refusal_code(error) == KEY_MISSING:
                raise HttpFailure(
                    "needs a key: give its URL with --url, and VLLM_API_KEY", code="key-missing"
                ) from None
            raise
        except ValueError:
            raise HttpFailure("its answer is not JSON", code="not-json") from None
        if not isinstance(figures, dict) or not {"nodes", "models", "ranks", "diagnosis"} <= figures.keys():
            raise HttpFailure("it has no figures: it is another kind of server", code="no-figures")
        return figures

    async def _get(self, path: str, *, admin: bool = False) -> bytes:
        try:
            return await asyncio.wait_for(self._clients[admin].get(path), PATIENCE_S)
        except TimeoutError:
            self._kind = None
            raise HttpFailure(f"no answer within {PATIENCE_S:g} s", code="no-answer") from None
        except HttpRefusal:
            raise
        except HttpFailure:
            self._kind = None  # another kind of server may come back
            raise

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()


def refusal_code(error: HttpRefusal) -> str:
    """Code of a refusal in OpenAI's shape; "" for another body."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(error.body)["error"]["code"])
    return ""


class ServerWatch:
    """The servers at the URLs, or of this user on this machine if there are none."""

    def __init__(self, urls: Sequence[str], api_key: str | None, admin_key: str | None) -> None:
        self._given = tuple(urls)
        self._api_key, self._admin_key = api_key, admin_key
        self._targets: dict[str, Target] = {}
        self._seen: set[str] = set()  # while the servers are asked

    async def snapshot(self) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
        """Figures by URL, and a line for each URL that gave none."""
        urls = self._given or await asyncio.to_thread(local_urls)
        self._seen = set[str]()
        answers = await asyncio.gather(*(self._look_at(url) for url in dict.fromkeys(urls)))
        servers: dict[str, dict[str, Any]] = {}
        problems: list[str] = []
        for figures, lines in answers:
            servers |= figures
            problems += lines
        for url in self._targets.keys() - self._seen:
            self._targets.pop(url).close()
        return list(servers.items()), problems

    async def _look_at(self, url: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Figures and problems of a server, or of all upstreams of a gateway."""
        try:
            target = self._target(url, given=url in self._given)
            upstreams = await target.upstreams()
            if upstreams is None:
                return {url: await target.figures()}, []
        except (HttpFailure, ConfigError, KeyError, TypeError) as error:
            return {}, [f"{url}: {error}"]
        figures: dict[str, dict[str, Any]] = {}
        problems = []
        answers = await asyncio.gather(*map(self._upstream, upstreams))
        for upstream, answer in zip(upstreams, answers, strict=True):
            if isinstance(answer, str):
                problems.append(f"{upstream} (of {url}): {answer}")
            else:
                figures[upstream] = answer
        return figures, problems

    async def _upstream(self, url: str) -> dict[str, Any] | str:
        if url.startswith("unix:"):
            return "a model of a set, which only the set may ask for figures; weft ps shows its state"
        try:
            return await self._target(url, given=url in self._given).figures()
        except (HttpFailure, ConfigError) as error:
            return str(error)

    def _target(self, url: str, *, given: bool) -> Target:
        self._seen.add(url)
        if url not in self._targets:
            keys = (self._api_key, self._admin_key) if given else (None, None)
            self._targets[url] = Target(url, *keys)
        return self._targets[url]

    def close(self) -> None:
        """Close all connections."""
        for target in self._targets.values():
            target.close()


def local_urls() -> tuple[str, ...]:
    """URLs of this user's servers on this machine."""
    return tuple(server.url for server in running_servers())


class LocalMachine:
    """This machine: its GPUs, or without any the use of its cores."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._host: Host | None = None
        self._sampler: GpuSampler | None = None
        self._ticks: dict[int, tuple[int, int]] = {}
        self.cores: dict[int, float] = {}

    def sample(self) -> dict[str, Any]:
        """The node as a server describes it. Also sets `cores`: the share of its time that each core has worked since
        the last sample."""
        if self._host is None:
            self._host = host.probe_host()
            driver = self._stack.enter_context(nvml.open_nvml()) if self._host.gpus else None
            self._sampler = GpuSampler(driver, self._host.gpus) if driver is not None else None
        moments = [] if self._sampler is None else sample_moments(self._sampler, self._sampler.sample())
        ticks = core_ticks()
        self.cores = {
            core: (busy - before[0]) / (whole - before[1])
            for core, (busy, whole) in ticks.items()
            if (before := self._ticks.get(core)) and whole > before[1]
        }
        self._ticks = ticks
        return {"node": self._host.hostname, "gpus": [describe_gpu(moment, []) for moment in moments]}

    def close(self) -> None:
        """End the session of the driver."""
        self._stack.close()


def core_ticks(root: Path = Path("/")) -> dict[int, tuple[int, int]]:
    """Clock ticks of each core since the start of the machine: of work, and in all. Empty outside Linux."""
    try:
        lines = (root / "proc/stat").read_text().splitlines()
    except OSError:
        return {}
    return dict(_core_line(line.split()) for line in lines if line.startswith("cpu") and line[3:4].isdigit())


def _core_line(words: Sequence[str]) -> tuple[int, tuple[int, int]]:
    ticks = [int(word) for word in words[1:9]]
    idle = ticks[3] + ticks[4]  # idle, iowait
    return int(words[0][3:]), (sum(ticks) - idle, sum(ticks))


def rows_of_servers(snapshot: TopSnapshot, key: str) -> list[tuple[str, dict[str, Any]]]:
    """The rows under `key` of all servers, each with the URL of its server."""
    return [(url, row) for url, figures in snapshot.servers for row in figures[key]]


def each_gpu(figures: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Node and figures of every GPU."""
    for node in figures["nodes"]:
        yield from ((node["node"], gpu) for gpu in node["gpus"])
