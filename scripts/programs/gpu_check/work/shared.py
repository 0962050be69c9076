"""Two ranks on one card through the host's memory: the tokens of one rank, and their speed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.programs.gpu_check.work import Figure, Options
from scripts.programs.gpu_check.work.bench import nano_asks, started
from weft import SamplingParams
from weft.study.bench.measure import run_batch

# Each rank of the two has its own share of the card.
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "device_ids": (0, 0)}
FLOAT32 = {"dtype": "float32", "kv_cache_memory_bytes": 2_000_000_000}
PROMPTS, NEW = [[5, 6, 7], [9] * 20, [11]], 24


def shared(options: Options) -> Iterator[Figure]:
    """Greedy tokens in float32, where sums over two ranks round too little to matter, then the workload's speed."""
    answers = []
    prompts, new = (PROMPTS[:1], 2) if options["rehearse"] else (PROMPTS, NEW)
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    for layout in ({}, TWO):
        with started({**options, "engine": {**FLOAT32, **layout}}) as (llm, _):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
    equal = answers[0] == answers[1]
    yield Figure("-tp 2 --device-ids 0,0: requests with other tokens", float(not equal), "errors", ok=equal)
    with started({**options, "engine": TWO}) as (llm, shape):
        run_batch(llm, nano_asks(shape, options, 1))
        done = run_batch(llm, nano_asks(shape, options, 0))
    yield Figure("-tp 2 --device-ids 0,0: nano-vllm seed 0", round(done.output_tok_s, 1), "tok/s")
