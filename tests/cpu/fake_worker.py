"""A worker without a model: sums and hands on numbers, and misbehaves where the plan's `model` tells it to.

`plan.model` is "fine", or "DEED RANK PHASE", as in "kill 1 load". What each row of a step
samples is the sum of the step's tokens times that of all ranks' numbers (rank + 1), as a token id.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2]))  # a rank's process knows this folder alone

from tests.pure.shapes import dense_shape, with_experts
from weft.checkpoint.architectures.shape import Experts
from weft.engine.core.commands import CaptureGraph, Command, GraphsLeft, RankReport, RankStats, Reply
from weft.engine.core.groups import empty_plan
from weft.engine.core.step import LockStep, StepPlan, StepResult
from weft.errors import ModelError
from weft.plan.memory import Capacity
from weft.plan.places import cut_places
from weft.plan.plan import Plan, named_devices
from weft.ranks.comm import Links

SHAPE = dense_shape(
    architecture="LlamaForCausalLM",
    layers=4,
    hidden=8,
    q_heads=4,
    kv_heads=4,
    head_dim=2,
    ffn=256,
    vocab=256,
    max_positions=64,
    dtype="float32",
)
HERE, GRAPHS = "fake_worker:FakeWorker", "fake_worker:GraphsWorker"


# For attention groups: as many experts as they may have ranks.
MIXTURE = with_experts(SHAPE, Experts(count=8, top_k=2, width=32))


def make_plan(model: str = "fine", *, tensor: int = 1, stages: int = 1, groups: int = 1) -> Plan:
    ranks, shape = tensor * stages * groups, MIXTURE if groups > 1 else SHAPE
    layers, dealt = [len(SHAPE.layers) // stages] * stages, tensor * groups if groups > 1 else 1
    return Plan(
        model=model,
        checkpoint="",
        load_format="dummy",
        shape=shape,
        dtype="float32",
        places=cut_places(shape, [1.0] * tensor, layers, data_parallel=groups, expert_parallel=dealt),
        devices=named_devices(*("cpu",) * ranks),
        cores=(tuple(os.sched_getaffinity(0)),) * ranks,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=4,
        kv_cache_bytes=64 << 10,
    )


def make_step(id: int, tokens: list[int]) -> StepPlan:
    return StepPlan(id, [], [], [0], [0], [len(tokens)], tokens, [[[0]]], [True], [0])


def make_lock_step(id: int, *tokens: list[int]) -> LockStep:
    """A step of several attention groups, of which some may have no tokens."""
    plans = [make_step(id, group) if group else empty_plan() for group in tokens]
    for plan in plans:
        plan.group_tokens = [len(group) for group in tokens]
    return LockStep(plans)


def total(plan: Plan, tokens: list[int], group: int = 0) -> int:
    """Answer of the fake to an attention group's step with these tokens."""
    ranks = [rank + 1 for rank in plan.attention_groups[group]]
    return sum(tokens) * sum(ranks) % SHAPE.vocab


class FakeWorker:
    def __init__(self, plan: Plan, rank: int, links: Links) -> None:
        self.plan, self.rank, self.links = plan, rank, links
        self.place = plan.places[rank]
        deed, culprit, phase = plan.model.split() if plan.model != "fine" else ("", "-1", "")
        self.deed, self.phase = (deed, phase) if int(culprit) == rank else ("", "")
        self.blocks = self.steps = 0
        self.at("start")

    def load(self) -> Capacity:
        self.at("load")
        return Capacity(
            rank=self.rank,
            host="here",
            device="cpu",
            weight_bytes=self.rank,
            activation_bytes=0,
            free_bytes=1 << 30,
            block_bytes=self.plan.block_bytes(self.rank),
            load_s=0.0,
        )

    def allocate(self, num_blocks: int) -> int:
        self.at("allocate")
        self.blocks = num_blocks
        return 0

    def call(self, command: Command) -> Reply:
        self.at(command.phase)
        assert isinstance(command, RankStats), "no other command means anything to it"
        return RankReport(
            steps=self.steps, compute_s=0.0, communication_s=0.0, waiting_s=0.0, allocated_bytes=self.rank
        )

    def execute(self, step: StepPlan) -> StepResult | None:
        self.at("step")
        self.steps += 1
        x = torch.tensor([sum(step.tokens) * (self.rank + 1.0)])
        x = self.links.tensor.sum(x)
        if self.plan.exchange:
            # All groups are in the same step, and know of each other's tokens.
            group = self.links.data if self.plan.exchange == "gather" else self.links.expert
            tokens = group.all_gather(torch.tensor([len(step.tokens)]), [1] * group.size).tolist()
            each = group.size // len(step.group_tokens)
            assert tokens == [count for count in step.group_tokens for _ in range(each)]
        if not self.place.first:
            x = x + self.links.stage.recv((1,), torch.float32)
        if not self.place.last:
            self.links.stage.send(x)
        if not self.place.samples:
            return None
        assert self.blocks, "steps come after allocate"
        sampled = step.samples.count(True)
        return StepResult(step.id, [int(x) % SHAPE.vocab] * sampled, [None] * sampled, {})

    def close(self) -> None:
        print(f"rank {self.rank} closes", file=sys.stderr, flush=True)

    def at(self, phase: str) -> None:
        if phase != self.phase:
            return
        match self.deed:
            case "raise":
                raise ValueError(f"rank {self.rank} does not like to {phase}")
            case "refuse":
                raise ModelError("model.safetensors is cut off", code="short-tensor")
            case "exhaust":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
            case "exit":
                print("the last thing it says", file=sys.stderr)
                os._exit(7)
            case "leave":
                sys.exit("leaving")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "crash":
                os.abort()
            case "hang":
                print(f"rank {self.rank} hangs in {phase}", file=sys.stderr, flush=True)
                time.sleep(600)


class GraphsWorker(FakeWorker):
    """Has three CUDA graphs to capture, each of which all ranks have to capture between the same two steps.

    It samples 100 times the number of captured ones.
    """

    def allocate(self, num_blocks: int) -> int:
        super().allocate(num_blocks)
        self.left = 3
        return self.left

    def call(self, command: Command) -> Reply:
        if not isinstance(command, CaptureGraph):
            return super().call(command)
        steps = self.links.tensor.sum(torch.tensor([float(self.steps)])).item()
        assert steps == self.steps * self.links.tensor.size, "another rank captures between other steps"
        self.left -= 1
        return GraphsLeft(self.left)

    def execute(self, step: StepPlan) -> StepResult | None:
        result = super().execute(step)
        return result and StepResult(result.id, [100 * (3 - self.left)], result.logprobs, {})
