"""Spread: whole layers over devices, in the words of Transformers."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.checkpoint.names import catalogue
from weft.checkpoint.quantised.precision import weight_bytes
from weft.planner.search.balance import ModelBytes, balance_layers, balanced, model_bytes, sequential

LAYERS = st.lists(st.integers(1, 20), min_size=1, max_size=12)
ROOMS = st.lists(st.integers(0, 120).map(float), min_size=1, max_size=5)
MODES = st.sampled_from(["auto", "balanced", "balanced_low_0", "sequential"])


@st.composite
def loads(draw: st.DrawFn) -> ModelBytes:
    weights = [float(it) for it in draw(LAYERS)]
    first, last, kv, sampling = (float(draw(st.integers(0, 9))) for _ in range(4))
    sizes = [it + kv for it in weights]
    return ModelBytes(weights=weights, sizes=sizes, first=first, last=last, both=first + last, sampling=sampling)


def held(load: ModelBytes, layers: tuple[int, ...]) -> list[float]:
    """Bytes on each device, with its end's."""
    ends = [0, *accumulate(layers)]
    found = [float(sum(load.sizes[start:stop])) for start, stop in pairwise(ends)]
    used = [number for number, count in enumerate(layers) if count]
    found[used[0]] += load.first
    found[used[-1]] += load.last + load.sampling
    return found


@given(loads(), ROOMS, MODES)
def test_every_layer_is_somewhere(load: ModelBytes, rooms: list[float], mode: str) -> None:
    found = balance_layers(load, rooms, mode)  # type: ignore[arg-type]
    assert len(found) == len(rooms) and sum(found) == len(load.sizes) and min(found) >= 0


def possible(load: ModelBytes, rooms: list[float]) -> list[tuple[int, ...]]:
    """Every way that has the room, with a layer on each of the devices in use, which may be any of them in order."""
    layers = len(load.sizes)

    def ways(left: int, devices: int) -> list[tuple[int, ...]]:
        if devices == 1:
            return [(left,)]
        return [(n, *rest) for n in range(left + 1) for rest in ways(left - n, devices - 1)]

    return [way for way in ways(layers, len(rooms)) if all(map(float.__le__, held(load, way), rooms))]


SMALL = st.builds(
    lambda load, cut: ModelBytes(
        weights=load.weights[:cut],
        sizes=load.sizes[:cut],
        first=load.first,
        last=load.last,
        both=load.both,
        sampling=load.sampling,
    ),
    loads(),
    st.integers(1, 6),
)
FEW = st.lists(st.integers(0, 90).map(float), min_size=1, max_size=3)


@given(SMALL, FEW)
def test_sequential_fills_the_first_devices_first(load: ModelBytes, rooms: list[float]) -> None:
    found = sequential(load, rooms)
    ways = possible(load, rooms)
    if found in ways:
        # No way has more on the first of them, and so on: but where that leaves the head without its layer.
        assert found == max(ways)
    elif not ways:
        assert sum(found) == len(load.sizes)


@given(SMALL, FEW)
def test_balanced_has_the_room_and_the_least_on_the_fullest(load: ModelBytes, rooms: list[float]) -> None:
    """Compared with all ways that use every device, if there are any."""
    found, fair = balanced(load, rooms), [way for way in possible(load, rooms) if all(way)]
    if fair:
        bare = ModelBytes(weights=load.weights, sizes=load.weights, first=load.first, last=load.last, both=load.both)
        assert found in fair
        assert max(held(bare, found)) == pytest.approx(min(max(held(bare, way)) for way in fair))


@given(SMALL, FEW, MODES)
def test_a_model_with_room_on_one_device_gets_that_device(load: ModelBytes, rooms: list[float], mode: str) -> None:
    """However small the others are."""
    whole = sum(load.sizes) + load.both + load.sampling
    rooms = [0.0, *rooms, whole]
    found = balance_layers(load, rooms, mode)  # type: ignore[arg-type]
    assert all(map(float.__le__, held(load, found), rooms))


@given(SMALL, st.lists(st.integers(0, 90).map(float), min_size=2, max_size=3))
def test_low_0_has_as_little_on_the_first_as_can_be(load: ModelBytes, rooms: list[float]) -> None:
    found = balance_layers(load, rooms, "balanced_low_0")
    ways = possible(load, rooms)
    if not found[0] and any(found):
        return
    # Those others that are in use have a layer each.
    full = [way for way in ways if all(way[1 : 1 + len(load.sizes) - way[0]])]
    if full and found in ways:
        assert found[0] <= min(way[0] for way in full)


def test_words() -> None:
    load = ModelBytes(weights=[10.0] * 8, sizes=[10.0] * 8, first=0.0, last=0.0, both=0.0)
    assert balance_layers(load, [1000.0] * 4, "auto") == balance_layers(load, [1000.0] * 4, "balanced") == (2, 2, 2, 2)
    assert balance_layers(load, [1000.0] * 4, "sequential") == (8, 0, 0, 0)
    assert balance_layers(load, [35.0, 25.0, 1000.0], "sequential") == (3, 2, 3)
    assert balance_layers(load, [1000.0] * 3, "balanced_low_0") == (0, 4, 4)
    assert balance_layers(load, [1000.0, 25.0, 25.0], "balanced_low_0") == (4, 2, 2)
    assert balance_layers(load, [5.0, 1000.0], "sequential") == (0, 8)
    assert balance_layers(load, [1000.0], "balanced_low_0") == (8,)
    # With more devices than layers, the last ones are left out.
    assert balance_layers(load, [1000.0] * 9, "balanced") == (*(1,) * 8, 0)


def test_the_ends_count() -> None:
    """An embedding of two layers' size on the first, and a head of as much on the last."""
    load = ModelBytes(weights=[10.0] * 10, sizes=[10.0] * 10, first=20.0, last=20.0, both=40.0)
    assert balance_layers(load, [1000.0] * 2, "balanced") == (5, 5)
    assert max(held(load, balance_layers(load, [1000.0] * 3, "balanced"))) == 50


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Llama-3.2-1B", "gpt2", "Mixtral-8x7B", "DeepSeek-V3"])
@pytest.mark.parametrize("precision", ["bf16", "int4", "q4_k_m"])
def test_a_model_s_load(model: str, precision: str) -> None:
    shape = catalogue.find(model).shape
    load = model_bytes(shape, precision, "bf16", 100, window_cache=False)
    assert sum(load.weights) + load.both == weight_bytes(shape, precision)
    # A tied head is stored again on a last stage that is not the first one.
    assert load.first + load.last == load.both or (shape.tied and load.first + load.last > load.both)
    assert all(size > weights for size, weights in zip(load.sizes, load.weights, strict=True))
