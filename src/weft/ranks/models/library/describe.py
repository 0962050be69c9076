"""Process that describes a model by Transformers' class for it: config.json on stdin, a LibraryReport on stdout.

It is started by `checkpoint.config.library`. The class is built on torch's meta device, and runs there once for two
tokens, so that its attention shows what it calls for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, cast

import msgspec
import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from weft.checkpoint.architectures.library import LibraryModel, LibraryTensor
from weft.checkpoint.config.library import LibraryReport
from weft.ranks.models.library.build import ClassError, base_model, build_on_meta, layer_list, read_config

PROBE = "weft_probe"
POSITIONS = 32768  # length of a model whose config gives none
LENGTH_BOUND = ("dynamic", "longrope")  # rotary embeddings whose angles depend on the longest text of a batch
# Fields of a config.json that a model must not have, and what they say that it has.
UNSUPPORTED = {
    "quantization_config": "quantised weights",
    "num_local_experts": "experts",
    "num_experts": "experts",
    "n_routed_experts": "experts",
    "kv_lora_rank": "latent attention",
    "attn_logit_softcapping": "capped attention scores",
    "alibi": "biased attention scores",
}
WHOLE = "replicated_with_grad_allreduce"  # the name in Transformers' plan of a module that is not cut
# Names in Transformers' plan for the cuts that Weft makes: the dimension that is cut, and if results are gathered.
STYLES: dict[str, tuple[Literal["", "rows", "cols"], bool]] = {
    "colwise": ("rows", False),
    "colwise_gather_output": ("rows", True),
    "rowwise": ("cols", False),
    "rowwise_split_input": ("cols", False),
    WHOLE: ("", False),
}


class LayerTable(NamedTuple):
    """The tensors of the layers.

    - `kinds`: the tensors of each kind of layer; `numbers`: the kind of each layer.
    - `joined`: modules whose results are gathered.
    - `whole`: the reason not to cut layers, "" if there is none.
    """

    kinds: tuple[tuple[LibraryTensor, ...], ...]
    numbers: tuple[int, ...]
    joined: tuple[str, ...]
    whole: str


class AttentionCall(NamedTuple):
    """The arguments that a layer's attention was called with."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None


def main() -> None:
    """Read a config.json, print the report."""
    try:
        report = describe(sys.stdin.read())
    except ClassError as error:
        report = LibraryReport(refusal=str(error))
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        report = LibraryReport(refusal=f"Transformers cannot build its class: {type(error).__name__}: {reason:.160}")
    print(msgspec.json.encode(report).decode(), flush=True)


def describe(text: str) -> LibraryReport:
    """The report on the model of a config.json. Raises ClassError for a model that cannot be run this way."""
    config = read_config(text)
    check_config(config)
    check_class(cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]))
    calls: dict[int, AttentionCall] = {}

    def probe(
        module: nn.Module, query: Any, key: Any, value: Any, mask: Any = None, **options: Any
    ) -> tuple[Any, None]:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in calls:
            raise ClassError(f"{type(module).__name__} is not the one attention of a numbered layer")
        calls[index] = read_call(module, query, key, value, mask, options)
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    model = build_on_meta(config, PROBE, probe)
    check_modules(model)
    _, layers = layer_list(model)
    run = run_on_meta(model)
    if sorted(calls) != list(range(len(layers))):
        raise ClassError(f"only {len(calls)} of the {len(layers)} layers of {type(model).__name__} attend")
    shapes = {call._replace(window=None) for call in calls.values()}
    if len(shapes) > 1:
        raise ClassError("its layers have different numbers or lengths of heads")
    call, windows = shapes.pop(), tuple(calls[layer].window for layer in range(len(layers)))
    check_windows(config, windows)
    if call.head_dim != call.value_dim or call.head_dim % 2 or call.heads % call.kv_heads:
        raise ClassError(f"its heads, {call.heads} for {call.kv_heads} keys of {call.head_dim}, are not the usual ones")
    table = describe_tensors(model, text, call.head_dim, run)
    return LibraryReport(
        name=type(model).__name__,
        model=table,
        heads=call.heads,
        kv_heads=call.kv_heads,
        head_dim=call.head_dim,
        scale=call.scale,
        windows=windows,
        ffn=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        hidden=table.width,
        vocab=embedding_dims(model)[0],
        max_positions=getattr(config, "max_position_embeddings", None) or POSITIONS,
        tied=is_tied(model),
        dtype=own_dtype(text),
        bos=first_id(config.bos_token_id),
        eos=token_ids(config.eos_token_id),
    )


