"""Words: a plan as the comment that every export begins with tells it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import msgspec

from weft import __version__
from weft.export.deployment import Deployment, Server
from weft.export.shell import Placeholder
from weft.formatting import format_counts
from weft.planner.deployment import Layout
from weft.planner.notes import notes
from weft.planner.ranking import Candidate

KEYS = "HF_TOKEN and VLLM_API_KEY are read from the environment; without VLLM_API_KEY nobody is asked for a key"
WIDTH = 100  # columns of a comment
SERVERS = 8  # of which the GPUs are told


class Remarks(msgspec.Struct, frozen=True):
    """What a target adds to the comment: what it leaves out and why, what has to be replaced, how to go on."""

    left_out: Sequence[str] = ()
    replace: Sequence[Placeholder] = ()
    use: Sequence[str] = ()


def comment(target: str, it: Deployment, remarks: Remarks) -> str:
    """The plan, where it is from, what it lacks; lines that begin with #."""
    paragraphs = [plan(it), predicted(it), f"Written by weft {__version__}: weft plan --emit {target}"]
    left_out = [*it.gaps, *notes(it.question, it.candidate), *remarks.left_out]
    lines = [line for paragraph in paragraphs for line in _wrapped(paragraph)]
    lines += _listed("In another way than planned, or left out:", left_out)
    lines += _listed("To be set before use:", [f"{one.name}: {one.meaning}" for one in remarks.replace])
    lines += _listed("Use:", remarks.use)
    return "\n".join(f"# {line}".rstrip() for line in lines)


def plan(it: Deployment) -> str:
    """The model, the hardware, the cut, and where everything lies."""
    layout = it.candidate.layout
    hardware = format_counts(it.question.cluster.gpus[at].name for at in layout.gpus)
    where = f"{len(it.nodes)} nodes with {hardware}" if len(it.nodes) > 1 else hardware
    return (
        f"{it.checkpoint.title} in {layout.precision} on {where}: {cut(layout)}; "
        f"requests of up to {it.max_model_len:,} tokens; {'; '.join(seats(it))}."
    )


def cut(layout: Layout) -> str:
    """What is cut how many ways, in words."""
    ranks = layout.replica(0)[: layout.tensor_parallel]
    words = []
    if layout.tensor_parallel > 1:
        heads = ", ".join(f"{len(place.q_heads)}" for place, _ in ranks)
        words.append(f"tensor parallel {layout.tensor_parallel}" + (f" ({heads} heads)" if uneven(layout) else ""))
    if layout.pipeline_parallel > 1:
        words.append(f"a pipeline of {' + '.join(map(str, layout.stage_layers))} layers")
    if layout.expert_parallel > 1:
        words.append(f"experts dealt out to {layout.expert_parallel} GPUs")
    if layout.data_parallel > 1:
        words.append(f"{layout.data_parallel} replicas")
    return ", ".join(words) or "one rank"


def told(candidate: Candidate) -> str:
    """A plan in a few words, as `weft plan` has them, with the heads of an uneven cut."""
    layout = candidate.layout
    if not uneven(layout):
        return f"{candidate.cut}"
    heads = [f"{len(place.q_heads)}" for place, _ in layout.replica(0)[: layout.tensor_parallel]]
    return f"{candidate.cut} with {', '.join(heads[:-1])} and {heads[-1]} query heads"


def uneven(layout: Layout) -> bool:
    """Whether tensor-parallel ranks have different shares of the heads."""
    return len({(len(place.q_heads), len(place.kv_heads)) for place in layout.places}) > 1


def seats(it: Deployment) -> list[str]:
    """Which GPUs answer on which port; without one, which hold a replica."""
    several = len(it.question.cluster.nodes) > 1
    found = []
    for server in it.servers[:SERVERS]:
        name = f"port {server.port}" if server.port else f"replica {server.number}"
        parts = [_gpus(it, server, server.node)]
        parts += [f"{_gpus(it, server, node)} on node {node}" for node in server.nodes[1:]]
        found.append(f"{name}{f' on node {server.node}' if several else ''}: {' and '.join(parts)}")
    more = len(it.servers) - SERVERS
    return [*found, f"and {more} more"] if more > 0 else found


def _gpus(it: Deployment, server: Server, node: int) -> str:
    gpus = server.gpus(node)
    return "the CPU" if it.gpu.kind == "cpu" else f"GPU{'s' * (len(gpus) > 1)} {','.join(gpus)}"


def predicted(it: Deployment) -> str:
    """What `weft plan` expects of it."""
    tokens, speed = it.candidate.memory.kv_tokens, it.candidate.predicted
    error = f"within {100 * speed.error_band:.0f} % ({speed.error_source})"
    return (
        f"Predicted with {it.question.engine}, {error}: a KV cache of {tokens:,} tokens, {speed.single_tok_s:,.1f} "
        f"tok/s for one request, {speed.saturated_tok_s:,.0f} for as many as fit."
    )


def _listed(title: str, entries: Sequence[str]) -> list[str]:
    if not entries:
        return []
    return ["", title, *(line for entry in entries for line in _entry(entry))]


def _entry(text: str) -> list[str]:
    """A sentence, and below it a command as it is."""
    sentence, *commands = text.split("\n")
    return [*_wrapped(sentence, "- "), *(f"    {line}" for line in commands)]


def _wrapped(text: str, start: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH - 2,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
