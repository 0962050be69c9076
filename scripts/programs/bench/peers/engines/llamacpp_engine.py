"""llama.cpp through llama-cpp-python's low-level interface: continuous batching in a loop of ours, the likeliest token
by numpy: `llamacpp_engine.py FILE.gguf`."""

import ctypes
import os
import sys
import time
from collections.abc import Iterator

import llama_cpp as llama
import numpy as np
from protocol import Answer, serve

SEQUENCES, CONTEXT, BATCH = 32, 16384, 2048


class Context:
    """A model, its KV cache and one batch, of at most BATCH tokens."""

    def __init__(self, path: str, threads: int) -> None:
        self._quiet = llama.llama_log_callback(lambda *_: None)  # kept: C calls it
        llama.llama_log_set(self._quiet, ctypes.c_void_p())
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = CONTEXT, BATCH, 512, SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self._context = llama.llama_init_from_model(model, params)
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(BATCH, 0, 1)

    def clear_cache(self) -> None:
        llama.llama_memory_clear(self._memory, True)

    def begin_batch(self) -> None:
        self._batch.n_tokens = 0

    def is_full(self) -> bool:
        return int(self._batch.n_tokens) >= BATCH

    def put(self, token: int, position: int, sequence: int, wants_logits: int) -> int:
        """Append a token to the batch; its index there."""
        batch, at = self._batch, int(self._batch.n_tokens)
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, position, 1, wants_logits
        batch.seq_id[at][0] = sequence
        batch.n_tokens = at + 1
        return at

    def decode(self) -> None:
        if llama.llama_decode(self._context, self._batch):
            raise SystemExit("llama_decode failed")

    def likeliest(self, at: int) -> int:
        logits = llama.llama_get_logits_ith(self._context, at)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab,))))

    def release(self, sequence: int) -> None:
        llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)


class Generation:
    """Prompts answered with continuous batching: decodes first, then prompt tokens as far as the batch has room."""

    def __init__(self, context: Context, prompts: list[list[int]], new: int) -> None:
        self.context, self.prompts, self.new = context, prompts, new
        self.answers = [Answer() for _ in prompts]
        self.waiting, self.tokens_read = list(range(len(prompts))), [0] * len(prompts)
        self.slots: dict[int, int] = {}  # sequence of each running request
        self.free = list(range(SEQUENCES))

    def answer(self) -> list[Answer]:
        self.context.clear_cache()
        while self.waiting or self.slots:
            self.context.begin_batch()
            sampled = [*self.put_decodes(), *self.put_prompts()]
            self.context.decode()
            self.take_tokens(sampled)
        return self.answers

    def put_decodes(self) -> Iterator[tuple[int, int]]:
        for request, slot in self.slots.items():
            tokens = self.answers[request].tokens
            if tokens:
                position = len(self.prompts[request]) + len(tokens) - 1
                yield request, self.context.put(tokens[-1], position, slot, 1)

    def put_prompts(self) -> Iterator[tuple[int, int]]:
        while self.waiting and not self.context.is_full() and (self.waiting[0] in self.slots or self.free):
            request = self.waiting[0]
            if request not in self.slots:
                self.slots[request] = self.free.pop(0)
            yield from self.put_prompt(request)

    def put_prompt(self, request: int) -> Iterator[tuple[int, int]]:
        prompt = self.prompts[request]
        while self.tokens_read[request] < len(prompt) and not self.context.is_full():
            position = self.tokens_read[request]
            is_last = position == len(prompt) - 1
            at = self.context.put(prompt[position], position, self.slots[request], int(is_last))
            self.tokens_read[request] += 1
            if is_last:
                self.waiting.pop(0)
                yield request, at

    def take_tokens(self, sampled: list[tuple[int, int]]) -> None:
        tokens, now = [self.context.likeliest(at) for _, at in sampled], time.perf_counter()
        for (request, _), token in zip(sampled, tokens, strict=True):
            self.answers[request].add([token], now)
            if len(self.answers[request].tokens) == self.new:
                self.context.release(self.slots[request])
                self.free.append(self.slots.pop(request))


def main(path: str) -> None:
    threads = len(os.sched_getaffinity(0))
    context = Context(path, threads)
    serve(lambda prompts, new: Generation(context, prompts, new).answer(), threads)


if __name__ == "__main__":
    main(*sys.argv[1:])
