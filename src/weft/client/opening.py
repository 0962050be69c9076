"""Steps that LLM, AsyncLLM and `weft serve` share: find the model before the engine starts, describe it afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from weft.client.frontend import Frontend, Prompt, PromptLike, TextTools
from weft.config import EngineConfig
from weft.core.params import SamplingParams
from weft.errors import RequestError
from weft.formats.checkpoint import Checkpoint, resolve
from weft.plan.plan import Plan

Message = Mapping[str, Any]


def open_model(config: EngineConfig) -> tuple[Checkpoint, TextTools]:
    """The checkpoint that the config names, fetched if need be, with its tokenizer and chat template.

    Before the ranks start: a tokenizer that is damaged is known at once. Raises ModelError and ConfigError.
    """
    checkpoint = resolve(
        config.model,
        revision=config.revision,
        hf_token=config.hf_token,
        download_dir=config.download_dir,
        load_format=config.load_format,
    )
    return checkpoint, TextTools.load(config, checkpoint)


def read_prompt(frontend: Frontend, prompt: PromptLike | Sequence[Message]) -> Prompt:
    """A text, token ids, or messages, as a prompt. Raises RequestError."""
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        return frontend.chat_prompt(cast(Sequence[Message], prompt))
    return frontend.parse_prompt(cast(PromptLike, prompt))


def check_params(params: object) -> None:
    """Raise RequestError for what is no SamplingParams, a dict for one."""
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"sampling_params is {params!r}; it must be a SamplingParams, a list of them, or None",
            param="sampling_params",
        )


def describe(kind: str, model: str, state: Plan | str) -> str:
    """A repr: class, model, and the layout, devices and limits of the plan that runs, or what else its state is."""
    if isinstance(state, str):
        return f"<{kind} {model!r}: {state}>"
    devices = ", ".join(
        f"{count} x {device}" if (count := state.devices.count(device)) > 1 else device
        for device in dict.fromkeys(state.devices)
    )
    layout = f"tensor_parallel_size={state.tensor_parallel}, pipeline_parallel_size={state.stages}"
    return f"<{kind} {model!r}: {layout}, {devices}, {state.dtype}, max_model_len={state.max_model_len}>"
