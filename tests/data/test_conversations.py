"""Conversations as prompts: forms that are taken or refused, and what the model sees."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from grpo_cli.data.conversations import normalized, parsed, template_kwargs
from grpo_cli.data.prompts import make_prompts, prompt_text
from grpo_cli.data.rows import load_rows
from grpo_cli.data.sample import Sample
from grpo_cli.data.settings import Dataset
from grpo_cli.data.stored_completions import load, prompt_cell, write_parquet
from grpo_cli.errors import UserError
from grpo_cli.records import Completion, Prompt, Rollout
from tests.data.test_rows import rows

USER = {"role": "user", "content": "1+1="}
ANSWER = {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Add."}
BLOCK = {"type": "image", "image": "a.png"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], [USER]),
        ([{**USER, "name": None}], [USER]),  # a table has the keys of all rows
        ([{**USER, "calls": [{"x": 1, "y": None}]}], [{**USER, "calls": [{"x": 1}]}]),
        ([{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}], [USER, ANSWER]),
        ([{"from": "system", "value": "Add."}], [SYSTEM]),
        ([{"role": "user", "content": [{"type": "text", "text": "1+1="}]}], [USER]),
        (
            [{"role": "assistant", "tool_calls": [{"id": 1}]}],
            [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}],
        ),
    ],
)
def test_forms_of_messages(messages: Any, expected: Any) -> None:
    assert normalized(messages, "row 0") == expected
    assert normalized(parsed(json.dumps(messages)), "row 0") == expected


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"content": "1"}], "row 0, message 0: has no role; it has content."),
        ([USER, {"role": "user"}], "row 0, message 1: has no content; the model takes text."),
        ([{"role": "user", "content": 3}], "has the content 3; the model takes text."),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "; the model takes text."),
        ([{"role": "user", "content": [BLOCK]}], f"the content {[BLOCK]}; the model takes text."),
        ([USER, "hello"], "row 0, message 1: is 'hello'; it must have a role and content."),
        (["hello"], "a conversation is a list of messages."),
        ([], "a conversation is a list of messages."),
    ],
)
def test_messages_that_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(UserError) as error:
        normalized(messages, "row 0")
    assert str(error.value).endswith(words)
    assert str(error.value).startswith("row 0")


def made(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast, **settings: Any) -> Prompt:
    (prompt,), _ = make_prompts(rows(row), Dataset(chat=True, **settings), tokenizer)
    return prompt


def test_an_answer_at_the_end_is_not_shown_to_the_model(tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"prompt": [USER, ANSWER]}
    dropped = made(row, tokenizer, final_assistant="drop")
    assert (dropped.text, dropped.prefill) == ([USER], "")
    assert dropped.ids == made({"prompt": [USER]}, tokenizer).ids
    assert row == {"prompt": [USER, ANSWER]}, "the row is not changed"


def test_a_prefill_is_continued(tokenizer: PreTrainedTokenizerFast) -> None:
    prefill = {"role": "assistant", "content": "The sum is "}
    prompt = made({"prompt": [USER, prefill]}, tokenizer, final_assistant="continue")
    assert tokenizer.decode(prompt.ids).endswith("<|im_start|>assistant\nThe sum is ")
    assert (prompt.text, prompt.prefill) == ([USER], "The sum is ")
    assert prompt.conversation == [USER, prefill]


@pytest.mark.parametrize(
    ("messages", "settings", "words"),
    [
        ([USER, ANSWER], {}, "row 0 ends with a message of the assistant: set dataset"),
        ([ANSWER], {"final_assistant": "drop"}, "has messages of the assistant only"),
        ([SYSTEM, USER], {"system": "Hello"}, "dataset.system: row 0 has a system message already"),
        (USER, {}, "row 0: the column 'prompt' holds {'role': .*, which is not text"),
    ],
)
def test_conversations_that_are_no_prompts(
    messages: Any, settings: dict[str, Any], words: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(UserError, match=words):
        made({"prompt": messages}, tokenizer, **settings)


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}|{% endfor %}{{ 'think' if thinking else 'plain' }}"
)


def test_arguments_of_the_template_by_recipe_and_by_row(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    given = rows({"prompt": "a"}, {"prompt": "b", "chat_template_kwargs": {"thinking": False}})
    prompts, _ = make_prompts(
        given, Dataset(chat=True), tokenizer, template_kwargs={"thinking": True}
    )
    assert [tokenizer.decode(p.ids) for p in prompts] == ["a|think", "b|plain"]


def test_a_table_fills_in_missing_arguments() -> None:
    row = {"chat_template_kwargs": {"a": None, "b": 2}}
    assert template_kwargs({"a": 1, "b": 1}, row) == {"a": 1, "b": 2}
    with pytest.raises(UserError, match="chat_template_kwargs must hold objects; it has '"):
        template_kwargs({}, {"chat_template_kwargs": "{}"})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for", "the chat template is not valid Jinja (line 1: "),
        ("{{ raise_exception('no') }}", "rows.jsonl, row 0: the chat template refuses the conv"),
    ],
)
def test_a_template_that_fails(
    template: str, words: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(UserError) as error:
        made({"prompt": [USER]}, tokenizer)
    assert str(error.value).startswith(words)


def test_a_part_of_an_object_is_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": {"text": "1+1"}}\n')
    config = Dataset(train=str(path), prompt="{question[text]}")
    loaded = load_rows(config, "train")
    assert prompt_text(loaded.rows[0], config, 0) == "1+1"


def test_a_stored_chat_is_scored_as_in_training(tmp_path: Path) -> None:
    """The prompt keeps all messages, and its prefill stands before the completion."""
    prompt = Prompt(0, [1], [SYSTEM, USER], {}, prefill="The sum is ")
    path = tmp_path / "completions.parquet"
    write_parquet(path, [{"prompt": prompt_cell(prompt), "completion": "2", "columns": "{}"}])
    (sample,) = load(path, {}, "input")
    completion = Completion(None, [], "stop")  # type: ignore[arg-type]  # as the file has none
    assert sample == Sample.of(Rollout(prompt, completion, "2"))
    assert sample.prefill == "The sum is "
