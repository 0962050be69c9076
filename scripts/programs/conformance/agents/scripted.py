"""Weft's HTTP server over a model that follows a script: `python -m ...agents.scripted PORT MAX_MODEL_LEN`.

A task in the conversation, "weft-task ID turns N cut K", has the model call the agent's shell N times, one call a turn,
and then say that it is done. Its K-th call is cut once, as by max_tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parents[4]))

from scripts.programs.bench.front_ends.weft_end import InstantEngine
from weft.api.server import server
from weft.api.service.service import Service
from weft.config import EngineConfig
from weft.engine.core.request import FinishReason, Output, Request
from weft.engine.frontend.frontend import Frontend
from weft.engine.replicas.opening import open_model
from weft.engine.text.tokenizer import Tokenizer
from weft.http import listen
from weft.http.admission import ConnectionLimits
from weft.http.options import ServeOptions

TASK = re.compile(r"weft-task (\w+) turns (\d+) cut (\d+)")
RESULT = "<tool_response>"  # by which the demo's template shows what a tool has said
# The shells of agents and their arguments: Claude Code, opencode, Codex in three of its forms.
SHELLS: dict[str, Callable[[str], dict[str, Any]]] = {
    "Bash": lambda command: {"command": command, "description": "Say a word"},
    "bash": lambda command: {"command": command, "description": "Say a word"},
    "exec_command": lambda command: {"cmd": command},
    "shell_command": lambda command: {"command": command},
    "shell": lambda command: {"command": ["bash", "-c", command]},
    "local_shell": lambda command: {"command": ["bash", "-c", command]},
}
CAPACITY = 64


class Script:
    """Says what the conversation so far asks for. It remembers which calls it has cut."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cut: set[str] = set()

    def __call__(self, request: Request) -> Iterator[Output]:
        """The outputs of one request, a token each."""
        text, cut = self.answer(self._tokenizer.decode(list(request.prompt), skip_special_tokens=False))
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        most = min(len(ids) + 1, request.params.max_tokens or sys.maxsize)
        ended = [*ids[: 3 * len(ids) // 4]] if cut else [*ids, min(self._tokenizer.end_ids)][:most]
        for at, token in enumerate(ended):
            last = at + 1 == len(ended)
            reason: FinishReason = "length" if cut or token not in self._tokenizer.end_ids else "stop"
            yield Output(request.id, [token], [None], reason if last else None)

    def answer(self, prompt: str) -> tuple[str, bool]:
        """The answer to a prompt, and whether it is to be cut."""
        tasks = list(TASK.finditer(prompt))
        shell = next((name for name in SHELLS if f'"name": "{name}"' in prompt), None)
        if not tasks or shell is None:
            return "A short talk", False
        task = tasks[-1]
        id, turns, cut = task[1], int(task[2]), int(task[3])
        done = prompt.count(RESULT, task.end())
        if done >= turns:
            return f"done {id} {done}", False
        arguments = SHELLS[shell](f"echo {id}-{done + 1}")
        text = f"<tool_call>\n{json.dumps({'name': shell, 'arguments': arguments})}\n</tool_call>"
        cuts = done + 1 == cut and id not in self._cut
        if cuts:
            self._cut.add(id)
        return text, cuts


async def serve(port: int, max_model_len: int) -> None:
    """Serve until the process is killed."""
    checkpoint, tools = open_model(EngineConfig(model="demo"))
    assert tools.tokenizer is not None
    script = Script(tools.tokenizer)

    def outputs(request: Request) -> Iterable[Output]:
        return script(request)

    shape = checkpoint.shape
    front = Frontend(vocab=shape.vocab, max_model_len=max_model_len, eos=shape.eos, text_tools=tools)
    options = ServeOptions(port=port, host="127.0.0.1", clip_max_tokens=True)
    service = Service(InstantEngine(outputs), front, options, model="demo", capacity=CAPACITY)
    with listen.bind(options) as listener:
        made = server.ServingServer(service, listener, asyncio.Event().wait, ConnectionLimits())
        listen.start_listening(listener, options)
        await made.serve(sockets=[listener])


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
