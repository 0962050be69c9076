"""vLLM's HTTP server over an engine that answers at once: `vllm_end.py PORT FOLDER`, in vLLM's environment.

The engine's process and the messages to it are left out; tokenizing, detokenizing and metrics are vLLM's own.
FOLDER has a tokenizer and a config.json.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[4]))

from scripts.programs.bench.front_ends.load import SAID


class InstantCore:
    """In the place of AsyncMPClient: each step brings every running request a token."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False, engine_manager=None)

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        self._ids = AutoTokenizer.from_pretrained(folder).encode(SAID)
        self._running: dict[str, tuple[int, int]] = {}  # tokens so far, and those wanted
        self._awake = asyncio.Event()

    async def add_request_async(self, request: Any) -> None:
        self._running[request.request_id] = (0, request.sampling_params.max_tokens)
        self._awake.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for id in request_ids:
            self._running.pop(id, None)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def get_output_async(self) -> Any:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        while not self._running:
            self._awake.clear()
            await self._awake.wait()
        await asyncio.sleep(0)
        outputs, going = [], {}
        for id, (count, most) in self._running.items():
            ended = count + 1 == most
            token = self._ids[count % len(self._ids)]
            outputs.append(EngineCoreOutput(id, [token], finish_reason=FinishReason.LENGTH if ended else None))
            if not ended:
                going[id] = (count + 1, most)
        ended_ids = self._running.keys() - going.keys()
        self._running = going
        return EngineCoreOutputs(outputs=outputs, finished_requests=ended_ids or None)

    async def reset_mm_cache_async(self) -> None: ...

    def shutdown(self, timeout: float | None = None) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the engine that answers at once has no {name}")


def main(port: str, folder: str) -> None:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.core_client import EngineCoreClient

    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: InstantCore(folder))
    words = ["--model", folder, "--served-model-name", "demo", "--host", "127.0.0.1", "--port", port]
    words += ["--max-model-len", "2048", "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    uvloop.run(run_server(make_arg_parser(FlexibleArgumentParser()).parse_args(words)))


if __name__ == "__main__":
    main(*sys.argv[1:])
