"""ModelRunner: one rank's part of a model, which runs batches. It knows no requests, and samples nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from msgspec.structs import replace

from weft.checkpoint.architectures.compose import shape_within
from weft.checkpoint.architectures.kv import kv_specs
from weft.engine.core.commands import PrepareSwap
from weft.engine.core.params import SamplingParams
from weft.engine.core.step import StepPlan
from weft.formatting import format_bytes
from weft.logs import event_fields
from weft.plan.determinism import not_deterministic
from weft.plan.fills import rank_weight_bytes
from weft.plan.memory import expanded_bytes, step_bytes
from weft.plan.plan import Plan
from weft.ranks.comm import Links
from weft.ranks.kernels import create_kernels, create_rounding
from weft.ranks.kernels.attention import AttentionShape, KVCache
from weft.ranks.kernels.batch import Batch, divide_batch
from weft.ranks.kernels.capture import WORKSPACE_BYTES, synchronize_device
from weft.ranks.kernels.fused import PhaseTimes
from weft.ranks.kernels.latents import LatentDims
from weft.ranks.kernels.staged import StagedStep
from weft.ranks.kernels.warm import warm_kernels
from weft.ranks.layers.exchange import TokenExchange, create_exchange
from weft.ranks.models.create import create_model
from weft.ranks.weights.load import allocate_parameters, load_weights
from weft.ranks.worker import rehearsal
from weft.ranks.worker.device import allocate_caches, prepare_device
from weft.ranks.worker.graphs import MOST_PADDING, CudaGraphs, Graphs, ReportCaptured, graph_sizes
from weft.ranks.worker.host_copies import HostCopies
from weft.ranks.worker.importance import measure_importance
from weft.ranks.worker.swap import WeightSwap

logger = logging.getLogger("weft")

GRAPH_BYTES = 8 << 20  # bytes of the driver's, for one graph; a prior, to be measured
# Bytes of KV that a GPU reads while the host launches one layer's kernels; a prior, to be measured.
EAGER_BYTES = 128 << 20


class Rehearse(Protocol):
    """Runs the `rehearsal.rehearsal_step` of these arguments, with all that belongs to a step, such as sampling."""

    def __call__(self, counts: list[int], params: SamplingParams, num_blocks: int | None = None) -> None: ...


class ModelRunner:
    """Rank `rank` of `plan`: weights, kernels, KV caches and CUDA graphs.

    Call `load`, `measure` and `allocate`, then for each step `fill_batch`, `forward` and, on the last stage, `logits`,
    all from one thread. `weight_bytes` are the bytes of the weights, `activation_bytes` the most that a step takes
    besides the weights, `graph_bytes` the memory that all graphs keep.
    """

    def __init__(self, plan: Plan, rank: int, links: Links) -> None:
        self.plan, self.rank, self.links = plan, rank, links
        self.place = plan.places[rank]
        self.dtype: torch.dtype = getattr(torch, plan.dtype)
        self.attention = AttentionShape.from_plan(plan, rank)
        self.caches: Sequence[KVCache] = []
        # Bytes of a token's KV in a layer, on average over the ranks of the stage.
        specs = kv_specs(plan.shape, plan.kv_dtype).values()
        self._token_bytes = max(spec.bytes_per_token for spec in specs) // links.tensor.size
        self._num_blocks = 0  # of the KV cache, asleep too
        # A GPU's weights, asleep.
        self._copies = HostCopies(len(plan.ranks_of(plan.devices[rank].node)))
        self._asleep = self._dropped = False
        self._swap: WeightSwap | None = None  # of weights that are on their way
        self._exchange: TokenExchange | None = None  # with other attention groups
        # Decode steps run as CUDA graphs, on all ranks that compute the same layers, or on none of them.
        self.captures = False
        self._capture: CudaGraphs | None = None
        self.graphs: Graphs | None = None
        self.weight_bytes = self.activation_bytes = self.graph_bytes = 0

    @torch.inference_mode()
    def load(self, report_read: Callable[[int, int], None] | None = None) -> None:
        """Read the weights, build the model and compile its kernels. `report_read` as for `load_weights`."""
        self.device = prepare_device(self.plan, self.rank)
        self._load_model(report_read)
        self._fill_ropes()
        warm_kernels(self.kernels.launches(self.attention, self.device), self.device)

    def _load_model(self, report_read: Callable[[int, int], None] | None = None) -> None:
        plan, shape = self.plan, self.plan.shape
        # The table of parameters gives every dim, so tensors are allocated once, where they stay.
        tensors = allocate_parameters(plan, self.place, self.device)
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
        backend = plan.rank_backend(self.rank), self.device, self.attention
        importance = measure_importance(plan, self.rank, self.links, tensors, self.device)
        load_weights(plan, self.place, tensors, create_rounding(*backend), importance, report_read)
        self.kernels = create_kernels(*backend, plan.product_backend)
        if plan.schemes and not self.kernels.matrices.multiplies_quantised:
            self.weight_bytes = rank_weight_bytes(shape, self.place, plan.dtype)
            logger.warning("The kernels of torch do not multiply quantised weights: they are held in %s", plan.dtype)
        self._exchange = create_exchange(plan.exchange, self.links, plan.places, self.rank, self.device)
        self.model = create_model(
            shape_within(shape, plan.max_model_len),
            plan.places,
            self.rank,
            tensors,
            self.links.tensor,
            self.kernels,
            exchange=self._exchange,
        )
        if plan.deterministic and not self.model.is_fused:
            raise not_deterministic("C++ does not compute all layers of this layout in one call")
        self.captures = self._agree_on_captures()

    def _agree_on_captures(self) -> bool:
        """Return True if this rank, and all ranks that take part in its steps, can capture them as CUDA graphs.

        A graph holds the exchanges of its step: a rank that captures would wait without end for a rank that does not.
        Ranks can differ if their GPUs do, since kernels that a GPU cannot run are replaced by torch's.
        """
        if not self.plan.graphs or self.device.type != "cuda":
            return False
        obstacle = self._capture_obstacle()
        able = self.links.tensor.capturable and not obstacle
        captures = all(self._of_all_ranks(float(able)))
        if able and not captures:
            obstacle = "Another rank of this stage cannot capture its kernels"
        if obstacle:
            logger.warning("%s: decode steps run without CUDA graphs", obstacle, extra=event_fields("no-cuda-graphs"))
        return captures

    def _capture_obstacle(self) -> str | None:
        """Reason that this rank's kernels cannot be captured, or None: they wait for the GPU in the middle of a step.

        Ranks that exchange on the host cannot capture their steps either, which needs no word.
        """
        if not self.kernels.attention.capturable:
            return "The kernels of torch cannot be captured"
        return None if self.model.capturable else "The experts of this layout cannot be captured"

    def _fill_ropes(self) -> None:
        """Compute the angles of a GPU; a CPU's are computed when the length of its KV cache is known."""
        if self.device.type != "cpu":
            # Before memory is measured, with all that a step needs.
            self.model.fill_ropes(self.plan.max_model_len, self.plan.max_model_len, self.device)

    @torch.inference_mode()
    def measure(self, rehearse: Rehearse) -> None:
        """Find `activation_bytes` and `graph_bytes`: measured on a GPU, computed on a CPU.

        All stages of a pipeline with a GPU run the same steps.
        """
        plan = self.plan
        rows, tokens = rehearsal.step_limits(plan)
        if self.device.type == "cpu":
            drafts = rehearsal.draft_limit(plan)
            number_bytes = self.dtype.itemsize
            self.activation_bytes = step_bytes(
                plan.shape, self.place, tokens, rows, number_bytes, draft_tokens=drafts, context=plan.max_model_len
            )
            if not plan.on_cpu:
                self._rehearse_beside_gpus(rehearse)
            return
        steps = rehearsal.largest_steps(plan)
        self._allocate_caches(max(rehearsal.blocks_needed(plan, counts) for counts, _ in steps))
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        for counts, params in steps:
            rehearse(counts, params)
        synchronize_device(self.device)
        self.activation_bytes = torch.cuda.max_memory_allocated(self.device) - before
        # Prompts that are read in chunks have a longer context than the prompts of the rehearsal.
        longest = max(max(counts) for counts, _ in steps)
        further_bytes = self._expanded_bytes(plan.max_model_len) - self._expanded_bytes(longest)
        self.activation_bytes += max(0, further_bytes)  # fewer heads are expanded at once over a longer context
        if self.captures or self._steps_with_cpu:
            # Graphs have memory of their own: as much as the largest needs, and what the driver takes for each.
            sizes = graph_sizes(rows)
            torch.cuda.reset_peak_memory_stats(self.device)
            with self._exchange_as_in_graphs():
                rehearse([1] * sizes[-1], rehearsal.DEMANDING)
            largest = torch.cuda.max_memory_allocated(self.device) - before
            # They are captured on a stream of their own, for which cuBLAS takes a workspace.
            self.graph_bytes = (largest + GRAPH_BYTES * len(sizes) + WORKSPACE_BYTES) * self.captures
        self.caches = []
        self.model.forget_caches()

    @contextmanager
    def _exchange_as_in_graphs(self) -> Iterator[None]:
        """Exchange tokens with other attention groups as graphs do, if this rank captures graphs."""
        if self._exchange:
            self._exchange.as_in_graphs = self.captures
        try:
            yield
        finally:
            if self._exchange:
                self._exchange.as_in_graphs = False

    def routed_tokens(self) -> list[int]:
        """`DecoderModel.routed_tokens`; [] while the weights are given back."""
        return [] if self._dropped else self.model.routed_tokens()

    @property
    def _steps_with_cpu(self) -> bool:
        """True if a stage on a CPU takes part in the steps of GPUs, and cannot tell if those capture graphs."""
        return self.plan.graphs and self.plan.uses_cpu

    def _rehearse_beside_gpus(self, rehearse: Rehearse) -> None:
        """Take part, on a CPU, in the steps with which the stages on GPUs measure their memory."""
        plan = self.plan
        steps = rehearsal.largest_steps(plan)
        self._allocate_caches(max(rehearsal.blocks_needed(plan, counts) for counts, _ in steps))
        self.model.fill_ropes(max(max(counts) for counts, _ in steps), plan.max_model_len, self.device)
        for counts, params in steps:
            rehearse(counts, params)
        if self._steps_with_cpu:
            rows, _ = rehearsal.step_limits(plan)
            rehearse([1] * graph_sizes(rows)[-1], rehearsal.DEMANDING)
        self.caches = []
        self.model.forget_caches()

    def _expanded_bytes(self, context: int) -> int:
        return expanded_bytes(self.plan.shape, self.place, context, self.dtype.itemsize)

    @torch.inference_mode()
    def allocate(
        self, num_blocks: int, rehearse: Rehearse, report_captured: ReportCaptured = lambda done, total: None
    ) -> None:
        """Allocate the KV cache, rehearse a step of each kind so that no request meets a cold path, capture graphs.

        `report_captured` as for `Graphs.capture_at_start`.
        """
        self._allocate_blocks(num_blocks)
        self._rehearse_small(rehearse)
        if self.captures:
            self.graphs = self._create_graphs()
            self.graphs.capture_at_start(self._slowest, report_captured)
        if not self.plan.on_cpu:
            # The largest steps again, together with the KV cache: the allocator keeps their memory, and later steps
            # find it.
            for counts, params in rehearsal.largest_steps(self.plan):
                rehearse(counts, params, num_blocks)

    def _allocate_blocks(self, num_blocks: int) -> None:
        """Allocate the KV cache and, on a CPU, compute the angles for the longest text that it holds."""
        plan = self.plan
        self._num_blocks = num_blocks
        self._allocate_caches(num_blocks)
        if self.device.type == "cpu":
            # No longer than a text can be: some models' own length is a million tokens.
            rows = plan.kv_layout.longest(num_blocks, plan.max_model_len)
            if not plan.on_cpu:
                rows = max(rows, *(max(counts) for counts, _ in rehearsal.largest_steps(plan)))
            self.model.fill_ropes(rows, plan.max_model_len, self.device)

    def _rehearse_small(self, rehearse: Rehearse) -> None:
        """Run a small step of each kind."""
        plan = self.plan
        tokens = min(16, plan.max_num_batched_tokens, plan.kv_layout.longest(self._num_blocks, plan.max_model_len))
        rehearse([tokens], rehearsal.DEMANDING)
        rehearse([1], rehearsal.PLAIN)

    def sleep(self, level: int) -> None:
        """Give the memory of KV cache, graphs and weights back, see the command Sleep."""
        self.graphs, self.caches, self._asleep = None, [], True
        if self._capture:
            self._capture.forget_pool()
        self.model.forget_caches()
        # A pipeline over a CPU and GPUs reads its weights again: all stages take part in that.
        if level > 1 or (self.plan.uses_cpu and not self.plan.on_cpu):
            self._drop_model()
            return
        if self.device.type == "cpu":  # whose weights are in the host's memory already
            self.model.fill_ropes(0, self.plan.max_model_len, self.device)
        else:
            model, matrices = self.model, self.kernels.matrices
            self._copies.save([*model.vectors.values(), *model.rope_angles, *matrices.tensors()])

    def wake(self, rehearse: Rehearse) -> None:
        """Load what `sleep` has dropped, and allocate as many KV blocks as before.

        A GPU whose weights come from the host's memory has run all kernels before: no step is rehearsed, only the
        memory of the largest one is taken. Graphs are captured between later steps; until then steps run without.
        """
        dropped, self._asleep, self._dropped = self._dropped, False, False
        if dropped:
            self._load_model()
            self._fill_ropes()
        else:
            self._copies.restore()
        self._allocate_blocks(self._num_blocks)
        if dropped or self.plan.uses_cpu:
            self._rehearse_small(rehearse)
        if self.captures:
            self.graphs = self._create_graphs()
        if self.device.type != "cpu":
            # The allocator keeps it, and later steps find it.
            torch.empty(self.activation_bytes, dtype=torch.uint8, device=self.device)
            synchronize_device(self.device)

    def prepare_swap(self, command: PrepareSwap) -> None:
        """Check or stage the weights of another checkpoint of the same shapes. Raises SwapRefusedError."""
        if command.stage:
            assert self._swap
            if not self._asleep:
                self._swap.stage()
                self._swap.check_kernels(self.model)
            return
        plan = replace(self.plan, checkpoint=command.checkpoint, load_format=command.load_format)
        rounding = create_rounding(plan.rank_backend(self.rank), self.device, self.attention)
        self._swap = WeightSwap(plan, self.rank, self.links, self.device, rounding)
        self._swap.check(asleep=self._asleep)

    def finish_swap(self, *, take: bool) -> None:
        """Take the weights that `prepare_swap` has made ready, in the memory of the old ones; asleep, with the next
        `wake`. Without `take`, drop them."""
        swap, self._swap = self._swap, None
        if swap is None or not take:
            return
        self.plan = swap.plan
        if self._asleep:
            self._drop_model()
        else:
            swap.move_into(self.model)

    def _drop_model(self) -> None:
        self._dropped = True
        self._copies.forget()
        self.model = self.kernels = None  # type: ignore[assignment]

    def _allocate_caches(self, num_blocks: int) -> None:
        self.caches = allocate_caches(self.plan, self.rank, self.attention.cache_dtype, self.device, num_blocks)

    def _create_graphs(self) -> Graphs:
        plan = self.plan
        self._capture = self._capture or CudaGraphs()
        return Graphs(
            self._forward,
            self._capture,
            prepare=self.kernels.attention.prepare,
            rows=plan.max_num_seqs,
            width=-(-plan.max_model_len // plan.block_size),
            groups=len(plan.kv_layout.groups),
            attention_groups=plan.data_parallel if plan.exchange else 1,
            incoming=None if self.place.first else (plan.shape.hidden, self.dtype),
            device=self.device,
            padding=MOST_PADDING if plan.schemes else math.inf,
            alone=self.links.tensor.size == 1 and not plan.exchange,
        )

    def _slowest(self, seconds: float) -> float:
        """The longest of these seconds of all ranks that capture together, the same bits on each."""
        return max(self._of_all_ranks(seconds))

    def _of_all_ranks(self, number: float) -> list[float]:
        """This number of each rank that computes the same layers: the same bits on each, in one order."""
        links, parts = self.links, torch.tensor([number], dtype=torch.float64, device=self.device)
        for group in (links.expert,) if links.expert.size > 1 else (links.tensor, links.data):
            parts = group.all_gather(parts, [len(parts)] * group.size)
        numbers: list[float] = parts.tolist()
        return numbers

    @property
    def uncaptured(self) -> int:
        """Number of CUDA graphs that are still to be captured."""
        return len(self.graphs.uncaptured) if self.graphs else 0

    @torch.inference_mode()
    def capture_graph(self) -> None:
        """Capture one more CUDA graph. All ranks call this between the same steps.

        None is captured any more once a rank has no memory for it: out of memory in the middle of a capture would end
        the engine.
        """
        assert self.graphs
        free = min(self._of_all_ranks(float(torch.cuda.mem_get_info(self.device)[0])))
        if free < GRAPH_BYTES:
            self.graphs.stop_captures(f"{format_bytes(int(free))} of the GPU's memory are free")
            return
        self.graphs.capture_between_steps()

    @property
    def expands_from(self) -> int | None:
        """Number of tokens of a row from which on its latents are expanded; None without latent attention."""
        latent = self.attention.latent
        return LatentDims.of(latent, self.attention.q_heads).expands_from if latent else None

    def runs_singly(self, step: StepPlan) -> bool:
        """Return True if each token of the step is to run as a row of its own.

        Rows of several tokens, such as draft tokens, then run as one graph, though attention reads the KV that a row's
        tokens have in common once for each of them.
        """
        tokens = len(step.tokens)
        if len(step.slots) == tokens or self.graphs is None or not self.graphs.has_graph(tokens):
            return False
        read_again = sum(
            (count - 1) * start + count * (count - 1) // 2
            for start, count in zip(step.starts, step.counts, strict=True)
        )
        return read_again * self._token_bytes <= EAGER_BYTES

    def fill_batch(self, staged: StagedStep, *, eager: bool = False) -> Batch:
        """Turn a staged step into a batch: in a graph's tensors if it can be replayed, unless `eager`."""
        batch = (self.graphs and not eager and self.graphs.captured_batch(staged)) or staged.eager()
        self.kernels.pointwise.fill_batch(staged, batch)
        return divide_batch(batch, staged.forms) if staged.forms else batch

    def trace(self, log: PhaseTimes | None) -> None:
        """Log the layers of later steps, see `DecoderModel.trace`; None ends that."""
        if not self._dropped:
            self.model.trace(log)

    def forward(self, batch: Batch, incoming: torch.Tensor | None = None) -> torch.Tensor:
        """Run this rank's layers: [T, hidden], valid until the next call; `incoming` is from the stage before."""
        if self.graphs:
            return self.graphs.run_batch(batch, incoming)
        self.kernels.attention.prepare(batch)
        return self._forward(batch, incoming)

    def forward_with_states(
        self, batch: Batch, incoming: torch.Tensor | None = None, *, layers: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run an eager batch as `forward` does; return also the hidden states after `layers`, see
        `DecoderModel.layer_states`. All ranks of a stage call this with the same layers, layer by layer and without a
        graph, so it takes longer than `forward`."""
        assert not batch.fixed, "a graph's batch has idle rows"
        self.kernels.attention.prepare(batch)
        return self.model.layer_states(incoming, self.caches, batch, layers)

    def _forward(self, batch: Batch, incoming: torch.Tensor | None) -> torch.Tensor:
        return self.model.hidden(incoming, self.caches, batch)

    def serve_others(self, step: StepPlan) -> None:
        """Take part in a step in which this rank's attention group has no tokens, if other groups need experts."""
        if self._exchange and not (self.graphs and self.graphs.run_idle(step.graph_rows)):
            self.model.serve_others(step.group_tokens)

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final states of rows of the last stage: [S, hidden] -> [S, hidden], see `DecoderModel.states`."""
        return self.model.states(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits of sampled rows: [S, hidden] -> [S, vocab], None on ranks of the last stage that do not sample."""
        return self.model.logits(hidden)

    def close(self) -> None:
        """Drop everything that takes memory."""
        self.graphs, self._capture, self.caches, self._swap = None, None, [], None
        self._drop_model()
