"""AsyncLLM, on small random weights, its engine in processes of its own."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.cpu import tiny
from tests.cpu.families import family
from tests.refusals import refuses
from weft import AsyncLLM, RequestOutput, SamplingParams
from weft.errors import ConfigError, EngineError, ModelError, RequestError

WAIT_S = 60
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": 512,
    "kv_cache_memory_bytes": 2**24,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("models") / "tiny")


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    async with asyncio.timeout(WAIT_S):
        outputs = [output async for output in stream]
    return outputs[-1]


async def test_answers_grow_together_and_alone_alike(folder: Path) -> None:
    """One engine for all that goes well: a start takes seconds."""
    async with AsyncLLM(folder, **ENGINE) as llm:
        lengths = [len(output.outputs[0].token_ids) async for output in llm.generate("a", GREEDY)]
        assert lengths == list(range(1, 41))
        assert "tensor_parallel_size=1" in repr(llm) and str(folder) in repr(llm)
        tokenizer = (await llm._ready()).frontend.tokenizer
        assert "longest_token" in vars(tokenizer)  # no prompt was long: computed at the start

        prompts: list[Any] = ["a", [98, 99], {"prompt": "def"}, "ghij", "k", "lm"]
        alone = [(await last(llm.generate(prompt, GREEDY))).outputs[0].token_ids for prompt in prompts]
        before = llm.stats.steps
        together = await asyncio.gather(*(last(llm.generate(prompt, GREEDY)) for prompt in prompts))
        assert [output.outputs[0].token_ids for output in together] == alone
        assert llm.stats.steps - before < 40 * len(prompts) / 2
        assert len({output.request_id for output in together}) == len(prompts)

        loud = await last(llm.chat(HI, GREEDY, chat_template_kwargs={"shout": True}))
        assert loud.prompt == "<bos><s>user:hi<e><s>assistant:LOUD"
        talk = await last(llm.chat(HI, GREEDY, "mine"))
        assert talk.request_id == "mine"
        stop = talk.outputs[0].text[3:5]
        response, turns = await llm.chat("hi", system="", temperature=0.0, max_tokens=40, ignore_eos=True)
        assert response == talk.outputs[0].text and turns == [("hi", response)]
        again, longer = await llm.chat(query="hi", history=turns, max_tokens=1)
        assert longer == [*turns, ("hi", again)] and len(turns) == 1
        cut = await last(llm.chat(HI, SamplingParams(temperature=0.0, max_tokens=40, stop=stop)))
        assert cut.finished and cut.outputs[0].stop_reason == stop
        await check_aborts(llm)
        await check_mistakes(llm)
        many = [last(llm.generate("a", SamplingParams(max_tokens=1))) for _ in range(1100)]
        assert all(output.finished for output in await asyncio.gather(*many))  # more than a server's queue holds
        assert (llm.stats.running, llm.stats.waiting, llm.stats.blocks_used) == (0, 0, 0)
    assert family() == []
    await llm.shutdown()
    with refuses(RequestError, "engine-closed"):
        await last(llm.generate("a"))


def test_the_page_s_program(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/python.md").read_text()
    (program,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "AsyncLLM" in block]
    small = program.replace('AsyncLLM("demo")', f"AsyncLLM({str(folder)!r}, **{ENGINE!r})")
    assert small != program
    exec(compile(small, "docs/python.md", "exec"), {"__name__": "__main__"})
    numbers = [line.split(" ")[0] for line in capfd.readouterr().out.splitlines() if line]
    assert numbers.count("0") >= 2 and numbers.count("1") >= 2


async def check_aborts(llm: AsyncLLM) -> None:
    """By name, by leaving the iteration, and by cancelling its task."""
    named = llm.generate("a", LONG, "mine")
    await anext(named)
    with refuses(RequestError, "duplicate-request-id"):
        await anext(llm.generate("b", LONG, "mine"))
    await llm.abort(["mine", "unknown"])
    output = await last(named)
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert 1 <= len(output.outputs[0].token_ids) < 500

    stream = llm.generate("a", LONG, "mine")  # the name is free again
    await anext(stream)
    await stream.aclose()
    task = asyncio.create_task(last(llm.generate("a", LONG, "mine")))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await last(llm.generate("a", GREEDY, "mine"))).finished


async def check_mistakes(llm: AsyncLLM) -> None:
    with refuses(RequestError, "invalid-sampling-params"):
        await anext(llm.generate("a", {"temperature": 0}))  # type: ignore[arg-type]
    with refuses(RequestError, "token-id-out-of-range"):
        await anext(llm.generate([9999]))
    with refuses(RequestError, "other-event-loop"):
        await asyncio.to_thread(lambda: asyncio.run(last(llm.generate("a"))))


async def test_shutdown_from_another_thread_ends_everybody(folder: Path) -> None:
    llm = AsyncLLM(folder, **ENGINE)
    assert repr(llm) == f"<AsyncLLM {str(folder)!r}: not started>"
    streams = [llm.generate(letter, LONG) for letter in "abc"]
    for stream in streams:
        await anext(stream)
    thread = threading.Thread(target=lambda: asyncio.run(llm.shutdown()))
    thread.start()
    for stream in streams:
        with refuses(EngineError, "engine-closed"):
            await last(stream)
    await asyncio.to_thread(thread.join, WAIT_S)
    assert not thread.is_alive() and family() == []
    assert repr(llm) == f"<AsyncLLM {str(folder)!r}: shut down>"


async def test_an_engine_that_dies_gives_everybody_the_cause(folder: Path) -> None:
    async with AsyncLLM(folder, **ENGINE) as llm:
        streams = [llm.generate(letter, LONG) for letter in "abc"]
        for stream in streams:
            await anext(stream)
        for child in family()[1:]:
            child.kill()
        for stream in [*streams, llm.generate("d")]:
            with refuses(EngineError, "process-killed"):
                await last(stream)
        assert "SIGKILL" in repr(llm)


async def test_a_start_that_fails_or_is_ended(folder: Path, tmp_path: Path) -> None:
    with refuses(ConfigError, "unknown-argument"):
        AsyncLLM(folder, tensor_paralel_size=2)
    with pytest.raises(ModelError):
        await AsyncLLM(tmp_path).start()
    llm = AsyncLLM(folder, **ENGINE)
    waiting = asyncio.create_task(last(llm.generate("a", GREEDY)))
    await asyncio.sleep(0.1)
    await llm.shutdown()
    with refuses(RequestError, "engine-closed"):
        await waiting
    assert family() == []
