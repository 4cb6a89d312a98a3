"""What a run says before it begins about texts that the model or the rewards do not see."""

from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from grpo_cli.config.recipe import Recipe
from grpo_cli.models import tiny
from grpo_cli.models.settings import Build
from grpo_cli.records import Prompt
from grpo_cli.scoring.settings import Reward
from grpo_cli.training.build import text_notices

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
USER_TURNS = TURNS.replace("in messages", "in messages if m.role == 'user'")


def make_tokenizer(special: Sequence[str] = (), plain: Sequence[str] = ()) -> Any:
    found = tiny.make_tokenizer(Build(), [])
    found.add_special_tokens({"additional_special_tokens": [*special]})
    found.add_tokens([*plain])
    return found


def make_prompt(
    tokenizer: PreTrainedTokenizerFast, template: str, *messages: tuple[str, str]
) -> Prompt:
    text = [{"role": role, "content": content} for role, content in messages]
    rendered = str(tokenizer.apply_chat_template(text, chat_template=template, tokenize=False))
    return Prompt(7, tokenizer(rendered, add_special_tokens=False)["input_ids"], text, {})


def notices(
    tokenizer: PreTrainedTokenizerFast,
    prompt: Prompt | None = None,
    eos_ids: Sequence[int] = (2,),
    **rewards: Reward,
) -> list[str]:
    recipe = Recipe(reward=rewards)
    recipe.generation.max_completion_tokens = 32
    return [*text_notices(recipe, tokenizer, eos_ids, [] if prompt is None else [prompt])]


def test_an_ordinary_run_says_nothing() -> None:
    tokenizer = make_tokenizer(plain=["<think>", "</think>"])
    prompt = make_prompt(tokenizer, TURNS, ("system", " Be brief.\n"), ("user", "2 + 2?"))
    assert notices(tokenizer, prompt, r=Reward("think_format")) == []
    assert notices(make_tokenizer(), Prompt(0, [5, 6], "no chat", {})) == []


def test_tags_that_rewards_never_see() -> None:
    tags = ["<think>", "</think>"]
    (line,) = notices(make_tokenizer(tags))
    assert line.startswith(f"the tokenizer has {' and '.join(tags)} as special tokens, and rewards")


def test_a_template_that_drops_the_system_message() -> None:
    tokenizer = make_tokenizer()
    messages = ("system", "Be brief."), ("user", "2 + 2?")
    (line,) = notices(tokenizer, make_prompt(tokenizer, USER_TURNS, *messages))
    assert line.startswith("the prompt of row 7 lacks its system message (of dataset.system or")
    assert "move it to dataset.prompt, or set model.chat_template" in line
    assert notices(tokenizer, make_prompt(tokenizer, USER_TURNS, messages[1])) == []


def test_double_bos() -> None:
    tokenizer = make_tokenizer()
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(5)
    (line,) = notices(tokenizer, Prompt(0, [5, 5, 6], "twice", {}))
    assert line.startswith("1 of 1 prompts begin with two tokens of the beginning")
    assert notices(tokenizer, Prompt(0, [5, 6], "once", {})) == []


def test_nothing_ends_a_completion() -> None:
    (line,) = notices(make_tokenizer(), eos_ids=[])
    assert line.startswith("neither the tokenizer nor the generation config has an end token")
    assert "max_completion_tokens = 32; set generation.stop_token_ids or generation.stop." in line
    for key, value in (("stop", ["\n"]), ("stop_token_ids", [5])):
        recipe = Recipe()
        setattr(recipe.generation, key, value)
        assert [*text_notices(recipe, make_tokenizer(), [], [])] == []


@pytest.mark.parametrize("plain", [["<think>"], []], ids=["token", "text"])
def test_think_format_after_a_template_that_opens_the_thought(plain: list[str]) -> None:
    tokenizer = make_tokenizer(plain=plain)
    prompt = make_prompt(tokenizer, TURNS + "assistant: <think>\n", ("user", "2 + 2?"))
    for function in ("think_format", "grpo_cli.rewards.think_format:think_format"):
        (line,) = notices(tokenizer, prompt, form=Reward(function))
        assert line.startswith("the chat template ends the prompt with <think>, so that")
        assert line.endswith("set reward.form.args.opening=false.")
    told = Reward("think_format", args={"opening": False})
    assert notices(tokenizer, prompt, form=told, other=Reward("math")) == []
