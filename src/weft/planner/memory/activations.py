"""Activations: bytes of a rank's step besides weights and KV."""

from __future__ import annotations

from weft.checkpoint.architectures.place import Place, whole
from weft.checkpoint.architectures.shape import ModelShape
from weft.plan.memory import LOGITS_BYTES, step_bytes
from weft.planner.memory.drafts import draft_on_rank, draft_tokens
from weft.planner.profiles import EngineProfile

MIB = 1 << 20


def activation_bytes(
    shape: ModelShape,
    place: Place,
    tokens: int,
    rows: int,
    profile: EngineProfile,
    number_bytes: int,
    *,
    context: int = 0,
) -> int:
    """Bytes of a step of `tokens` tokens besides weights and KV, if `rows` of its sequences sample. `context` is the
    length of the longest request.

    The steps of a draft model come after the large model's, in the same memory.
    """
    if profile.own_activations.value:
        speculation = profile.speculation
        own = step_bytes(
            shape, place, tokens, rows, number_bytes, draft_tokens=draft_tokens(speculation), context=context
        )
        draft = draft_on_rank(speculation, place)
        return max(own, step_bytes(draft, whole(draft), tokens, rows, number_bytes)) if draft else own
    factors = profile.activations_experts if shape.experts else profile.activations_dense
    hidden = max((mixer.heads * mixer.head_dim for mixer in shape.mixers if not mixer.latent_dim), default=shape.hidden)
    passes = int(2 * tokens * hidden * factors.at(place.tp_size))
    logits = LOGITS_BYTES * rows * shape.vocab * place.last
    return max(passes, int(profile.activations_least_MiB.value * MIB)) + logits
