"""Worker: one rank. It loads its share, says what room is left, takes its KV blocks and runs steps."""

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
from weft.core.step import Admission, StepPlan, StepResult, TokenLogprobs
from weft.errors import ModelError
from weft.kernels import create_kernels, create_rounding
from weft.kernels.base import AttentionShape, KVCache
from weft.kernels.batch import Batch
from weft.kernels.capture import release_cached_memory, synchronize_device
from weft.kernels.staged import StagedStep
from weft.kernels.streams import NOT_FINITE
from weft.kernels.warm import warm_kernels
from weft.layers import rope
from weft.models.decoder import Decoder
from weft.plan.fills import weight_bytes
from weft.plan.memory import SCORED, Capacity, step_bytes
from weft.plan.plan import Plan
from weft.weights.load import allocate, load
from weft.worker import device as devices
from weft.worker.chooser import chooser
from weft.worker.drafter import Drafter
from weft.worker.graphs import CudaGraphs, Graphs, sizes
from weft.worker.importance import importance
from weft.worker.logprobs import scorer
from weft.worker.rows import Rows
from weft.worker.sampler import Order, Sampler

logger = logging.getLogger("weft")

GRAPH_BYTES = 8 << 20  # of the driver's, for one graph; a prior, to be measured
# Of KV that a GPU reads while the host launches one layer's kernels; a prior, to be measured.
EAGER_BYTES = 128 << 20
# All that a sampler can be asked for at once: the widest moment of its memory as well. And what leaves logits in the
# model's own dtype, for which kernels are compiled by themselves.
DEMANDING = SamplingParams(top_k=50, top_p=0.9, repetition_penalty=1.1, logprobs=20)
PLAIN = SamplingParams(top_k=50, top_p=0.9)
SCORING = SamplingParams(prompt_logprobs=20)


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
        self.drafter: Drafter | None = None

    @torch.inference_mode()
    def load(self) -> Capacity:
        """Read this rank's weights, build its part of the model, measure a step's peak."""
        began = time.monotonic()
        plan, shape = self.plan, self.plan.shape
        self.device = devices.prepare(plan, self.rank)
        self.rows = Rows(plan.max_num_seqs, plan.max_model_len, plan.block_size, self.device)
        # The table of parameters gives every dim, so tensors are made once, where they stay.
        tensors = allocate(plan, self.place, self.device)
        held = sum(tensor.nbytes for tensor in tensors.values())
        wanted = plan.attention_backend, self.device, self.attention
        found = importance(plan, self.rank, self.links, tensors, self.device)
        load(plan, self.place, tensors, create_rounding(*wanted), found)
        self.kernels = create_kernels(*wanted)
        if plan.schemes and self.kernels.name == "torch":
            held = weight_bytes(shape, self.place, plan.dtype)
            logger.warning("The kernels of torch do not multiply quantised weights: they are held in %s", plan.dtype)
        if plan.graphs and not self.kernels.capturable:
            logger.warning("The kernels of torch cannot be captured: decode steps run without CUDA graphs")
        self.model = Decoder(shape, plan.places, self.rank, tensors, self.links.tensor, self.kernels)
        if self.device.type != "cpu":
            # Where the peak is measured, with all that a step needs.
            self.rope = self._rope(plan.max_model_len)
        warm_kernels(self.kernels.launches(self.attention, self.device), self.device)
        self.sampler: Sampler | None = None
        if self.rank == plan.output_rank:
            choosing = chooser(self.kernels, plan.max_num_seqs, self.device)
            self.sampler = Sampler(shape.vocab, plan.max_num_seqs, shape.eos, choosing, scorer(self.kernels))
        eager, block_bytes = self._measure(), plan.block_bytes(self.rank)
        if self.sampler and plan.speculation and plan.speculation.draft:
            self.drafter = Drafter(plan)
            theirs = self.drafter.load()
            # One after the other: they take turns. But graphs keep what they have.
            eager = max(eager, theirs.activation_bytes - self.drafter.graph_bytes)
            self.graph_bytes += self.drafter.graph_bytes
            held += theirs.weight_bytes
            block_bytes += theirs.block_bytes
        activation = eager + self.graph_bytes
        return Capacity(
            rank=self.rank,
            host=socket.gethostname(),
            device=plan.devices[self.rank],
            weight_bytes=held,
            activation_bytes=activation,
            free_bytes=devices.free_bytes(plan, self.rank, self.device, activation),
            block_bytes=block_bytes,
            load_s=time.monotonic() - began,
        )

    @torch.inference_mode()
    def allocate(self, num_blocks: int) -> int:
        """Take the KV cache, and run a step of each kind so that no request meets a cold path. Returns the number of
        CUDA graphs that are left to `capture_graph`."""
        self.caches = self._caches(num_blocks)
        if self.drafter:
            self.drafter.allocate(num_blocks)
        if self.device.type == "cpu":
            # No longer than a text can be: some models' own length is a million tokens.
            self.rope = self._rope(min(self.plan.max_model_len, num_blocks * self.plan.block_size))
        tokens = min(16, self.plan.max_model_len, self.plan.max_num_batched_tokens, num_blocks * self.plan.block_size)
        self._rehearse([tokens])
        self._rehearse([1], PLAIN)
        if self._captures:
            incoming = None if self.place.first else (self.plan.shape.hidden, self.dtype)
            self.graphs = Graphs(
                self._forward,
                CudaGraphs(),
                prepare=self.kernels.prepare,
                rows=self.plan.max_num_seqs,
                width=self.rows.tables.shape[1],
                incoming=incoming,
                device=self.device,
                alone=self.links.tensor.size == 1,
            )
            self.graphs.capture_at_start(self._agreed)
        if self.device.type == "cuda":
            # The largest steps again, beside the KV cache: the allocator keeps what they take, and later steps find it.
            for counts, params in self._largest_steps():
                self._rehearse(counts, params, num_blocks)
        return self.uncaptured

    @property
    def uncaptured(self) -> int:
        """Number of CUDA graphs that are still to be captured, a draft's too."""
        return (len(self.graphs.uncaptured) if self.graphs else 0) + (self.drafter.uncaptured if self.drafter else 0)

    @torch.inference_mode()
    def capture_graph(self) -> int:
        """Capture one more CUDA graph; returns the number that is left. All ranks call it between the same steps."""
        if self.graphs and self.graphs.uncaptured:
            self.graphs.capture_next()
        elif self.drafter:
            self.drafter.capture_graph()
        return self.uncaptured

    def _agreed(self, seconds: float) -> float:
        """The sum of all ranks' seconds, the same bits on each."""
        return self.links.tensor.sum(torch.tensor([seconds], device=self.device)).item()

    @torch.inference_mode()
    def execute(self, step: StepPlan) -> StepResult | Callable[[], StepResult] | None:
        """Run one step; the output rank returns what was sampled, or on a GPU a function that waits for it."""
        for slot in step.released:
            self._release(slot)
        for admission in step.admitted:
            self.rows.admit(admission)
            if self.sampler:
                self.sampler.admit(admission)
            if self.drafter:
                self.drafter.admit(admission)
        if not step.slots:
            return StepResult(step.id, [], [], {}) if self.sampler else None
        picks, slots, positions = sampled_positions(step)
        order = self.sampler.order(slots, positions) if self.sampler and slots else None
        wanted = order.arrays if order else [np.array(slots, dtype=np.int64)]
        more = [np.array(picks, dtype=np.int64), *wanted]
        staged, there = self.rows.stage(step, more, singly=self.is_decode(step))
        batch = self.lay(staged)
        if self.drafter:
            self.drafter.note(step, self.rows)
        incoming = None
        if not self.place.first:
            dims = (len(step.tokens), self.plan.shape.hidden)
            incoming = self.links.pipeline.recv(dims, self.dtype, self.place.stage - 1)
        hidden = self.hidden(batch, incoming)
        if not self.place.last:
            self.links.pipeline.send(hidden, self.place.stage + 1)
            return None
        result = self._finish(step, hidden, order, there)
        if self.drafter and self.sampler and any(step.draft_requests):
            # Guesses come after what was sampled: it is waited for.
            found = result() if callable(result) else result
            assert found is not None
            found.drafts = self.drafter.guess(step, found.tokens, self.rows, self.sampler)
            return found
        return result

    def is_decode(self, step: StepPlan) -> bool:
        """Whether a step whose rows have several tokens, such as guesses, is run like one of so many rows: as one
        graph, though attention reads what a row's tokens have in common for each of them."""
        tokens = len(step.tokens)
        if self.graphs is None or not len(step.slots) < tokens <= self.graphs.largest:
            return False
        again = sum(
            (count - 1) * start + count * (count - 1) // 2
            for start, count in zip(step.starts, step.counts, strict=True)
        )
        each = layer_bytes_per_token(self.plan.shape, self.plan.kv_dtype) // self.links.tensor.size
        return again * each <= EAGER_BYTES

    @property
    def _captures(self) -> bool:
        """True if decode steps run as CUDA graphs. Ranks that meet on the host in the middle of a step cannot, nor can
        kernels that wait for the GPU."""
        wanted = self.plan.graphs and self.device.type == "cuda"
        return wanted and self.links.tensor.capturable and self.kernels.capturable

    def close(self) -> None:
        """Give the memory back."""
        self.graphs = None
        if self.drafter:
            self.drafter.close()
        self.caches = []
        self.model = self.kernels = self.sampler = None  # type: ignore[assignment]
        if self.device.type == "cuda":
            release_cached_memory()

    @torch.inference_mode()
    def lay(self, staged: StagedStep) -> Batch:
        """The step as a batch, in a graph's tensors if it can be replayed."""
        batch = (self.graphs and self.graphs.room(staged)) or staged.eager()
        self.kernels.fill_batch(staged, batch)
        return batch

    @torch.inference_mode()
    def hidden(self, batch: Batch, incoming: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] after this rank's layers, valid until the next call; `incoming` is from the stage before."""
        if self.graphs:
            return self.graphs.run(batch, incoming)
        self.kernels.prepare(batch)
        return self._forward(batch, incoming)

    def _forward(self, batch: Batch, incoming: torch.Tensor | None) -> torch.Tensor:
        return self.model.hidden(incoming, self.rope, self.caches, batch)

    def _release(self, slot: int) -> None:
        self.rows.release(slot)
        if self.sampler:
            self.sampler.release(slot)

    def _finish(
        self, step: StepPlan, hidden: torch.Tensor, order: Order | None, there: list[torch.Tensor]
    ) -> StepResult | Callable[[], StepResult] | None:
        """Sample, and score prompts where asked. Every rank of the last stage comes here: the head is cut. `there` are
        the indices of the tokens to sample after, and then the order's arrays; without a sampler their slots alone."""
        prompt_logprobs = self._score_prompts(step, hidden) if self.rows.wishes else {}
        picks, *rest = there
        if not len(picks):
            return StepResult(step.id, [], [], prompt_logprobs) if self.sampler else None
        # Every token wanted, the usual decode step: nothing to pick out.
        if len(picks) < len(hidden):
            hidden = hidden.index_select(0, picks)
        logits = self.model.logits(hidden)
        if self.sampler is None:
            self._remember(rest[0], None)
            return None
        assert logits is not None and order is not None
        sampled, slots = self.sampler.sample(logits, order, rest), order.slots
        self._remember(rest[0], sampled.tokens)

        def result() -> StepResult:
            tokens, logprobs = sampled.result()
            made = StepResult(step.id, tokens, logprobs, prompt_logprobs)
            if min(tokens) == NOT_FINITE:
                self._tell_broken(made, slots)
            return made

        return result() if self.device.type == "cpu" else result

    def _tell_broken(self, made: StepResult, slots: np.ndarray) -> None:
        """Say which of the rows' `slots` had logits that are not finite; ids take the place of what was not sampled."""
        why = f"rank {self.rank}: the model produced NaN or infinite logits, from which nothing can be sampled"
        made.failed = {int(slots[row]): why for row, token in enumerate(made.tokens) if token == NOT_FINITE}
        made.tokens = [max(token, 0) for token in made.tokens]

    def _remember(self, slots: torch.Tensor, tokens: torch.Tensor | None) -> None:
        """Keep what was sampled for the step after, on every rank: only the output rank has it, as [R] int64."""
        if not self.plan.lookahead:
            return
        last = self.rows.last
        if self.links.tensor.size > 1:
            # As floats, which every kind of group can sum: exact for any vocabulary below 16 million.
            given = last.new_zeros(len(slots), dtype=torch.float32) if tokens is None else tokens.float()
            tokens = self.links.tensor.sum(given)
        assert tokens is not None
        last.index_copy_(0, slots, tokens.to(last.dtype))

    def _score_prompts(self, step: StepPlan, hidden: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        """For rows that want it: the logprob of each prompt token that follows a position of this step."""
        scores: dict[int, list[TokenLogprobs]] = {}
        begin = 0
        for slot, start, count in zip(step.slots, step.starts, step.counts, strict=True):
            wish = self.rows.wishes.get(slot)
            if wish is not None:
                targets = wish.prompt[start + 1 : start + count + 1]
                for at in range(0, len(targets), SCORED):
                    chunk = targets[at : at + SCORED]
                    logits = self.model.logits(hidden[begin + at : begin + at + len(chunk)])
                    if self.sampler:
                        assert logits is not None
                        scored = self.sampler.prompt_logprobs(logits, chunk, wish.top)
                        scores.setdefault(slot, []).extend(scored)
            begin += count
        return scores

    def _caches(self, num_blocks: int) -> list[KVCache]:
        dims = (num_blocks, self.plan.block_size, len(self.place.kv_heads), self.plan.shape.head_dim)
        return [
            KVCache(*(devices.zeros(dims, self.attention.cache_dtype, self.device) for _ in range(2)))
            for _ in range(len(self.place.layers))
        ]

    def _rope(self, rows: int) -> torch.Tensor:
        """Cosines and sines of the first `rows` positions: [rows, head_dim] float32."""
        shape = self.plan.shape
        made = rope.table(shape.rope, shape.head_dim, shape.max_positions, self.plan.max_model_len, rows)
        return made.to(self.device)

    def _measure(self) -> int:
        """Bytes that the largest step takes beside the weights and graphs: run on a GPU, reckoned on a CPU."""
        plan = self.plan
        rows, tokens = self._most
        if self.device.type == "cpu":
            return step_bytes(plan.shape, self.place, tokens, rows, self.dtype.itemsize, guesses=self._guesses)
        steps = self._largest_steps()
        num_blocks = max(sum(-(-count // plan.block_size) for count in counts) for counts, _ in steps)
        self.caches = self._caches(num_blocks)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        for counts, params in steps:
            self._rehearse(counts, params)
        synchronize_device(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        if self._captures:
            # Graphs have memory of their own: that of the largest, and what the driver takes for each.
            captured = sizes(rows)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._rehearse([1] * captured[-1])
            largest = torch.cuda.max_memory_allocated(self.device) - before
            self.graph_bytes = largest + GRAPH_BYTES * len(captured)
        self.caches = []
        return peak

    @property
    def _most(self) -> tuple[int, int]:
        """Rows and tokens that a step has at most."""
        plan = self.plan
        rows = min(plan.max_num_seqs, plan.max_num_batched_tokens)
        return rows, min(plan.max_num_batched_tokens, rows * plan.max_model_len)

    def _largest_steps(self) -> list[tuple[list[int], SamplingParams]]:
        """Prompts' lengths and wishes of the steps that take the most memory."""
        rows, tokens = self._most
        return [
            ([tokens // rows + (r < tokens % rows) for r in range(rows)], DEMANDING),
            # A prompt's logits are more than those of few requests, beside all else of a step full of it.
            ([min(tokens, self.plan.max_model_len)], SCORING),
        ]

    @property
    def _guesses(self) -> int:
        """The most that a row of a step may have, each of which is sampled after."""
        return self.plan.speculation.tokens if self.plan.speculation else 0

    def _rehearse(self, counts: list[int], params: SamplingParams = DEMANDING, num_blocks: int | None = None) -> None:
        """Run one step of made-up prompts with these lengths, in slots and blocks that nobody holds yet, and with as
        many guesses as may be. A cache of fewer `num_blocks` than that takes holds some of them one over the other."""
        size, blocks, first = self.plan.block_size, [], 0
        for count in counts:
            need = -(-count // size)
            blocks.append([block % (num_blocks or first + need) for block in range(first, first + need)])
            first += need
        slots = list(range(len(counts)))
        step = StepPlan(
            id=-1,
            released=[],
            admitted=[Admission(slot, 0, params, [0] * count, []) for slot, count in zip(slots, counts, strict=True)],
            slots=slots,
            starts=[0] * len(counts),
            counts=counts,
            tokens=[0] * sum(counts),
            blocks=blocks,
            samples=[True] * len(counts),
            draft_counts=[min(self._guesses, count - 1) for count in counts],
        )
        result = self.execute(step)
        made = result() if callable(result) else result
        for slot in slots:
            self._release(slot)
        if made and made.failed:
            raise ModelError(
                f"the checkpoint {self.plan.checkpoint} produces NaN or infinite logits, from which nothing can be "
                f"sampled: its weights are damaged, or beyond what {self.plan.dtype} holds; fetch it again, or try "
                f"--dtype {'float32' if self.plan.dtype == 'bfloat16' else 'bfloat16'}"
            )


def sampled_positions(step: StepPlan) -> tuple[list[int], list[int], list[int]]:
    """Of all tokens that are sampled: the index in the step of the one before it, its slot, and its position."""
    picks, slots, positions, end = [], [], [], 0
    for slot, start, count, samples, guesses in zip(
        step.slots, step.starts, step.counts, step.samples, step.draft_counts, strict=True
    ):
        end += count
        if samples:
            for back in range(guesses, -1, -1):
                picks.append(end - 1 - back)
                slots.append(slot)
                positions.append(start + count - back)
    return picks, slots, positions
