"""LLM called by several threads at once, and how its engine ends under them."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.cpu import tiny
from tests.refusals import refuses
from weft import LLM, RequestOutput, SamplingParams
from weft.engine.core.step import StepPlan, StepResult
from weft.engine.executors.ranks import CLOSED
from weft.errors import Cause, EngineError, RequestError

WAIT_S = 60
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": 512,
    "kv_cache_memory_bytes": 2**24,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
PROMPTS = ["a", "bc", "def", "ghij", "k", "lm"]

T = TypeVar("T")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **ENGINE, max_num_seqs=8, max_num_queued_reqs=2) as made:
        yield made


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def in_threads(*calls: Callable[[], T]) -> list[Future[T]]:
    """The calls, begun together, each in a thread; ended, one way or the other, in bounded time."""
    ready = threading.Barrier(len(calls))

    def begin(call: Callable[[], T]) -> T:
        ready.wait(WAIT_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(begin, call) for call in calls]
        for future in futures:
            future.exception(WAIT_S)
    return futures


def at_rest(llm: LLM) -> bool:
    stats = llm.stats()
    return (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


def test_threads_share_the_steps_and_get_what_they_get_alone(llm: LLM) -> None:
    alone = [ids(llm.generate(prompt, GREEDY)) for prompt in PROMPTS]
    before = llm.stats().steps
    together = in_threads(*(lambda p=prompt: ids(llm.generate(p, GREEDY)) for prompt in PROMPTS))
    assert [future.result() for future in together] == alone
    assert llm.stats().steps - before < 40 * len(PROMPTS) / 2  # one after the other they take 40 each
    assert at_rest(llm)


async def test_asyncio_may_gather_generate_in_threads(llm: LLM) -> None:
    alone = [ids(llm.generate(prompt, GREEDY)) for prompt in PROMPTS]
    async with asyncio.timeout(WAIT_S):
        gathered = await asyncio.gather(*(asyncio.to_thread(llm.generate, prompt, GREEDY) for prompt in PROMPTS))
    assert [ids(outputs) for outputs in gathered] == alone and at_rest(llm)


def test_a_long_list_does_not_keep_others_out(llm: LLM) -> None:
    """More than the queue holds; runs take turns in it."""
    short = SamplingParams(temperature=0.0, max_tokens=1)
    ended: list[str] = []

    def ask(name: str, count: int, params: SamplingParams) -> None:
        llm.generate([[97, 98]] * count, params)
        ended.append(name)

    stream = llm.stream("a", LONG)
    next(stream)  # the engine is at work before either comes
    in_threads(lambda: ask("many", 60, GREEDY), lambda: ask("one", 1, short))
    stream.close()
    assert ended == ["one", "many"] and at_rest(llm)


def test_callers_do_not_affect_each_other(llm: LLM) -> None:
    """Its mistakes, an interrupt, a stream that it leaves."""
    alone = ids(llm.generate("a", GREEDY))

    def interrupted() -> None:
        def bar(**given: Any) -> Any:
            raise KeyboardInterrupt

        llm.generate(["b", "c"], LONG, use_tqdm=bar)

    def left() -> None:
        for _ in llm.stream("d", LONG):
            break

    def wrong() -> None:
        llm.generate([9999], GREEDY)

    good, *others = in_threads(lambda: ids(llm.generate("a", GREEDY)), interrupted, left, wrong)
    assert good.result() == alone
    assert [type(other.exception()) for other in others] == [KeyboardInterrupt, type(None), RequestError]
    assert at_rest(llm)


def test_ctrl_c_ends_the_main_threads_requests_alone(llm: LLM) -> None:
    """The other thread's request goes on, and gets all of its tokens."""
    executor: Any = llm._engine and llm._engine._executor
    submit, steps = executor.submit, iter(range(10**6))

    def interrupting(step: StepPlan) -> Future[StepResult]:
        if next(steps) == 20:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return submit(step)  # type: ignore[no-any-return]

    alone = ids(llm.generate("a", LONG))
    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "submit", interrupting)
        other = pool.submit(llm.generate, "a", LONG)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["b", "c"], LONG)
        assert ids(other.result(WAIT_S)) == alone
    assert at_rest(llm)


