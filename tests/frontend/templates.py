"""Compact chat templates with the constructs that those of the real families rely on."""

from __future__ import annotations

# Turns with role markers, tools, tool results inside a user turn, reasoning taken out of earlier
# answers.
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\nAnswer inside <tool_call></tool_call>.<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string
           and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and thought %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- (call.arguments | tojson) ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# A date, a macro, tools as indented JSON, trimmed content, a default when there is no system
# message.
LLAMA = """
{%- macro turn(role, text) -%}
    {{- '<|im_start|>' ~ role ~ '\\n\\n' ~ (text | trim) ~ '<|im_end|>' -}}
{%- endmacro -%}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- turn('system', 'Today Date: ' + date_string + '\\n' + system) }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model makes one tool call at a time!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- generation %}
        {{- turn('assistant', dict(name=call.name, parameters=call.arguments) | tojson(indent=2)) }}
        {%- endgeneration %}
    {%- else %}
        {{- turn('ipython' if message.role == 'tool' else message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n" if not loop.last }}{%- endfor %}
{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
"""

# Strict alternation, the system message folded into the first user turn, filters over the messages.
MISTRAL = """
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set chat = messages[1:] %}
{%- else %}
    {%- set chat = messages %}
{%- endif %}
{%- set users = chat | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in chat %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if system is defined and message == users[0] %}
            {{- "[INST]" + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] | trim + eos_token }}
    {%- else %}
        {%- break %}
    {%- endif %}
{%- endfor %}
"""

# Channels: control tokens around headers, tools as types, reasoning under the name `thinking` and
# only before calls that no answer has followed, one call in a message, results named after the last
# call.
HARMONY = """
{%- macro type_of(schema) -%}
    {%- if schema.type == 'string' and schema.enum -%}{{- '"' + schema.enum | join('" | "') + '"' -}}
    {%- elif schema.type in ('number', 'integer') -%}{{- 'number' -}}
    {%- else -%}{{- schema.type or 'any' -}}{%- endif -%}
{%- endmacro -%}
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '\\n\\nReasoning: ' }}
{{- (reasoning_effort if reasoning_effort is defined else 'medium') + '\\n\\n# Valid channels: analysis, final.' }}
{%- if tools %}{{- '\\nCalls go to the commentary channel: \\'functions\\'.' }}{%- endif %}{{- '<|end|>' }}
{%- set instructions = messages[0].content if messages[0].role in ('system', 'developer') else '' %}
{%- set turns = messages[1:] if messages[0].role in ('system', 'developer') else messages %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if instructions %}{{- '# Instructions\\n\\n' + instructions }}{%- endif %}
    {%- if tools %}
        {{- ('\\n\\n' if instructions else '') + '# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' }}
        {%- for tool in tools %}
            {{- '// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = ' }}
            {%- if tool.function.parameters and tool.function.parameters.properties %}
                {{- '(_: {\\n' }}
                {%- for name, schema in tool.function.parameters.properties.items() %}
                    {{- name + ('' if name in (tool.function.parameters.required or []) else '?') + ': ' }}
                    {{- type_of(schema) + ',\\n' }}
                {%- endfor %}
                {{- '}) => any;\\n\\n' }}
            {%- else %}{{- '() => any;\\n\\n' }}{%- endif %}
        {%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in turns %}
    {%- if message.role == 'assistant' %}
        {%- if 'content' in message and '<|channel|>final<|message|>' in message.content %}
            {{- raise_exception('channels in the content') }}
        {%- endif %}
        {%- if 'tool_calls' in message %}
            {%- set later = namespace(found=false) %}
            {%- for one in turns[loop.index:] %}
                {%- if one.role == 'assistant' and 'tool_calls' not in one %}{%- set later.found = true %}{%- endif %}
            {%- endfor %}
            {%- set call = message.tool_calls[0] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {%- if message.content and message.thinking %}
                {{- raise_exception('content and thinking beside calls') }}
            {%- elif message.content and not later.found %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}
            {%- elif message.thinking and not later.found %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- (call.arguments if call.arguments is string else call.arguments | tojson) + '<|call|>' }}
            {%- set last.name = call.name %}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}{{- raise_exception('a result without a call') }}{%- endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content + '<|end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
