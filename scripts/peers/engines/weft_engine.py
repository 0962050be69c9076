"""Weft in the caller's process: `weft_engine.py MODEL [key=value ...]` with arguments of LLM."""

import json
import sys
import time

from protocol import Answer, lengths, serve

from weft import LLM, SamplingParams


def main(model, *options):
    chosen = dict(option.split("=", 1) for option in options)
    with LLM(model, skip_tokenizer_init=True, **{name: literal(value) for name, value in chosen.items()}) as llm:

        def generate(prompts, new):
            begin, clock = time.perf_counter(), time.monotonic()
            params = [
                SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in lengths(new, len(prompts))
            ]
            done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            shift = begin - clock
            return [
                Answer(it.metrics.first_token_s + shift, it.metrics.finished_s + shift, it.outputs[0].token_ids)
                for it in done
            ]

        serve(generate, sum(llm.plan.threads(rank) for rank in range(len(llm.plan.places))))


def literal(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main(*sys.argv[1:])