def test_a_stream_cannot_be_awaited_and_says_what_can(llm: LLM) -> None:
    async def wrong() -> None:
        async for _ in llm.stream("a", GREEDY):  # type: ignore[attr-defined]
            pass

    with pytest.raises(TypeError, match="AsyncLLM"):
        asyncio.run(wrong())
    assert at_rest(llm)


def test_a_callers_garbage_is_kept_for_the_length_of_a_call_only(llm: LLM) -> None:
    class Node:
        me: Node

    node = Node()
    node.me = node
    gone = weakref.ref(node)
    frozen: list[int] = []

    def bar(**given: Any) -> Any:
        class Bar:
            def update(self, n: int) -> None:
                frozen.append(gc.get_freeze_count())

            def close(self) -> None: ...

        return Bar()

    del node
    gc.unfreeze()  # what was frozen once the tests were collected
    try:
        llm.generate(["a", "b"], [GREEDY, LONG], use_tqdm=bar)
        assert frozen[0] > 10_000 and gc.get_freeze_count() == 0
        gc.collect()
        assert gone() is None
        gc.freeze()  # the caller's own
        before = gc.get_freeze_count()
        llm.generate("a", GREEDY)
        assert gc.get_freeze_count() > before / 2
    finally:
        gc.freeze()


# How it ends


def test_shutdown_from_another_thread_ends_everybody(folder: Path) -> None:
    llm = LLM(folder, **ENGINE)
    begun = threading.Event()

    def stream() -> None:
        for _ in llm.stream("a", LONG):
            begun.set()

    def shut() -> None:
        assert begun.wait(WAIT_S)
        llm.shutdown()

    calls = [lambda: llm.generate(["a"] * 300, LONG), lambda: llm.generate("b", LONG)]
    *failed, ended, again = in_threads(*calls, stream, shut, shut)
    for future in failed:
        assert isinstance(error := future.exception(), EngineError | RequestError)
        assert error.code == "engine-closed"
    assert ended.exception() is None and again.exception() is None
    assert repr(llm) == f"<LLM {str(folder)!r}: shut down>"
    with refuses(RequestError, "engine-closed"):
        llm.generate("a")


FALLEN = Cause(rank=0, phase="step", code="card-lost", cause="the card fell out")


def test_every_caller_of_an_engine_that_dies_gets_the_cause(folder: Path) -> None:
    with LLM(folder, **ENGINE) as llm:
        executor: Any = llm._engine and llm._engine._executor
        stream = llm.stream("a", LONG)
        next(stream)
        calls = [lambda: llm.generate(["a"] * 300, LONG), lambda: list(stream)]
        dying = threading.Timer(0.2, executor._fail, [FALLEN])
        dying.start()
        for future in in_threads(*calls):
            assert isinstance(error := future.exception(), EngineError)
            assert error.cause == FALLEN
        dying.join()
        for ask in (lambda: llm.generate("a"), llm.stats):
            with refuses(EngineError, "card-lost"):
                ask()
        assert "the card fell out" in repr(llm)


def test_an_idle_engine_that_dies_is_known_to_the_next_caller(folder: Path) -> None:
    with LLM(folder, **ENGINE) as llm:
        executor: Any = llm._engine and llm._engine._executor
        executor._fail(FALLEN)
        with refuses(EngineError, "card-lost"):
            llm.generate("a", GREEDY)


def test_a_program_that_forgets_to_shut_down_ends(folder: Path) -> None:
    """With a stream that nobody closes, and a daemon thread whose answer has hardly begun."""
    program = (
        "import sys, threading, weft\n"
        f"llm = weft.LLM({str(folder)!r}, **{ENGINE!r})\n"
        "long = weft.SamplingParams(max_tokens=500, ignore_eos=True)\n"
        "threading.excepthook = lambda failure: print(failure.exc_value)\n"
        "threading.Thread(target=llm.generate, args=(['a'] * 300, long), daemon=True).start()\n"
        "stream = llm.stream('a', long)\n"
        "next(stream)\n"
        "sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.strip() in ("", str(CLOSED))


def test_a_repr_tells_model_layout_and_device(llm: LLM, folder: Path) -> None:
    told = "tensor_parallel_size=1, pipeline_parallel_size=1, cpu, float32, max_model_len=512"
    assert repr(llm) == f"<LLM {str(folder)!r}: {told}>"
