"""llama.cpp through llama-cpp-python's low-level interface: continuous batching in a loop of ours, the likeliest token
by numpy: `llamacpp_engine.py FILE.gguf`."""

import ctypes
import os
import sys
import time

import llama_cpp as llama
import numpy as np
from protocol import Answer, serve

SEQUENCES, CONTEXT, BATCH = 32, 16384, 2048


def main(path):
    threads = len(os.sched_getaffinity(0))
    quiet = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(quiet, ctypes.c_void_p())
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = CONTEXT, BATCH, 512, SEQUENCES
    params.n_threads = params.n_threads_batch = threads
    params.kv_unified = True
    context = llama.llama_init_from_model(model, params)
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    memory, batch = llama.llama_get_memory(context), llama.llama_batch_init(BATCH, 0, 1)

    def put(token, position, sequence, wanted):
        at = batch.n_tokens
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, position, 1, wanted
        batch.seq_id[at][0] = sequence
        batch.n_tokens = at + 1
        return at

    def likeliest(at):
        return int(np.argmax(np.ctypeslib.as_array(llama.llama_get_logits_ith(context, at), (vocab,))))

    def generate(prompts, new):
        llama.llama_memory_clear(memory, True)
        answers = [Answer() for _ in prompts]
        waiting, read = list(range(len(prompts))), [0] * len(prompts)
        slots, free = {}, list(range(SEQUENCES))
        while waiting or slots:
            batch.n_tokens, wanted = 0, []
            for request, slot in slots.items():
                tokens = answers[request].tokens
                if tokens:
                    wanted.append((request, put(tokens[-1], len(prompts[request]) + len(tokens) - 1, slot, 1)))
            # Prompts fill the rest.
            while waiting and batch.n_tokens < BATCH and (waiting[0] in slots or free):
                request = waiting[0]
                if request not in slots:
                    slots[request] = free.pop(0)
                slot, prompt = slots[request], prompts[request]
                while read[request] < len(prompt) and batch.n_tokens < BATCH:
                    last = read[request] == len(prompt) - 1
                    at = put(prompt[read[request]], read[request], slot, int(last))
                    read[request] += 1
                    if last:
                        wanted.append((request, at))
                        waiting.pop(0)
            if llama.llama_decode(context, batch):
                raise SystemExit("llama_decode failed")
            tokens, now = [likeliest(at) for _, at in wanted], time.perf_counter()
            for (request, _), token in zip(wanted, tokens, strict=True):
                answers[request].add([token], now)
                if len(answers[request].tokens) == new:
                    llama.llama_memory_seq_rm(memory, slots[request], -1, -1)
                    free.append(slots.pop(request))
        return answers

    serve(generate, threads)


if __name__ == "__main__":
    main(*sys.argv[1:])