def check_config(config: PreTrainedConfig) -> None:
    """Raise ClassError for a config of a kind of model that Weft does not run through its class."""
    for key, what in UNSUPPORTED.items():
        if getattr(config, key, None):
            raise ClassError(f"it has {what} ({key}), which Weft does not run through Transformers' class")
    if config.is_encoder_decoder:
        raise ClassError("it has an encoder besides its decoder")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise ClassError(f"it has layers of {kind}, a state or a mask that Weft's cache does not hold")
    kind = next((kind for kind in rope_kinds(config) if kind in LENGTH_BOUND), None)
    if kind is not None:
        raise ClassError(f"its rotary embedding ({kind}) depends on the longest text of a batch")


def rope_kinds(config: PreTrainedConfig) -> list[object]:
    """The kinds of all rotary embeddings of a config, which may have one set of parameters for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = (parameters, *parameters.values())
    return [fields.get("rope_type") for fields in sets if isinstance(fields, Mapping)]


def check_class(kind: type[PreTrainedModel]) -> None:
    """Raise ClassError for a class that Weft does not run."""
    if kind._is_stateful:
        raise ClassError(f"{kind.__name__} has recurrent states, which Weft's cache does not hold")
    if not kind._supports_attention_backend:
        raise ClassError(f"{kind.__name__} does not let its attention be replaced")


def check_modules(model: PreTrainedModel) -> None:
    """Raise ClassError for a model with modules that Weft does not run."""
    name = type(model).__name__
    if any("experts" in path.split(".") or tensor.dim() > 2 for path, tensor in model.named_parameters()):
        raise ClassError(f"{name} has experts, which Weft does not run through Transformers' class")
    embedding = type(model.get_input_embeddings())
    if embedding is not nn.Embedding:
        raise ClassError(f"{name} has an embedding of its own kind, {embedding.__name__}")
    if type(output_head(model)) is not nn.Linear:
        raise ClassError(f"{name} has no linear head")
    stored = set(model.state_dict()).difference(name for name, _ in model.named_parameters(remove_duplicate=False))
    if stored:
        raise ClassError(f"{name} reads {min(stored)}, which is no parameter, from its checkpoint")


def check_windows(config: PreTrainedConfig, windows: Sequence[int | None]) -> None:
    """Raise ClassError if the config has sliding windows that the attention of the layers is not told of."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    slides = [kind == "sliding_attention" for kind in types] if types else [bool(window)] * len(windows)
    if any(slid and own is None for slid, own in zip(slides, windows, strict=True)):
        raise ClassError("it has sliding windows that its attention is not told of")


def read_call(
    module: nn.Module, query: Any, key: Any, value: Any, mask: Any, options: Mapping[str, Any]
) -> AttentionCall:
    """One call of an attention function. Raises ClassError for an option that Weft's attention does not have."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ClassError(f"{type(module).__name__} calls for {name}, which Weft's attention does not compute here")
    if mask is not None or options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ClassError(f"{type(module).__name__} has a mask of its own")
    scale, window = options.get("scaling"), options.get("sliding_window")
    head_dim = query.shape[3]
    scale = head_dim**-0.5 if scale is None else float(scale)
    return AttentionCall(query.shape[1], key.shape[1], head_dim, value.shape[3], scale, window)


def describe_tensors(model: PreTrainedModel, text: str, head_dim: int, run: MetaRun) -> LibraryModel:
    """The table of a model's tensors."""
    layers_name, _ = layer_list(model)
    layers = describe_layers(model, head_dim)
    embedding, head = outer_names(model)
    outside = list(tensors_outside_layers(model, {embedding, *head}))
    before = tuple(tensor for tensor, comes_after in outside if not comes_after)
    after = tuple(tensor for tensor, comes_after in outside if comes_after)
    return LibraryModel(
        config=text,
        layer=f"{model.base_model_prefix}.{layers_name}.{{layer}}.",
        embedding=embedding,
        head=head,
        width=embedding_dims(model)[1],
        before=before,
        after=after,
        kinds=layers.kinds,
        layers=layers.numbers,
        joined=layers.joined,
        merged=tuple(group for group in run.siblings if can_merge(group, layers)),
        whole=layers.whole,
        one_stage=reason_for_one_stage(model, run.single, before),
    )


