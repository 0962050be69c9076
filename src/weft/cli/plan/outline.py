"""weft plan MODEL for a checkpoint of an unknown architecture: whether it fits, apart from whether it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from weft.checkpoint.outline import Outline, read_outline
from weft.cli.flags.plan_flags import Subject
from weft.errors import ModelError
from weft.formatting import format_bytes
from weft.machine.hardware.cluster import Cluster
from weft.planner.deployment import default_lengths
from weft.planner.memory.outline_fit import UTILIZATION, Fit, fit_outline

# Codes of the errors that lead here.
NOT_RUN = frozenset(
    {
        "unknown-architecture",
        "not-run-through-transformers",
        "transformers-not-installed",
        "transformers-too-old",
        "cannot-describe-model",
    }
)
NO_CONTEXT = 4096  # tokens that are planned for at most if the config tells no longest sequence


def main(subject: Subject, cluster: Cluster, error: ModelError, *, as_json: bool) -> int:
    """Print the fit of the model of the flags; return 3 if it does not fit.

    `error` says why the engine does not run the model; it is raised again if the sizes cannot be read either.
    """
    source, work, layout = subject.source, subject.workload, subject.layout
    try:
        outline = read_outline(subject.model, revision=source.revision, hf_token=source.hf_token)
    except ModelError as other:
        raise ModelError(f"{error}; nor can its size be summed: {other}", code=error.code) from other
    most = layout.max_model_len or outline.context or NO_CONTEXT
    fit = fit_outline(
        outline,
        cluster,
        length=layout.max_model_len or sum(default_lengths(work.input_len, work.output_len, most)),
        requests=work.concurrency or 1,
        utilization=layout.gpu_memory_utilization or UTILIZATION,
    )
    if as_json:
        print(json.dumps(outline_json(outline, fit, cluster, error)))
    else:
        print("\n".join(outline_lines(outline, fit, cluster, error)))
    return 3 if fit.verdict == "does not fit" else 0


def outline_json(outline: Outline, fit: Fit, cluster: Cluster, error: ModelError) -> dict[str, Any]:
    """The plan as JSON; `best` is null, since there is no layout that the engine runs."""
    return {
        "model": {
            "name": outline.name,
            "architecture": outline.architecture,
            "source": outline.source,
            "params": outline.params,
            "layers": len(outline.layer_bytes),
            "weight_bytes": outline.weight_bytes,
            "kv_bytes_per_token": outline.kv.high if outline.kv.known else None,
            "kv_bytes_per_token_range": [outline.kv.low, outline.kv.high] if outline.kv.known else None,
            "kv_reason": outline.kv.reason,
            "state_bytes_per_sequence": outline.kv.state,
        },
        "runs": False,
        "reason": _not_run(outline, error),
        "hardware": {"gpus": len(cluster.gpus), "names": [gpu.name for gpu in cluster.gpus]},
        "fit": msgspec.to_builtins(fit),
        "best": None,
        "candidates": [],
        "rejected": [],
        "advice": [],
    }


def outline_lines(outline: Outline, fit: Fit, cluster: Cluster, error: ModelError) -> Iterator[str]:
    """The plan as text."""
    kv = outline.kv
    exactly = "in equal layers, since only their sum is known" if outline.equal_layers else "summed from their headers"
    yield f"{outline.name}: {outline.architecture}, {len(outline.layer_bytes)} layers"
    yield f"  weights   {format_bytes(outline.weight_bytes)}, {exactly} ({outline.source})"
    per_token = f"{kv.high:,}" if kv.low == kv.high else f"{kv.low:,} to {kv.high:,}"
    size = f"{per_token} bytes per token in 16 bits, estimated" if kv.known else "unknown"
    yield f"  KV cache  {size}: {kv.reason}"
    if kv.state:
        yield f"  state     about {format_bytes(kv.state)} per sequence, estimated"
    yield f"The engine does not run it: {_not_run(outline, error)}."
    yield _verdict(fit, cluster, known=kv.known)
    for share in fit.shares:
        last = share.first_layer + share.layers - 1
        held = f"layers {share.first_layer} to {last}" if share.layers else "no layers"
        yield (
            f"  {share.name} {share.device}: {held}, {format_bytes(share.weight_bytes)} of weights and "
            f"{format_bytes(share.kv_bytes)} of KV cache, of {format_bytes(share.usable_bytes)}"
        )
    if fit.bound_tok_s:
        yield (
            "An engine that reads all layers for each token, on these devices so, makes "
            f"{fit.bound_tok_s:,.1f} tok/s at most for one request."
        )
    elif fit.shares and outline.mixture:
        yield "It has experts, of which a token reads a part that Weft does not know: no bound of its speed."


def _not_run(outline: Outline, error: ModelError) -> str:
    if error.code == "unknown-architecture":
        return f"{outline.architecture} is not among the architectures that Weft knows"
    return str(error)


def _verdict(fit: Fit, cluster: Cluster, *, known: bool) -> str:
    """The sentence that says whether the model fits; the bytes of its KV cache may not be `known`."""
    low, high = format_bytes(fit.kv_low_bytes), format_bytes(fit.kv_high_bytes)
    kv = f"{high if low == high else f'{low} to {high}'}" if known else "of a KV cache of unknown size"
    load = f"{fit.requests} {'request' if fit.requests == 1 else 'requests'} of {fit.length:,} tokens ({kv})"
    if fit.verdict == "does not fit":
        return f"It does not fit {len(cluster.gpus)} x {cluster.gpus[0].name} with {load}."
    devices = f"{len(fit.shares)} of {len(cluster.gpus)} devices"
    if fit.verdict == "may fit":
        return f"It may fit {devices} with {load}{': with the lower estimate of the KV cache only' * known}."
    return f"It fits {devices} with {load}."
