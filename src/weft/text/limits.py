"""Limits of a request: what one client may send, and what the server spends on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """Every bound on the content of one request, far above what clients send. Over HTTP all of them hold; the
    offline `LLM`, whose caller owns the process, has only those of templates.

    Sizes are bytes where the name says so, else characters or numbers of items. Times are seconds.
    """

    # A body. What a model with a long context can need is added to `body_bytes`.
    body_bytes: int = 8 * 2**20
    bytes_per_token: int = 16  # a token in JSON: an id of six digits, or a character as \uXXXX, and what is around it
    bodies: int = 32  # bodies of the longest kind that may be held at once
    small_bytes: int = 64 * 2**10  # a body up to here is small: it does not wait for large ones
    tiny_bytes: int = 4096  # a body up to here may be worked on in the event loop
    tiny_s: float = 0.05  # if that kind of work takes no longer than this
    tiny_after_s: float = 60.0  # since it last took longer
    json_texts: int = 100_000  # keys included
    json_containers: int = 100_000  # lists and objects
    json_values: int = 500_000  # or twice the model's length, if that is more

    # Lists of a request. Characters are those of all items together.
    messages: int = 10_000
    stops: int = 64
    stop_characters: int = 4096
    bad_words: int = 1024
    bad_word_characters: int = 16_384
    stop_token_ids: int = 1024
    logit_bias: int = 16_384
    fields: int = 256
    detokenize_ids: int = 131_072  # or the model's length, if that is more
    tokenize_characters: int = 2**20  # or as many as the model's length can hold, if that is more

    # What goes to the engine for one HTTP request, counted once per choice.
    prompt_tokens: int = 4_000_000  # or four times the model's length, if that is more
    sampling_ids: int = 1_000_000  # of stop_token_ids, logit_bias, allowed_token_ids and bad_words

    # Unknown fields, for the log.
    unknown_name: int = 80
    unknown_names: int = 1000
    unknown_names_per_line: int = 10

    # Answers. What is longer is made and encoded in a thread.
    loop_positions: int = 512  # tokens of prompt and answer together

    # Threads. A thread cannot be ended from outside: one that runs over its time keeps its place until it is done.
    large_threads: int = 2  # for large bodies
    small_threads: int = 8  # for small bodies
    waiting: int = 64  # requests that wait for a place, per kind
    work_s: float = 30.0

    # A chat template's rendering.
    template_s: float = 10.0
    template_characters: int = 32 * 2**20  # of the prompt, and of any text on the way to it
    template_work: int = 256 * 2**20  # of all texts on the way together
    template_number: int = 9999  # of a width or a count; and the bits of a number


LIMITS = RequestLimits()
