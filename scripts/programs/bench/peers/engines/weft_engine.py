"""Weft in the caller's process: `weft_engine.py MODEL [key=value ...]` with arguments of LLM."""

import json
import sys
import time
from typing import Any

from protocol import Answer, lengths, serve

from weft import LLM, RequestOutput, SamplingParams


def main(model: str, *options: str) -> None:
    chosen = dict(option.split("=", 1) for option in options)
    with LLM(model, skip_tokenizer_init=True, **{name: literal(value) for name, value in chosen.items()}) as llm:

        def generate(prompts: list[list[int]], new: int | list[int]) -> list[Answer]:
            begin, clock = time.perf_counter(), time.monotonic()
            params = [
                SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in lengths(new, len(prompts))
            ]
            done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            shift = begin - clock
            return [answer_of(it, shift) for it in done]

        serve(generate, sum(llm.plan.threads(rank) for rank in range(len(llm.plan.places))))


def answer_of(output: RequestOutput, shift: float) -> Answer:
    times = output.metrics
    assert times.first_token_s is not None and times.finished_s is not None
    return Answer(times.first_token_s + shift, times.finished_s + shift, output.outputs[0].token_ids)


def literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main(*sys.argv[1:])
