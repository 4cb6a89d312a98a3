# ruff: noqa: E501, lines of templates
"""Chat templates in the manner of the families, short, and tokenizers of bytes for them."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerFast

from grpo_cli.config.schema import Build
from grpo_cli.models import loading, tiny

MULTIPLY: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "One."},
                "b": {"type": "integer", "description": "Another."},
                "note": {"type": "string", "description": "A remark."},
            },
            "required": ["a", "b"],
        },
    },
}

_QWEN_TOOLS = """{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}"""
_QWEN_RESULT = """
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}"""
_QWEN_END = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_HERMES_CALLS = """{% for c in m.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
            {{- c.function.arguments | tojson }}{{ '}\n</tool_call>' }}
        {%- endfor %}"""

QWEN2_5 = (
    _QWEN_TOOLS
    + """{%- for m in messages %}
    {%- if m.role != 'tool' %}
        {{- '<|im_start|>' + m.role + '\n' + m.content }}"""
    + _HERMES_CALLS
    + "{{- '<|im_end|>\n' }}"
    + _QWEN_RESULT
    + "{%- endfor %}"
    + _QWEN_END
)

# The thought of a turn stays until the user asks anew; the last turn has an empty one.
QWEN3 = (
    _QWEN_TOOLS
    + """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set parts = m.content.split('</think>') %}
        {%- set thought = parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- parts[-1].lstrip('\n') }}"""
    + _HERMES_CALLS
    + """{{- '<|im_end|>\n' }}
    {%- elif m.role != 'tool' %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"""
    + _QWEN_RESULT
    + "{%- endfor %}"
    + _QWEN_END
)

# Thoughts stay between tool results; the generation prompt opens one.
QWEN3_5 = (
    _QWEN_TOOLS
    + """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set parts = m.content.split('</think>') %}
        {%- set thought = parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
        {{- parts[-1].lstrip('\n') }}
        {%- for c in m.tool_calls or [] %}
            {{- '\n\n<tool_call>\n<function=' + c.function.name + '>\n' }}
            {%- for key, value in c.function.arguments.items() %}
                {{- '<parameter=' + key + '>\n' }}
                {{- value if value is string else value | tojson }}{{ '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role != 'tool' %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"""
    + _QWEN_RESULT
    + "{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)

LLAMA3 = """{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- m.content | tojson if m.content is mapping or m.content is iterable else m.content }}
        {{- '<|eot_id|>' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}
        {%- set f = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
        {%- if loop.first and tools %}{% for t in tools %}{{ t | tojson }}{{ '\n' }}{% endfor %}{% endif %}
        {{- m.content | trim }}{{ '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# The tools stand before the last message of the user.
MISTRAL = """{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for c in m.tool_calls %}
            {{- {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}
            {{- ', ' if not loop.last else ']</s>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids must have 9 characters') }}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}"""

GEMMA = """{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""


@dataclass
class Family:
    template: str
    special: list[str]
    eos: list[str]
    added: list[str] = field(default_factory=list)  # not marked as special

    def tokenizer(self, template: str | None = None) -> PreTrainedTokenizerFast:
        found = tiny.make_tokenizer(Build(), [])
        found.add_special_tokens({"additional_special_tokens": self.special})
        found.add_tokens(self.added)
        found.chat_template = template or self.template
        return found

    def eos_ids(self, tokenizer: PreTrainedTokenizerFast) -> list[int]:
        return [int(i) for i in tokenizer.convert_tokens_to_ids(self.eos)]


_TAGS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
_LLAMA = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
_MISTRAL = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
_RESULTS = ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"]
FAMILIES = {
    "tiny": Family(tiny.CHAT_TEMPLATE, [], ["<|im_end|>"]),
    "qwen2_5": Family(QWEN2_5, [], ["<|im_end|>", "<|endoftext|>"], _TAGS),
    "qwen3": Family(QWEN3, [], ["<|im_end|>", "<|endoftext|>"], _TAGS),
    "qwen3_5": Family(QWEN3_5, [], ["<|im_end|>", "<|endoftext|>"], _TAGS),
    "llama3": Family(LLAMA3, _LLAMA, ["<|eot_id|>", "<|eom_id|>"]),
    "mistral": Family(MISTRAL, [*_MISTRAL, *_RESULTS], ["</s>"]),
    "hermes": Family(loading.read_template("hermes"), [], ["<|im_end|>"]),
    "gemma": Family(GEMMA, ["<start_of_turn>", "<end_of_turn>"], ["<end_of_turn>"]),
}
