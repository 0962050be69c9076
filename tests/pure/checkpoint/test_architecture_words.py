"""Strings of an `Architecture` that no block knows are refused when it is built."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from msgspec.structs import replace

from weft.checkpoint.architectures.architecture import Architecture, ConfigFields
from weft.checkpoint.architectures.families.llama import LLAMA
from weft.checkpoint.architectures.shape import Norms


@pytest.mark.parametrize("norms", get_args(Norms))
def test_norms_that_layers_have_are_accepted(norms: Norms) -> None:
    assert Architecture(name="Own", config=LLAMA.config, norms=norms).norms == norms


@pytest.mark.parametrize(
    "build",
    [
        lambda value: Architecture(name="Own", config=LLAMA.config, norms=value),
        lambda value: replace(LLAMA, norms=value),
    ],
)
def test_other_norms_are_refused(build: Any) -> None:
    with pytest.raises(ValueError, match=r"^Architecture\(norms='parallel'\): .*; known: pre, post, both, residual$"):
        build("parallel")


@pytest.mark.parametrize(
    ("field", "known"),
    [
        ("bias", "config, qkv, all, none"),
        ("qk_norm", "none, head, all"),
        ("window", "none, all, some"),
        ("norm", "rms, layer"),
        ("activation", "silu, gelu, gelu_tanh, relu"),
        ("normalised", "always, config"),
    ],
)
def test_other_words_of_the_config_are_refused(field: str, known: str) -> None:
    values: dict[str, Any] = {field: "parallel"}
    with pytest.raises(ValueError, match=rf"^ConfigFields\({field}='parallel'\): .*; known: {known}$"):
        ConfigFields(model_type="own", max_positions=8, **values)


def test_a_window_may_be_a_number() -> None:
    assert ConfigFields(model_type="own", max_positions=8, window=6).window == 6
