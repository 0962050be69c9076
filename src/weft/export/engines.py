"""Engines: what each of those that an export starts cannot do of what its planner's profile allows."""

from __future__ import annotations

from weft.export import vllm, weft_serve
from weft.planner.deployment import Layout
from weft.planner.question import Question

KNOWN = {"weft": weft_serve.unsupported, "vllm": vllm.unsupported}


def unsupported(question: Question, layout: Layout) -> str:
    """In words, "" where the question's engine can run the layout; of engines that are not known here nothing."""
    return KNOWN[question.engine](question, layout) if question.engine in KNOWN else ""


def narrow_cache(question: Question) -> bool:
    """Whether the question's engine keeps keys and values in fewer than 16 bits on all of its GPUs."""
    if question.engine == "weft":
        return weft_serve.narrow_cache(question)
    return question.engine != "transformers"
