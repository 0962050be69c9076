"""Chat templates of the tests' own, each with traits that the published ones of a family have."""

from __future__ import annotations

HARMONY = """\
{%- if messages[0].role in ['system', 'developer'] %}<|dev|>{{ messages[0].content }}{% set messages = messages[1:] %}\
{% endif %}
{%- for tool in tools or [] %}// {{ tool.function.name + ": " + tool.function.description }}
{% for key, part in (tool.function.parameters.properties or {}).items() %}
{%- if part.enum and part.default is defined %}{{ key + " = " + part.default }}{% endif %}{% endfor %}{% endfor %}
{%- set last = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if '<|channel|>' in m.content %}{{ raise_exception('no channels') }}{% endif %}
        {%- if m.tool_calls %}
            {%- set later = namespace(text=false) %}
            {%- for other in messages[loop.index:] %}
                {%- if other.role == 'assistant' and not other.tool_calls %}{% set later.text = true %}{% endif %}
            {%- endfor %}
            {%- if m.content and m.thinking %}{{ raise_exception('either content or thinking') }}{% endif %}
            {%- if not later.text and (m.content or m.thinking) %}<|analysis|>{{ m.content or m.thinking }}{% endif %}
            {%- set last.name = m.tool_calls[0].function.name %}
            {{- '<|call|>' + last.name }}{{ m.tool_calls[0].function.arguments | tojson }}
        {%- else %}<|final|>{{ m.content }}{% set last.name = none %}{% endif %}
    {%- elif m.role == 'tool' %}
        {%- if last.name is none %}{{ raise_exception('no call before') }}{% endif %}
        {{- '<|result|>' + last.name + m.content | tojson }}
    {%- elif m.role == 'user' %}<|user|>{{ m.content }}{% endif %}
{%- endfor %}"""

THINKING = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}[{{ m.role }}]
    {%- if m.role == 'assistant' %}
        {%- set text = m.content.split('</think>')[-1] if '</think>' in m.content else m.content %}
        {%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ text.strip() }}
        {%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}
            {{- c.function.arguments | tojson }}{% endfor %}
    {%- else %}{{ m.content }}{% endif %}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

PRINTS = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
    {%- for c in m.tool_calls or [] %}<call>{{ c.function.name }}
        {%- for key, value in c.function.arguments | items %}<arg>{{ key }}={{ value }}{% endfor %}
    {%- endfor %}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

ONE_CALL = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}[{{ m.role }}]
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
        {{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
        {{- m.tool_calls[0].function.arguments | tojson }}
    {%- elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""

ALTERNATING = """\
{%- if messages[0].role == 'system' %}[SYSTEM]{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- if tools %}[TOOLS]{{ tools | tojson }}{% endif %}
{%- set turn = namespace(number=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != (turn.number % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
        {%- set turn.number = turn.number + 1 %}
    {%- endif %}
    {%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
    {%- elif m.tool_calls %}[TOOL_CALLS][
        {%- for c in m.tool_calls %}
            {%- if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
            {{- c.function | tojson }}{{ c.id }}{{ ', ' if not loop.last }}
        {%- endfor %}]
    {%- elif m.role == 'assistant' %}
        {%- if not m.content %}{{ raise_exception('content or calls') }}{% endif %} {{ m.content }}</s>
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | default('') | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}
        {{- '[TOOL_RESULTS]' + m.content + m.tool_call_id }}
    {%- else %}{{ raise_exception('unknown role') }}
    {%- endif %}
{%- endfor %}"""

NO_SYSTEM = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<start>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end>\n' }}
{%- endfor %}{% if add_generation_prompt %}<start>model
{% endif %}"""

SYSTEM_FIRST = """\
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('the system message comes first') }}{% endif %}
    {{- '[' + m.role + ']' + (m.content or '') }}
    {%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"""

SILENT = """\
{%- if messages[0].role == 'system' %}S: {{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- for m in messages %}{% if m.role in ['user', 'assistant'] %}
{{ m.role }}: {{ m.content }}{% endif %}{% endfor %}"""

DEEPSEEK = """\
{%- set ns = namespace(system='') %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}
{{- ns.system }}
{%- for m in messages %}
    {%- if m.role == 'user' %}<｜User｜>{{ m.content }}
    {%- elif m.role == 'assistant' and m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>
        {%- for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>
            {{- c.function.name + '\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}<｜tool▁calls▁end｜>
    {%- elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}
    {%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
    {%- endif %}
{%- endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>
{% endif %}"""

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

SYSTEM_LAST = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}[INST]{% if loop.last and system %}{{ system }} {% endif %}{{ m.content }}[/INST]
    {%- else %}{{ m.content }}</s>{% endif %}
{%- endfor %}"""

TEMPLATES = {
    "harmony": HARMONY,
    "thinking": THINKING,
    "prints": PRINTS,
    "one call": ONE_CALL,
    "alternating": ALTERNATING,
    "no system": NO_SYSTEM,
    "system first": SYSTEM_FIRST,
    "silent": SILENT,
    "deepseek": DEEPSEEK,
    "chatml": CHATML,
    "system last": SYSTEM_LAST,
}
# Templates whose text of a message depends on later messages, whatever their form.
CHANGING = ("harmony", "deepseek", "system last")
