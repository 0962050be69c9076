"""Chat templates: what they may do, and what is said when they or the messages are wrong."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.pure.vocabularies import byte_level, word_level
from tests.refusals import refusals, refuses
from weft.engine.templates.chat_environment import ChatEnvironment
from weft.engine.templates.limits import RequestLimits
from weft.engine.templates.template import ChatML, ChatTemplate
from weft.engine.text.settings import TokenizerSettings
from weft.engine.text.tokenizer import Tokenizer
from weft.errors import ConfigError, ModelError, RequestError

PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
USER = {"role": "user", "content": "hi"}


def test_names_that_a_template_knows() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{% endfor %}"
        "{% if tools is none and documents is none %}-{% endif %}{{ unk_token }}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{% if enable_thinking %}<think>{% endif %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render([USER]) == "<s>[user]hi-[assistant]"
    assert template.render([USER], add_generation_prompt=False, enable_thinking=True) == "<s>[user]hi-<think>"
    assert template.render([USER], messages=[], bos_token="") == "[user]hi-[assistant]"


def test_whitespace_loops_and_filters_are_those_of_transformers() -> None:
    source = """
    {%- for m in messages %}
        {% if loop.index0 == 2 %}
            {% break %}
        {% endif %}
{{ {"a<b": "é", "n": [1, none]} | tojson }}|{{ {"b": 1, "a": 2} | tojson(indent=1, sort_keys=true) }}
    {% endfor %}
{%- generation %}{% set x = 1 %}G{{ x }}{% endgeneration %}{{ x }}
"""
    line = '{"a<b": "é", "n": [1, null]}|{\n "a": 2,\n "b": 1\n}\n'
    assert ChatTemplate(source).render([USER] * 3) == line * 2 + "G1"


# In the published forms: DeepSeek V2, V3 with its namespace, Kimi-K2 with its macro.
DEEPSEEK2 = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
DEEPSEEK3 = (
    "{% set ns = namespace(is_tool=false, system_prompt='', is_first_sp=true) %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}"
    "{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}{%- else %}"
    "{% set ns.system_prompt = ns.system_prompt + '\n\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{%- set ns.is_tool = false -%}{{'<User>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<Assistant>' + content + eos_token}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt and not ns.is_tool %}{{'<Assistant>'}}{% endif %}"
)
KIMI = (
    "{% macro render(content) -%}{%- if content is string %}{{- content }}{%- else %}"
    "{%- for part in content -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}{%- endmacro %}"
    "{%- for message in messages -%}{%- if loop.first and messages[0]['role'] != 'system' -%}"
    "{{ '<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>' }}{%- endif -%}"
    "{%- set name = message.get('name') or message['role'] -%}"
    "{%- if message['role'] == 'user' -%}<|im_user|>{{ name }}<|im_middle|>"
    "{%- elif message['role'] == 'assistant' -%}<|im_assistant|>{{ name }}<|im_middle|>"
    "{%- else -%}<|im_system|>{{ name }}<|im_middle|>{%- endif -%}{{ render(message['content']) }}<|im_end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)


def test_templates_as_deepseek_and_kimi_publish_them() -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    turns = [USER, {"role": "assistant", "content": "<think>hm</think>hello"}, {"role": "user", "content": "so?"}]
    system = {"role": "system", "content": "Be brief."}
    second, third, kimi = (ChatTemplate(source, tokens).render for source in (DEEPSEEK2, DEEPSEEK3, KIMI))
    assert second([system, USER]) == "<s>Be brief.\n\nUser: hi\n\nAssistant:"
    assert third([system, *turns]) == "<s>Be brief.<User>hi<Assistant>hello</s><User>so?<Assistant>"
    assert third([USER], add_generation_prompt=False) == "<s><User>hi"
    assert kimi([USER]) == (
        "<|im_system|>system<|im_middle|>You are Kimi.<|im_end|><|im_user|>user<|im_middle|>hi<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )


def test_the_date() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([USER]).startswith("20")


# What gpt-oss's template uses of Jinja: macros that call themselves, with defaults; names that are set within one;
# namespaces; tests of types; slices of the messages by the loop's own index.
HARMONY = """\
{%- macro kind(spec, wanted, is_nullable=false) -%}
    {%- if spec.type == "array" -%}
        {%- set inner = kind(spec['items'], wanted) -%}
        {{- inner + "[]" if inner|length < 50 else "any[]" }}
    {%- elif spec.type is iterable and spec.type is not string and spec.type is not mapping and spec.type[0] -%}
        {{- spec.type | join(" | ") }}
    {%- elif spec.type == "object" -%}
        {%- for name, part in spec.properties.items() -%}
            {{- name }}{{ "?" if name not in (wanted or []) }}: {{ kind(part, spec.required or []) }}
            {%- if not loop.last %}, {% endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- '"' + spec.enum|join('" | "') + '"' if spec.enum else spec.type }}
    {%- endif -%}
{%- endmacro -%}
{%- macro system() -%}
    {%- if model_identity is not defined %}{% set model_identity = "You are a model." %}{% endif %}
    {{- model_identity + " " + strftime_now("%Y-%m-%d") + " " }}
    {{- reasoning_effort if reasoning_effort is defined else "medium" }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{ system() }}{{ "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set instructions, loop_messages = messages[0].content, messages[1:] %}
{%- else %}
    {%- set instructions, loop_messages = "", messages %}
{%- endif %}
{%- if instructions or tools %}
    {{- "<|start|>developer<|message|>" + instructions }}
    {%- for tool in tools or [] %}{{ tool.function.name + "(" }}{{ kind(tool.function.parameters, []) }}){% endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if "tool_calls" in message %}
        {%- set later = namespace(found=false) %}
        {%- for other in loop_messages[loop.index:] %}
            {%- if other.role == "assistant" and "tool_calls" not in other %}{% set later.found = true %}{% endif %}
        {%- endfor %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.thinking and not later.found %}{{ "<|channel|>analysis" + message.thinking }}{% endif %}
        {{- "<|start|>assistant to=functions." + call.name + "<|message|>" }}{{ call.arguments|tojson }}<|call|>
        {%- set last_call.name = call.name %}
    {%- elif message.role == "tool" %}
        {%- if last_call.name is none %}{{ raise_exception("no call before this") }}{% endif %}
        {{- "<|start|>functions." + last_call.name + "<|message|>" + message.content|tojson + "<|end|>" }}
    {%- else %}
        {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}"""


def test_what_the_harmony_format_asks_of_a_template() -> None:
    template = ChatTemplate(HARMONY)
    text = template.render([{"role": "system", "content": "Be brief."}, USER], reasoning_effort="high")
    date = datetime.now().strftime("%Y-%m-%d")
    assert text == (
        f"<|start|>system<|message|>You are a model. {date} high<|end|><|start|>developer<|message|>Be brief.<|end|>"
        "<|start|>user<|message|>hi<|end|><|start|>assistant"
    )
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Ulm", "Bonn"]},
            "days": {"type": "array", "items": {"type": ["integer", "null"]}},
        },
        "required": ["city"],
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    told = [
        USER,
        {"role": "assistant", "content": "", "thinking": "Look.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    text = template.render(told, tools=[tool])
    assert 'weather(city?: "Ulm" | "Bonn", days?: integer | null[])' in text
    assert '<|channel|>analysisLook.<|start|>assistant to=functions.weather<|message|>{"city": "Ulm"}<|call|>' in text
    assert text.endswith('<|start|>functions.weather<|message|>"sunny"<|end|><|start|>assistant')
    assert "<|message|><tool_response>\nsunny\n</tool_response><|end|>" in template.render(told[2:])


def test_a_template_that_refuses_says_why() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate!') }}")
    with refuses(RequestError, "chat-template-refused", "Roles must alternate!") as error:
        template.render([USER])
    assert error.value.param == "messages"
    with refuses(RequestError, "chat-template-refused", "str"):
        ChatTemplate("{{ messages[0].content + 1 }}").render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_the_sandbox(source: str) -> None:
    with refuses(RequestError, "chat-template-refused"):
        ChatTemplate(source).render([USER])


def test_the_short_ways_to_attributes_are_those_of_jinja() -> None:
    loops: list[Any] = []
    ChatTemplate("{% for m in messages %}{{ keep(loop) }}{% endfor %}").render([USER], keep=loops.append)
    ours, jinjas = ChatEnvironment(), ImmutableSandboxedEnvironment()
    for value in ({"role": "user", "_x": 1, "pop": 2}, {}, "text", *loops):
        for name in {*dir(value), "role", "_x", "absent", "__globals__"} - {"format", "format_map"}:
            mine, theirs = ours.getattr(value, name), jinjas.getattr(value, name)
            assert type(mine) is type(theirs), (value, name)
            assert isinstance(mine, Undefined) or mine == theirs or callable(mine), (value, name)
    assert ours.getattr("{:>3}", "format")(1) == "  1"


DOUBLED = "{%% set ns = namespace(s=%s) %%}{%% for i in range(40) %%}{%% set ns.s = %s %%}{%% endfor %%}{{ ns.s }}"


# A template, and what its refusal names.
UNBOUNDED = [
    ("{{ 'x' * 10**10 }}", "10,000,000,000 characters"),
    (DOUBLED % ("'x'", "ns.s ~ ns.s"), "67,108,864 characters"),
    (DOUBLED % ("'x'", "ns.s + ns.s"), "67,108,864 characters"),
    (DOUBLED % ("[1]", "ns.s + ns.s"), "67,108,864 characters"),
    (DOUBLED % ("[1]", "[ns.s, ns.s]"), "characters; the limit"),
    (DOUBLED % ("3", "ns.s * ns.s"), "over the limit of 9,999"),
    ("{{ 'x' | center(10**10) }}", "over the limit of 9,999"),
    ("{{ 'x'.ljust(10**10) }}", "over the limit of 9,999"),
    ("{{ '%99999d' % 3 }}", "too large or computed"),
    ("{{ '%*d' | format(99999, 3) }}", "too large or computed"),
    ("{{ '{:{}}'.format(3, 99999) }}", "too large or computed"),
    ("{{ ('a' * 1000000).replace('a', 'x' * 1000000) }}", "1,000,001,000,000 characters"),
    ("{{ (['x' * 1000000] * 100000) | join }}", "100,000,000,000 characters"),
    ("{{ ','.join(['x' * 1000000] * 100000) }}", "100,000,100,000 characters"),
    ("{{ ('\n' * 1000000) | indent(9999) }}", "characters; the limit"),
    ("{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}", "268,435,456 characters in all"),
    ("{{ ([[0] * 1000] * 100000) | sum(start=[]) }}", "adds numbers only"),
]


@pytest.mark.parametrize(("source", "says"), UNBOUNDED)
def test_templates_are_bounded_in_what_they_make(source: str, says: str) -> None:
    with refuses(RequestError, "chat-template-refused", says):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    ],
)
def test_templates_are_bounded_in_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.templates.budget.LIMITS", RequestLimits(template_s=0.05))
    with refuses(RequestError, "chat-template-refused", "0.05"):
        ChatTemplate(source).render([USER])


def test_filters_within_the_bounds_are_jinjas() -> None:
    source = (
        "{{ [1, 'a'] | join('-') }} {{ messages | join(',', attribute='role') }} {{ 'aXa' | replace('a', 'b', 1) }} "
        "{{ [1, 2] | sum }} {{ messages | map(attribute='n') | sum }} {{ 'a\nb' | indent(2) }} {{ 'x' | center(3) }}|"
        "{{ '%s-%02d' | format('q', 3) }} {{ 1 ~ none ~ 'z' }} {{ '{:>3}'.format(1) }} {{ [1] | string }} {{ 2 ** 3 }} "
        "{% for i in 'ab' %}{{ loop.index }}{{ loop.last }}{% endfor %}"
    )
    rendered = ChatTemplate(source).render([{**USER, "n": 2}, {**USER, "n": 3}])
    assert rendered == "1-a user,user bXa 3 5 a\n  b  x |q-03 1Nonez   1 [1] 8 1False2True"


def test_a_template_that_is_nested_too_deeply() -> None:
    with refuses(ModelError, "chat-template-nested-too-deeply"):
        ChatTemplate("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}")


def test_without_a_template() -> None:
    with refuses(RequestError, "no-chat-template", "--chat-template"):
        ChatTemplate(None).render([USER])


def test_a_template_that_is_none() -> None:
    with refuses(ModelError, "invalid-chat-template", "2", "--chat-template"):
        ChatTemplate("a\n{% for %}")


# --- which template


def chatml_tokenizer(**settings: Any) -> Tokenizer:
    return Tokenizer(byte_level(), TokenizerSettings(**settings))


def test_the_models_own_template() -> None:
    own = chatml_tokenizer(chat_template="{{ bos_token }}!", tokens={"bos_token": "<s>"})
    assert ChatTemplate.for_tokenizer(own).render([USER]) == "<s>!"


def test_chatml_where_its_tokens_are() -> None:
    chat = [{"role": "system", "content": "Be kind."}, USER]
    assert ChatTemplate.for_tokenizer(chatml_tokenizer()).render(chat) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate.for_tokenizer(chatml_tokenizer()).render([USER], add_generation_prompt=False) == (
        "<|im_start|>user\nhi<|im_end|>\n"
    )
    with refuses(RequestError, "no-chat-template"):
        ChatTemplate.for_tokenizer(Tokenizer(word_level(("[UNK]", "a")), TokenizerSettings())).render([USER])


def test_models_that_only_continue_a_text_get_the_last_message() -> None:
    template = ChatTemplate.for_tokenizer(chatml_tokenizer(), chat_format="raw")
    assert template.render([{"role": "system", "content": "Be kind."}, USER]) == "hi"


def test_chatml_leaves_the_oldest_turns_out() -> None:
    tokenizer = chatml_tokenizer()
    chat = [{"role": "system", "content": "Be kind."}]
    for number in range(4):
        chat += [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}"}]
    chat.append(USER)

    def kept(window: int | None, room: int = 1000) -> list[str]:
        messages, ids = ChatML(tokenizer, window).encode(chat, room, opens=True, unfinished=False)
        assert ids == tokenizer.encode(ChatML(tokenizer).render(messages), add_special_tokens=False)
        return [message["content"] for message in messages]

    everything = [message["content"] for message in chat]
    assert kept(None) == kept(None, 10) == kept(1000) == everything
    assert kept(1) == kept(1000, 10) == ["Be kind.", "hi"]
    ids = ChatML(tokenizer).encode(chat[:1] + chat[-3:-1], 1000, opens=False, unfinished=False)[1]
    assert kept(len(ids)) == ["Be kind.", "hi"]
    assert kept(len(ids) + 1) == ["Be kind.", "q3", "a3", "hi"]


def test_chatml_goes_on_with_an_unfinished_message() -> None:
    tokenizer = chatml_tokenizer()
    chat = [USER, {"role": "assistant", "content": "Well, \n"}]
    _, ids = ChatML(tokenizer, 100).encode(chat, 1000, opens=False, unfinished=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, \n"
    )


def test_a_template_given_by_the_user(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("file {{ messages | length }}", encoding="utf-8")
    this = chatml_tokenizer(chat_template="own")
    assert ChatTemplate.for_tokenizer(this, str(file)).render([USER]) == "file 1"
    assert ChatTemplate.for_tokenizer(this, "text {{ messages | length }}").render([USER]) == "text 1"
    for wrong in (str(tmp_path / "nowhere.jinja"), str(tmp_path), "x" * 5000, "a\0b"):
        with refuses(ConfigError, "bad-chat-template-flag"):
            ChatTemplate.for_tokenizer(this, wrong)


# --- messages


def test_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ChatTemplate(PLAIN).render([{"role": "user", "content": parts}]) == "user:one\ntwo;"
    assert ChatTemplate(PLAIN).render([{"role": "user", "content": []}]) == "user:;"


def test_developer_is_system_to_a_template_that_knows_no_better() -> None:
    chat = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, USER]
    assert ChatTemplate(PLAIN).render(chat) == "system:a\n\nb;user:hi;"
    assert ChatTemplate(PLAIN).render(chat[1:]) == "system:b;user:hi;"
    knows = PLAIN + "{% if messages[0].role == 'developer' %}{% endif %}"
    assert ChatTemplate(knows).render(chat) == "system:a;developer:b;user:hi;"
    assert chat[0]["content"] == "a"


def test_fields_of_no_value_are_not_there() -> None:
    source = "{{ messages[0].keys() | sort | join(' ') }}"
    message = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "name": "x"}
    for calls in (None, []):
        assert ChatTemplate(source).render([{**message, "tool_calls": calls}]) == "content name role"


def test_tool_calls() -> None:
    source = "{% set m = messages[0] %}{{ m.tool_calls[0].function.arguments | tojson }}{{ m.content is none }}"
    for content in ({}, {"content": None}):
        call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
        message = {"role": "assistant", "tool_calls": [call], **content}
        assert ChatTemplate(source).render([message]) == '{"a": 1}True'
        assert call["function"]["arguments"] == '{"a": 1}'
    tool = {"role": "tool", "content": "42", "tool_call_id": "1"}
    assert ChatTemplate("{{ messages[0].tool_call_id }}").render([tool]) == "1"


# Messages, the code of what is wrong with them, and values of the message.
BAD_MESSAGES: list[tuple[Any, str, tuple[str, ...]]] = [
    ([], "messages-not-list", ()),
    ("hi", "messages-not-list", ()),
    ({"role": "user", "content": "hi"}, "messages-not-list", ()),
    (["hi"], "message-not-object", ("messages[0]", "str")),
    ([USER, {"role": "robot"}], "unknown-role", ("messages[1]", "'robot'", "system, developer, user, assistant, tool")),
    ([{"content": "hi"}], "unknown-role", ("None",)),
    ([{"role": ["user"], "content": "hi"}], "unknown-role", ()),
    ([{"role": "user"}], "content-not-text", ("messages[0].content", "None")),
    ([{"role": "user", "content": 5}], "content-not-text", ("5",)),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "content-part-not-text", ("content[0]", "'image_url'")),
    ([{"role": "user", "content": [{"type": "text"}]}], "text-of-part-not-text", ("content[0].text",)),
    ([{"role": "user", "content": ["hi"]}], "content-part-not-text", ("content[0]", "'str'")),
    ([{"role": "assistant", "tool_calls": [1]}], "tool-calls-not-objects", ("tool_calls",)),
    ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "tool-calls-not-objects", ("[0]",)),
]


@pytest.mark.parametrize(("messages", "code", "values"), BAD_MESSAGES)
def test_messages_that_are_none(messages: Any, code: str, values: tuple[str, ...]) -> None:
    with refuses(RequestError, code, *values) as error:
        ChatTemplate(PLAIN).render(messages)
    assert error.value.param == "messages"


def test_the_wording_of_refusals(golden: Callable[[str, str], None]) -> None:
    refused = refusals(lambda source: ChatTemplate(source).render([USER]), [source for source, _ in UNBOUNDED])
    wrong = refusals(lambda messages: ChatTemplate(PLAIN).render(messages), [chat for chat, *_ in BAD_MESSAGES])
    golden("chat_template.txt", refused + wrong)
