"""Chat templates in the manner of the families, short, and tokenizers of bytes for them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from grpo_cli.config import sources
from grpo_cli.models import tiny
from grpo_cli.models.settings import Build

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

# A template of a tokenizer's own for the turns of the model.
RESPONSE_TEMPLATE: dict[str, Any] = {
    "version": 1,
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}

FOLDER = Path(__file__).parent / "chat_templates"
SHIPPED = {"tiny": tiny.CHAT_TEMPLATE, "hermes": sources.template_file("hermes").read_text()}


@dataclass
class Family:
    name: str
    special: list[str]
    eos: list[str]
    added: list[str] = field(default_factory=list)  # not marked as special

    @property
    def template(self) -> str:
        return SHIPPED.get(self.name) or (FOLDER / f"{self.name}.jinja").read_text("utf-8")

    def tokenizer(self, template: str | None = None) -> PreTrainedTokenizerFast:
        found = tiny.make_tokenizer(Build(), [])
        found.add_special_tokens({"additional_special_tokens": self.special})
        found.add_tokens(self.added)
        found.chat_template = template or self.template
        return found

    def eos_ids(self, tokenizer: PreTrainedTokenizerFast) -> list[int]:
        return [int(i) for i in tokenizer.convert_tokens_to_ids(self.eos)]


_TAGS = [f"<{end}{tag}>" for tag in ("tool_call", "tool_response", "think") for end in ("", "/")]
_LLAMA = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
_MISTRAL = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
_RESULTS = ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"]
FAMILIES = {
    family.name: family
    for family in (
        Family("tiny", [], ["<|im_end|>"]),
        Family("qwen2_5", [], ["<|im_end|>", "<|endoftext|>"], _TAGS),
        Family("qwen3", [], ["<|im_end|>", "<|endoftext|>"], _TAGS),
        Family("qwen3_5", [], ["<|im_end|>", "<|endoftext|>"], _TAGS),
        Family("llama3", _LLAMA, ["<|eot_id|>", "<|eom_id|>"]),
        Family("mistral", [*_MISTRAL, *_RESULTS], ["</s>"]),
        Family("hermes", [], ["<|im_end|>"]),
        Family("gemma", ["<start_of_turn>", "<end_of_turn>"], ["<end_of_turn>"]),
    )
}
