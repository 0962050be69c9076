"""The worker of one rank: a model runner with a sampler and a proposer of draft tokens. It executes steps."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from msgspec.structs import replace

from weft.engine.core.commands import (
    CaptureGraph,
    Done,
    FinishSwap,
    GraphsLeft,
    PrepareSwap,
    Profile,
    RankCommand,
    RankStats,
    Refused,
    Reply,
    Sleep,
    TraceFile,
    Wake,
)
from weft.engine.core.params import SamplingParams
from weft.engine.core.step import Admission, StepPlan, StepResult
from weft.engine.executors.rank import unfreeze_start
from weft.errors import error_reason
from weft.machine.hardware import malloc
from weft.plan.memory import Capacity
from weft.plan.plan import Plan
from weft.plan.speculation import draft_plan
from weft.ranks.comm import Links
from weft.ranks.comm.nccl_log import read_choices
from weft.ranks.kernels.capture import release_cached_memory, release_workspaces, use_workspaces
from weft.ranks.kernels.streams import NOT_FINITE
from weft.ranks.worker import rehearsal
from weft.ranks.worker.device import free_bytes
from weft.ranks.worker.model_proposer import ModelProposer
from weft.ranks.worker.pooling import PooledRows, pool_prompts
from weft.ranks.worker.prompt_logprobs import score_prompts
from weft.ranks.worker.request_slots import RequestSlots
from weft.ranks.worker.runner import ModelRunner
from weft.ranks.worker.sample_arrays import SampleArrays, int64_array, sampled_positions
from weft.ranks.worker.sampler import SampleBatch, Sampler
from weft.ranks.worker.step_clock import create_step_clock
from weft.ranks.worker.swap import SwapRefusedError
from weft.ranks.worker.trace import RankTrace, finish_writing

logger = logging.getLogger("weft")

# A step's result, or on a GPU a function that waits for it; None on ranks that do not sample.
Result = StepResult | Callable[[], StepResult] | None
UNTRACED = nullcontext()


class Worker:
    """Rank `rank` of `plan`. Call `load`, then `allocate`, then `execute` once per step, all from one thread."""

    def __init__(self, plan: Plan, rank: int, links: Links) -> None:
        self.plan, self.rank, self.links = plan, rank, links
        self.place = plan.places[rank]
        self.runner = ModelRunner(plan, rank, links)
        self.report_read: Callable[[int, int], None] = lambda done, total: None
        self.report_captured: Callable[[int, int], None] = lambda done, total: None
        self.sampler: Sampler | None = None
        self.proposer: Proposer | None = None
        self.trace: RankTrace | None = None
        self._traces = 0

    @torch.inference_mode()
    def load(self) -> Capacity:
        """Read this rank's weights, build its part of the model, and measure the peak memory of a step."""
        began = time.monotonic()
        plan, runner = self.plan, self.runner
        runner.load(self.report_read)
        self._use_gpu()
        self.clock = create_step_clock(runner.device, self.links)
        groups = len(plan.kv_layout.groups)
        self.request_slots = RequestSlots(
            plan.max_num_seqs, plan.max_model_len, plan.block_size, runner.device, groups=groups
        )
        if self.place.samples:
            self.sampler = self._create_sampler()
        runner.measure(self._rehearse)
        if self.sampler and plan.speculation and plan.speculation.draft:
            draft = ModelRunner(draft_plan(plan), 0, Links())
            self.proposer = ModelProposer(draft, self.request_slots, self.sampler)
            self.proposer.load()
        # The larger peak of the two, since model and draft run in turn. But graphs keep their memory.
        activation = max(runner.activation_bytes for runner in self.runners)
        activation += sum(runner.graph_bytes for runner in self.runners)
        return Capacity(
            rank=self.rank,
            host=socket.gethostname(),
            device=plan.devices[self.rank].name,
            weight_bytes=sum(runner.weight_bytes for runner in self.runners),
            activation_bytes=activation,
            free_bytes=free_bytes(plan, self.rank, runner.device, activation),
            block_bytes=sum(runner.plan.block_bytes(runner.rank) for runner in self.runners),
            load_s=time.monotonic() - began,
        )

    def _create_sampler(self) -> Sampler:
        plan, shape = self.plan, self.plan.shape
        return Sampler(shape.vocab, plan.max_num_seqs, shape.eos, self.runner.kernels.sampling)

    @property
    def runners(self) -> list[ModelRunner]:
        """This rank's runners: the proposer's own after the model's."""
        return [self.runner, *(self.proposer.runners if self.proposer else ())]

    @torch.inference_mode()
    def allocate(self, num_blocks: int) -> int:
        """Allocate the KV cache, and run a step of each kind so that no request meets a cold path.

        Returns the number of CUDA graphs that are left to `capture_graph`.
        """
        if self.proposer:
            self.proposer.allocate(num_blocks)
        self.runner.allocate(num_blocks, self._rehearse, self.report_captured)
        for line in read_choices():
            logger.info("rank %d, NCCL: %s", self.rank, line)
        return sum(runner.uncaptured for runner in self.runners)

    @torch.inference_mode()
    def call(self, command: RankCommand) -> Reply:
        """Execute a command. All ranks do so between the same steps."""
        match command:
            case CaptureGraph():
                self.capture_graph()
            case Profile(steps, directory):
                traced = self.trace.steps if self.trace and not steps else 0
                return TraceFile(self.profile(steps, directory), traced)
            case RankStats(reset):
                alone = self.links.tensor.size == 1 and self.plan.exchange is None
                report = self.clock.report(self.runner.device, alone=alone, reset=reset)
                return replace(report, routed_tokens=tuple(self.runner.routed_tokens()))
            case Sleep(level):
                self.sleep(level)
                return Done()
            case Wake():
                self.wake()
            case PrepareSwap():
                return self.prepare_swap(command)
            case FinishSwap(take):
                self.runner.finish_swap(take=take)
                malloc.release()
                return Done()
        return GraphsLeft(sum(runner.uncaptured for runner in self.runners))

    def prepare_swap(self, command: PrepareSwap) -> Done | Refused:
        """Make the weights of another checkpoint ready, or say why that cannot be; the model's weights stay."""
        try:
            self.runner.prepare_swap(command)
        except SwapRefusedError as error:
            logger.error("rank %d keeps its weights", self.rank, exc_info=error)
            return Refused(error.code, str(error))
        return Done()

    def capture_graph(self) -> None:
        """Capture one more CUDA graph, if one is left."""
        runner = next((runner for runner in self.runners if runner.uncaptured), None)
        if runner:
            runner.capture_graph()

    def profile(self, steps: int, directory: str) -> str:
        """End the trace that runs, if any. If `steps` is above 0, trace as many steps.

        Returns the path of the new trace, or else of the ended one, which a thread writes; "" if another rank of this
        process traces, or if none can begin.
        """
        ended = self._end_trace()
        if not steps:
            return ended
        # The ranks of an engine that are threads have one plan, and count the same traces.
        self._traces += 1
        engine = id(self.plan)
        try:
            self.trace = RankTrace(steps, self.rank, directory, self.links.times, engine=engine, number=self._traces)
        except (OSError, RuntimeError) as error:  # a full disk, a profiler of somebody else
            logger.error("rank %d: no trace begins in %s: %s", self.rank, directory, error_reason(error))
            return ""
        self.runner.trace(self.trace.log_phase)
        return self.trace.path

    def _end_trace(self) -> str:
        trace, self.trace = self.trace, None
        if trace is None:
            return ""
        self.runner.trace(None)
        return trace.end(self.links.times)

    def sleep(self, level: int) -> None:
        """Give memory back, see the command Sleep. No request holds a slot any more."""
        for slot in range(self.plan.max_num_seqs):
            self._release(slot)
        for runner in self.runners:
            runner.sleep(level)
        unfreeze_start()
        malloc.release()
        self._leave_gpu()

    def _use_gpu(self) -> None:
        if self.runner.device.type == "cuda":
            use_workspaces(self)

    def _leave_gpu(self) -> None:
        """Give back what torch keeps of the GPU's memory."""
        if self.runner.device.type == "cuda":
            release_workspaces(self)
            release_cached_memory()

    def wake(self) -> None:
        """Load what `sleep` has dropped, and allocate the KV cache as at the start."""
        self._use_gpu()
        if self.proposer:
            self.proposer.wake()
        self.runner.wake(self._rehearse)
        if self.runner.device.type == "cpu":
            malloc.release()  # of weights that were packed

    @torch.inference_mode()
    def execute(self, step: StepPlan) -> Result:
        """Run one step. The output rank returns its result, or on a GPU a function that waits for it."""
        clock = self.clock
        clock.steps += 1
        clock.begin()
        with self._traced("step"):
            result = self._run_step(step)
        clock.end()
        if self.trace:
            self.trace.left -= 1
            if not self.trace.left:
                self._end_trace()
        return result

    def _traced(self, part: str) -> AbstractContextManager[None]:
        """A context for a part of a step, which a trace that runs has as a span."""
        return self.trace.span(part) if self.trace else UNTRACED

    def _run_step(self, step: StepPlan) -> Result:
        self._update_slots(step)
        if not step.slots:
            if any(step.group_tokens):
                self.runner.serve_others(step)
            return StepResult(step.id, [], [], {}) if self.sampler else None
        samples, arrays = self._prepare_samples(step)
        runner = self.runner
        staged, tensors = self.request_slots.stage(
            step, arrays, singly=runner.runs_singly(step), expands_from=runner.expands_from
        )
        batch = runner.fill_batch(staged)
        incoming = None
        if not self.place.first:
            dims = (len(step.tokens), self.plan.shape.hidden)
            self.clock.pause()
            with self._traced("wait for the stage before"):
                incoming = self.links.stage.recv(dims, runner.dtype)
            self.clock.resume()
        with self._traced("layers"):
            hidden = runner.forward(batch, incoming)
        if not self.place.last:
            self.links.stage.send(hidden)
            return None
        if self.proposer:
            self.proposer.note(step, hidden)
        with self._traced("sampling"):
            result = self._finish(step, hidden, samples, tensors)
        if step.draft_requests and any(step.draft_requests):
            return self._propose_drafts(step, result)
        return result

    def _update_slots(self, step: StepPlan) -> None:
        """Release and admit the requests that a step names."""
        for slot in step.released:
            self._release(slot)
        for admission in step.admitted:
            self.request_slots.admit(admission)
            if self.sampler:
                self.sampler.admit(admission)
            if self.proposer:
                self.proposer.admit(admission)

    def _release(self, slot: int) -> None:
        self.request_slots.release(slot)
        if self.sampler:
            self.sampler.release(slot)

    def _prepare_samples(self, step: StepPlan) -> tuple[SampleBatch | None, SampleArrays[np.ndarray] | None]:
        """Prepare the tokens that a step samples: a batch on the output rank, arrays on every rank of the last stage.

        Both are None if the step samples no token.
        """
        if not self.place.last:
            return None, None
        picks, slots, positions = sampled_positions(step)
        if not picks:
            return None, None
        if self.sampler is None:
            return None, SampleArrays(int64_array(picks), int64_array(slots), int64_array(positions))
        samples = self.sampler.prepare_batch(picks, slots, positions, step.masks)
        return samples, samples.arrays

    def _finish(
        self,
        step: StepPlan,
        hidden: torch.Tensor,
        samples: SampleBatch | None,
        tensors: SampleArrays[torch.Tensor] | None,
    ) -> Result:
        """Sample, and score or pool prompts if requests want it. Every rank of the last stage comes here, since the
        head is cut; only the output rank has `samples`. `tensors` are None if the step samples no token."""
        prompt_logprobs, scoring = {}, self.request_slots.prompt_logprobs
        if scoring:
            prompt_logprobs = score_prompts(step, hidden, scoring, self.runner.logits, self.sampler)
        pooled, prompts = None, self.request_slots.pooled
        if prompts:
            pooled = pool_prompts(step, hidden, prompts, self.runner, returns=self.sampler is not None)
        if tensors is None:
            return self._unsampled(StepResult(step.id, [], [], prompt_logprobs), pooled) if self.sampler else None
        # In the usual decode step every token is sampled after: nothing to select.
        if len(tensors.picks) < len(hidden):
            hidden = hidden.index_select(0, tensors.picks)
        logits = self.runner.logits(hidden)
        if self.sampler is None:
            self._keep_last_tokens(tensors.slots, None)
            return None
        assert logits is not None and samples is not None
        sampled = self.sampler.sample(logits, samples, tensors)
        self._keep_last_tokens(tensors.slots, sampled.tokens)

        def result() -> StepResult:
            tokens, logprobs = sampled.result()
            step_result = StepResult(step.id, tokens, logprobs, prompt_logprobs)
            if min(tokens) == NOT_FINITE:
                step_result.failed = samples.failures(tokens, self.rank)
                step_result.tokens = [max(token, 0) for token in tokens]
            return pooled.add_to(step_result) if pooled else step_result

        return result() if self.runner.device.type == "cpu" else result

    def _unsampled(self, result: StepResult, pooled: PooledRows | None) -> Result:
        """The result of a step that samples no token, with what is `pooled` of prompts."""
        if pooled is None:
            return result
        return pooled.add_to(result) if self.runner.device.type == "cpu" else lambda: pooled.add_to(result)

    def _keep_last_tokens(self, slots: torch.Tensor, tokens: torch.Tensor | None) -> None:
        """Keep the sampled tokens [R] int64 for the next step, on every rank; only the output rank has them."""
        if not self.plan.lookahead:
            return
        last = self.request_slots.last
        sampled = last.new_empty(len(slots)) if tokens is None else tokens
        last.index_copy_(0, slots, self.links.tensor.broadcast(sampled))

    def _propose_drafts(self, step: StepPlan, result: Result) -> Result:
        """Add the proposer's draft tokens to a result, which it waits for: they follow the sampled tokens."""
        if self.proposer is None:
            return result
        step_result = result() if callable(result) else result
        assert step_result is not None
        step_result.drafts = self.proposer.propose(step, step_result.tokens)
        return step_result

    def close(self) -> None:
        """Free the memory."""
        self._end_trace()
        finish_writing()
        for runner in self.runners:
            runner.close()
        self.sampler = self.proposer = None
        self._leave_gpu()

    def _rehearse(self, counts: list[int], params: SamplingParams, num_blocks: int | None = None) -> None:
        """Run a `rehearsal_step`. Raises ModelError if its logits are not finite."""
        step = rehearsal.rehearsal_step(self.plan, counts, params, num_blocks)
        result = self.execute(step)
        step_result = result() if callable(result) else result
        for slot in step.slots:
            self._release(slot)
        if step_result and step_result.failed:
            raise rehearsal.not_finite(self.runner.plan)


class Proposer(Protocol):
    """Proposes draft tokens, which the model verifies in the next step.

    Call `load`, then `allocate`; then for each step `admit` for each request that takes a slot, `note`, and `propose`
    if the step asks for draft tokens.
    """

    @property
    def runners(self) -> Sequence[ModelRunner]:
        """Runners that belong to the proposer alone: their memory counts as the rank's."""
        ...

    def load(self) -> None: ...

    def allocate(self, num_blocks: int) -> None: ...

    def wake(self) -> None:
        """Load what has been dropped while the rank slept, and allocate as before."""
        ...

    def admit(self, admission: Admission) -> None:
        """Give a slot to a request."""
        ...

    def note(self, step: StepPlan, hidden: torch.Tensor) -> None:
        """Note the rows of a step, whose new blocks the request slots have already, and the last layer's result for
        their tokens, `hidden` [T, hidden], whose memory the next step may take."""
        ...

    def propose(self, step: StepPlan, sampled: list[int]) -> dict[int, list[int]]:
        """Propose draft tokens by slot, to follow the tokens that the model `sampled` in this step."""
        ...
