"""vLLM's offline engine on a GPU, in the caller's process, driven step by step: `vllm_cuda_engine.py MODEL
[key=value ...]` with arguments of its LLM."""

import json
import os
import sys
import time
from typing import Any

from protocol import Answer, lengths, serve

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"


def main(model: str, *options: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    chosen = {name: literal(value) for name, value in (option.split("=", 1) for option in options)}
    engine = LLM(model, skip_tokenizer_init=True, seed=0, **chosen).llm_engine
    made = 0

    def generate(prompts: list[list[int]], new: int | list[int]) -> list[Answer]:
        nonlocal made
        answers = {}
        for prompt, count in zip(prompts, lengths(new, len(prompts)), strict=True):
            made += 1
            answers[str(made)] = Answer()
            params = SamplingParams(
                temperature=0.0,
                max_tokens=count,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(str(made), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                # Longer names than those given, where vLLM adds to them what keeps them apart.
                answers[output.request_id.split("-")[0]].add(list(output.outputs[0].token_ids), time.perf_counter())
        return list(answers.values())

    serve(generate, 1)


def literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main(*sys.argv[1:])
