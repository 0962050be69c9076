"""Flags of `vllm serve` that Weft does not have: read with their values, then refused or warned about."""

from __future__ import annotations

import re

from weft.client.vllm import VLLMArgument, short_forms, vllm_arguments


class RefusedFlag(Exception):
    """A flag of vLLM that changes what is served or how safe it is; the message names it, and the way out."""


def strip(argv: list[str], own: frozenset[str]) -> tuple[list[str], list[str]]:
    """`argv` without the flags that vLLM has and the command does not, and a warning for each that is ignored.

    `own` are the command's options, which come first; a short form or `--flag.key` counts as its flag. Raises
    RefusedFlag.
    """
    kept: list[str] = []
    warnings: list[str] = []
    rest = iter(range(len(argv)))
    for at in rest:
        written, glued, value = argv[at].partition("=")
        flag, positive = _flag(written)
        if written in own or flag is None:
            kept.append(argv[at])
            continue
        arity = 0 if glued or re.fullmatch(r"-O\d", written) else flag.arity
        taken = [value] if glued else []
        while arity and at + 1 < len(argv) and not argv[at + 1].startswith("--"):
            at = next(rest)
            arity -= 1
            taken.append(argv[at])
        why = flag.refusal(" ".join(taken) if taken else str(positive))
        if why:
            raise RefusedFlag(f"{' '.join([written, *taken])}: {why}")
        if not flag.refused:
            warnings.append(f"{written}: {flag.warning}")
    return kept, warnings


def _flag(option: str) -> tuple[VLLMArgument | None, bool]:
    """The flag that an option is written for, without what selects a part of it (--config.key, -O3), and whether it
    is not its --no-."""
    stem = option.partition(".")[0]
    if re.fullmatch(r"-O\d", stem):
        stem = "-O"
    name = short_forms().get(stem, "") if not stem.startswith("--") else stem[2:]
    flag = vllm_arguments().get(name)
    if flag is not None or not name.startswith("no-"):
        return flag, True
    switch = vllm_arguments().get(name.removeprefix("no-"))
    return (switch, False) if switch is not None and switch.arity == 0 else (None, True)
