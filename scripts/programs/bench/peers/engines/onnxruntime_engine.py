"""ONNX Runtime GenAI, one static batch padded on the left: `onnxruntime_engine.py FOLDER`."""

import os
import sys
import time

import numpy as np
import onnxruntime_genai as genai
from protocol import Answer, serve

PAD = 2


def main(folder: str) -> None:
    model = genai.Model(folder)

    def generate(prompts: list[list[int]], new: int) -> list[Answer]:
        longest = max(map(len, prompts))
        params = genai.GeneratorParams(model)
        params.set_search_options(
            max_length=longest + new, min_length=longest + new, batch_size=len(prompts), do_sample=False
        )
        generator = genai.Generator(model, params)
        ids = [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
        answers = [Answer() for _ in prompts]
        generator.append_tokens(np.array(ids, dtype=np.int32))
        for _ in range(new):
            generator.generate_next_token()
            tokens, now = generator.get_next_tokens(), time.perf_counter()
            for answer, token in zip(answers, tokens, strict=True):
                answer.add([int(token)], now)
        return answers

    serve(generate, len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    main(*sys.argv[1:])
