"""Flags of `vllm serve` that Weft does not have: parsed with their values, then refused or ignored with a warning."""

from __future__ import annotations

import re
from itertools import takewhile

from weft.engine.client.vllm import VLLMArgument, short_forms, vllm_arguments


class RefusedFlag(Exception):
    """A flag of vLLM that changes what is served or how safe it is; the message names the flag and the way out."""


def strip_vllm_flags(argv: list[str], own: frozenset[str]) -> tuple[list[str], list[str]]:
    """`argv` without the flags that vLLM has and the command does not, and a warning for each that is ignored.

    `own` are the options of the command itself; they take precedence. A short form or `--flag.key` counts as its flag.
    Raises RefusedFlag.
    """
    kept: list[str] = []
    warnings: list[str] = []
    positions = iter(range(len(argv)))
    for at in positions:
        written, equals, value = argv[at].partition("=")
        flag, enabled = _vllm_flag(written)
        if written in own or flag is None:
            kept.append(argv[at])
            continue
        complete = equals or re.fullmatch(r"-O\d", written)
        taken = [value] if equals else []
        for word in [] if complete else _values(argv[at + 1 :], flag.arity):
            next(positions)
            taken.append(word)
        why = flag.refusal(" ".join(taken) if taken else str(enabled))
        if why:
            raise RefusedFlag(f"{' '.join([written, *taken])}: {why}")
        if not flag.refused:
            warnings.append(f"{written}: {flag.warning}")
    return kept, warnings


def _values(argv: list[str], arity: int) -> list[str]:
    """The words up to the next flag, at most `arity`; any number if that is negative."""
    limited = argv if arity < 0 else argv[:arity]
    return list(takewhile(lambda word: not word.startswith("--"), limited))


def _vllm_flag(option: str) -> tuple[VLLMArgument | None, bool]:
    """The vLLM flag of an option, and False if the option is its `--no-` form.

    A suffix that selects a part of the flag (--config.key, -O3) is ignored.
    """
    stem = option.partition(".")[0]
    if re.fullmatch(r"-O\d", stem):
        stem = "-O"
    name = short_forms().get(stem, "") if not stem.startswith("--") else stem[2:]
    flag = vllm_arguments().get(name)
    if flag is not None or not name.startswith("no-"):
        return flag, True
    switch = vllm_arguments().get(name.removeprefix("no-"))
    return (switch, False) if switch is not None and switch.arity == 0 else (None, True)
