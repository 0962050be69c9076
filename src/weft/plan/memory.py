"""KV blocks: how many every rank can hold, and what that means for the lengths that are served."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from weft.architectures.place import Place
from weft.architectures.shape import ModelShape
from weft.errors import PlanError
from weft.plan.plan import Plan
from weft.plan.speculation import draft_plan

CPU_KV_BYTES = 4_000_000_000  # per host, at most, without --kv-cache-memory-bytes
CPU_KV_SHARE = 4  # and at most one part in so many of the free memory
HIDDEN_COPIES = 3  # residual, norm and output
FFN_COPIES = 3  # gate, up and their product
LOGITS_BYTES = 2 * 4  # float32, twice: as they come and as they are sampled from
CPU_RUNTIME_BYTES = 500 << 20  # resident memory of torch and its libraries in a rank: 0.4 to 0.6 GB measured
SCORED_POSITIONS = (
    64  # positions of a prompt whose logits are held at once, where a request wants its prompt's logprobs
)


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says once its weights are loaded and its peak is measured. All in bytes.

    `device` names the memory that it draws on ("cpu" of one host, "cuda:0"), `host` the machine; ranks with
    equal (host, device) share `free_bytes`. `block_bytes` is the cost of one KV block on this rank. On a GPU
    `free_bytes` is what gpu_memory_utilization leaves for KV; on a CPU it is the host's free memory.
    """

    rank: int
    host: str
    device: str
    weight_bytes: int
    activation_bytes: int
    free_bytes: int
    block_bytes: int
    load_s: float


def step_bytes(
    shape: ModelShape, place: Place, tokens: int, sequences: int, number_bytes: int, *, draft_tokens: int = 0
) -> int:
    """What our own step of `tokens` tokens takes beside weights and KV, where it cannot be measured: the widest
    moment of a layer for each token, and on the rank that samples the logits that it holds at once: after the last
    token of each of `sequences` and after each of its `draft_tokens`, or after SCORED tokens of a prompt."""
    attention = (len(place.q_heads) * 2 + len(place.kv_heads) * 2) * shape.head_dim
    width = HIDDEN_COPIES * shape.hidden + max(attention, FFN_COPIES * len(place.ffn))
    rows = min(tokens, max(SCORED_POSITIONS, sequences * (1 + draft_tokens))) if place.samples else 0
    return tokens * width * number_bytes + LOGITS_BYTES * rows * shape.vocab


