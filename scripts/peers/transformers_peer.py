"""The Transformers side of the benchmark, a process of its own: `python transformers_peer.py FOLDER GGUF DEVICE`.

Reads one JSON object per line, {"prompts": [[ids], ...], "new": n}, generates exactly n tokens for each prompt
(one static batch, padded on the left, greedy) and answers {"ttft_s", "seconds"} in one line.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class Clock(StoppingCriteria):
    """Notes the time of the first token; never stops."""

    def __init__(self):
        self.first = None

    def __call__(self, input_ids, scores, **kwargs):
        if self.first is None:
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            self.first = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.inference_mode()
def generate(model, prompts, new):
    start = time.perf_counter()
    longest = max(map(len, prompts))
    pad = [[0] * (longest - len(prompt)) for prompt in prompts]
    ids = torch.tensor([p + prompt for p, prompt in zip(pad, prompts, strict=True)], device=model.device)
    mask = torch.tensor([p + [1] * len(prompt) for p, prompt in zip(pad, prompts, strict=True)], device=model.device)
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
    if out.is_cuda:
        torch.cuda.synchronize()
    end = time.perf_counter()
    if out.shape[1] != longest + new:
        raise SystemExit(f"asked for {new} tokens, got {out.shape[1] - longest}")
    return {"ttft_s": clock.first - start, "seconds": end - start}


def main(folder, gguf, device):
    # The same file as Weft runs, dequantised to the same bfloat16 weights.
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.bfloat16)
    model = model.to(device).eval()
    print(json.dumps({"ready": model.config.model_type, "threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(generate(model, asked["prompts"], asked["new"])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
