"""Limits on the content of one request, and on the work that the server does for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """All limits on one request, far above what clients send.

    All of them apply over HTTP. In the offline `LLM`, whose caller owns the process, only the limits of templates
    apply. Sizes are bytes if the name says so, else characters or numbers of items. Times are seconds.
    """

    # A body. `body_bytes` is raised for models with a long context.
    body_bytes: int = 8 * 2**20
    bytes_per_token: int = 16  # a token in JSON: an id of six digits, or a character as \uXXXX, with separators
    bodies: int = 32  # bodies of maximum size that may be held at once
    small_bytes: int = 64 * 2**10  # a body up to this size is small: it does not wait for large ones
    tiny_bytes: int = 4096  # a body up to this size may be processed in the event loop
    tiny_s: float = 0.05  # if this kind of work takes no longer
    tiny_after_s: float = 60.0  # time after which work that took longer may run in the loop again
    json_texts: int = 100_000  # keys included
    json_containers: int = 100_000  # lists and objects
    json_values: int = 500_000  # or twice the model's maximum length, if larger

    # Lists of a request. Characters are counted over all items together.
    messages: int = 10_000
    stops: int = 64
    stop_characters: int = 4096
    bad_words: int = 1024
    bad_word_characters: int = 16_384
    stop_token_ids: int = 1024
    logit_bias: int = 16_384
    tools: int = 1024
    tool_name: int = 256
    fields: int = 256
    detokenize_ids: int = 131_072  # or the model's maximum length, if larger
    tokenize_characters: int = 2**20  # or as many as the model's maximum length can hold, if larger
    pair_characters: int = 64 * 2**20  # of all pairs of a query and a document

    # Sent to the engine for one HTTP request, counted once per choice.
    prompt_tokens: int = 4_000_000  # or four times the model's maximum length, if larger
    sampling_ids: int = 1_000_000  # of stop_token_ids, logit_bias, allowed_token_ids and bad_words

    # Names of unknown fields in the log.
    unknown_name: int = 80
    unknown_names: int = 1000
    unknown_names_per_line: int = 10

    # Responses. Longer ones are built and encoded in a thread.
    loop_positions: int = 512  # tokens of prompt and answer together

    # Threads. A thread cannot be stopped from outside: work that exceeds its time keeps its place until it is done.
    large_threads: int = 2  # for large bodies
    small_threads: int = 8  # for small bodies
    waiting: int = 64  # requests that wait for a thread, per kind
    work_s: float = 30.0

    # A chat template's rendering.
    template_s: float = 10.0
    template_characters: int = 32 * 2**20  # of the prompt, and of any intermediate text
    template_work: int = 256 * 2**20  # characters of all intermediate texts together
    template_number: int = 9999  # largest width or count, and most bits of an integer


LIMITS = RequestLimits()