def describe_layers(model: PreTrainedModel, head_dim: int) -> LayerTable:
    """The tensors of all layers, and how Transformers' plan for tensor parallelism cuts them."""
    layers_name, layers = layer_list(model)
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    joined, reasons = dict[str, None](), list[str]()
    if not plan:
        reasons.append(f"{type(model).__name__} has no plan for tensor parallelism")
    kinds, numbers = list[tuple[LibraryTensor, ...]](), list[int]()
    for layer in layers:
        tensors = tuple(layer_tensors(layer, layers_name, plan, joined, reasons))
        reasons += head_tensors(tensors, joined, head_dim)
        if tensors not in kinds:
            kinds.append(tensors)
        numbers.append(kinds.index(tensors))
    return LayerTable(tuple(kinds), tuple(numbers), tuple(joined), whole=next(iter(reasons), ""))


def can_merge(group: Sequence[str], layers: LayerTable) -> bool:
    """Return True if linear modules can be one product: cut alike by rows or not at all, all with a bias or none."""
    for tensors in layers.kinds:
        weights = {tensor.name: tensor.cut for tensor in tensors if tensor.linear}
        names = {tensor.name for tensor in tensors}
        cuts = {weights.get(f"{path}.weight", "cols") for path in group}
        biases = {f"{path}.bias" in names for path in group}
        if len(cuts) > 1 or "cols" in cuts or len(biases) > 1:
            return False
    return not set(group) & set(layers.joined)


def tensors_outside_layers(model: PreTrainedModel, outer: Collection[str]) -> Iterator[tuple[LibraryTensor, bool]]:
    """Yield each tensor outside the layers whose name is not in `outer`, and True if it comes after the layers.

    The order is as in Transformers' plan for pipelines; a tensor that it does not place comes before the layers.
    """
    layers_name, _ = layer_list(model)
    stages = list(getattr(model.config, "base_model_pp_plan", None) or {})
    for name, tensor in model.named_parameters():
        path = name.removeprefix(model.base_model_prefix + ".")
        if name in outer or path.startswith(layers_name + "."):
            continue
        part = path.partition(".")[0]
        comes_after = part in stages and stages.index(part) > stages.index(layers_name)
        yield LibraryTensor(name, tuple(tensor.shape)), comes_after


def reason_for_one_stage(model: PreTrainedModel, single: bool, before: Sequence[LibraryTensor]) -> str:
    """The reason why the model runs in one stage only, "" if there is none; `before` are tensors before the layers."""
    name = type(model).__name__
    if not getattr(model.config, "base_model_pp_plan", None):
        return f"{name} has no plan for pipelines"
    if not single:
        return f"layers of {name} hand on more than hidden states"
    if before:
        return f"the plan for pipelines of {name} does not place {before[0].name}"
    return ""


def layer_tensors(
    layer: nn.Module, layers_name: str, plan: Mapping[str, str], joined: dict[str, None], reasons: list[str]
) -> Iterator[LibraryTensor]:
    """Yield the tensors of a layer. Adds to the modules whose results are gathered, and to the reasons not to cut."""
    for name, tensor in layer.named_parameters():
        path, _, kind = name.rpartition(".")
        linear = type(layer.get_submodule(path)) is nn.Linear
        style = planned_style(f"{layers_name}.0.{path}", plan)
        cut, gathers = STYLES.get(style, ("", False))
        if not can_follow(style, linear=linear):
            reasons.append(f"its plan for tensor parallelism wants {path} {style}")
        if gathers:
            joined[path] = None
        if kind == "bias" and cut == "cols":
            cut = ""
        yield LibraryTensor(name, tuple(tensor.shape), linear and kind == "weight", cut)


def can_follow(style: str, *, linear: bool) -> bool:
    """Return True for a cut that Weft makes: of a linear module, or none at all."""
    return style in STYLES and (linear or not STYLES[style][0])


