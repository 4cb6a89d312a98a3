"""Prompts that render oddly are counted."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedTokenizerFast

from grpo_cli.config.schema import Dataset, Model, Recipe, Reward
from grpo_cli.evaluation.probe.prompt_checks import PromptChecks, check_prompts
from grpo_cli.records import Prompt
from grpo_cli.scoring.scorer import Scorer

REWARDS = {"exact_match": Reward("exact_match")}


def checked(
    tokenizer: PreTrainedTokenizerFast,
    rows: list[tuple[list[int], Any, dict[str, Any]]],
    recipe: Recipe | None = None,
) -> PromptChecks:
    prompts = [Prompt(n, ids, text, columns) for n, (ids, text, columns) in enumerate(rows)]
    scorer = Scorer(REWARDS, ["answer"], "here")
    return check_prompts(recipe or Recipe(), prompts, tokenizer, scorer.rewards, rows=len(rows) + 2)


def test_what_is_odd_is_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"bos_token": "<|im_start|>", "unk_token": "<unk>"})
    bos, unknown = own.bos_token_id, own.unk_token_id
    found = checked(
        own,
        [
            ([bos, 10, 11], "a", {"answer": "1"}),
            ([bos, 10, 11], "a", {"answer": "2"}),  # a duplicate
            ([bos, bos, 12], "b", {"answer": ""}),
            ([12, unknown, unknown], " \n", {"answer": None}),
            ([bos, 13, 14, 15], [{"role": "user", "content": ""}], {"answer": "3"}),
        ],
        Recipe(dataset=Dataset(max_prompt_tokens=4)),
    )
    assert (found.prompts, found.kept, found.rows, found.dropped) == (5, 5, 7, 2)
    assert (found.duplicates, found.blank, found.longest) == (1, 2, 4)
    assert (found.without_bos, found.double_bos) == (1, 1)
    assert found.unknown_tokens == 2 / 16
    assert found.empty_columns == {"answer": 2}


def test_nothing_is_odd(tokenizer: PreTrainedTokenizerFast) -> None:
    found = checked(tokenizer, [([10], "a", {"answer": "1"}), ([11], "b", {"answer": "0"})])
    assert (found.duplicates, found.blank) == (0, 0)
    assert (found.without_bos, found.double_bos, found.unknown_tokens) == (0, 0, 0.0)
    assert found.empty_columns == {}
    assert not found.unused_template


def test_a_chat_template_that_is_not_used(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [([10], "a", {"answer": "1"})]
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{{ messages }}"
    of_hub = Recipe(model=Model(path="some/model"))
    assert checked(own, rows, of_hub).unused_template
    assert not checked(own, rows).unused_template, "a model that is built has no other use for it"
    own.chat_template = None
    assert not checked(own, rows, of_hub).unused_template