def kv_blocks(plan: Plan, capacities: Sequence[Capacity]) -> int:
    """The blocks that every rank has: the minimum over the devices of budget ÷ bytes per block of its ranks.

    With `plan.kv_cache_bytes` each rank's budget is that. Else the ranks of a device share what the poorest
    report says is free, and a CPU gives min(4 GB, a quarter of it); with `plan.max_memory` no more than that leaves
    beside weights, activations and what every rank takes of a CPU's for itself (of a GPU's, the reports know that:
    `gpu_memory_utilization` is no more than that share). Raises PlanError where a device has no room for one block, or
    where the two contradict each other.
    """
    devices: dict[tuple[str, str], list[Capacity]] = defaultdict(list)
    for capacity in capacities:
        devices[capacity.host, capacity.device].append(capacity)
    rooms = []
    for (host, device), ranks in devices.items():
        if plan.kv_cache_bytes is not None:
            cost, budget = max(rank.block_bytes for rank in ranks), plan.kv_cache_bytes
        else:
            # Reports are made one after the other: the lowest has seen the most of the others' weights.
            cost, budget = sum(rank.block_bytes for rank in ranks), min(rank.free_bytes for rank in ranks)
            if device == "cpu":
                budget = min(CPU_KV_BYTES, budget // CPU_KV_SHARE)
        if device in plan.max_memory:
            own = CPU_RUNTIME_BYTES if device == "cpu" else 0
            left = plan.max_memory[device] - sum(rank.weight_bytes + rank.activation_bytes + own for rank in ranks)
            if plan.kv_cache_bytes is not None and plan.kv_cache_bytes * len(ranks) > left:
                raise PlanError(
                    f"--max-memory leaves {max(0, left):,} bytes of {device} beside the weights, and "
                    f"--kv-cache-memory-bytes wants {plan.kv_cache_bytes * len(ranks):,}: leave one of them out"
                )
            budget = min(budget, left)
        if budget < cost:
            raise PlanError(_no_room(plan, host, device, budget, cost))
        rooms.append(budget // cost)
    return min(rooms)


def _no_room(plan: Plan, host: str, device: str, budget: int, cost: int) -> str:
    gpu = device != "cpu"
    ways = [
        "raise --kv-cache-memory-bytes"
        if plan.kv_cache_bytes is not None
        else ("raise --gpu-memory-utilization" if gpu else "free memory or give --kv-cache-memory-bytes"),
        "cut the model across more ranks (--tensor-parallel-size, --pipeline-parallel-size)",
    ]
    if gpu and plan.kv_cache_bytes is None:
        ways.append("lower --max-num-batched-tokens")
    if plan.kv_cache_bytes is not None:
        source = "--kv-cache-memory-bytes gives"
    else:
        source = "the weights leave" if gpu else "a quarter of the free memory, at most 4 GB, is"
    if device in plan.max_memory and plan.kv_cache_bytes is None:
        source, ways[0] = "--max-memory leaves beside weights, activations and the engine itself", "raise it"
        ways[1:] = ways[1:] if gpu else ["lower --max-num-batched-tokens"]
    return (
        f"no room for the KV cache on {device} of {host}: one block of {plan.block_size} tokens takes {cost:,} bytes, "
        f"{source} {max(0, budget):,}; {', or '.join(ways)}"
    )


def fit_length(plan: Plan, num_blocks: int) -> int:
    """The max_model_len that is served, in tokens: the plan's, or what the KV cache holds where that is less.

    A length that the user asked for is never shortened: PlanError with the largest that fits.
    """
    held = num_blocks * plan.block_size
    if plan.max_model_len <= held:
        return plan.max_model_len
    if plan.max_model_len_given:
        need = -(-plan.max_model_len // plan.block_size)
        most = max(plan.block_bytes(place.rank) for place in plan.places)
        if plan.speculation and plan.speculation.draft:
            most = max(most, plan.block_bytes(plan.output_rank) + draft_plan(plan).block_bytes(0))
        # What is not asked cannot help: a CPU has no such share, and a figure for the cache takes its place.
        measured = plan.kv_cache_bytes is None and any(device != "cpu" for device in plan.devices)
        share = " (or a higher --gpu-memory-utilization)" if measured else ""
        raise PlanError(
            f"max_model_len {plan.max_model_len:,} is more than the {held:,} tokens that the KV cache holds; "
            f"use --max-model-len {held} or less, or --kv-cache-memory-bytes {need * most} per rank"
            f"{share}, or more ranks"
        )
    return held


def capacity_lines(plan: Plan, num_blocks: int) -> list[str]:
    """Log lines for the allocated cache: the two that scripts read, in vLLM's words (which say GPU; of a CPU the first
    says CPU), and one more where the model's length had to be fitted down."""
    length = fit_length(plan, num_blocks)
    per_request = -(-length // plan.block_size)
    kind = "CPU" if all(device == "cpu" for device in plan.devices) else "GPU"
    lines = [
        f"{kind} KV cache size: {num_blocks * plan.block_size:,} tokens",
        f"Maximum concurrency for {length:,} tokens per request: {num_blocks / per_request:.2f}x",
    ]
    if length < plan.max_model_len:
        lines.append(
            f"max_model_len is {length:,} tokens, not the model's {plan.max_model_len:,}: the KV cache holds no more"
        )
    return lines
