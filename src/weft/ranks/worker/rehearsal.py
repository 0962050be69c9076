"""Made-up steps with which a rank measures its memory and warms up, before it serves requests."""

from __future__ import annotations

from weft.engine.core.params import SamplingParams
from weft.engine.core.step import Admission, StepPlan
from weft.engine.core.token_ids import TokenIds
from weft.errors import ModelError
from weft.machine.native.structures import MASK_BITS
from weft.plan.plan import Plan
from weft.ranks.kernels.sampling import mask_words

# All that a sampler can be asked for at once: its most memory. PLAIN leaves logits in the model's own dtype, for which
# kernels are compiled separately.
DEMANDING = SamplingParams(top_k=50, top_p=0.9, repetition_penalty=1.1, logprobs=20)
PLAIN = SamplingParams(top_k=50, top_p=0.9)
SCORING = SamplingParams(prompt_logprobs=20)
ALL_TOKENS = b"\xff" * (MASK_BITS // 8)  # a word of a mask


def step_limits(plan: Plan) -> tuple[int, int]:
    """Number of rows and of tokens that a step has at most."""
    rows = min(plan.max_num_seqs, plan.max_num_batched_tokens)
    return rows, min(plan.max_num_batched_tokens, rows * plan.max_model_len)


def draft_limit(plan: Plan) -> int:
    """Number of draft tokens that a row has at most; the model samples after each of them too."""
    return plan.speculation.tokens if plan.speculation else 0


def largest_steps(plan: Plan) -> list[tuple[list[int], SamplingParams]]:
    """The steps that take the most memory: lengths of their prompts, and sampling parameters."""
    rows, tokens = step_limits(plan)
    return [
        ([tokens // rows + (row < tokens % rows) for row in range(rows)], DEMANDING),
        # The logits of a prompt that is scored are larger than the logits of few requests, on top of the rest of a full
        # step.
        ([min(tokens, plan.max_model_len)], SCORING),
    ]


def blocks_needed(plan: Plan, counts: list[int]) -> int:
    """Number of KV blocks that prompts of these lengths need in all KV groups."""
    return len(plan.kv_layout.groups) * sum(-(-count // plan.block_size) for count in counts)


def rehearsal_step(plan: Plan, counts: list[int], params: SamplingParams, num_blocks: int | None = None) -> StepPlan:
    """A step of prompts with these lengths, in slots and blocks that no request holds yet, with as many draft tokens as
    a row may have, and with masks that allow all tokens. All attention groups run the same step together.

    In a cache of `num_blocks`, fewer than the prompts need, some of them share blocks.
    """
    blocks: list[list[list[int]]] = []
    first = 0
    for _ in plan.kv_layout.groups:
        blocks.append([])
        for count in counts:
            end = first - (-count // plan.block_size)
            blocks[-1].append([block % (num_blocks or end) for block in range(first, end)])
            first = end
    slots = list(range(len(counts)))
    drafts = [min(draft_limit(plan), count - 1) for count in counts]
    in_groups = plan.data_parallel > 1
    return StepPlan(
        id=-1,
        released=[],
        admitted=[
            Admission(slot, 0, params, TokenIds.pack([0] * count), [])
            for slot, count in zip(slots, counts, strict=True)
        ],
        slots=slots,
        starts=[0] * len(counts),
        counts=counts,
        tokens=[0] * sum(counts),
        blocks=blocks,
        samples=[True] * len(counts),
        draft_counts=drafts,
        group_tokens=[sum(counts)] * plan.data_parallel if in_groups else [],
        graph_rows=len(counts) if in_groups and max(counts) == 1 else 0,
        masks={slot: ALL_TOKENS * mask_words(plan.shape.vocab) * (1 + count) for slot, count in enumerate(drafts)},
    )


def not_finite(plan: Plan) -> ModelError:
    """Error for a checkpoint whose logits are not finite."""
    return ModelError(
        f"the checkpoint {plan.checkpoint} produces NaN or infinite logits, from which nothing can be "
        f"sampled: its weights are damaged, or beyond what {plan.dtype} holds; fetch it again, or try "
        f"--dtype {'float32' if plan.dtype == 'bfloat16' else 'bfloat16'}",
        code="nan-logits",
    )
