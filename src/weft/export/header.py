"""Words: a plan as the comment that every export begins with tells it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import msgspec

from weft import __version__
from weft.export.deployment import Deployment, ReplicaServer
from weft.export.shell import Placeholder
from weft.planner.deployment import Layout
from weft.planner.notes import notes
from weft.planner.ranking import Candidate
from weft.words import by_type

KEYS = "HF_TOKEN and VLLM_API_KEY are read from the environment; without VLLM_API_KEY nobody is asked for a key"
WIDTH = 100  # columns of a comment
SERVERS = 8  # of which the GPUs are told


class TargetRemarks(msgspec.Struct, frozen=True):
    """What a target adds to the comment: what it leaves out and why, what has to be replaced, how to go on."""

    left_out: Sequence[str] = ()
    replace: Sequence[Placeholder] = ()
    use: Sequence[str] = ()


def header_comment(target: str, deployment: Deployment, remarks: TargetRemarks) -> str:
    """The plan, where it is from, what it lacks; lines that begin with #."""
    paragraphs = [
        plan_paragraph(deployment),
        prediction_paragraph(deployment),
        f"Written by weft {__version__}: weft plan --emit {target}",
    ]
    left_out = [*deployment.gaps, *notes(deployment.question, deployment.candidate), *remarks.left_out]
    lines = [line for paragraph in paragraphs for line in _wrapped(paragraph)]
    lines += _listed("In another way than planned, or left out:", left_out)
    lines += _listed("To be set before use:", [f"{one.name}: {one.meaning}" for one in remarks.replace])
    lines += _listed("Use:", remarks.use)
    return "\n".join(f"# {line}".rstrip() for line in lines)


def plan_paragraph(deployment: Deployment) -> str:
    """The model, the hardware, the cut, and where everything lies."""
    layout = deployment.candidate.layout
    hardware = by_type(deployment.question.cluster.gpus[at].name for at in layout.gpus)
    where = f"{len(deployment.nodes)} nodes with {hardware}" if len(deployment.nodes) > 1 else hardware
    return (
        f"{deployment.checkpoint.title} in {layout.precision} on {where}: {describe_cut(layout)}; "
        f"requests of up to {deployment.max_model_len:,} tokens; {'; '.join(server_places(deployment))}."
    )


def describe_cut(layout: Layout) -> str:
    """What is cut how many ways, in words."""
    ranks = layout.replica(0)[: layout.tensor_parallel]
    words = []
    if layout.tensor_parallel > 1:
        heads = ", ".join(f"{len(place.q_heads)}" for place, _ in ranks)
        words.append(f"tensor parallel {layout.tensor_parallel}" + (f" ({heads} heads)" if is_uneven(layout) else ""))
    if layout.pipeline_parallel > 1:
        words.append(f"a pipeline of {' + '.join(map(str, layout.stage_layers))} layers")
    if layout.expert_parallel > 1:
        words.append(f"experts dealt out to {layout.expert_parallel} GPUs")
    if layout.data_parallel > 1:
        words.append(f"{layout.data_parallel} replicas")
    return ", ".join(words) or "one rank"


def describe_plan(candidate: Candidate) -> str:
    """A plan in a few words, as `weft plan` has them, with the heads of an uneven cut."""
    layout = candidate.layout
    if not is_uneven(layout):
        return f"{candidate.cut}"
    heads = [f"{len(place.q_heads)}" for place, _ in layout.replica(0)[: layout.tensor_parallel]]
    return f"{candidate.cut} with {', '.join(heads[:-1])} and {heads[-1]} query heads"


def is_uneven(layout: Layout) -> bool:
    """Whether tensor-parallel ranks have different shares of the heads."""
    return len({(len(place.q_heads), len(place.kv_heads)) for place in layout.places}) > 1


def server_places(deployment: Deployment) -> list[str]:
    """Which GPUs answer on which port; without one, which hold a replica."""
    several = len(deployment.question.cluster.nodes) > 1
    found = []
    for server in deployment.servers[:SERVERS]:
        name = f"port {server.port}" if server.port else f"replica {server.number}"
        parts = [_gpus(deployment, server, server.node)]
        parts += [f"{_gpus(deployment, server, node)} on node {node}" for node in server.nodes[1:]]
        found.append(f"{name}{f' on node {server.node}' if several else ''}: {' and '.join(parts)}")
    more = len(deployment.servers) - SERVERS
    return [*found, f"and {more} more"] if more > 0 else found


def _gpus(deployment: Deployment, server: ReplicaServer, node: int) -> str:
    gpus = server.gpus(node)
    return "the CPU" if deployment.gpu.kind == "cpu" else f"GPU{'s' * (len(gpus) > 1)} {','.join(gpus)}"


def prediction_paragraph(deployment: Deployment) -> str:
    """What `weft plan` expects of it."""
    tokens, speed = deployment.candidate.memory.kv_tokens, deployment.candidate.predicted
    error = f"within {100 * speed.error_band:.0f} % ({speed.error_source})"
    return (
        f"Predicted with {deployment.question.engine}, {error}: a KV cache of {tokens:,} tokens, {speed.single_tok_s:,.1f} "
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
