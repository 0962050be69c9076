"""Options are declared once: their flags, their keywords and the checks of their values follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.refusals import refuses
from weft.checkpoint.architectures.shape import DTYPE_BYTES
from weft.cli.commands import COMMANDS
from weft.cli.flags import values
from weft.cli.flags.declared import Flag, option_flags
from weft.cli.parser import default_text
from weft.config import DeviceMap, EngineConfig, Options, declared_options, option
from weft.engine.client.arguments import engine_config
from weft.errors import ConfigError
from weft.plan.layout import DTYPES


@dataclass(frozen=True, kw_only=True)
class BrewOptions(Options):
    """Options of a coffee machine."""

    beans: str = option(help="kind of beans")
    cups: int = option(2, minimum=1, short="-c", help="cups to fill")
    mode: str | None = option(
        None, flag="brew-mode", choices=("fast", "slow"), synonyms={"quick": "fast"}, help="speed of brewing"
    )
    limit: int | None = option(None, auto=True, help="grams of coffee")
    shares: tuple[float, ...] = option((0.5, 0.25), metavar="0.5,0.5", help="share of each cup")
    places: DeviceMap | None = option(None, help="place of each cup")
    names: tuple[str, ...] = option((), several=True, help="names on the cups")
    milk: bool | None = option(None, help="add milk")


def test_an_option_s_flag_is_its_declaration() -> None:
    assert option_flags(BrewOptions) == (
        Flag(name="beans", field="beans", help="kind of beans"),
        Flag(name="cups", field="cups", parse=values.size, short="-c", help="cups to fill", config_default=2),
        Flag(name="brew-mode", field="mode", choices=("quick", "fast", "slow"), help="speed of brewing"),
        Flag(name="limit", field="limit", parse=values.length, help="grams of coffee"),
        Flag(
            name="shares",
            field="shares",
            parse=values.decimals,
            metavar="0.5,0.5",
            help="share of each cup",
            config_default=(0.5, 0.25),
        ),
        Flag(name="places", field="places", parse=values.device_map, help="place of each cup"),
        Flag(name="names", field="names", several=True, help="names on the cups", config_default=()),
        Flag(name="milk", field="milk", parse=None, help="add milk"),
    )


def test_a_config_checks_its_values_and_replaces_synonyms() -> None:
    made = BrewOptions(beans="arabica", mode="quick")
    assert (made.mode, made.cups, made.limit) == ("fast", 2, None)
    with refuses(ConfigError, "unknown-choice"):
        BrewOptions(beans="arabica", mode="never")
    with refuses(ConfigError, "below-minimum"):
        BrewOptions(beans="arabica", cups=0)
    with pytest.raises(TypeError, match="beans"):
        BrewOptions()


@pytest.mark.parametrize(
    ("keywords", "code"),
    [
        ({"dtype": "float8"}, "unknown-choice"),
        ({"load_format": "pt"}, "unknown-choice"),
        ({"generation_config": "folder"}, "unknown-choice"),
        ({"distributed_executor_backend": "slurm"}, "unknown-choice"),
        ({"attention_backend": "xformers"}, "unknown-choice"),
        ({"max_num_seqs": 0}, "below-minimum"),
        ({"seed": -1}, "below-minimum"),
    ],
    ids=str,
)
def test_keywords_of_python_are_checked_before_a_model_is_fetched(keywords: dict[str, Any], code: str) -> None:
    with refuses(ConfigError, code):
        engine_config("some/model", keywords)


def test_rules_for_several_values_are_checked_as_early() -> None:
    with refuses(ConfigError, "bad-utilization", "gpu_memory_utilization", "1.5"):
        engine_config("some/model", {"gpu_memory_utilization": 1.5})
    with refuses(ConfigError, "device-map-beside-other-cut", "--device-map"):
        engine_config("some/model", {"device_map": "auto", "tensor_parallel_size": 2})


def test_an_option_has_two_keywords_if_its_flag_has_another_name() -> None:
    for name in ("executor", "distributed_executor_backend"):
        assert engine_config("some/model", {name: "mp"}).executor == "processes"
    assert EngineConfig(model="m", executor="uni").executor == "inline"


def test_every_dtype_that_may_be_chosen_is_known() -> None:
    assert ("auto", *DTYPES) == declared_options(EngineConfig)["dtype"].choices
    assert set(DTYPES.values()) == set(DTYPE_BYTES)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_help_gives_a_default_once(command: Any) -> None:
    for flag in command.flags:
        if default_text(flag):
            assert "default:" not in flag.help.lower(), flag.long
