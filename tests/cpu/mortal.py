"""A program with an engine, for others to kill: `python mortal.py executor|forker|engine WORKER MODEL TENSOR STAGES`.

It prints "started" once the engine runs, and "failed: ..." where what it asked for fails.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from fake_worker import make_plan, make_step

from weft.config import EngineConfig
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Request
from weft.engine.core.token_ids import TokenIds
from weft.engine.executors.processes import ProcessExecutor
from weft.engine.replicas.remote import AsyncEngine
from weft.errors import EngineError
from weft.plan.plan import Plan


def executor(plan: Plan, worker: str) -> None:
    executor = ProcessExecutor(worker)
    executor.start(plan)
    print("started", flush=True)
    executor.submit(make_step(0, [1])).result()


def forker(plan: Plan, worker: str) -> None:
    ProcessExecutor(worker).start(plan)
    if pid := os.fork():
        print("fork", pid, flush=True)
    time.sleep(600)


async def engine(plan: Plan, worker: str) -> None:
    engine = await AsyncEngine.start(plan, EngineConfig(model=plan.model), worker)
    print("started", flush=True)
    try:
        async for _ in engine.submit(
            [Request(id="0", prompt=TokenIds.pack([1, 2]), params=SamplingParams(max_tokens=3))]
        ):
            pass
    finally:
        await engine.close()


if __name__ == "__main__":
    kind, worker, model, tensor, stages = sys.argv[1:]
    plan = make_plan(model, tensor=int(tensor), stages=int(stages))
    try:
        match kind:
            case "executor":
                executor(plan, worker)
            case "forker":
                forker(plan, worker)
            case "engine":
                asyncio.run(engine(plan, worker))
    except EngineError as error:
        print(f"failed: {error.code}: {error}", flush=True)
