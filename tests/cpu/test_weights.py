"""Loading: every rank gets what it owns of the checkpoint, from every format, and reads nothing else."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.pure.drawn_shapes import layouts
from tests.pure.gguf_files import ggml_name, interleave, write_model
from tests.pure.shapes import dense_shape
from tests.refusals import refuses
from weft.checkpoint.architectures.parameters import parameter_dims, rank_parameters
from weft.checkpoint.architectures.place import Place, Span
from weft.checkpoint.architectures.shape import DTYPE_BYTES, ModelShape
from weft.checkpoint.checkpoint import resolve
from weft.checkpoint.files.tensor import ENCODINGS, TensorInfo
from weft.checkpoint.hub import demo
from weft.checkpoint.tensor_index import expected_tensors, locate_tensors
from weft.errors import ModelError
from weft.plan.fills import Fill, rank_fills
from weft.plan.places import cut_places
from weft.plan.plan import Plan, named_devices
from weft.ranks.weights import stored
from weft.ranks.weights.blocks import BLOCKS
from weft.ranks.weights.load import allocate_parameters, load_weights

SHAPE = dense_shape(
    architecture="LlamaForCausalLM",
    layers=2,
    hidden=256,
    q_heads=8,
    kv_heads=4,
    head_dim=64,
    ffn=512,
    vocab=96,
    max_positions=64,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)
UNEVEN = ((5.0, 2.0, 1.0), (1, 1))  # tensor weights, layers per stage


def plan_for(
    shape: ModelShape,
    path: Path | None,
    format: str,
    layout: tuple[Any, Any] = UNEVEN,
    dtype: str = "float32",
    **more: Any,
) -> Plan:
    ranks = cut_places(shape, *layout)
    return Plan(
        model="test",
        checkpoint=str(path or ""),
        load_format=format,
        shape=shape,
        dtype=dtype,
        places=ranks,
        devices=named_devices(*("cpu",) * len(ranks)),
        cores=((0,),) * len(ranks),
        max_model_len=16,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        block_size=16,
        **more,
    )


def loaded(plan: Plan, place: Place) -> dict[str, torch.Tensor]:
    targets = {
        # What is not filled stays NaN, which equals nothing.
        name: torch.full(parameter_dims(place, parameter), torch.nan, dtype=getattr(torch, plan.dtype))
        for name, parameter, _ in rank_parameters(plan.shape, place)
    }
    load_weights(plan, place, targets)
    return targets


def pieces(plan: Plan) -> Iterator[tuple[str, Span, Span | None, torch.Tensor]]:
    """(source, rows, cols, values) of everything that the ranks of a plan hold after loading."""
    for place in plan.places:
        targets = loaded(plan, place)
        for fill in rank_fills(plan.shape, place):
            yield fill.source, fill.rows, fill.cols, targets[fill.param][fill.at : fill.at + len(fill.rows)]


def cut(values: torch.Tensor, rows: Span, cols: Span | None) -> torch.Tensor:
    values = values[rows.start : rows.stop]
    return values if cols is None else values[:, cols.start : cols.stop]


def agrees(plan: Plan, truth: dict[str, torch.Tensor]) -> None:
    """Each rank's pieces are the truth's, and together they are all of it."""
    seen = {name: torch.zeros_like(values, dtype=torch.bool) for name, values in truth.items()}
    for name, rows, cols, values in pieces(plan):
        assert torch.equal(values, cut(truth[name], rows, cols).to(values.dtype)), name
        cut(seen[name], rows, cols).fill_(True)
    assert all(values.all() for values in seen.values())


def random_weights(shape: ModelShape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(dims, generator=generator).to(dtype) for name, dims in expected_tensors(shape)}


@settings(max_examples=25)
@given(layouts(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), st.sampled_from([*DTYPE_BYTES]))
def test_safetensors_in_any_layout(
    tmp_path_factory: pytest.TempPathFactory, layout: tuple[Any, Any, Any], stored_as: torch.dtype, dtype: str
) -> None:
    shape, weights, stages = layout
    folder = tmp_path_factory.getbasetemp()
    truth = random_weights(shape, stored_as)
    save_file(truth, folder / "model.safetensors")
    agrees(plan_for(shape, folder, "safetensors", (weights, stages), dtype), truth)


@settings(max_examples=25)
@given(layouts(), st.sampled_from(["F32", "F16", "BF16"]))
def test_gguf_in_any_layout(
    tmp_path_factory: pytest.TempPathFactory, layout: tuple[Any, Any, Any], stored_as: str
) -> None:
    shape, weights, stages = layout
    if shape.architecture == "MistralForCausalLM":  # which is `llama` in GGUF files, and comes back as that
        shape = msgspec.structs.replace(shape, architecture="LlamaForCausalLM")
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    truth = {name: torch.from_numpy(values) for name, values in write_model(path, shape, stored_as).items()}
    agrees(plan_for(shape, path, "gguf", (weights, stages)), truth)


@pytest.mark.each_value
@pytest.mark.parametrize("type", BLOCKS)
@pytest.mark.parametrize("chunk", [1 << 20, 1500])
def test_quantised_in_an_uneven_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type: str, chunk: int) -> None:
    """Columns end within blocks of 256, and heads within chunks."""
    monkeypatch.setattr(stored, "CHUNK", {"cpu": chunk})
    monkeypatch.setattr(stored, "BAND", 4 * chunk)  # so that a matrix has several bands
    truth = {name: torch.from_numpy(values) for name, values in write_model(tmp_path / "m.gguf", SHAPE, type).items()}
    plan = plan_for(SHAPE, tmp_path / "m.gguf", "gguf")
    (mixer,) = SHAPE.mixers
    borders = {place.q_heads.stop * mixer.head_dim for place in plan.places} | {p.ffn.stop for p in plan.places}
    assert any(border % ENCODINGS[type].elements for border in borders) == (ENCODINGS[type].elements == 256)
    agrees(plan, truth)


def test_only_llamas_rows_are_reordered(tmp_path: Path) -> None:
    """In ggml's `llama` the heads of q and k lie interleaved, in its `qwen2` they do not."""
    qwen = msgspec.structs.replace(SHAPE, architecture="Qwen2ForCausalLM")
    for shape, moved in ((SHAPE, True), (qwen, False)):
        truth = write_model(tmp_path / "m.gguf", shape)
        on_disk = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
        for name in ("q_proj.weight", "k_proj.bias"):
            name = f"model.layers.1.self_attn.{name}"
            there = on_disk[ggml_name(name)]
            assert np.array_equal(there, interleave(truth[name], 64) if moved else truth[name])
        whole = plan_for(shape, tmp_path / "m.gguf", "gguf", ((1.0,), (2,)))
        agrees(whole, {name: torch.from_numpy(values) for name, values in truth.items()})


