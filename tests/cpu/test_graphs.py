"""Graphs: batches laid into captured ones. A capture here is a function that is called again, on the same tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.cpu import checkpoints
from tests.cpu.attention import as_staged
from tests.cpu.fake_worker import make_plan
from weft import LLM, SamplingParams
from weft.engine.core.step import Admission, StepPlan
from weft.engine.core.token_ids import TokenIds
from weft.ranks.comm import Links
from weft.ranks.comm.threads import Meeting, ThreadGroup
from weft.ranks.kernels.batch import Batch
from weft.ranks.kernels.plain import create_plain_kernels
from weft.ranks.worker import graphs, runner
from weft.ranks.worker.graphs import Capture, Graphs, Prepare, capture_order, graph_sizes
from weft.ranks.worker.request_slots import RequestSlots

pytest.importorskip("triton", reason="needs triton, whose kernels pass over rows without a context")


class Again:
    """Recording of a CUDA graph; attempts in `failing` find no memory."""

    def __init__(self, failing: Container[int] = (), *, told: bool = True) -> None:
        self.captured, self.attempts, self.failing, self.told = 0, 0, failing, told

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.attempts += 1
        if self.attempts - 1 in self.failing:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            finally:
                if not self.told:
                    raise RuntimeError("operation failed due to a previous error during capture")
        self.captured += 1
        run()
        return run


def batch(tokens: list[int], contexts: list[int], width: int) -> Batch:
    rows = len(tokens)
    return Batch(
        tokens=torch.tensor(tokens, dtype=torch.int32),
        positions=torch.tensor(contexts, dtype=torch.int32) - 1,
        slots=torch.arange(rows) + 5,
        row_starts=torch.arange(rows + 1, dtype=torch.int32),
        context=torch.tensor(contexts, dtype=torch.int32),
        tables=torch.arange(rows * width, dtype=torch.int32).view(rows, width),
        order=torch.tensor(contexts).argsort(descending=True).int(),
        decodes=rows,
    )


def forward(inputs: Batch, incoming: torch.Tensor | None) -> torch.Tensor:
    """Says what it was given."""
    figures = [
        inputs.tokens,
        inputs.positions,
        inputs.slots,
        inputs.context,
        inputs.tables[:, 0] * (inputs.context > 0),
    ]
    out = torch.stack([figure.float() for figure in figures], 1)
    return out if incoming is None else out + incoming


def made(
    capture: Capture,
    rows: int = 9,
    incoming: tuple[int, torch.dtype] | None = None,
    prepare: Prepare = lambda it: None,
    clock: Callable[[], float] = lambda: 0.0,
    padding: float = math.inf,
) -> Graphs:
    where = {"incoming": incoming, "device": torch.device("cpu"), "clock": clock, "padding": padding}
    return Graphs(forward, capture, prepare=prepare, rows=rows, width=6, **where)


def replayed(graph: Graphs, inputs: Batch, incoming: torch.Tensor | None = None) -> torch.Tensor:
    staged = as_staged(inputs)
    laid = graph.captured_batch(staged) or staged.eager()
    create_plain_kernels().pointwise.fill_batch(staged, laid)
    return graph.run_batch(laid, incoming)


def test_sizes_waste_little() -> None:
    assert (
        graph_sizes(1) == [1]
        and graph_sizes(9) == [1, 2, 4, 8, 9]
        and graph_sizes(256)[-1] == 256
        and graph_sizes(5000)[-1] == 512
    )
    for most in (1, 3, 64, 100, 256, 512):
        found = graph_sizes(most)
        assert found == sorted(set(found)) and len(found) <= 25
        for rows in range(17, most + 1):
            assert min(size for size in found if size >= rows) <= rows * 1.5


def test_the_largest_is_captured_first_then_powers_of_two() -> None:
    order = capture_order(graph_sizes(256))
    assert order[:9] == [256, 1, 2, 4, 8, 16, 32, 64, 128] and order[9:] == sorted(order[9:])
    assert sorted(order) == graph_sizes(256)
    assert capture_order(graph_sizes(9)) == [9, 1, 2, 4, 8] and capture_order([1]) == [1] and capture_order([]) == []


@pytest.mark.parametrize("incoming", [False, True])
def test_a_replayed_batch_gives_what_the_eager_one_gives(incoming: bool) -> None:
    capture = Again()
    graph = made(capture, incoming=(5, torch.float32) if incoming else None)
    graph.capture_at_start()
    assert capture.captured == len(graph_sizes(9)) and not graph.uncaptured
    for rows, width in ((3, 4), (1, 2), (9, 6), (4, 1), (3, 6), (2, 3)):
        inputs = batch(list(range(10, 10 + rows)), list(range(1, rows + 1)), width)
        sent = torch.randn(rows, 5) if incoming else None
        torch.testing.assert_close(replayed(graph, inputs, sent), forward(inputs, sent))
    assert capture.captured == len(graph_sizes(9))


def test_leftovers_of_a_small_batch_are_not_summed_into_it() -> None:
    """Layers add to what the stage before sent, in its place."""

    def forward(inputs: Batch, incoming: torch.Tensor | None) -> torch.Tensor:
        assert incoming is not None
        return incoming.add_(incoming)

    where = {"incoming": (5, torch.float32), "device": torch.device("cpu")}
    graph = Graphs(forward, Again(), prepare=lambda it: None, rows=4, width=6, **where)
    graph.capture_at_start()
    replayed(graph, batch([1, 2, 3, 4], [1] * 4, 1), torch.ones(4, 5))
    for _ in range(3):
        replayed(graph, batch([1, 2, 3], [1] * 3, 1), torch.ones(3, 5))
    assert graph._incoming is not None and graph._incoming[3].eq(0).all()


@pytest.mark.parametrize(("seconds", "agreed", "at_start"), [(0.1, 0.1, 5), (0.1, 0.7, 3), (9.0, 9.0, 1)])
def test_a_start_captures_for_two_seconds(seconds: float, agreed: float, at_start: int) -> None:
    """The others are captured when nobody waits; until then their batches replay a larger one."""
    capture, clock = Again(), iter([0.0, seconds])
    graph = made(capture, clock=lambda: next(clock))
    reported: list[tuple[int, int]] = []
    graph.capture_at_start(lambda own: max(own, agreed), lambda *report: reported.append(report))
    assert reported == [(number, at_start) for number in range(1, at_start + 1)]
    assert capture.captured == at_start and graph.uncaptured == graph_sizes(9)[at_start - 1 : -1]
    for rows in (1, 3, 8, 9):
        inputs = batch(list(range(rows)), list(range(1, rows + 1)), 2)
        torch.testing.assert_close(replayed(graph, inputs), forward(inputs, None))
    assert capture.captured == at_start, "none is captured while a step waits"
    left = len(graph.uncaptured)
    while left:
        left -= 1
        assert graph.capture_next() == left
    assert graph.capture_next() == 0 and capture.captured == 5


@pytest.mark.parametrize(
    ("ranks", "seconds", "captured"),
    [
        (8, 0.1, graph_sizes(256)),
        (8, 0.4, [1, 2, 4, 8, 16, 256]),
        (1, 0.4, [1, 2, 4, 8, 16, 256]),
        (8, 3.0, [256]),
    ],
)
def test_ranks_that_capture_together_take_as_long_as_the_slowest(
    ranks: int, seconds: float, captured: list[int]
) -> None:
    """Each has a clock of its own, which only captures move on."""
    meeting, sizes = Meeting(ranks), graph_sizes(256)

    def captured_by(number: int) -> list[int]:
        now = 0.0

        def capture(run: Callable[[], None]) -> Callable[[], None]:
            nonlocal now
            now += seconds * (1 - number / 100)
            return run

        group = ThreadGroup(meeting, number, torch.device("cpu"))
        rank = runner.ModelRunner(make_plan(tensor=ranks // 2 or 1), 0, Links(tensor=group))
        rank.device = torch.device("cpu")
        graph = made(capture, rows=256, clock=lambda: now)
        graph.capture_at_start(rank._slowest)
        return [size for size in sizes if size not in graph.uncaptured]

    with ThreadPoolExecutor(ranks) as pool:
        assert list(pool.map(captured_by, range(ranks))) == [captured] * ranks


def test_quantised_weights_are_not_multiplied_with_many_rows_of_padding() -> None:
    """A step of few rows runs without a graph until there is one of at most twice the rows."""
    for quantised in (False, True):
        plan = msgspec.structs.replace(make_plan(), schemes={"a": "Q4_1"} if quantised else {}, max_num_seqs=256)
        rank: Any = runner.ModelRunner(plan, 0, Links())
        rank.device, rank._capture = torch.device("cpu"), Again()
        rank.kernels = SimpleNamespace(attention=SimpleNamespace(prepare=lambda it: None))
        rank._forward = forward
        graph = rank._create_graphs()
        graph.capture_next()
        assert [graph.has_graph(rows) for rows in (1, 127, 128, 256, 257)] == [
            *[not quantised] * 2,
            *[True, True, False],
        ]
        inputs = batch([1, 2, 3], [1, 2, 3], 2)
        assert (graph.captured_batch(as_staged(inputs)) is None) == quantised
        for _ in range(3):
            graph.capture_next()
        assert graph.has_graph(3) and graph.has_graph(4)
        torch.testing.assert_close(replayed(graph, inputs), forward(inputs, None))


def test_every_forward_is_prepared_for_outside_of_its_graph() -> None:
    """Once to capture it, then before each replay, of as many rows as the graph has."""
    seen = []

    def prepare(inputs: Batch) -> None:
        lengths = inputs.lengths()
        seen.append((inputs.fixed, lengths.row_starts.tolist(), lengths.context.tolist(), inputs.context.tolist()))

    capture = Again()
    graph = made(capture, rows=4, prepare=prepare)
    graph.capture_at_start()
    few = batch([1, 2, 3], [4, 5, 6], 2)
    for _ in range(2):
        replayed(graph, few)
    replayed(graph, batch([1, 2, 3, 4, 5], [4, 5, 6, 7, 8], 2))
    assert seen == [
        *[(True, [*range(size + 1)], [0] * size, [0] * size) for size in (4, 1, 2)],
        *[(True, [0, 1, 2, 3, 4], [4, 5, 6, 0], [4, 5, 6, 0])] * 2,
        (False, [0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8], [4, 5, 6, 7, 8]),
    ]


def test_the_host_knows_the_lengths_of_a_step() -> None:
    """Without asking the device, which would have it wait for all that is under way."""
    rows = RequestSlots(3, 64, 4, torch.device("cpu"))
    for slot, count in ((0, 5), (2, 9)):
        rows.admit(Admission(slot, 0, SamplingParams(), TokenIds.pack([1] * count), []))
    step = StepPlan(
        id=0,
        released=[],
        admitted=[],
        slots=[2, 0],
        starts=[8, 0],
        counts=[1, 5],
        tokens=[1] * 6,
        blocks=[[[3, 4, 5], [0, 1]]],
        samples=[True, True],
        draft_counts=[0, 0],
    )
    staged, _ = rows.stage(step)
    inputs = staged.eager()
    create_plain_kernels().pointwise.fill_batch(staged, inputs)
    assert inputs.host is not None and inputs.lengths() is inputs.host
    assert inputs.host.row_starts.tolist() == inputs.row_starts.tolist() == [0, 1, 6]
    assert inputs.host.context.tolist() == inputs.context.tolist() == [9, 5] and inputs.decodes == 1
    staged, _ = rows.stage(msgspec.structs.replace(step, blocks=[[[], []]]), singly=True)
    apart = staged.eager()
    create_plain_kernels().pointwise.fill_batch(staged, apart)
    assert apart.host is not None and apart.decodes == apart.rows == 6
    assert apart.host.row_starts.tolist() == apart.row_starts.tolist() == [*range(7)]
    assert apart.host.context.tolist() == apart.context.tolist() == [9, 1, 2, 3, 4, 5]
    assert apart.tables.tolist() == [[3, 4, 5, 0], *[[0, 1, 0, 0]] * 5]
    assert inputs.order.tolist() == [0] and apart.order.tolist() == [0, 5, 4, 3, 2, 1], "the longest first"
    assert torch.equal(apart.slots, inputs.slots) and torch.equal(apart.tokens, inputs.tokens)


def test_prompts_and_batches_beyond_the_largest_run_eagerly() -> None:
    capture = Again()
    graph = made(capture, rows=2)
    inputs = batch([1, 2, 3], [4, 5, 6], 2)
    torch.testing.assert_close(replayed(graph, inputs), forward(inputs, None))
    mixed = Batch(**{**vars(batch([1, 2], [4, 5], 2)), "decodes": 1})
    torch.testing.assert_close(replayed(graph, mixed), forward(mixed, None))
    assert capture.captured == 0


@pytest.mark.parametrize("told", [True, False], ids=["told", "capture ended"])
@pytest.mark.parametrize(("failing", "largest"), [((0,), 8), (range(1, 9), 9), (range(9), 0)], ids=str)
def test_without_memory_for_a_graph_the_batch_still_runs(
    caplog: pytest.LogCaptureFixture, failing: Container[int], largest: int, told: bool
) -> None:
    """Not even for the smallest one."""
    graph = made(Again(failing, told=told))
    graph.capture_at_start()
    left = graph.capture_next()
    assert graph.largest == largest and left == 0
    for rows in (1, 3, 9):
        inputs = batch(list(range(rows)), list(range(2, rows + 2)), 3)
        torch.testing.assert_close(replayed(graph, inputs), forward(inputs, None))
    assert len(caplog.records) == (largest < 9) and ("--gpu-memory-utilization" in caplog.text) == (largest < 9)


def test_other_errors_of_a_capture_end_the_step() -> None:
    def broken(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        made(broken).capture_at_start()


def test_a_rank_that_others_sum_with_cannot_go_on_by_itself() -> None:
    where = {"incoming": None, "device": torch.device("cpu"), "alone": False}
    graph = Graphs(forward, Again([0]), prepare=lambda batch: None, rows=9, width=6, **where)
    with pytest.raises(torch.OutOfMemoryError):
        graph.capture_at_start()


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3-moe", "gpt-oss"))]
)
def test_an_engine_with_triton_and_graphs_gives_the_same_tokens(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.make(name, tmp_path_factory.mktemp("graphs"))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompts = [[1, 5, 9], [4], [3, 4]]

    def answers(**how: object) -> list[list[int]]:
        with LLM(str(path), dtype="float32", skip_tokenizer_init=True, executor="inline", **how) as llm:
            return [it.outputs[0].token_ids for it in llm.generate(prompts, params)]

    plain = answers(attention_backend="torch")
    captures: list[Again] = []

    def capture() -> Again:
        captures.append(Again())
        return captures[-1]

    monkeypatch.setattr(runner.ModelRunner, "_agree_on_captures", lambda self: self.model.capturable)
    monkeypatch.setattr(runner, "CudaGraphs", capture)
    monkeypatch.setattr(graphs, "graph_sizes", lambda most: [1, 4])
    monkeypatch.setattr(graphs, "CAPTURE_S", 3600.0)  # the interpreter takes long
    assert answers(attention_backend="triton", max_num_seqs=4) == plain
    assert captures and all(it.captured == 2 for it in captures)
