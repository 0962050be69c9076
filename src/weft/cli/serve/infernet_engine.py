"""weft-infernet-engine: a model behind standard input and output, for Infernet's INFERNET_ENGINE_BIN.

It takes no arguments, since a node gives none. WEFT_ENGINE_ARGS has the model and flags of `weft serve`'s engine;
INFERNET_ENGINE_MODEL the model if that names none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.cli.flags.command_flags import ServeArguments
    from weft.config import EngineConfig
    from weft.engine.client.async_llm import AsyncLLM
    from weft.engine.frontend.outputs import RequestOutput

VARIABLE, MODEL = "WEFT_ENGINE_ARGS", "INFERNET_ENGINE_MODEL"
INTERRUPTED = 130


def main() -> int:
    """Run the engine; return 0 after `shutdown` or the end of the input, 1 for an error, 2 for wrong flags."""
    from weft.cli import dispatch, streams

    try:
        streams.settle()
        write = take_standard_output()
        if len(sys.argv) > 1:
            return dispatch.fail(f"weft-infernet-engine takes no arguments; put flags into {VARIABLE}", 2)
        return serve_pipe(write)
    except KeyboardInterrupt:
        return INTERRUPTED


def take_standard_output() -> int:
    """Descriptor of the node's pipe; what anything else prints goes to standard error from now on."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    return pipe


def serve_pipe(pipe: int) -> int:
    """Serve with the flags of the environment, with events on `pipe`."""
    from weft import logs
    from weft.api.server.standard_streams import StreamEngine
    from weft.cli import dispatch
    from weft.errors import WeftError

    logs.configure("INFO")
    try:
        arguments, config = read_environment(os.environ)
    except WeftError as error:
        engine = StreamEngine(_no_model, lambda data: write_all(pipe, data))
        engine.emit("error", message=str(error))  # the node shows it
        return dispatch.report(error)
    return asyncio.run(serve(arguments, config, pipe))


async def _no_model(name: str) -> Any:
    raise NotImplementedError(name)


def read_environment(environment: Mapping[str, str]) -> tuple[ServeArguments, EngineConfig]:
    """The flags in WEFT_ENGINE_ARGS, and the config of the engine; its model is "" if none is named.

    Raises UsageError and ConfigError.
    """
    from weft.cli.commands import COMMANDS
    from weft.cli.flags.flags import engine_config
    from weft.cli.parser import UsageError, parse_command

    try:
        argv = shlex.split(environment.get(VARIABLE, ""))
    except ValueError as error:
        raise UsageError(f"{VARIABLE} cannot be split into words: {error}", code="invalid-flag-value") from None
    # The server's flags are known too: of these the names count, and the others have nothing to act on.
    arguments: ServeArguments = parse_command(COMMANDS["serve"], argv)
    if not arguments.model and environment.get(MODEL):
        arguments = arguments.with_model(environment[MODEL])
    return arguments, engine_config(arguments, model="")


async def serve(arguments: ServeArguments, config: EngineConfig, pipe: int) -> int:
    """Serve standard input until its end, `shutdown`, SIGTERM or Ctrl-C."""
    from weft.api.server.standard_streams import StreamEngine

    async def load(name: str) -> ChatModel:
        return await ChatModel.load(name, config, arguments.server.served_model_name)

    engine = StreamEngine(load, lambda data: write_all(pipe, data), config.model or None)
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    if task is not None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError, BrokenPipeError):  # a signal; the node has gone
        await engine.serve_lines(input_lines())
    return 0


async def input_lines() -> AsyncIterator[bytes]:
    """Lines of standard input, until its end."""
    from weft.api.server.standard_streams import LINE_BYTES, bounded_lines

    reader = asyncio.StreamReader(LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in bounded_lines(reader):
        yield line


def write_all(pipe: int, data: bytes) -> None:
    """Write all of an event."""
    while data:
        data = data[os.write(pipe, data) :]


class ChatModel:
    """A model in an engine of its own, for `StreamEngine`."""

    def __init__(self, llm: AsyncLLM, names: tuple[str, ...]) -> None:
        self._llm, self.names = llm, names

    @classmethod
    async def load(cls, name: str, config: EngineConfig, names: tuple[str, ...]) -> ChatModel:
        """Start an engine for a model; `names` are further ones of the configured model. Raises WeftError."""
        from weft.checkpoint.hub import model_names
        from weft.engine.client.async_llm import AsyncLLM

        aliases = names if config.model else ()
        model = config.model if name in aliases else model_names.full_name(name, folder=config.download_dir)
        llm = AsyncLLM.from_config(replace(config, model=model))
        try:
            await llm.start()
        except BaseException:
            await llm.shutdown()
            raise
        known = (name, *aliases, model) if model == config.model or name in aliases else (name, model)
        return cls(llm, tuple(dict.fromkeys(known)))

    async def chat(
        self, messages: list[dict[str, Any]], sampling: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `LoadedModel.chat`."""
        params = self._llm.sampling_params({**sampling}, max_tokens=None)
        async for output in self._llm.chat(messages, params):
            yield output

    async def close(self) -> None:
        """See `LoadedModel.close`."""
        await self._llm.shutdown()