def test_vectors_may_be_quantised_too(tmp_path: Path) -> None:
    """llama.cpp never does so, the format allows it."""
    write_model(tmp_path / "m.gguf", SHAPE, "Q8_0")
    infos = resolve(str(tmp_path / "m.gguf")).tensors()
    matrix = infos["model.layers.0.mlp.down_proj.weight"]
    row = TensorInfo(file=matrix.file, type="Q8_0", dims=(512,), offset=matrix.offset, nbytes=512 // 32 * 34)
    source = stored.StoredWeights({"matrix": matrix, "row": row})
    whole, part = torch.empty(256, 512), torch.empty(100)
    source.read_range("matrix", Span(0, 256), Span(0, 512), whole)
    source.read_range("row", Span(7, 107), None, part)
    assert torch.equal(part, whole[0, 7:107])


def test_numbers_off_their_own_grid(tmp_path: Path) -> None:
    """Nothing in the format puts the data behind a header of a round length."""
    truth = random_weights(SHAPE, torch.float32)
    save_file(truth, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = content[8 : 8 + length].rstrip() + b" "
    header += b" " * (len(header) % 2 == 0)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    agrees(plan_for(SHAPE, tmp_path, "safetensors"), truth)
    # Most processors forgive that most of the time, so look at where the numbers are read from.
    assert stored.view_bytes(torch.zeros(9, dtype=torch.uint8)[1:], torch.float32).data_ptr() % 4 == 0


def test_a_rank_maps_its_own_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(random_weights(SHAPE, torch.bfloat16), tmp_path / "model.safetensors")
    plan = plan_for(SHAPE, tmp_path, "safetensors", dtype="bfloat16")
    mapped: list[tuple[TensorInfo, int, int]] = []
    original = stored.map_bytes

    def record(info: TensorInfo, start: int, nbytes: int, *, ahead: int = 0) -> torch.Tensor:
        mapped.append((info, start, nbytes))
        return original(info, start, nbytes, ahead=ahead)

    monkeypatch.setattr(stored, "map_bytes", record)
    for place in plan.places:
        mapped.clear()
        targets = loaded(plan, place)
        # Matrices that are cut by columns, and vectors, are mapped from end to end.
        by_rows = {name for name, dims in expected_tensors(SHAPE) if dims[1:] == (SHAPE.hidden,)}
        owned = [fill for fill in rank_fills(SHAPE, place) if fill.source in by_rows]
        assert len(mapped) == len(list(rank_fills(SHAPE, place)))
        assert sorted(n for info, _, n in mapped if info.dims[1:] == (SHAPE.hidden,)) == sorted(
            2 * SHAPE.hidden * len(fill.rows) for fill in owned
        )
        assert all(not values.isnan().any() for values in targets.values())


def read_from_disk() -> int:
    """Bytes that this process had the disk read."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def forget_pages(path: Path) -> None:
    """Have the system drop what it keeps of a file."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("layout", [((1.0, 1.0), (2,)), ((2.0, 1.0), (1, 1))])
def test_ranks_of_a_host_together_have_a_disk_read_each_byte_once(tmp_path: Path, layout: tuple[Any, Any]) -> None:
    sizes = {"hidden": 1024, "q_heads": 16, "kv_heads": 8, "head_dim": 64, "ffn": 4096, "vocab": 512}
    shape = dense_shape(layers=2, max_positions=64, **sizes)
    file = tmp_path / "model.safetensors"
    save_file(random_weights(shape, torch.bfloat16), file)
    plan, size = plan_for(shape, tmp_path, "safetensors", layout, "bfloat16"), file.stat().st_size
    forget_pages(file)
    before = read_from_disk()
    file.read_bytes()
    if read_from_disk() - before < size // 2:
        pytest.skip("the system does not drop files from memory here, or does not count what it reads")
    forget_pages(file)
    before = read_from_disk()
    with ThreadPoolExecutor(len(plan.places)) as ranks:
        list(ranks.map(lambda place: loaded(plan, place), plan.places))
    assert 0.95 * size < read_from_disk() - before <= 1.02 * size


def test_a_rank_reports_the_bytes_that_it_reads(tmp_path: Path) -> None:
    save_file(random_weights(SHAPE, torch.float32), tmp_path / "model.safetensors")
    plan = plan_for(SHAPE, tmp_path, "safetensors", ((1.0,), (2,)), "bfloat16")
    reports: list[tuple[int, int]] = []
    targets = allocate_parameters(plan, plan.places[0], torch.device("cpu"))
    load_weights(plan, plan.places[0], targets, report_read=lambda *report: reports.append(report))
    size = sum(info.nbytes for info in locate_tensors(plan.checkpoint, plan.load_format, plan.shape).values())
    assert reports[-1] == (size, size)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


def test_the_loader_works_in_inference_mode_and_leaves_threads_alone(tmp_path: Path) -> None:
    save_file(random_weights(SHAPE, torch.float32), tmp_path / "model.safetensors")
    plan, before = plan_for(SHAPE, tmp_path, "safetensors"), torch.get_num_threads()
    with torch.inference_mode():
        targets = loaded(plan, plan.places[0])
    assert not any(values.isnan().any() for values in targets.values())
    # Of this thread, and of those that have no number of their own yet.
    assert torch.get_num_threads() == before
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == before


def test_a_checkpoint_that_changed_since_it_was_planned(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(random_weights(SHAPE, torch.float32), path)
    plan = plan_for(SHAPE, tmp_path, "safetensors")
    infos = locate_tensors(plan.checkpoint, plan.load_format, plan.shape)
    path.write_bytes(path.read_bytes()[:-4])
    with refuses(ModelError, "short-tensor", path):
        loaded(plan, plan.places[0])
    path.unlink()
    with refuses(ModelError, "no-weights", tmp_path):
        loaded(plan, plan.places[0])
    name = "model.norm.weight"
    with refuses(ModelError, "cannot-read-model", path, "No such file"):
        stored.StoredWeights(infos).read_range(name, Span(0, 256), None, torch.empty(256))


@pytest.mark.parametrize("unread", [{"expert": 0}], ids=str)
def test_a_fill_with_a_field_that_the_loader_does_not_read_is_refused(
    unread: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would load other numbers than the table of parameters says."""

    def with_unread(shape: ModelShape, place: Place) -> list[Fill]:
        return [msgspec.structs.replace(fill, **unread) for fill in rank_fills(shape, place)]

    plan = plan_for(SHAPE, None, "dummy")
    loaded(plan, plan.places[0])
    monkeypatch.setattr("weft.ranks.weights.load.rank_fills", with_unread)
    monkeypatch.setattr("weft.ranks.weights.load.KNOWN_FIELDS", frozenset({"param", "source", "rows", "cols", "at"}))
    with pytest.raises(AssertionError, match=rf"\b{next(iter(unread))}\b.*\bFill\b"):
        loaded(plan, plan.places[0])


@settings(max_examples=25)
@given(layouts(), st.sampled_from([*DTYPE_BYTES]))
def test_dummies_are_the_same_in_any_layout(layout: tuple[Any, Any, Any], dtype: str) -> None:
    shape, weights, stages = layout
    truth: dict[str, torch.Tensor] = {}
    for name, rows, _, values in pieces(plan_for(shape, None, "dummy", ((1.0,), (len(shape.layers),)))):
        assert rows.start == 0
        truth[name] = values
    agrees(plan_for(shape, None, "dummy", (weights, stages), dtype), truth)


def test_dummies_are_normal_and_differ() -> None:
    shape = msgspec.structs.replace(SHAPE, vocab=4096)  # an embedding of several blocks

    def dummy(seed: int) -> dict[str, torch.Tensor]:
        plan = plan_for(shape, None, "dummy", ((1.0,), (2,)), seed=seed)
        return loaded(plan, plan.places[0])

    one, other = dummy(0), dummy(1)
    embedding = one["embed.weight"]
    assert abs(embedding.mean()) < 1e-3
    assert abs(embedding.std() - 0.02) < 1e-3
    assert (one["layers.0.attention_norm.weight"] == 1).all()
    assert (one["layers.0.mlp.gate_up.bias"] != 0).all()
    assert not torch.equal(embedding, other["embed.weight"])
    assert not torch.equal(embedding[:1024], embedding[1024:2048])
    assert not torch.equal(one["layers.0.mlp.down.weight"], one["layers.1.mlp.down.weight"])


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return demo.fetch_demo()
    except ModelError as error:
        pytest.skip(f"{Path(demo.MEMBER).name} is not here: {error}")


def test_the_demo_is_what_the_library_makes_of_it(smollm2: Path) -> None:
    checkpoint = resolve(str(smollm2))
    infos, content = checkpoint.tensors(), np.memmap(smollm2, mode="r")
    plan = plan_for(checkpoint.shape, smollm2, "gguf", ((2.0, 1.0), (30,)), dtype="bfloat16")
    assert [len(place.q_heads) for place in plan.places] == [6, 3]
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    for layer in (0, 29):
        names += [f"model.layers.{layer}.self_attn.{m}_proj.weight" for m in "qkvo"]
        names += [f"model.layers.{layer}.mlp.{m}_proj.weight" for m in ("gate", "down")]
    truth = {}
    for name in names:
        info = infos[name]
        data = content[info.offset : info.offset + info.nbytes].reshape(*info.dims[:-1], -1)
        values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[info.type])
        truth[name] = torch.from_numpy(values.copy()).bfloat16()
    compared = 0
    for name, rows, cols, values in pieces(plan):
        if name not in truth:
            continue
        if ".q_proj." in name or ".k_proj." in name:
            values = torch.from_numpy(interleave(values.float().numpy(), 64)).bfloat16()
        assert torch.equal(values, cut(truth[name], rows, cols))
        compared += 1
    assert compared == 2 * len(names)
