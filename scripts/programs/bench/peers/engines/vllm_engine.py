"""vLLM's offline engine in the caller's process, driven step by step: `vllm_engine.py FOLDER [eager]`."""

import os
import sys
import time

from protocol import Answer, serve

CORES = sorted(os.sched_getaffinity(0))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, CORES)))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"


def main(folder: str, *options: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(
        folder,
        dtype="bfloat16",
        enforce_eager="eager" in options,
        max_model_len=2048,
        enable_prefix_caching=True,
        seed=0,
    ).llm_engine
    made = 0

    def generate(prompts: list[list[int]], new: int) -> list[Answer]:
        nonlocal made
        params = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        answers = {}
        for prompt in prompts:
            made += 1
            answers[str(made)] = Answer()
            engine.add_request(str(made), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[output.request_id].add(list(output.outputs[0].token_ids), time.perf_counter())
        return list(answers.values())

    serve(generate, len(CORES))


if __name__ == "__main__":
    main(*sys.argv[1:])
