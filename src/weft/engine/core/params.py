"""SamplingParams: a request's sampling options, with vLLM's names and defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, nextafter
from numbers import Integral, Real
from typing import Annotated, Any, NamedTuple, NoReturn, get_type_hints

import msgspec

from weft.errors import RequestError, nearest_name

MAX_CHOICES = 16384
MAX_LOGPROBS = 20
MAX_COUNT = 2**31 - 1

# A temperature below this only loses precision: it is taken as 0, greedy.
MIN_TEMPERATURE = 1e-5


class Range(NamedTuple):
    """The numbers that a parameter may be, ends included, and `text` where words are clearer than the ends.

    Numbers that divide or multiply logits are limited so that the result is finite in fp32: no request may produce NaN.
    """

    least: float
    most: float
    text: str = ""

    def __str__(self) -> str:
        return self.text or f"from {self.least:.10g} to {self.most:.10g}"


LOGPROBS = Range(0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS} (the whole vocabulary, -1, is not supported)")
PENALTY = Range(-2.0, 2.0)
# Fields of other versions of vLLM, with their values without effect: programs written for those versions pass them.
ASK_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "early_stopping": (False, None),
    "use_beam_search": (False, None),
    "best_of": (1, None),
    "length_penalty": (1.0, None),
    "detokenize": (True, None),
    "spaces_between_special_tokens": (True, None),
    "logits_processors": (None, [], ()),
    "guided_decoding": (None,),
}
MAX_BIAS = 100.0


# Names of the same parameters in other libraries.
OTHER_NAMES = {
    "do_sample": "temperature",
    "length_penalty": "repetition_penalty",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}


class SuggestingStructMeta(msgspec.StructMeta):
    """Metaclass of a struct whose constructor answers an unknown keyword with the nearest field's name."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except TypeError:
            wanted = {name: value for name, value in fields.items() if value not in ASK_FOR_NOTHING.get(name, ())}
            if len(wanted) < len(fields):
                return cls(*args, **wanted)
            unknown = next((name for name in fields if name not in cls.__struct_fields__), None)
            if unknown is None:
                raise
            suggestion = nearest_name(unknown, cls.__struct_fields__, OTHER_NAMES)
            raise TypeError(f"{cls.__name__} has no parameter {unknown!r}{suggestion}") from None


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on an answer, with vLLM's names. Raises RequestError unless exactly one field is set.

    `json`: a JSON schema, as an object or a text. `json_object`: True for any JSON object. `regex`: a regular
    expression for the whole answer. `choice`: one of these texts. `grammar`: a grammar in Lark's or GBNF's form.
    """

    json: Any | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}, and needs exactly one",
                param="structured_outputs",
                code="invalid-structured-outputs",
            )

    @classmethod
    def convert(cls, value: object) -> StructuredOutputsParams:
        """The value for a mapping or another object with the same fields. Raises RequestError."""
        if isinstance(value, cls):
            return value
        fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
        try:
            if fields is None:
                raise msgspec.ValidationError("expected an object")
            given = {name: item for name, item in fields.items() if item is not None and item is not False}
            unknown = sorted(given.keys() - set(cls.__struct_fields__))
            if unknown:
                raise msgspec.ValidationError(f"unknown: {', '.join(unknown)[:200]}")
            return msgspec.convert(given, cls)
        except (msgspec.ValidationError, AttributeError) as error:
            raise RequestError(
                f"structured_outputs is not usable: {error}; it has exactly one of {', '.join(cls.__struct_fields__)}",
                param="structured_outputs",
                code="invalid-structured-outputs",
            ) from None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=SuggestingStructMeta):
    """Sampling options of a request, and when its answer ends. Immutable; validated on construction.

    `temperature` 0 is greedy. `top_k` 0 or -1 means all tokens. `seed` None (or -1) takes the engine's seed and the
    request's number, so that the same requests in the same order give the same tokens. `max_tokens` None means up to
    the model's length. `logprobs` and `prompt_logprobs` are the number of alternatives per token in addition to the
    chosen token (0: only the chosen token). `stop` and `bad_words` may be one text or a sequence of texts; any sequence
    is kept as a tuple, and `logit_bias` with integer keys. The client sets `bad_word_ids` from `bad_words`.
    `structured_outputs` may be a mapping too. Raises RequestError, naming the field, for a value of the wrong type or
    out of range.
    """

    n: Annotated[int, Range(1, MAX_CHOICES)] = 1
    temperature: Annotated[float, Range(0.0, 1e6, "a finite number from 0 (greedy) to 1e6")] = 1.0
    top_p: Annotated[float, Range(nextafter(0.0, 1.0), 1.0, "above 0 and at most 1")] = 1.0
    top_k: Annotated[int, Range(-1, MAX_COUNT, "at least 1, or 0 or -1 for all tokens")] = 0
    min_p: Annotated[float, Range(0.0, 1.0)] = 0.0
    presence_penalty: Annotated[float, PENALTY] = 0.0
    frequency_penalty: Annotated[float, PENALTY] = 0.0
    repetition_penalty: Annotated[float, Range(1e-3, 1e3)] = 1.0
    seed: Annotated[int | None, Range(-(2**63), 2**64 - 1, "a 64-bit integer, or None")] = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: Annotated[
        int | None, Range(1, MAX_COUNT, "at least 1, or None for as many as the model's length allows")
    ] = 16
    min_tokens: Annotated[int, Range(0, MAX_COUNT, "at least 0")] = 0
    logprobs: Annotated[int | None, LOGPROBS] = None
    prompt_logprobs: Annotated[int | None, LOGPROBS] = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        # Idempotent, because a decoder and `msgspec.structs.replace` run it again. The constructor checks no types.
        self._check_numbers()
        self._normalise_numbers()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        if (wanted := self.structured_outputs) is not None:
            self._keep("structured_outputs", wanted, StructuredOutputsParams.convert(wanted))
        self._check_sequences()

    def _check_numbers(self) -> None:
        if self.top_k is None:
            self._keep("top_k", None, DEFAULTS["top_k"])
        for name, (least, most, _) in INTEGERS.items():
            value = getattr(self, name)
            if type(value) is int and least <= value <= most:
                continue
            if value is not None or name not in OPTIONAL:
                self._keep(name, value, _integer(name, value, INTEGERS[name]))
        for name, (least, most, _) in NUMBERS.items():
            value = getattr(self, name)
            if value is None:  # as generation configs of Transformers have it
                self._keep(name, value, DEFAULTS[name])
            elif type(value) is not float or not least <= value <= most:
                self._keep(name, value, _number(name, value, NUMBERS[name]))
        for name in FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                _refuse(name, value, "true or false")

    def _normalise_numbers(self) -> None:
        if self.temperature < MIN_TEMPERATURE:
            self._keep("temperature", self.temperature, 0.0)
        if self.top_k == -1:
            self._keep("top_k", -1, 0)
        if self.seed == -1:
            self._keep("seed", -1, None)

    def _check_sequences(self) -> None:
        for name in ("stop", "bad_words"):
            if not _is_empty(given := getattr(self, name)):
                self._keep(name, given, _texts(name, given))
        if not _is_empty(given := self.stop_token_ids):
            self._keep("stop_token_ids", given, _ids("stop_token_ids", given))
        if (given := self.allowed_token_ids) is not None:
            ids = _ids("allowed_token_ids", given)
            if not ids:
                _refuse("allowed_token_ids", given, "at least one id, or None for all")
            self._keep("allowed_token_ids", given, ids)
        if not _is_empty(self.bad_word_ids):
            words = _items("bad_word_ids", self.bad_word_ids)
            # A word without ids, which a tokenizer may make, forbids nothing.
            self._keep("bad_word_ids", words, tuple(ids for word in words if (ids := _ids("bad_word_ids", word))))
        if (bias := self.logit_bias) is not None:
            self._keep("logit_bias", bias, _bias(bias))

    def _keep(self, name: str, given: object, value: object) -> None:
        """Set a field to its checked `value` if that is another object."""
        if value is not given:
            msgspec.structs.force_setattr(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def id_count(self) -> int:
        """Number of token ids in all lists: the size of the parameters on their way to the ranks."""
        lists = (self.stop_token_ids, self.logit_bias or (), self.allowed_token_ids or (), *self.bad_word_ids)
        return sum(map(len, lists))

    @property
    def needs_history(self) -> bool:
        """True if sampling a token depends on the tokens before it by more than the logits."""
        return self.penalised or any(len(word) > 1 for word in self.bad_word_ids)


def _is_empty(value: object) -> bool:
    """Return True for the value of a sequence that is left out."""
    return type(value) is tuple and not value


DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
KINDS = get_type_hints(SamplingParams)
_DECLARED = get_type_hints(SamplingParams, include_extras=True)
RANGES: dict[str, Range] = {name: kind.__metadata__[0] for name, kind in _DECLARED.items() if kind != KINDS[name]}
NUMBERS = {name: allowed for name, allowed in RANGES.items() if KINDS[name] is float}
INTEGERS = {name: allowed for name, allowed in RANGES.items() if name not in NUMBERS}
OPTIONAL = frozenset(name for name in INTEGERS if KINDS[name] is not int)
FLAGS = tuple(name for name, kind in KINDS.items() if kind is bool)
IDS, BIAS = Range(0, MAX_COUNT), Range(-MAX_BIAS, MAX_BIAS)


def _refuse(name: str, value: object, limit: str) -> NoReturn:
    shown = repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    raise RequestError(f"{name} is {shown}; it must be {limit}", param=name, code="invalid-parameter") from None


def _integer(name: str, value: object, allowed: Range) -> int:
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            _refuse(name, value, "an integer")
        value = int(value)
    if not allowed.least <= value <= allowed.most:
        _refuse(name, value, str(allowed))
    return value


def _number(name: str, value: object, allowed: Range) -> float:
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, Real):
            _refuse(name, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = inf
    else:
        number = value
    # Also false for NaN.
    if not allowed.least <= number <= allowed.most:
        _refuse(name, value, str(allowed))
    return number


def _items(name: str, value: object, wanted: str = "a list of token ids") -> Iterable[object]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        _refuse(name, value, wanted)
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    wanted = "a text or a list of texts, none of them empty"
    texts = []
    for text in (value,) if isinstance(value, str) else _items(name, value, wanted):
        if not isinstance(text, str) or not text:
            _refuse(name, value, wanted)
        texts.append(text)
    return tuple(texts)


def _ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    items: tuple[Any, ...] = tuple(_items(name, value))
    # The core and each rank repeat this check while other requests wait, so it runs no Python bytecode per id.
    if items and set(map(type, items)) == {int} and min(items) >= 0 and max(items) <= MAX_COUNT:
        return items
    return tuple(_integer(name, token, IDS) for token in items)


def _bias(value: object) -> dict[int, float]:
    wanted = f"an object of token ids, each with a number from {-MAX_BIAS:g} to {MAX_BIAS:g}"
    if not isinstance(value, Mapping):
        _refuse("logit_bias", value, wanted)
    bias = {}
    for key, amount in value.items():
        try:
            # JSON has only strings as keys.
            token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
            bias[_integer("logit_bias", token, IDS)] = _number("logit_bias", amount, BIAS)
        except ValueError:
            _refuse("logit_bias", {key: amount}, wanted)
    return bias
