"""Attention groups that exchange tokens inside of CUDA graphs, on the stand-in for a GPU: Transformers' tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

from tests.cpu import checkpoints
from tests.cpu.captured import Captured
from tests.cpu.fake_cuda import Card, the_card  # noqa: F401
from tests.cpu.test_expert_layouts import make_mixture
from tests.cpu.test_parity import greedy
from weft import LLM, SamplingParams
from weft.ranks.comm import threads
from weft.ranks.kernels.batch import Batch
from weft.ranks.layers.exchange import DispatchExchange
from weft.ranks.worker import graphs

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

# With as many parts as a token chooses or fewer all groups gather all tokens, else each rank sends its own ones.
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 x ep2": {"data_parallel_size": 2},
    "dp3 x ep3": {"data_parallel_size": 3},
    "dp2 x tp2 x ep4": {"data_parallel_size": 2, "tensor_parallel_size": 2},
    "dp2 x ep2 x pp2": {"data_parallel_size": 2, "pipeline_parallel_size": 2},
}
# One request more than groups: one of these has two rows, the others one; in the end one goes on alone.
PROMPTS = [[5, 9, 44], [7], [30, 31, 32, 33], [8, 8]]
LENGTHS = [2, 4, 3, 2]
Mixture = tuple[Path, list[list[int]]]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return with_answers(tmp_path_factory.mktemp("card"), 1)


def with_answers(folder: Path, layers: int) -> Mixture:
    """A checkpoint of so many layers with 7 experts, and Transformers' answers."""
    path = make_mixture(folder, f"groups-{layers}", num_experts=7, num_hidden_layers=layers, mlp_only_layers=[])
    model = checkpoints.reference(path)
    return path, [greedy(model, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]


@pytest.mark.parametrize(
    "layout",
    [name if name in ("dp2 x ep2", "dp3 x ep3") else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS],
)
def test_groups_exchange_tokens_in_graphs(
    layout: str, mixture: Mixture, card: Card, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    piped = "pipeline_parallel_size" in LAYOUTS[layout]
    path, truth = with_answers(tmp_path, 2) if piped else mixture
    monkeypatch.setattr(threads, "ThreadGroup", Captured)
    monkeypatch.setattr(graphs, "graph_sizes", lambda most: [1, 2])
    replayed: list[tuple[int, int]] = []
    run = graphs.Graphs.run_batch

    def run_batch(self: graphs.Graphs, batch: Batch, incoming: Any) -> Any:
        if batch.fixed:
            replayed.append((batch.rows, batch.idle))
        return run(self, batch, incoming)

    monkeypatch.setattr(graphs.Graphs, "run_batch", run_batch)
    ranks = 1
    for count in LAYOUTS[layout].values():
        ranks *= count
    with LLM(
        str(path),
        **{"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **LAYOUTS[layout]},
        enable_expert_parallel=True,
        device="cuda",
        device_ids=(0,) * ranks,
        attention_backend="triton",
        dtype="float32",
        skip_tokenizer_init=True,
        executor="inline",
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=500_000,
    ) as llm:
        assert llm.plan.exchange == ("gather" if ranks == 2 or piped else "dispatch")
        replayed.clear()
        waits = card.waits.copy()
        requests = LAYOUTS[layout]["data_parallel_size"] + 1
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in LENGTHS[:requests]]
        outputs = llm.generate(PROMPTS[:requests], params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == truth[:requests]
    # The tokens of prompts are exchanged by what they choose, those of decode steps in graphs, without a wait.
    assert card.waits == waits or layout != "dp2 x ep2"
    # The requests of a pipeline are in steps of their own.
    assert piped or {(2, 0), (2, 1)} <= {*replayed}, "groups of different sizes take the same graph"
    assert (1, 0) in replayed and (1, 1) in replayed, "a group without rows takes part in it"


def test_memory_of_graphs_is_measured_with_their_exchange(
    mixture: Mixture, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens come to each rank in a graph, whatever they choose."""
    seen: list[bool] = []
    dispatch = DispatchExchange.dispatch

    def noted(self: DispatchExchange, *args: Any, **how: Any) -> Any:
        seen.append(self.as_in_graphs)
        return dispatch(self, *args, **how)

    monkeypatch.setattr(threads, "ThreadGroup", Captured)
    monkeypatch.setattr(graphs, "graph_sizes", lambda most: [1])
    monkeypatch.setattr(DispatchExchange, "dispatch", noted)
    path, _ = mixture
    how: dict[str, Any] = {"device": "cuda", "device_ids": (0,) * 3, "attention_backend": "triton", "dtype": "float32"}
    limits = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 8, "kv_cache_memory_bytes": 500_000}
    with LLM(
        str(path),
        **how,
        **limits,
        data_parallel_size=3,
        enable_expert_parallel=True,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        skip_tokenizer_init=True,
        executor="inline",
    ):
        assert seen.count(True) == 3, "one step of each rank"
