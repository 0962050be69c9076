"""Hidden states and logits behind prompts, for requests that want these instead of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from weft.engine.core.step import Pooling, SlotFailure, StepPlan, StepResult
from weft.plan.memory import SCORED_POSITIONS
from weft.ranks.kernels.rows import copy_to_device
from weft.ranks.worker.device import ToHost
from weft.ranks.worker.runner import ModelRunner
from weft.ranks.worker.sample_arrays import int64_array

NOT_FINITE = SlotFailure("nan-logits", "the model made NaN or infinite numbers of this prompt")


@dataclass(frozen=True)
class PooledPrompt:
    """A prompt of `length` tokens, and what is wanted of it."""

    length: int
    pooling: Pooling


@dataclass(frozen=True)
class PooledRows:
    """The numbers of prompts that end in a step, on their way to the host: `lengths[r]` of them for `slots[r]`."""

    slots: list[int]
    lengths: list[int]
    arrival: ToHost

    def add_to(self, result: StepResult) -> StepResult:
        """Wait for the numbers, and add them to the step's result."""
        numbers = self.arrival.array()
        ends = accumulate(self.lengths)
        for slot, length, end in zip(self.slots, self.lengths, ends, strict=True):
            row = numbers[end - length : end]
            if np.isfinite(row).all():
                result.pooled[slot] = row.astype("<f4").tobytes()
            else:
                result.failed[slot] = NOT_FINITE
        return result


def pool_prompts(
    step: StepPlan, hidden: torch.Tensor, prompts: Mapping[int, PooledPrompt], runner: ModelRunner, *, returns: bool
) -> PooledRows | None:
    """Compute what is wanted of the prompts that end in a step, by the slot of each of `prompts`.

    `hidden` [T, hidden] are the step's hidden states. Every rank of the last stage calls this, since the head is cut;
    only the output rank `returns`. None if no prompt ends.
    """
    states, scored = _ending_prompts(step, prompts)
    if not states and not scored:
        return None
    scores = _score_tokens(hidden, scored, runner)
    if not returns:
        return None
    parts = [scores]
    if states:
        picks = copy_to_device(int64_array(list(states.values())), hidden.device)
        parts.insert(0, runner.states(hidden.index_select(0, picks)).float().flatten())
    lengths = [hidden.shape[1]] * len(states) + [len(prompts[slot].pooling.token_ids) for slot in scored]
    return PooledRows([*states, *scored], lengths, ToHost(torch.cat(parts)))


def _ending_prompts(
    step: StepPlan, prompts: Mapping[int, PooledPrompt]
) -> tuple[dict[int, int], dict[int, tuple[int, tuple[int, ...]]]]:
    """The index in the step of each ending prompt's last token: by slot for prompts whose states are wanted, and with
    the token ids for prompts whose logits are wanted."""
    states: dict[int, int] = {}
    scored: dict[int, tuple[int, tuple[int, ...]]] = {}
    end = 0
    for slot, start, count in zip(step.slots, step.starts, step.counts, strict=True):
        end += count
        prompt = prompts.get(slot)
        if prompt is None or start + count < prompt.length:
            continue
        if prompt.pooling.token_ids:
            scored[slot] = end - 1, prompt.pooling.token_ids
        else:
            states[slot] = end - 1
    return states, scored


def _score_tokens(
    hidden: torch.Tensor, scored: Mapping[int, tuple[int, tuple[int, ...]]], runner: ModelRunner
) -> torch.Tensor:
    """The logits of each prompt's tokens, one after the other, in float32; empty on ranks that do not sample."""
    rows, parts = list(scored.values()), [hidden.new_empty(0, dtype=torch.float32)]
    for at in range(0, len(rows), SCORED_POSITIONS):
        chunk = rows[at : at + SCORED_POSITIONS]
        picks = copy_to_device(int64_array([pick for pick, _ in chunk]), hidden.device)
        logits = runner.logits(hidden.index_select(0, picks))
        if logits is not None:
            width = logits.shape[1]
            places = [row * width + token for row, (_, ids) in enumerate(chunk) for token in ids]
            wanted = copy_to_device(int64_array(places), hidden.device)
            parts.append(logits.flatten().index_select(0, wanted).float())
    return torch.cat(parts)
