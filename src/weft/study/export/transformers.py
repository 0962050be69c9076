"""Transformers: a Python script with the plan's device map."""

from __future__ import annotations

import json
from collections import Counter

from weft.checkpoint.architectures.modules import pipeline_units
from weft.checkpoint.architectures.shape import ModelShape
from weft.checkpoint.files import gguf_types
from weft.planner.deployment import DeploymentLayout
from weft.planner.memory.activations import MIB
from weft.planner.question import Question
from weft.study.export import hosts
from weft.study.export.checkpoint import FLOATS
from weft.study.export.deployment import Deployment
from weft.study.export.files import SCRIPT, ExportFile
from weft.study.export.header import TargetRemarks, header_comment
from weft.study.export.pages import render_template
from weft.study.export.shell import command_line
from weft.study.export.target import spans_nodes

SCRIPT_NAME = "transformers_plan.py"
PRECISION_SUBSTITUTES = dict.fromkeys(gguf_types.MIXES, "bf16")  # substitutes for precisions that it does not run
REMOTE_CODE_ARCHITECTURE = "QWenLMHeadModel"  # Qwen v1
# Modules of a multimodal model before its layers, besides the embedding.
VISION_MODULES = ("model.vision_tower", "model.multi_modal_projector")
WITHOUT_ROTARY = ("GPT2LMHeadModel", "OPTForCausalLM")


def unsupported(question: Question, layout: DeploymentLayout) -> str:
    """The reason why a device map cannot express a layout, in words."""
    if question.shape.architecture == REMOTE_CODE_ARCHITECTURE:
        return (
            f"it has {REMOTE_CODE_ARCHITECTURE} only as code in the checkpoint, and Weft does not turn on "
            "trust_remote_code"
        )
    if layout.parallelism.shares_experts:
        return "replicas share no experts: each has all of them"
    return "a device map is for the GPUs of one node" if spans_nodes(question, layout) else ""


def transformers_files(deployment: Deployment) -> list[ExportFile]:
    """The Python script."""
    layout = deployment.candidate.layout
    text = render_template(
        "transformers.py.j2",
        comment=header_comment(
            "transformers",
            deployment,
            TargetRemarks(omitted_options(deployment), deployment.checkpoint.placeholders, next_steps(deployment)),
        ),
        model=json.dumps(deployment.checkpoint.name) if deployment.checkpoint.name else 'os.environ["MODEL"]',
        dtype=f"torch.{FLOATS[layout.precision]}" if layout.precision in FLOATS else '"auto"',
        loader="AutoModelForImageTextToText" if sees_pictures(deployment.question.shape) else "AutoModelForCausalLM",
        device_map=device_map(deployment),
        max_memory=max_memory(deployment),
    )
    return [ExportFile(SCRIPT_NAME, text, SCRIPT)]


def device_map(deployment: Deployment) -> list[str]:
    """Lines of a dictionary with each module's GPU, counted within the replica."""
    shape, layout = deployment.question.shape, deployment.candidate.layout
    if hosts.on_cpu(deployment) or layout.parallelism.replica_size == 1:
        return [f'"": {json.dumps("cpu") if hosts.on_cpu(deployment) else 0}']
    first, layer, norm, head = module_names(shape)
    numbers = gpu_numbers(layout)
    lines = [f'"{name}": {numbers[0]}' for name in first]
    for (place, _), number in zip(layout.replica(0), numbers, strict=True):
        span = place.layers
        lines.append(f'**{{f"{layer}{{n}}": {number} for n in range({span.start}, {span.stop})}}')
    end = numbers[-1]
    # Tied weights are one tensor, on the GPU of the embedding.
    return [*lines, f'"{norm}": {end}', f'"{head}": {numbers[0] if shape.tied else end}']


def module_names(shape: ModelShape) -> tuple[list[str], str, str, str]:
    """Transformers' names of the modules before the layers, of a layer without its number, of norm and head."""
    embedding, layer, *_, norm, head = pipeline_units(shape)
    tables = list(dict.fromkeys(names[0].rpartition(".")[0] for names in embedding.tensors))
    first = [*(VISION_MODULES if sees_pictures(shape) else ()), *tables]
    if shape.architecture not in WITHOUT_ROTARY:
        first.append(f"{tables[0].rpartition('.')[0]}.rotary_emb")
    return first, layer.name.removesuffix("0"), norm.name, head.name


def sees_pictures(shape: ModelShape) -> bool:
    """Return True if the shape is the language part of a multimodal model."""
    return shape.architecture.endswith("ForConditionalGeneration")


def gpu_numbers(layout: DeploymentLayout) -> list[int]:
    """GPU of each stage, counted within its replica."""
    gpus = layout.gpus[: layout.parallelism.replica_size]
    return [list(dict.fromkeys(gpus)).index(gpu) for gpu in gpus]


def max_memory(deployment: Deployment) -> str:
    """Entries with the memory of each GPU that the plan leaves for weights, after the KV cache of one longest
    request."""
    length, room = deployment.question.workload.longest, Counter[int | str]()
    for number, rank in zip(
        gpu_numbers(deployment.candidate.layout), deployment.candidate.memory.replicas[0].ranks, strict=True
    ):
        # Ranks that share a GPU share its usable bytes; the parts of a CPU have their own.
        usable = 0 if number in room else rank.usable_bytes
        free = usable - rank.other_bytes - length * rank.kv_bytes_per_token
        room['"cpu"' if hosts.on_cpu(deployment) else number] += free // MIB
    return ", ".join(f'{device}: "{size}MiB"' for device, size in room.items())


def omitted_options(deployment: Deployment) -> list[str]:
    """Differences from what the plan may suggest, in words."""
    layout, omissions = deployment.candidate.layout, []
    if layout.parallelism.pipeline_parallel > 1:
        omissions.append(
            "stages that work at the same time: with a device map one GPU works after the other, a token at a time"
        )
        if deployment.question.shape.tied:
            omissions.append("the head on the last GPU: it is the embedding's tensor, which is on the first GPU")
    omissions.append("a server: Transformers answers in this process; batches are the caller's")
    if layout.precision not in FLOATS:
        omissions.append(f"the package that reads {layout.precision} weights: the checkpoint's card names it")
    return omissions


def next_steps(deployment: Deployment) -> list[str]:
    """Next steps, in words."""
    steps = ["needs transformers 4.56 or newer, and accelerate; HF_TOKEN is read from the environment"]
    for server in deployment.servers:
        variables = hosts.visible_gpus(deployment, server, server.node)
        command = command_line([f"./{SCRIPT_NAME}", "Why is the sky blue?"], {}, variables)
        steps.append(f"{'run it' if len(deployment.servers) == 1 else f'replica {server.number}'}:\n{command}")
    return steps
