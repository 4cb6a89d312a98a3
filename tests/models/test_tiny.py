"""The warm-up of a built model on solutions that are episodes of several turns."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from grpo_cli.data import conversations
from grpo_cli.environments.chat import Chat
from grpo_cli.environments.chat_template import ChatTemplate
from grpo_cli.models import tiny
from tests.conftest import BUILD
from tests.environments.templates import MULTIPLY

USER = [{"role": "user", "content": "6x7"}]
CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}
EPISODE = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "multiply", "content": "42"},
    {"role": "assistant", "content": "42"},
]


def encoder(tokenizer: PreTrainedTokenizerBase, tools: conversations.Schemas) -> tiny.EpisodeIds:
    return Chat(ChatTemplate(tokenizer, [tokenizer.eos_token_id], tools)).episode_ids


PAIR = tiny.Pair(USER, EPISODE, [MULTIPLY])


def test_solution_as_an_episode() -> None:
    tokenizer = tiny.make_tokenizer(BUILD, [])
    (row,) = tiny.examples(tokenizer, [PAIR], encoder)
    prompt, ids, is_trained = row.prompt.ids, row.solution, row.is_trained
    assert tokenizer.decode(prompt) == (
        "<|im_start|>tools multiply(a, b, note)<|im_end|>\n"
        "<|im_start|>user\n6x7<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [i for i, is_own in zip(ids, is_trained, strict=True) if is_own]
    foreign = [i for i, is_own in zip(ids, is_trained, strict=True) if not is_own]
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call><|im_end|>'
    assert tokenizer.decode(own) == f"{call}42<|im_end|>"
    assert tokenizer.decode(foreign) == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"


def test_foreign_tokens_do_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    cross_entropy = torch.nn.functional.cross_entropy

    def spy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(labels.tolist())
        return cross_entropy(logits, labels)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", spy)
    config = replace(BUILD, warmup_steps=1, warmup_batch=1)
    tokenizer = tiny.make_tokenizer(config, [])
    model = tiny.make_model(config, tokenizer)
    rows = list(tiny.examples(tokenizer, [PAIR], encoder))
    tiny.warm_up(model, config, rows, 0, lambda step, loss: None)
    ids, is_trained = rows[0].solution, rows[0].is_trained
    expected = [tiny.IGNORED] * (len(rows[0].prompt.ids) - 1)
    expected += [i if own else tiny.IGNORED for i, own in zip(ids, is_trained, strict=True)]
    assert seen == [expected]
    assert False in is_trained


def test_cache_key_depends_on_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path))

    def built(pair: tiny.Pair) -> str:
        return tiny.build(BUILD, [pair], 0, lambda step, loss: None, encoder).name

    without = built(tiny.Pair("a", "b"))
    assert without == built(tiny.Pair("a", "b", []))
    assert without != built(tiny.Pair("a", "b", [MULTIPLY]))
    assert without != built(PAIR)
