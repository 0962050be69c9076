"""Hidden states of chosen layers: those of Transformers, in every kind of layout."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from tests.cpu import checkpoints
from tests.cpu.layouts import LogitsWorker, plan_for, run_prompt
from weft.plan.plan import Plan
from weft.ranks.comm import Links
from weft.ranks.kernels.batch import Batch
from weft.ranks.worker.runner import ModelRunner

PROMPT = list(range(3, 60))
ASKED = 27  # tokens of the step whose states are read; no rehearsal has as many
LAYERS = (0, 2, 3)


class StatesRunner(ModelRunner):
    """Keeps by rank the hidden states of each step with ASKED tokens, and the hidden states after the last layer."""

    states: ClassVar[dict[int, dict[int, torch.Tensor]]] = {}
    hidden: ClassVar[dict[int, torch.Tensor]] = {}

    def forward(self, batch: Batch, incoming: torch.Tensor | None = None) -> torch.Tensor:
        if len(batch.tokens) != ASKED:
            return super().forward(batch, incoming)
        hidden, self.states[self.rank] = self.forward_with_states(batch, incoming, layers=LAYERS)
        self.hidden[self.rank] = hidden.clone()
        return hidden


class StatesWorker(LogitsWorker):
    def __init__(self, plan: Plan, rank: int, links: Links) -> None:
        super().__init__(plan, rank, links)
        self.runner = StatesRunner(plan, rank, links)


@pytest.mark.parametrize("layout", ["whole", "tp2", "pp2", "pp 1,3,1"])
@pytest.mark.parametrize("recipe", ["llama-biased", "qwen3-moe", "gemma3"])
def test_states_after_layers_are_those_of_transformers(recipe: str, layout: str, tmp_path: Path) -> None:
    """The first tokens are computed as usual, by fused layers if there are some, and the last ones read their KV."""
    path = checkpoints.make(recipe, tmp_path)
    with torch.inference_mode():
        truth = checkpoints.reference(path)(torch.tensor([PROMPT]), output_hidden_states=True)
    plan = plan_for(path, layout, dtype="float32")
    StatesRunner.states.clear()
    run_prompt(plan, [PROMPT[:-ASKED], PROMPT[-ASKED:]], f"{__name__}:StatesWorker")
    for place in plan.places:
        states = StatesRunner.states[place.rank]
        assert list(states) == [number for number in LAYERS if number in place.layers]
        for number, state in states.items():
            want = truth.hidden_states[number + 1][0, -ASKED:]
            assert (state - want).abs().max() <= 1e-4 * want.std()
        if not place.last and place.layers.stop - 1 in states:
            assert torch.equal(StatesRunner.hidden[place.rank], states[place.layers.stop - 1])
    assert (LogitsWorker.logits - truth.logits[0, -ASKED:]).abs().max() <= 1e-4 * truth.logits.std()
