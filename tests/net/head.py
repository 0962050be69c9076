"""The head of a test: `python head.py MODEL JSON` starts an LLM, then answers each line of its input with tokens."""

from __future__ import annotations

import json
import sys

from weft import LLM, SamplingParams, logs
from weft.errors import WeftError

PROMPTS = [[3 + (7 * row + 3 * at) % 22 for at in range(1 + 5 * row)] for row in range(3)]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def main(model: str, options: str) -> int:
    logs.configure("INFO")
    try:
        with LLM(model, **json.loads(options)) as llm:
            print(json.dumps({"layout": llm.layout()}), flush=True)
            for _ in sys.stdin:
                print(json.dumps({"tokens": answers(llm)}), flush=True)
    except WeftError as error:
        print(f"weft: error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
