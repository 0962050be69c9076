"""Logprobs of prompts, for requests that want them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from weft.engine.core.step import StepPlan, TokenLogprobs
from weft.plan.memory import SCORED_POSITIONS
from weft.ranks.worker.sampler import Sampler


@dataclass(frozen=True)
class PromptLogprobsRequest:
    """A request for the logprobs of its prompt, with `top` alternatives each."""

    prompt: list[int]
    top: int


def score_prompts(
    step: StepPlan,
    hidden: torch.Tensor,
    requests: Mapping[int, PromptLogprobsRequest],
    compute_logits: Callable[[torch.Tensor], torch.Tensor | None],
    sampler: Sampler | None,
) -> dict[int, list[TokenLogprobs]]:
    """Logprobs of the prompt tokens that follow the positions of a step, by the slot of each of `requests`.

    `hidden` [T, hidden] are the step's hidden states. Every rank of the last stage calls this, since the head is cut;
    only the output rank has a sampler and gets logprobs.
    """
    scores: dict[int, list[TokenLogprobs]] = {}
    begin = 0
    for slot, start, count in zip(step.slots, step.starts, step.counts, strict=True):
        request = requests.get(slot)
        if request is not None:
            targets = request.prompt[start + 1 : start + count + 1]
            for at in range(0, len(targets), SCORED_POSITIONS):
                chunk = targets[at : at + SCORED_POSITIONS]
                logits = compute_logits(hidden[begin + at : begin + at + len(chunk)])
                if sampler:
                    assert logits is not None
                    scores.setdefault(slot, []).extend(sampler.prompt_logprobs(logits, chunk, request.top))
        begin += count
    return scores
