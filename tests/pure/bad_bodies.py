"""Bodies of requests that the server refuses, with what is wrong in each."""

from __future__ import annotations

from typing import Any

from tests.pure.letters import VOCAB
from tests.pure.worlds import HI

# Fields of a chat, and the parameter that the error names.
BAD_CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"n": 9}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"logit_bias": {"65": 1000}}, "logit_bias"),
    ({"seed": "x"}, "seed"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 100}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"best_of": 5}, "best_of"),
    ({"priority": 10**30}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"cache_salt": "x" * 1025}, "cache_salt"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
]

# Fields of a completion, and the parameter that the error names.
BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": "", "add_special_tokens": False}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [[97, "a"]]}, "prompt[0][1]"),
    ({"prompt": [9999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 99}, "logprobs"),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
    ({"prompt": ["a"] * 5, "n": 2}, "n"),
]

# Bodies that are no usable JSON object, and the code of the error.
BROKEN_BODIES: list[tuple[bytes, str]] = [
    (b"", "body-not-json"),
    (b"{", "body-not-json"),
    (b"[]", "body-not-object"),
    (b'"x"', "body-not-object"),
    (b'{"model": NaN}', "body-not-json"),
    (b'{"temperature": 1e999}', "body-not-json"),
    (b'{"model": "\xff"}', "body-not-utf8"),
    (b"\xff\xfe", "body-not-utf8"),
    (b"[" * 100_000, "json-nested-too-deeply"),
    (b'{"model": "\\ud800"}', "body-not-json"),
]

# Fields of a chat with too much in them, the parameter, the code of the error, and the number and its limit.
TOO_MANY: list[tuple[dict[str, Any], str, str, tuple[str, str]]] = [
    ({"stop": ["ab"] * 65}, "stop", "too-many-items", ("65", "64")),
    ({"stop": ["a" * 3000, "b" * 3000]}, "stop", "too-many-characters", ("6,000", "4,096")),
    ({"stop": "a" * 5000}, "stop", "too-many-characters", ("5,000", "4,096")),
    ({"bad_words": ["ab"] * 1025}, "bad_words", "too-many-items", ("1,025", "1,024")),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "too-many-items", ("1,025", "1,024")),
    ({"logit_bias": {str(i): 1 for i in range(16_385)}}, "logit_bias", "too-many-items", ("16,385", "16,384")),
    ({"allowed_token_ids": [1] * (VOCAB + 1)}, "allowed_token_ids", "too-many-items", (f"{VOCAB + 1}", f"{VOCAB}")),
    ({"messages": HI * 10_001}, "messages", "too-many-items", ("10,001", "10,000")),
]