def planned_style(path: str, plan: Mapping[str, str]) -> str:
    """The name in Transformers' plan for the cut of a module; WHOLE for a module that the plan does not name."""
    return next((plan[pattern] for pattern in plan if fnmatchcase(path, pattern)), WHOLE)


def head_tensors(tensors: tuple[LibraryTensor, ...], joined: Collection[str], head_dim: int) -> Iterator[str]:
    """Yield a reason not to cut a layer if a tensor has values for each head next to projections that are cut."""
    linear = {tensor.name.rpartition(".")[0]: tensor for tensor in tensors if tensor.linear}
    cut = {path.rpartition(".")[0] for path, tensor in linear.items() if tensor.cut == "rows" and path not in joined}
    for tensor in tensors:
        path = tensor.name.rpartition(".")[0]
        extra = {path, path.rpartition(".")[0]} & cut
        if extra and path not in linear and tensor.dims not in ((head_dim,), (1,)):
            yield f"{tensor.name} has values for each head, which its plan for tensor parallelism leaves whole"


def embedding_dims(model: PreTrainedModel) -> tuple[int, int]:
    """Rows of the embedding, and their length."""
    rows, width = cast(nn.Embedding, model.get_input_embeddings()).weight.shape
    return rows, width


def output_head(model: PreTrainedModel) -> nn.Linear:
    """The head, if the model has a linear one."""
    head: nn.Linear = model.get_output_embeddings()
    return head


def outer_names(model: PreTrainedModel) -> tuple[str, tuple[str, ...]]:
    """Names of the embedding's weight, and of the head's weight and bias."""
    modules = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    embedding, head = model.get_input_embeddings(), output_head(model)
    names = [modules[id(head)] + ".weight"] + [modules[id(head)] + ".bias"] * (head.bias is not None)
    return modules[id(embedding)] + ".weight", tuple(names)


def is_tied(model: PreTrainedModel) -> bool:
    """Return True if the head is the embedding."""
    return bool(model.config.tie_word_embeddings) and bool(model._tied_weights_keys)


def own_dtype(text: str) -> str | None:
    """The dtype that a config.json names, if it does."""
    match = re.search(r'"(?:torch_)?dtype":\s*"(?:torch\.)?(\w+)"', text)
    return match[1] if match else None


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def first_id(value: int | list[int] | None) -> int | None:
    return next(iter(token_ids(value)), None)


class MetaRun(NamedTuple):
    """The findings of a run.

    - `single`: each layer hands on its hidden states alone.
    - `siblings`: groups of linear modules that read the same tensor, in every layer.
    """

    single: bool
    siblings: tuple[tuple[str, ...], ...]


@torch.inference_mode()
def run_on_meta(model: PreTrainedModel) -> MetaRun:
    """Run the layers for two tokens."""
    alone: list[bool] = []
    _, layers = layer_list(model)
    layers[0].register_forward_hook(lambda module, inputs, output: alone.append(isinstance(output, torch.Tensor)))
    inputs = [note_inputs(layer) for layer in layers]
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        base_model(model)(input_ids=tokens, position_ids=tokens, use_cache=False)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ClassError(f"{type(model).__name__} does not run without its weights: {reason:.160}") from error
    shared = [siblings_of(seen) for seen in inputs]
    return MetaRun(all(alone), tuple(group for group in shared[0] if all(group in others for others in shared)))


def note_inputs(layer: nn.Module) -> list[tuple[str, Any]]:
    """Return a list to which each linear module of a layer adds its path and its input when it runs."""
    seen: list[tuple[str, Any]] = []

    def note(path: str, inputs: tuple[Any, ...]) -> None:
        seen.append((path, inputs[0] if inputs else None))

    for path, module in layer.named_modules():
        if type(module) is nn.Linear:
            module.register_forward_pre_hook(lambda module, inputs, path=path: note(path, inputs))
    return seen


def siblings_of(seen: Sequence[tuple[str, Any]]) -> list[tuple[str, ...]]:
    """Groups of paths whose inputs were one and the same tensor, each in the order of its calls."""
    groups: dict[int, list[str]] = {}
    for path, tensor in seen:
        if tensor is None:  # given by name
            continue
        groups.setdefault(id(tensor), []).append(path)
    return [tuple(paths) for paths in groups.values() if 1 < len(paths) == len(set(paths))]


if __name__ == "__main__":
    main()
