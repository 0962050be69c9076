"""An engine of `scripts/bench net`: `engine.py MODEL JSON` starts an LLM, then runs a batch for each line of its input.

A line is a JSON object: {"requests": 16, "input": 128, "output": 64}, with "network": [bytes per second, seconds] for a
prediction over that network too. The answer is a JSON object on one line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from weft import LLM, SamplingParams, logs
from weft.errors import ConfigError


def run_batch(llm: LLM, requests: int, input: int, output: int) -> dict[str, Any]:
    """Run random prompts; return the seconds, and all tokens as a check."""
    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": [3 + (7 * row + 3 * at) % 200 for at in range(input)]} for row in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    began = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    return {"seconds": time.perf_counter() - began, "tokens": [list(one.outputs[0].token_ids) for one in answers]}


def predictions(llm: LLM, requests: int, input: int, output: int, network: list[float]) -> dict[str, float]:
    """Predicted output tokens per second: in shared memory, and over a network."""
    here = llm.forecast()
    speeds = {
        name: forecast.speed(input, output, requests)
        for name, forecast in (("memory", here), ("network", here.over_network(*network)))
    }
    return {name: speed.output_tok_s for name, speed in speeds.items()}


def main(model: str, options: str) -> None:
    logs.configure("INFO")
    with LLM(model, **json.loads(options)) as llm:
        print(json.dumps({"layout": [row["node"] for row in llm.layout()]}), flush=True)
        for line in sys.stdin:
            work = json.loads(line)
            network = work.pop("network", None)
            answer = run_batch(llm, **work)
            if network:
                try:
                    answer["predicted"] = predictions(llm, **work, network=network)
                except ConfigError as error:
                    answer["predicted"] = str(error)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
