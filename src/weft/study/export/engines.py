"""Limits of each engine that an export starts, beyond its planner profile's."""

from __future__ import annotations

from weft.planner.deployment import DeploymentLayout
from weft.planner.question import Question
from weft.study.export import vllm, weft_serve

UNSUPPORTED = {"weft": weft_serve.unsupported, "vllm": vllm.unsupported}


def unsupported(question: Question, layout: DeploymentLayout) -> str:
    """The reason, in words, that the question's engine cannot run the layout; "" if it can, or is not known here."""
    return UNSUPPORTED[question.engine](question, layout) if question.engine in UNSUPPORTED else ""


def narrow_cache(question: Question) -> bool:
    """Return True if the question's engine supports a KV cache below 16 bits on all of its GPUs."""
    if question.engine == "weft":
        return weft_serve.narrow_cache(question)
    return question.engine != "transformers"
