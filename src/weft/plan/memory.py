"""KV-cache blocks that every rank can hold, and the request length that they allow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from weft.checkpoint.architectures.place import Place
from weft.checkpoint.architectures.shape import LatentAttention, Mixer, ModelShape
from weft.errors import PlanError
from weft.plan.plan import Plan
from weft.plan.speculation import draft_plan

CPU_KV_BYTES = 4_000_000_000  # per host, at most, without --kv-cache-memory-bytes
CPU_KV_SHARE = 4  # the KV cache on a CPU gets at most 1/CPU_KV_SHARE of the free memory
HIDDEN_COPIES = 3  # residual, norm and output
FFN_COPIES = 3  # gate, up and their product
LOGITS_BYTES = 2 * 4  # float32, twice: as computed and as sampled from
CPU_RUNTIME_BYTES = 500 << 20  # resident memory of torch and its libraries in a rank: 0.4 to 0.6 GB measured
EXPANDED_BYTES = (
    64 << 20
)  # of a context's keys and values that latent attention expands at once, unless a head has more
SCORED_POSITIONS = 64  # positions whose logits are held at once for a request that wants its prompt's logprobs


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a rank that has loaded its weights and measured its peak memory. All sizes in bytes.

    - `device`: the memory that the rank uses ("cpu" of one host, "cuda:0"); `host`: the machine. Ranks with equal
      (host, device) share `free_bytes`.
    - `node`: the executor's name for the node; "" if all ranks are on one.
    - `free_bytes`: on a GPU, what gpu_memory_utilization leaves for the KV cache; on a CPU, the host's free memory.
    - `block_bytes`: bytes of one KV block on this rank.
    """

    rank: int
    host: str
    device: str
    weight_bytes: int
    activation_bytes: int
    free_bytes: int
    block_bytes: int
    load_s: float
    node: str = ""


def step_bytes(
    shape: ModelShape,
    place: Place,
    tokens: int,
    sequences: int,
    number_bytes: int,
    *,
    draft_tokens: int = 0,
    context: int = 0,
) -> int:
    """Estimate the bytes that a step of our engine needs besides weights and KV cache, if they cannot be measured.

    Counted are the widest point of a layer for each of `tokens` tokens and, on the output rank, the logits held at
    once. These are one row for each of `sequences` and each of its `draft_tokens`, or SCORED_POSITIONS rows of a
    prompt. With latent attention, so is the `context` of a prompt that is expanded.
    """
    attention = max(_mixer_width(mixer, place) for mixer in shape.mixers)
    feed_forward = FFN_COPIES * len(place.ffn)
    if shape.experts:
        # Each token is copied to its experts, and their results are copied back into the order of the tokens.
        # The ranks of all attention groups may bring as many tokens.
        routed = HIDDEN_COPIES * shape.hidden + FFN_COPIES * len(place.expert_ffn)
        feed_forward = max(feed_forward, place.dp_size * shape.experts.top_k * routed)
    width = HIDDEN_COPIES * shape.hidden + max(attention, feed_forward)
    rows = min(tokens, max(SCORED_POSITIONS, sequences * (1 + draft_tokens))) if place.samples else 0
    expanded = expanded_bytes(shape, place, context, number_bytes)
    return tokens * width * number_bytes + LOGITS_BYTES * rows * shape.vocab + expanded


def expanded_bytes(shape: ModelShape, place: Place, context: int, number_bytes: int) -> int:
    """Bytes that latent attention takes to read a prompt after `context` tokens; 0 for other attention.

    The latents of the context are copied out of the cache; they are counted twice. Then as many heads as fit into
    EXPANDED_BYTES, or one, have their keys and values projected from them. Except in Triton both are copied to whole
    keys, and values are padded to the keys' length.
    """
    latents = (mixer for mixer in shape.mixers if isinstance(mixer, LatentAttention))
    return max((_expanded_bytes(latent, place, context, number_bytes) for latent in latents), default=0)


