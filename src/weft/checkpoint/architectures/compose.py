"""Layers of a model from what its file says of all of them: windows per layer, and the layers without experts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from weft.checkpoint.architectures.architecture import Architecture
from weft.checkpoint.architectures.shape import Attention, Dense, Experts, LayerSpec, Mixer, ModelShape, Norms, Rope


def compose_layers(
    architecture: Architecture,
    mixer: Mixer,
    windows: Sequence[int | None],
    dense: Dense,
    experts: Experts | None = None,
    dense_layers: Collection[int] = (),
    *,
    local_rope: Rope | None = None,
    norms: Norms | None = None,
) -> tuple[LayerSpec, ...]:
    """One layer per entry of `windows`, which are in tokens; None for attention to the whole context.

    With `experts`, the layers numbered in `dense_layers` have the MLP `dense`, all others the experts. Layers with a
    window have `local_rope`, if the model has one for them. `norms` are the architecture's, if the file does not say.
    """
    layers = []
    for number, window in enumerate(windows):
        attention = mixer
        if isinstance(mixer, Attention) and window is not None:
            attention = replace(mixer, window=window, rope=local_rope or mixer.rope)
        ffn = dense if experts is None or number in dense_layers else experts
        layers.append(LayerSpec(mixer=attention, ffn=ffn, norms=norms or architecture.norms))
    return tuple(layers)


def shape_within(shape: ModelShape, length: int) -> ModelShape:
    """The model for texts of at most `length` tokens: without the factor on queries that only longer texts have."""
    layers = tuple(replace(layer, mixer=_mixer_within(layer.mixer, length)) for layer in shape.layers)
    return replace(shape, layers=layers)


def _mixer_within(mixer: Mixer, length: int) -> Mixer:
    if isinstance(mixer, Attention) and mixer.logn is not None and mixer.logn >= length:
        return replace(mixer, logn=None)
    return mixer
