"""Speculation as a user asks for it (vLLM's --speculative-config), and the plan of a draft model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from weft.architectures.shape import ModelShape
from weft.errors import ConfigError
from weft.formats import checkpoint
from weft.plan.places import cut_places
from weft.plan.plan import DraftModel, Plan, Speculation

DEFAULT_SPECULATION = Speculation(tokens=4)  # guesses of a step
MOST_TOKENS, MOST_LOOKUP = 16, 32
KNOWN = ("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
METHODS = ("ngram", "draft_model")


def resolve_speculation(
    said: Mapping[str, Any], model: str, shape: ModelShape, find: Callable[[str], DraftModel]
) -> Speculation:
    """What `said` means for a model of this name and shape: {"method": "ngram"}, or {"model": NAME} for a draft model,
    which `find` looks up. Raises ConfigError, and what `find` raises."""
    speculation, name = parse_speculative_config(said)
    if name is None:
        return speculation
    draft = find(name)
    if draft.shape.vocab != shape.vocab:
        raise ConfigError(
            f"the draft model {name} has {draft.shape.vocab:,} tokens in its vocabulary and {model} {shape.vocab:,}; "
            "a draft has to share its model's tokeniser"
        )
    return replace(speculation, draft=draft)


def parse_speculative_config(said: Mapping[str, Any]) -> tuple[Speculation, str | None]:
    """The figures, and the name of a draft model. Raises ConfigError."""
    unknown = sorted(set(said) - set(KNOWN))
    if unknown:
        raise ConfigError(f"speculative_config has no {unknown[0]!r}; it has {', '.join(KNOWN)}")
    model = said.get("model")
    method = said.get("method", "draft_model" if model else "ngram")
    if method not in METHODS:
        raise ConfigError(f"speculative_config: the method {method!r} is none of {', '.join(METHODS)}")
    if (method == "draft_model") != bool(model):
        raise ConfigError(
            f"speculative_config: the method {method} {'needs' if not model else 'has no'} model; "
            'give {"method": "ngram"} or {"model": "NAME"}'
        )
    tokens = count(said, "num_speculative_tokens", DEFAULT_SPECULATION.tokens, MOST_TOKENS)
    shortest = count(said, "prompt_lookup_min", DEFAULT_SPECULATION.lookup_min, MOST_LOOKUP)
    longest = count(said, "prompt_lookup_max", max(DEFAULT_SPECULATION.lookup_max, shortest), MOST_LOOKUP)
    if said.get("prompt_lookup_min") is None:
        shortest = min(shortest, longest)
    if shortest > longest:
        raise ConfigError(f"speculative_config: prompt_lookup_min {shortest} is above prompt_lookup_max {longest}")
    return Speculation(tokens=tokens, lookup_min=shortest, lookup_max=longest), str(model) if model else None


def to_speculative_config(how: Speculation) -> dict[str, Any]:
    """As `read` takes it."""
    tokens = {"num_speculative_tokens": how.tokens}
    if how.draft:
        return {"model": how.draft.model, **tokens}
    return {"method": "ngram", **tokens, "prompt_lookup_min": how.lookup_min, "prompt_lookup_max": how.lookup_max}


def count(said: Mapping[str, Any], name: str, default: int, most: int) -> int:
    value = said.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"speculative_config: {name} is {value!r}; it must be 1 to {most}")
    return value


def fetch_draft(model: str, load_format: str) -> DraftModel:
    """A draft model whose weights are fetched like any other's; `load_format` is that of the large one."""
    found = checkpoint.resolve(model, load_format="dummy" if load_format == "dummy" else "auto")
    return DraftModel(model=model, checkpoint=str(found.path), load_format=found.format, shape=found.shape)


def draft_plan(plan: Plan) -> Plan:
    """How the draft model of `plan` runs: whole, beside the output rank's part of the large one."""
    assert plan.speculation and plan.speculation.draft
    draft, rank = plan.speculation.draft, plan.output_rank
    return replace(
        plan,
        checkpoint=draft.checkpoint,
        load_format=draft.load_format,
        shape=draft.shape,
        quantization="none",
        schemes={},
        places=cut_places(draft.shape, (1.0,), (draft.shape.layers,)),
        devices=(plan.devices[rank],),
        uuids=plan.uuids[rank : rank + 1],
        cores=(plan.cores[rank],),
        gpu_memory_utilization=plan.gpu_memory_utilization[rank : rank + 1],
        speculation=None,
    )
