"""Header comment of every exported file: the plan, its prediction, and remarks on the target."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import msgspec

from weft._version import __version__
from weft.formatting import format_counts
from weft.plan.parallelism import Parallelism
from weft.planner.deployment import DeploymentLayout
from weft.planner.report.notes import notes
from weft.planner.search.ranking import Candidate
from weft.study.export.deployment import Deployment, ReplicaServer
from weft.study.export.shell import Placeholder

KEYS = "HF_TOKEN and VLLM_API_KEY are read from the environment; without VLLM_API_KEY clients need no key"
WIDTH = 100  # columns of a comment
SERVERS = 8  # at most this many servers are listed with their GPUs


class TargetRemarks(msgspec.Struct, frozen=True):
    """A target's part of the header: omissions and their reasons, placeholders to replace, and the next steps."""

    omitted: Sequence[str] = ()
    placeholders: Sequence[Placeholder] = ()
    next_steps: Sequence[str] = ()


def header_comment(target: str, deployment: Deployment, remarks: TargetRemarks) -> str:
    """Header of a file, in lines that begin with #: the plan, its prediction, its origin and the remarks."""
    paragraphs = [
        plan_paragraph(deployment),
        prediction_paragraph(deployment),
        f"Written by weft {__version__}: weft plan --emit {target}",
    ]
    differences = (*deployment.gaps, *notes(deployment.question, deployment.candidate))
    omitted = [*map(str, differences), *remarks.omitted]
    lines = [line for paragraph in paragraphs for line in _wrapped(paragraph)]
    lines += _listed("Different from the plan, or left out:", omitted)
    lines += _listed("To be set before use:", [f"{item.name}: {item.meaning}" for item in remarks.placeholders])
    lines += _listed("Use:", remarks.next_steps)
    return "\n".join(f"# {line}".rstrip() for line in lines)


def plan_paragraph(deployment: Deployment) -> str:
    """The model, the hardware, the cut, and the GPUs of each server, in one sentence."""
    layout = deployment.candidate.layout
    hardware = format_counts(deployment.question.cluster.gpus[index].name for index in layout.gpus)
    where = f"{len(deployment.nodes)} nodes with {hardware}" if len(deployment.nodes) > 1 else hardware
    return (
        f"{deployment.checkpoint.title} in {layout.precision} on {where}: {describe_cut(layout)}; "
        f"requests of up to {deployment.max_model_len:,} tokens; {'; '.join(server_places(deployment))}."
    )


def describe_cut(layout: DeploymentLayout) -> str:
    """The cut in words, as in "tensor parallel 2, 2 replicas"."""
    cut = layout.parallelism
    words = []
    if cut.tensor_parallel > 1:
        heads = ", ".join(f"{len(place.q_heads)}" for place, _ in layout.replica(0)[: cut.tensor_parallel])
        words.append(f"tensor parallel {cut.tensor_parallel}" + (f" ({heads} heads)" if is_uneven(layout) else ""))
    if cut.pipeline_parallel > 1:
        words.append(f"a pipeline of {' + '.join(map(str, cut.pipeline_split))} layers")
    if cut.deals_experts:
        words.append(_describe_experts(cut))
    if cut.shares_experts:
        words.append(f"{cut.data_parallel} attention groups that share the experts")
    elif cut.data_parallel > 1:
        words.append(f"{cut.data_parallel} replicas")
    return ", ".join(words) or "one rank"


def _describe_experts(cut: Parallelism) -> str:
    """The cut of the experts in words, of a layout that deals them out."""
    parts, columns = cut.expert_parallel, cut.expert_columns
    if parts == 1:
        return f"every expert cut over {columns} ranks"
    return f"experts dealt out to {parts} ranks" if columns == 1 else f"experts in {parts} parts of {columns} ranks"


def describe_plan(candidate: Candidate) -> str:
    """A plan in a few words, as `weft plan` prints it, with the heads of an uneven cut."""
    layout = candidate.layout
    if not is_uneven(layout):
        return f"{candidate.cut}"
    heads = [f"{len(place.q_heads)}" for place, _ in layout.replica(0)[: layout.parallelism.tensor_parallel]]
    return f"{candidate.cut} with {', '.join(heads[:-1])} and {heads[-1]} query heads"


def is_uneven(layout: DeploymentLayout) -> bool:
    """Return True if tensor-parallel ranks have different shares of the heads."""
    return len({(len(place.q_heads), len(place.kv_heads)) for place in layout.places}) > 1


def server_places(deployment: Deployment) -> list[str]:
    """GPUs of each server, by its port; by its replica if the target has no ports."""
    several = len(deployment.question.cluster.nodes) > 1
    places = []
    for server in deployment.servers[:SERVERS]:
        name = f"port {server.port}" if server.port else f"replica {server.number}"
        parts = [_gpus(deployment, server, server.node)]
        parts += [f"{_gpus(deployment, server, node)} on node {node}" for node in server.nodes[1:]]
        places.append(f"{name}{f' on node {server.node}' if several else ''}: {' and '.join(parts)}")
    others = len(deployment.servers) - SERVERS
    return [*places, f"and {others} more"] if others > 0 else places


def _gpus(deployment: Deployment, server: ReplicaServer, node: int) -> str:
    gpus = server.gpus(node)
    return "the CPU" if deployment.gpu.kind == "cpu" else f"GPU{'s' * (len(gpus) > 1)} {','.join(gpus)}"


def prediction_paragraph(deployment: Deployment) -> str:
    """The prediction of `weft plan`, in one sentence."""
    tokens, speed = deployment.candidate.memory.kv_tokens, deployment.candidate.predicted
    error = f"within {100 * speed.error_band:.0f} % ({speed.error_source})"
    return (
        f"Predicted with {deployment.question.engine}, {error}: a KV cache of {tokens:,} tokens, "
        f"{speed.single_tok_s:,.1f} tok/s for one request, {speed.saturated_tok_s:,.0f} for as many as fit."
    )


def _listed(title: str, entries: Sequence[str]) -> list[str]:
    if not entries:
        return []
    return ["", title, *(line for entry in entries for line in _entry(entry))]


def _entry(text: str) -> list[str]:
    """Lines of a sentence, and of the commands below it, which are not wrapped."""
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
