"""OpenVINO GenAI's continuous batching, its KV cache in 16 bits as everybody's: `openvino_engine.py FOLDER`."""

import os
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import Answer, serve


def main(folder: str) -> None:
    threads = len(os.sched_getaffinity(0))
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 2, 2048, 256
    scheduler.enable_prefix_caching = scheduler.dynamic_split_fuse = True
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
    }
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    made = 0

    def generate(prompts: list[list[int]], new: int) -> list[Answer]:
        nonlocal made
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        answers = []
        for prompt in prompts:
            made += 1
            ids = ov.Tensor(np.array([prompt], dtype=np.int64))
            answers.append((pipeline.add_request(made, ids, config), Answer()))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter()
            for handle, answer in answers:
                while handle.can_read():
                    for output in handle.read().values():
                        answer.add(list(output.generated_ids), now)
        return [answer for _, answer in answers]

    serve(generate, threads)


if __name__ == "__main__":
    main(*sys.argv[1:])
