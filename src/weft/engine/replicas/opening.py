"""Steps shared by LLM, AsyncLLM and `weft serve`: opening the model before the engine starts, and its description."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from weft.checkpoint.checkpoint import Checkpoint
from weft.checkpoint.tensor_index import expected_tensors
from weft.config import EngineConfig
from weft.engine.cluster.assembly import AnyAssembly
from weft.engine.cluster.groups import NodeGroup
from weft.engine.cluster.ray_cluster import RayGroup
from weft.engine.core.params import SamplingParams
from weft.engine.frontend.frontend import Frontend
from weft.engine.frontend.prompt import Prompt, PromptLike
from weft.engine.frontend.text_tools import TextTools
from weft.engine.text.tokenizer import Tokenizer
from weft.errors import ModelError, RequestError
from weft.machine.hardware.host import Host
from weft.plan.nodes import on_other_nodes
from weft.plan.opening import resolve_checkpoint
from weft.plan.plan import Plan
from weft.planner.execution.execution import plan_over_nodes
from weft.planner.execution.replicas import ReplicaPlan, plan_replicas

Message = Mapping[str, Any]


def open_model(config: EngineConfig) -> tuple[Checkpoint, TextTools]:
    """Open the checkpoint that the config names, downloading it if needed, with its tokenizer and chat template.

    Called before the ranks start, so that a damaged tokenizer is noticed at once. Raises ModelError and ConfigError.
    """
    checkpoint = resolve_checkpoint(config)
    tools = TextTools.load(config, checkpoint)
    if tools.tokenizer is not None:
        check_vocabulary(tools.tokenizer, checkpoint, config.tokenizer or checkpoint.path)
    return checkpoint, tools


def plan_engines(
    config: EngineConfig, checkpoint: Checkpoint, host: Host, assembly: AnyAssembly | None, *, whole: bool = False
) -> list[ReplicaPlan]:
    """The plans of all replicas on this machine, or on the nodes of `assembly`.

    With `whole` the search chooses the number of replicas, see `plan_replicas`. The nodes learn of an error. Raises
    ConfigError and PlanError.
    """
    if assembly is None:
        return plan_replicas(config, checkpoint, host, whole=whole)
    try:
        plans = [plan_group(config, checkpoint, group) for group in assembly.groups]
    except BaseException as error:
        assembly.dismiss(error)
        raise
    return [ReplicaPlan(plan, host) for plan in plans]


def plan_group(config: EngineConfig, checkpoint: Checkpoint, group: NodeGroup) -> Plan:
    """The plan of one engine on the nodes of a group. Raises ConfigError and PlanError."""
    if isinstance(group, RayGroup):
        config = replace(config, executor="ray")
    if not config.enable_expert_parallel:
        config = replace(config, data_parallel_size=None)
    plan = plan_over_nodes(config, checkpoint, group.hosts, group.rooms, group.round_trip_s)
    return on_other_nodes(plan, group.first) if group.first else plan


def check_vocabulary(tokenizer: Tokenizer, checkpoint: Checkpoint, where: str) -> None:
    """Raise ModelError if a tokenizer, read from the file or directory `where`, has more tokens than the embedding.

    Added tokens do not count: many models have some without a row of the embedding, and a prompt with such a token is
    refused.
    """
    shape = checkpoint.shape
    if tokenizer.base_size > shape.vocab:
        embedding, dims = next(iter(expected_tensors(shape)))
        raise ModelError(
            f"{where} has a vocabulary of {tokenizer.base_size:,} tokens, and tensor {embedding} of {checkpoint.path} "
            f"has {dims[0]:,} rows; give the tokenizer of this model with --tokenizer",
            code="vocabulary-beyond-embedding",
        )


async def parse_prompt_or_chat(frontend: Frontend, prompt: PromptLike | Sequence[Message]) -> Prompt:
    """Return the prompt made of a text, of token ids, or of a conversation's messages. Raises RequestError."""
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        return await frontend.chat_prompt(cast(Sequence[Message], prompt))
    return frontend.parse_prompt(cast(PromptLike, prompt))


def list_prompts(prompts: PromptLike | Sequence[PromptLike]) -> Sequence[PromptLike]:
    """Return a list of one prompt or several. A text, a dict and a list of token ids are one prompt."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    several = list(cast(Iterable[PromptLike], prompts))
    return [cast(Sequence[int], several)] if several and all(isinstance(part, int) for part in several) else several


def check_params(params: object) -> None:
    """Raise RequestError for anything but SamplingParams, such as a dict."""
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"sampling_params is {params!r}; it must be a SamplingParams, a list of them, or None",
            param="sampling_params",
            code="invalid-sampling-params",
        )


def describe_engine(kind: str, model: str, state: Plan | str) -> str:
    """Return an engine's repr: class, model, and its layout, devices and limits, or its state in words."""
    if isinstance(state, str):
        return f"<{kind} {model!r}: {state}>"
    devices = ", ".join(
        f"{count} x {name}" if count > 1 else name
        for name, count in Counter(device.name for device in state.devices).items()
    )
    layout = f"tensor_parallel_size={state.tensor_parallel}, pipeline_parallel_size={state.stages}"
    if state.parallelism.deals_experts:
        layout += f", data_parallel_size={state.data_parallel}, expert_parallel_size={state.expert_parallel}"
    return f"<{kind} {model!r}: {layout}, {devices}, {state.dtype}, max_model_len={state.max_model_len}>"
