"""Transformers: one static batch padded on the left, `transformers_engine.py FOLDER`, or FOLDER GGUF-NAME."""

import sys
import time
from typing import Any

import torch
from protocol import Answer, serve
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class Clock(StoppingCriteria):  # type: ignore[misc]  # Transformers is not read: it is Any
    """Notes the time of the first token; never stops."""

    first = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if not self.first:
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            self.first = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def main(folder: str, gguf: str | None = None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.bfloat16).to(device).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new: int) -> list[Answer]:
        longest = max(map(len, prompts))
        pad = [[0] * (longest - len(prompt)) for prompt in prompts]
        ids = torch.tensor([p + prompt for p, prompt in zip(pad, prompts, strict=True)], device=device)
        mask = torch.tensor([p + [1] * len(prompt) for p, prompt in zip(pad, prompts, strict=True)], device=device)
        clock = Clock()
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        answers = out[:, longest:].tolist()  # waits for the device
        return [Answer(clock.first, time.perf_counter(), tokens) for tokens in answers]

    serve(generate, torch.get_num_threads())


if __name__ == "__main__":
    main(*sys.argv[1:])
