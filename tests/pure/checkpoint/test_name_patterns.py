"""Regular expressions of a model's publisher: what `re` matches, without its backtracking."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refuses
from weft.checkpoint.files.fields import Fields
from weft.checkpoint.quantised import name_patterns
from weft.checkpoint.quantised.name_patterns import ModuleList
from weft.checkpoint.quantised.registry import quantised_layer_predicate
from weft.errors import ModelError

NAMES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 7, 12, 100)
    for module in ("self_attn.q_proj", "mlp.experts.0.down_proj", "mlp.gate", "block_sparse_moe.gate")
]
NAMES += ["lm_head", "model.embed_tokens", ""]
PUBLISHED = [
    ".*lm_head",
    r"model\.layers\.\d+\.self_attn.*",
    ".*mlp.gate$",
    "^(?!.*experts).*$",
    r".*\.(?:[0-9]|1[0-5])\..*",
    r"(model\.)?layers",
    "[^m].*",
    r"\w+\.[a-k]+s.\d{1,2}\.",
    ".*(gate|router)",
    r".*?_proj\Z",
    "(?=.*q_proj)model",
    r"\D+[\d]\.\S",
    "",
]
ENDLESS = ["([a-z0-9_.]+)+X", "(a|a)*X", "(.*)*X", ".*.*.*.*.*.*.*.*.*.*X", "(.*a){25}.{40}", "(m|[mo]|.)*X"]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_expressions_match_as_in_re(pattern: str) -> None:
    modules = ModuleList((), [pattern], "config.json")
    for name in NAMES:
        assert (name in modules) == (re.match(pattern, name) is not None), name


def _expressions() -> st.SearchStrategy[str]:
    atoms = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w", "^", "$", ""])
    repeats = st.sampled_from(["", "*", "+", "?", "{1,3}", "{2}", "*?"])
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
            st.tuples(inner, repeats).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
            inner.map(lambda part: f"(?!{part})"),
            inner.map(lambda part: f"(?={part})"),
        ),
        max_leaves=8,
    )


@given(pattern=_expressions(), name=st.text("abc", max_size=8))
def test_any_expression_matches_as_in_re(pattern: str, name: str) -> None:
    if len(pattern) <= name_patterns.PATTERN_CHARACTERS:
        assert (name in ModuleList((), [pattern], "config.json")) == (re.match(pattern, name) is not None)


@pytest.mark.parametrize("pattern", ENDLESS)
def test_an_expression_that_backtracks_takes_few_steps(pattern: str) -> None:
    modules = ModuleList((), [pattern], "config.json")
    assert not any(name in modules for name in NAMES)
    assert modules._steps < 100_000


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a)\1",
        "(?i)a",
        "(?<=a)b",
        r"\ba",
        "(",
        "a{9999}",
        "((a{90}){90}){90}",
        "(?:){99999999}",
        "(?>a)",
        "(?P<n>",
        "a**",
    ],
)
def test_what_no_automaton_does_is_refused(pattern: str) -> None:
    with refuses(ModelError, "bad-regular-expression", "config.json"):
        ModuleList((), [pattern], "config.json")


def test_lists_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(ModelError, "pattern-too-long", "201", "200"):
        ModuleList((), ["a" * 201], "config.json")
    with refuses(ModelError, "too-many-patterns", "1,001", "1,000"):
        ModuleList((), [f"x{number}" for number in range(1001)], "config.json")
    with refuses(ModelError, "too-many-patterns", "100,001", "100,000"):
        ModuleList([str(number) for number in range(100_001)], (), "config.json")
    monkeypatch.setattr(name_patterns, "STEPS", 1000)
    modules = ModuleList((), [f"(.*a){{25}}{number}" for number in range(100)], "config.json")
    with refuses(ModelError, "pattern-too-complex", "config.json", "1,000"):
        _ = "a" * 60 in modules


@pytest.mark.parametrize(
    "config",
    [
        {
            "quant_method": "compressed-tensors",
            "ignore": ["re:([a-z0-9_.]+)+X"],
            "config_groups": {"g": {"targets": ["Linear"]}},
        },
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear", "re:([a-z0-9_.]+)+X"]}}},
        {"quant_method": "gptq", "dynamic": {"-:([a-z0-9_.]+)+X": {}}},
    ],
)
def test_a_config_with_an_endless_expression_is_read(config: dict[str, object]) -> None:
    is_quantised = quantised_layer_predicate(Fields(config, "config.json"))
    assert all(is_quantised(name) for name in NAMES[:-3])


@pytest.mark.parametrize(
    ("method", "key"),
    [("awq", "modules_to_not_convert"), ("fp8", "ignored_layers"), ("bitsandbytes", "llm_int8_skip_modules")],
)
def test_lists_of_names_are_bounded(method: str, key: str) -> None:
    config = {"quant_method": method, key: [f"x{number}" for number in range(100_001)]}
    with refuses(ModelError, "wrong-field-value", key, "10,000"):
        quantised_layer_predicate(Fields(config, "config.json"))