def _expanded_bytes(latent: LatentAttention, place: Place, context: int, number_bytes: int) -> int:
    head = context * (latent.head_dim + latent.v_dim) * number_bytes
    heads = max(1, min(len(place.heads_of(latent.head_counts).q), EXPANDED_BYTES // max(1, head)))
    projected = latent.nope_dim + latent.v_dim
    copied = 2 * max(latent.head_dim, latent.v_dim)
    return context * number_bytes * (2 * latent.latent_dim + heads * (projected + copied))


def _mixer_width(mixer: Mixer, place: Place) -> int:
    """Numbers of a token at the widest point of a mixer."""
    q_heads, kv_heads = map(len, place.heads_of(mixer.head_counts))
    if isinstance(mixer, LatentAttention):
        # Queries, queries in the space of latents, and mixed latents.
        return q_heads * (mixer.head_dim + mixer.latent_dim + mixer.kv_lora_rank) + mixer.latent_dim
    return (q_heads * 2 + kv_heads * 2) * mixer.head_dim


def kv_blocks(plan: Plan, capacities: Sequence[Capacity]) -> int:
    """Number of KV blocks that every rank can hold: the minimum over all devices of budget / bytes per block.

    GPUs of the same number on several nodes are several devices; the memory of a host is one. The budget is
    `plan.kv_cache_bytes` per rank if the user gave it. Otherwise the ranks of a device share the smallest free memory
    that they report, of which a CPU gives min(4 GB, a quarter) to all engines together. `plan.max_memory` limits the
    budget to what it leaves after weights, activations and, on a CPU, the engine's own memory; on a GPU the reports
    include that memory, since `gpu_memory_utilization` is at most that share.

    Raises PlanError if a device has no room for one block of each KV group, or if kv_cache_bytes and max_memory
    contradict each other.
    """
    devices: dict[tuple[str, str], list[Capacity]] = defaultdict(list)
    for capacity in capacities:
        node = f" (node {capacity.node})" if capacity.node and capacity.device != "cpu" else ""
        devices[capacity.host + node, capacity.device].append(capacity)
    return min(_device_blocks(plan, host, device, ranks) for (host, device), ranks in devices.items())


def _device_blocks(plan: Plan, host: str, device: str, ranks: Sequence[Capacity]) -> int:
    """Number of blocks that each rank of one device can hold. Raises PlanError as `kv_blocks` does."""
    if plan.kv_cache_bytes is not None:
        cost, budget = max(rank.block_bytes for rank in ranks), plan.kv_cache_bytes
    else:
        # Ranks report one after the other: the lowest report has seen the most of the others' weights.
        cost, budget = sum(rank.block_bytes for rank in ranks), min(rank.free_bytes for rank in ranks)
        if device == "cpu":
            budget = min(CPU_KV_BYTES, budget // CPU_KV_SHARE) // plan.engines
    if device in plan.max_memory:
        budget = min(budget, _capped_budget(plan, device, ranks))
    least = cost * len(plan.kv_layout.paged)
    if budget < least:
        raise PlanError(_no_room(plan, host, device, budget, least), code="no-room-for-kv-cache")
    return budget // cost


def _capped_budget(plan: Plan, device: str, ranks: Sequence[Capacity]) -> int:
    """Bytes that --max-memory leaves of a device for the KV cache. Raises PlanError if the user gave the cache more."""
    own = CPU_RUNTIME_BYTES if device == "cpu" else 0
    left = plan.max_memory[device] - sum(rank.weight_bytes + rank.activation_bytes + own for rank in ranks)
    if plan.kv_cache_bytes is not None and plan.kv_cache_bytes * len(ranks) > left:
        raise PlanError(
            f"--max-memory leaves {max(0, left):,} bytes of {device} after the weights, and "
            f"--kv-cache-memory-bytes wants {plan.kv_cache_bytes * len(ranks):,}: leave one of them out",
            code="kv-cache-exceeds-max-memory",
        )
    return left


def _no_room(plan: Plan, host: str, device: str, budget: int, cost: int) -> str:
    """Message for a device whose budget does not hold one block of `cost` bytes: the source of the budget, ways out."""
    more_ranks = "cut the model across more ranks (--tensor-parallel-size, --pipeline-parallel-size)"
    fewer_tokens = "lower --max-num-batched-tokens"
    if plan.kv_cache_bytes is not None:
        source, ways = "--kv-cache-memory-bytes gives", ["raise --kv-cache-memory-bytes", more_ranks]
    elif device in plan.max_memory:
        source = "--max-memory leaves after weights, activations and the engine itself"
        ways = ["raise it", fewer_tokens] if device == "cpu" else ["raise it", more_ranks, fewer_tokens]
    elif device == "cpu":
        source = "a quarter of the free memory, at most 4 GB, is"
        ways = ["free memory or give --kv-cache-memory-bytes", more_ranks]
    else:
        source, ways = "the weights leave", ["raise --gpu-memory-utilization", more_ranks, fewer_tokens]
    return (
        f"no room for the KV cache on {device} of {host}: one block of {plan.block_size} tokens takes {cost:,} bytes, "
        f"{source} {max(0, budget):,}; {', or '.join(ways)}"
    )


def fit_length(plan: Plan, num_blocks: int) -> int:
    """The max_model_len that is served, in tokens: the plan's, or the length that the KV cache holds if that is less.

    A length that the user gave is never shortened: raises PlanError with the largest that fits.
    """
    held = plan.kv_layout.longest(num_blocks, plan.max_model_len)
    if plan.max_model_len_given and held < plan.max_model_len:
        need = plan.kv_layout.blocks(plan.max_model_len)
        block_bytes = _largest_block_bytes(plan)
        # Advice only if it can help: a CPU has no such share, and kv_cache_bytes takes the share's place.
        measured = plan.kv_cache_bytes is None and not plan.on_cpu
        share = " (or a higher --gpu-memory-utilization)" if measured else ""
        raise PlanError(
            f"max_model_len {plan.max_model_len:,} is more than the {held:,} tokens that the KV cache holds; "
            f"use --max-model-len {held} or less, or --kv-cache-memory-bytes {need * block_bytes} per rank"
            f"{share}, or more ranks",
            code="context-exceeds-kv-cache",
        )
    return held


def _largest_block_bytes(plan: Plan) -> int:
    """Bytes of one KV block on the rank that needs the most, with a draft model's block on the output rank."""
    largest = max(plan.block_bytes(place.rank) for place in plan.places)
    if plan.speculation and plan.speculation.draft:
        largest = max(largest, plan.block_bytes(plan.output_rank) + draft_plan(plan).block_bytes(0))
    return largest


def capacity_lines(plan: Plan, num_blocks: int) -> list[str]:
    """Log lines for the allocated cache: the two that scripts read, and a third if max_model_len is fitted down.

    The two are vLLM's, which say GPU; on a CPU the first one says CPU. They count all attention groups together.
    """
    length, layout, groups = fit_length(plan, num_blocks), plan.kv_layout, plan.data_parallel
    kind, requests = "CPU" if plan.on_cpu else "GPU", groups * layout.requests(num_blocks, length)
    lines = [
        f"{kind} KV cache size: {groups * layout.tokens(num_blocks, length):,} tokens",
        f"Maximum concurrency for {length:,} tokens per request: {requests:.2f}x",
    ]
    if length < plan.max_model_len:
        lines.append(
            f"max_model_len is {length:,} tokens, not the model's {plan.max_model_len:,}: the KV cache holds no more"
        )
    return lines
