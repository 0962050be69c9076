"""Graphs: batches laid into captured ones. A capture here is a function that is called again, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.cpu import checkpoints
from weft import LLM, SamplingParams
from weft.kernels.batch import Batch
from weft.worker import graphs, worker
from weft.worker.graphs import Graphs, sizes

pytest.importorskip("triton", reason="needs triton, whose kernels pass over rows without a context")


class Again:
    """What CUDA would record."""

    def __init__(self, memory: int = 100) -> None:
        self.captured, self.memory = 0, memory

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.captured == self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
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
        decodes=rows,
    )


def forward(it: Batch, incoming: torch.Tensor | None) -> torch.Tensor:
    """Says what it was given."""
    figures = [it.tokens, it.positions, it.slots, it.context, it.tables[:, 0] * (it.context > 0)]
    out = torch.stack([figure.float() for figure in figures], 1)
    return out if incoming is None else out + incoming


def made(capture: Again, rows: int = 9, incoming: tuple[int, torch.dtype] | None = None) -> Graphs:
    return Graphs(forward, capture, rows=rows, width=6, incoming=incoming, device=torch.device("cpu"))


def test_sizes_waste_little() -> None:
    assert sizes(1) == [1] and sizes(9) == [1, 2, 4, 8, 9] and sizes(256)[-1] == 256 and sizes(5000)[-1] == 512
    for most in (1, 3, 64, 100, 256, 512):
        found = sizes(most)
        assert found == sorted(set(found)) and len(found) <= 25
        for rows in range(17, most + 1):
            assert min(size for size in found if size >= rows) <= rows * 1.5


@pytest.mark.parametrize("incoming", [False, True])
def test_a_replayed_batch_gives_what_the_eager_one_gives(incoming: bool) -> None:
    capture = Again()
    graph = made(capture, incoming=(5, torch.float32) if incoming else None)
    graph.warm(2)
    assert capture.captured == 3  # the largest and two small ones
    for rows, width in ((3, 4), (1, 2), (9, 6), (4, 1), (3, 6), (2, 3)):
        it = batch(list(range(10, 10 + rows)), list(range(1, rows + 1)), width)
        sent = torch.randn(rows, 5) if incoming else None
        torch.testing.assert_close(graph.run(it, sent), forward(it, sent))
    assert capture.captured == 4


def test_prompts_and_batches_beyond_the_largest_run_eagerly() -> None:
    capture = Again()
    graph = made(capture, rows=2)
    it = batch([1, 2, 3], [4, 5, 6], 2)
    torch.testing.assert_close(graph.run(it, None), forward(it, None))
    mixed = Batch(**{**vars(batch([1, 2], [4, 5], 2)), "decodes": 1})
    torch.testing.assert_close(graph.run(mixed, None), forward(mixed, None))
    assert capture.captured == 0


def test_without_memory_for_a_graph_the_batch_still_runs(caplog: pytest.LogCaptureFixture) -> None:
    capture = Again(memory=1)
    graph = made(capture)
    few, many = batch([1], [2], 3), batch([1, 2, 3], [4, 5, 6], 3)
    torch.testing.assert_close(graph.run(few, None), forward(few, None))
    for _ in range(2):
        torch.testing.assert_close(graph.run(many, None), forward(many, None))
    torch.testing.assert_close(graph.run(few, None), forward(few, None))
    assert capture.captured == 1 and len(caplog.records) == 1 and "--gpu-memory-utilization" in caplog.text


def test_a_rank_that_others_sum_with_cannot_go_on_by_itself() -> None:
    graph = Graphs(forward, Again(memory=0), rows=9, width=6, incoming=None, device=torch.device("cpu"), alone=False)
    with pytest.raises(torch.OutOfMemoryError):
        graph.run(batch([1], [2], 3), None)


def test_an_engine_with_triton_and_graphs_gives_the_same_tokens(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.make("qwen3", tmp_path_factory.mktemp("graphs"))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompts = [[1, 5, 9, 33, 7], [4], [3, 4]]

    def answers(**how: object) -> list[list[int]]:
        with LLM(str(path), dtype="float32", skip_tokenizer_init=True, executor="inline", **how) as llm:
            return [it.outputs[0].token_ids for it in llm.generate(prompts, params)]

    plain = answers(attention_backend="torch")
    captures: list[Again] = []

    def capture() -> Again:
        captures.append(Again())
        return captures[-1]

    monkeypatch.setattr(worker.Worker, "_captures", True)
    monkeypatch.setattr(worker, "CudaGraphs", capture)
    monkeypatch.setattr(graphs, "sizes", lambda most: [1, 2, 4])
    assert answers(attention_backend="triton", max_num_seqs=4) == plain
    assert captures and all(it.captured == 3 for it in captures)
