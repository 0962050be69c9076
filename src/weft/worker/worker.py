"""The worker of one rank: it loads its share of the model, reports its memory, takes its KV blocks and runs steps."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

import numpy as np
import torch

from weft.architectures.kv import layer_bytes_per_token
from weft.comm import Links
from weft.core.params import SamplingParams
from weft.core.step import StepPlan, StepResult
from weft.errors import ModelError
from weft.kernels import create_kernels, create_rounding
from weft.kernels.base import AttentionShape, KVCache
from weft.kernels.batch import Batch
from weft.kernels.capture import release_cached_memory, synchronize_device
from weft.kernels.staged import StagedStep
from weft.kernels.streams import NOT_FINITE
from weft.kernels.warm import warm_kernels
from weft.models.decoder import DecoderModel
from weft.plan.fills import rank_weight_bytes
from weft.plan.memory import Capacity, step_bytes
from weft.plan.plan import Plan
from weft.weights.load import allocate_parameters, load_weights
from weft.worker import rehearsal
from weft.worker.device import allocate_caches, free_bytes, prepare_device
from weft.worker.draft_runner import DraftRunner
from weft.worker.graphs import CudaGraphs, Graphs, graph_sizes
from weft.worker.importance import measure_importance
from weft.worker.prompt_logprobs import score_prompts
from weft.worker.request_slots import RequestSlots
from weft.worker.sample_arrays import SampleArrays, int64_array, sampled_positions
from weft.worker.sampler import SampleBatch, Sampler

logger = logging.getLogger("weft")

GRAPH_BYTES = 8 << 20  # of the driver's, for one graph; a prior, to be measured
# Bytes of KV that a GPU reads while the host launches one layer's kernels; a prior, to be measured.
EAGER_BYTES = 128 << 20

# A step's result, or on a GPU a function that waits for it; None on ranks that do not sample.
Result = StepResult | Callable[[], StepResult] | None


class Worker:
    """Rank `rank` of `plan`. Call `load`, then `allocate`, then `execute` once per step, all from one thread."""

    def __init__(self, plan: Plan, rank: int, links: Links) -> None:
        self.plan, self.rank, self.links = plan, rank, links
        self.place = plan.places[rank]
        self.dtype: torch.dtype = getattr(torch, plan.dtype)
        self.attention = AttentionShape.from_plan(plan, rank)
        self.caches: list[KVCache] = []
        self.graphs: Graphs | None = None
        self.graph_bytes = 0  # that all graphs keep, a draft's too
        self.draft_runner: DraftRunner | None = None

    @torch.inference_mode()
    def load(self) -> Capacity:
        """Read this rank's weights, build its part of the model, and measure the peak memory of a step."""
        began = time.monotonic()
        plan = self.plan
        self.device = prepare_device(plan, self.rank)
        self.request_slots = RequestSlots(plan.max_num_seqs, plan.max_model_len, plan.block_size, self.device)
        held = self._load_model()
        if self.device.type != "cpu":
            # Here, since the peak is measured with all that a step needs.
            self.model.fill_ropes(plan.max_model_len, plan.max_model_len, self.device)
        warm_kernels(self.kernels.launches(self.attention, self.device), self.device)
        self.sampler = self._create_sampler() if self.rank == plan.output_rank else None
        eager, block_bytes = self._measure(), plan.block_bytes(self.rank)
        if self.sampler and plan.speculation and plan.speculation.draft:
            self.draft_runner = DraftRunner(plan)
            draft = self.draft_runner.load()
            # The larger of the two, since model and draft run in turn. But graphs keep their memory.
            eager = max(eager, draft.activation_bytes - self.draft_runner.graph_bytes)
            self.graph_bytes += self.draft_runner.graph_bytes
            held += draft.weight_bytes
            block_bytes += draft.block_bytes
        activation = eager + self.graph_bytes
        return Capacity(
            rank=self.rank,
            host=socket.gethostname(),
            device=plan.devices[self.rank].name,
            weight_bytes=held,
            activation_bytes=activation,
            free_bytes=free_bytes(plan, self.rank, self.device, activation),
            block_bytes=block_bytes,
            load_s=time.monotonic() - began,
        )

    def _load_model(self) -> int:
        """Load the weights and build the model; return the bytes of weights that the rank holds."""
        plan, shape = self.plan, self.plan.shape
        # The table of parameters gives every dim, so tensors are allocated once, where they stay.
        tensors = allocate_parameters(plan, self.place, self.device)
        held = sum(tensor.nbytes for tensor in tensors.values())
        backend = plan.attention_backend, self.device, self.attention
        importance = measure_importance(plan, self.rank, self.links, tensors, self.device)
        load_weights(plan, self.place, tensors, create_rounding(*backend), importance)
        self.kernels = create_kernels(*backend)
        if plan.schemes and not self.kernels.matrices.multiplies_quantised:
            held = rank_weight_bytes(shape, self.place, plan.dtype)
            logger.warning("The kernels of torch do not multiply quantised weights: they are held in %s", plan.dtype)
        if plan.graphs and not self.kernels.attention.capturable:
            logger.warning("The kernels of torch cannot be captured: decode steps run without CUDA graphs")
        self.model = DecoderModel(shape, plan.places, self.rank, tensors, self.links.tensor, self.kernels)
        return held

    def _create_sampler(self) -> Sampler:
        plan, shape = self.plan, self.plan.shape
        return Sampler(shape.vocab, plan.max_num_seqs, shape.eos, self.kernels.sampling)

    @torch.inference_mode()
    def allocate(self, num_blocks: int) -> int:
        """Allocate the KV cache, and run a step of each kind so that no request meets a cold path.

        Returns the number of CUDA graphs that are left to `capture_graph`.
        """
        plan = self.plan
        self.caches = allocate_caches(plan, self.rank, self.attention.cache_dtype, self.device, num_blocks)
        if self.draft_runner:
            self.draft_runner.allocate(num_blocks)
        if self.device.type == "cpu":
            # No longer than a text can be: some models' own length is a million tokens.
            rows = min(plan.max_model_len, num_blocks * plan.block_size)
            self.model.fill_ropes(rows, plan.max_model_len, self.device)
        tokens = min(16, plan.max_model_len, plan.max_num_batched_tokens, num_blocks * plan.block_size)
        self._rehearse([tokens])
        self._rehearse([1], rehearsal.PLAIN)
        if self._captures:
            self.graphs = self._create_graphs()
            self.graphs.capture_at_start(self._sum_seconds)
        if self.device.type == "cuda":
            # The largest steps again, beside the KV cache: the allocator keeps their memory, and later steps find it.
            for counts, params in rehearsal.largest_steps(plan):
                self._rehearse(counts, params, num_blocks)
        return self.uncaptured

    def _create_graphs(self) -> Graphs:
        return Graphs(
            self._forward,
            CudaGraphs(),
            prepare=self.kernels.attention.prepare,
            rows=self.plan.max_num_seqs,
            width=self.request_slots.tables.shape[1],
            incoming=None if self.place.first else (self.plan.shape.hidden, self.dtype),
            device=self.device,
            alone=self.links.tensor.size == 1,
        )

    def _sum_seconds(self, seconds: float) -> float:
        """Sum of all ranks' seconds, the same bits on each."""
        return self.links.tensor.sum(torch.tensor([seconds], device=self.device)).item()

    @property
    def uncaptured(self) -> int:
        """Number of CUDA graphs that are still to be captured, a draft's too."""
        own = len(self.graphs.uncaptured) if self.graphs else 0
        return own + (self.draft_runner.uncaptured if self.draft_runner else 0)

    @torch.inference_mode()
    def capture_graph(self) -> int:
        """Capture one more CUDA graph; return the number that is left. All ranks call this between the same steps."""
        if self.graphs and self.graphs.uncaptured:
            self.graphs.capture_next()
        elif self.draft_runner:
            self.draft_runner.capture_graph()
        return self.uncaptured

    @torch.inference_mode()
    def execute(self, step: StepPlan) -> Result:
        """Run one step. The output rank returns its result, or on a GPU a function that waits for it."""
        self._update_slots(step)
        if not step.slots:
            return StepResult(step.id, [], [], {}) if self.sampler else None
        samples, arrays = self._prepare_samples(step)
        staged, tensors = self.request_slots.stage(step, arrays, singly=self.runs_singly(step))
        batch = self.fill_batch(staged)
        if self.draft_runner:
            self.draft_runner.note(step, self.request_slots)
        incoming = None
        if not self.place.first:
            dims = (len(step.tokens), self.plan.shape.hidden)
            incoming = self.links.stage.recv(dims, self.dtype)
        hidden = self.hidden(batch, incoming)
        if not self.place.last:
            self.links.stage.send(hidden)
            return None
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
            if self.draft_runner:
                self.draft_runner.admit(admission)

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

    def runs_singly(self, step: StepPlan) -> bool:
        """Return True if each token of the step is to run as a row of its own.

        Rows of several tokens, such as draft tokens, then run as one graph, though attention reads the KV that a row's
        tokens have in common once for each of them.
        """
        tokens = len(step.tokens)
        if self.graphs is None or not len(step.slots) < tokens <= self.graphs.largest:
            return False
        read_again = sum(
            (count - 1) * start + count * (count - 1) // 2
            for start, count in zip(step.starts, step.counts, strict=True)
        )
        token_bytes = layer_bytes_per_token(self.plan.shape, self.plan.kv_dtype) // self.links.tensor.size
        return read_again * token_bytes <= EAGER_BYTES

    @torch.inference_mode()
    def fill_batch(self, staged: StagedStep) -> Batch:
        """Turn a staged step into a batch, in a graph's tensors if it can be replayed."""
        batch = (self.graphs and self.graphs.captured_batch(staged)) or staged.eager()
        self.kernels.pointwise.fill_batch(staged, batch)
        return batch

    @torch.inference_mode()
    def hidden(self, batch: Batch, incoming: torch.Tensor | None = None) -> torch.Tensor:
        """Run this rank's layers: [T, hidden], valid until the next call; `incoming` is from the stage before."""
        if self.graphs:
            return self.graphs.run_batch(batch, incoming)
        self.kernels.attention.prepare(batch)
        return self._forward(batch, incoming)

    def _forward(self, batch: Batch, incoming: torch.Tensor | None) -> torch.Tensor:
        return self.model.hidden(incoming, self.caches, batch)

    def _finish(
        self,
        step: StepPlan,
        hidden: torch.Tensor,
        samples: SampleBatch | None,
        tensors: SampleArrays[torch.Tensor] | None,
    ) -> Result:
        """Sample, and score prompts if requests want it. Every rank of the last stage comes here, since the head is
        cut; only the output rank has `samples`. `tensors` are None if the step samples no token."""
        prompt_logprobs, scoring = {}, self.request_slots.prompt_logprobs
        if scoring:
            prompt_logprobs = score_prompts(step, hidden, scoring, self.model, self.sampler)
        if tensors is None:
            return StepResult(step.id, [], [], prompt_logprobs) if self.sampler else None
        # In the usual decode step every token is sampled after: nothing to select.
        if len(tensors.picks) < len(hidden):
            hidden = hidden.index_select(0, tensors.picks)
        logits = self.model.logits(hidden)
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
            return step_result

        return result() if self.device.type == "cpu" else result

    def _keep_last_tokens(self, slots: torch.Tensor, tokens: torch.Tensor | None) -> None:
        """Keep the sampled tokens [R] int64 for the next step, on every rank; only the output rank has them."""
        if not self.plan.lookahead:
            return
        last = self.request_slots.last
        sampled = last.new_empty(len(slots)) if tokens is None else tokens
        last.index_copy_(0, slots, self.links.tensor.broadcast(sampled))

    def _propose_drafts(self, step: StepPlan, result: Result) -> Result:
        """Add the draft model's tokens to a result, which it waits for: they follow the sampled tokens."""
        if self.draft_runner is None or self.sampler is None:
            return result
        step_result = result() if callable(result) else result
        assert step_result is not None
        step_result.drafts = self.draft_runner.propose(step, step_result.tokens, self.request_slots, self.sampler)
        return step_result

    @property
    def _captures(self) -> bool:
        """True if decode steps run as CUDA graphs. Neither ranks that exchange on the host in the middle of a step nor
        kernels that wait for the GPU can be captured."""
        enabled = self.plan.graphs and self.device.type == "cuda"
        return enabled and self.links.tensor.capturable and self.kernels.attention.capturable

    def close(self) -> None:
        """Free the memory."""
        self.graphs = None
        if self.draft_runner:
            self.draft_runner.close()
        self.caches = []
        self.model = self.kernels = self.sampler = None  # type: ignore[assignment]
        if self.device.type == "cuda":
            release_cached_memory()

    def _measure(self) -> int:
        """Bytes that the largest step takes beside weights and graphs: measured on a GPU, computed on a CPU."""
        plan = self.plan
        rows, tokens = rehearsal.step_limits(plan)
        if self.device.type == "cpu":
            return step_bytes(
                plan.shape, self.place, tokens, rows, self.dtype.itemsize, draft_tokens=rehearsal.draft_limit(plan)
            )
        steps = rehearsal.largest_steps(plan)
        self.caches = allocate_caches(
            plan,
            self.rank,
            self.attention.cache_dtype,
            self.device,
            max(rehearsal.blocks_needed(plan, counts) for counts, _ in steps),
        )
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        for counts, params in steps:
            self._rehearse(counts, params)
        synchronize_device(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        if self._captures:
            # Graphs have memory of their own: that of the largest, and what the driver takes for each.
            sizes = graph_sizes(rows)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._rehearse([1] * sizes[-1])
            largest = torch.cuda.max_memory_allocated(self.device) - before
            self.graph_bytes = largest + GRAPH_BYTES * len(sizes)
        self.caches = []
        return peak

    def _rehearse(
        self, counts: list[int], params: SamplingParams = rehearsal.DEMANDING, num_blocks: int | None = None
    ) -> None:
        """Run a `rehearsal_step`. Raises ModelError if its logits are not finite."""
        step = rehearsal.rehearsal_step(self.plan, counts, params, num_blocks)
        result = self.execute(step)
        step_result = result() if callable(result) else result
        for slot in step.slots:
            self._release(slot)
        if step_result and step_result.failed:
            raise ModelError(
                f"the checkpoint {self.plan.checkpoint} produces NaN or infinite logits, from which nothing can be "
                f"sampled: its weights are damaged, or beyond what {self.plan.dtype} holds; fetch it again, or try "
                f"--dtype {'float32' if self.plan.dtype == 'bfloat16' else 'bfloat16'}",
                code="nan-logits",
            )
