"""Speculative decoding as a user configures it (vLLM's --speculative-config), and the plan of a draft model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from weft.checkpoint import checkpoint
from weft.checkpoint.architectures.shape import ModelShape
from weft.errors import ConfigError
from weft.plan.places import cut_places
from weft.plan.plan import DraftModel, Plan, Speculation

DEFAULT_SPECULATION = Speculation(tokens=4)
MAX_DRAFT_TOKENS, MAX_LOOKUP_TOKENS = 16, 32
FIELDS = ("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
METHODS = ("ngram", "draft_model")


def resolve_speculation(
    config: Mapping[str, Any], model: str, shape: ModelShape, find: Callable[[str], DraftModel]
) -> Speculation:
    """Parse a speculative config for a model of this name and shape; `find` looks up its draft model by name.

    `config` is as in {"method": "ngram"}, or {"model": NAME} for a draft model. Raises ConfigError, also for a draft
    model of another vocabulary, and the errors of `find`.
    """
    speculation, name = parse_speculative_config(config)
    if name is None:
        return speculation
    draft = find(name)
    if draft.shape.vocab != shape.vocab:
        raise ConfigError(
            f"the draft model {name} has {draft.shape.vocab:,} tokens in its vocabulary and {model} {shape.vocab:,}; "
            "a draft has to share its model's tokeniser",
            code="draft-of-other-vocabulary",
        )
    return replace(speculation, draft=draft)


def parse_speculative_config(config: Mapping[str, Any]) -> tuple[Speculation, str | None]:
    """Parse a speculative config into its figures and the name of its draft model, if any. Raises ConfigError."""
    unknown = sorted(set(config) - set(FIELDS))
    if unknown:
        raise ConfigError(
            f"speculative_config has no {unknown[0]!r}; it has {', '.join(FIELDS)}", code="unknown-speculative-field"
        )
    model = config.get("model")
    _check_method(config, model)
    tokens = _count(config, "num_speculative_tokens", DEFAULT_SPECULATION.tokens, MAX_DRAFT_TOKENS)
    shortest = _count(config, "prompt_lookup_min", DEFAULT_SPECULATION.lookup_min, MAX_LOOKUP_TOKENS)
    longest = _count(config, "prompt_lookup_max", max(DEFAULT_SPECULATION.lookup_max, shortest), MAX_LOOKUP_TOKENS)
    if config.get("prompt_lookup_min") is None:
        shortest = min(shortest, longest)
    if shortest > longest:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min {shortest} is above prompt_lookup_max {longest}",
            code="lookup-min-above-max",
        )
    return Speculation(tokens=tokens, lookup_min=shortest, lookup_max=longest), str(model) if model else None


def _check_method(config: Mapping[str, Any], model: object) -> None:
    method = config.get("method", "draft_model" if model else "ngram")
    if method not in METHODS:
        raise ConfigError(
            f"speculative_config: the method {method!r} is none of {', '.join(METHODS)}",
            code="unknown-speculative-method",
        )
    if (method == "draft_model") != bool(model):
        raise ConfigError(
            f"speculative_config: the method {method} {'needs' if not model else 'has no'} model; "
            'give {"method": "ngram"} or {"model": "NAME"}',
            code="speculative-model-mismatch",
        )


def _count(config: Mapping[str, Any], name: str, default: int, most: int) -> int:
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(
            f"speculative_config: {name} is {value!r}; it must be 1 to {most}", code="speculative-value-out-of-range"
        )
    return value


def to_speculative_config(speculation: Speculation) -> dict[str, Any]:
    """The config that `parse_speculative_config` turns into this speculation."""
    tokens = {"num_speculative_tokens": speculation.tokens}
    if speculation.draft:
        return {"model": speculation.draft.model, **tokens}
    lookup = {"prompt_lookup_min": speculation.lookup_min, "prompt_lookup_max": speculation.lookup_max}
    return {"method": "ngram", **tokens, **lookup}


def fetch_draft(model: str, load_format: str) -> DraftModel:
    """Fetch a draft model by name, like any other model; `load_format` is the large model's."""
    source = checkpoint.resolve(model, load_format="dummy" if load_format == "dummy" else "auto")
    if source.format == "sharded_state":
        raise ConfigError(
            f"the draft model {model} is cut for the ranks of one layout, and drafts run whole; give the model itself",
            code="sharded-draft",
        )
    return DraftModel(model=model, checkpoint=str(source.path), load_format=source.format, shape=source.shape)


def check_draft_groups(speculation: Speculation, data_parallel: int) -> None:
    """Raise ConfigError for a draft model together with several attention groups."""
    if speculation.draft is not None and data_parallel > 1:
        raise ConfigError(
            f"the draft model {speculation.draft.model} runs next to one output rank, and --data-parallel-size "
            f"{data_parallel} has as many: leave one of them out, or draft by prompt lookup "
            '(--speculative-config \'{"method": "ngram"}\')',
            code="draft-beside-attention-groups",
        )


def draft_plan(plan: Plan) -> Plan:
    """Plan of the draft model of `plan`: whole, on the output rank's device, next to its part of the large model."""
    assert plan.speculation and plan.speculation.draft
    draft, rank = plan.speculation.draft, plan.output_rank
    return replace(
        plan,
        checkpoint=draft.checkpoint,
        load_format=draft.load_format,
        shape=draft.shape,
        quantization="none",
        schemes={},
        places=cut_places(draft.shape, (1.0,), (len(draft.shape.layers),)),
        devices=(plan.devices[rank],),
        uuids=plan.uuids[rank : rank + 1],
        attention_backend=plan.rank_backend(rank),
        product_backend="own",
        deterministic=False,  # what it guesses is checked
        cores=(plan.cores[rank],),
        gpu_memory_utilization=plan.gpu_memory_utilization[rank : rank + 1],
        speculation=None,
        window_cache=False,
    )
