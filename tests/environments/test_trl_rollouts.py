"""Tests rollout functions in TRL's form."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from grpo_cli.data.prompts import make_prompts
from grpo_cli.data.rows import Rows
from grpo_cli.data.settings import Dataset
from grpo_cli.environments.trl_rollouts import RolloutTrainer, TrlRollouts
from grpo_cli.errors import TrainingError
from grpo_cli.generation.base import Generator, Request
from grpo_cli.generation.sampling import Sampling
from grpo_cli.images import StoredImage
from grpo_cli.records import Completion, Prompt

REQUEST = Request([], 2, Sampling(max_tokens=8), [0])


class Echo(Generator):
    """Answers a prompt with its ids and an eos; notes the requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def sample(self, request: Request) -> Iterator[tuple[int, list[Completion]]]:
        self.requests.append(request)
        for number, prompt in enumerate(request.prompts):
            ids = [*prompt.ids, 2]
            yield number, [Completion(ids, [-0.5] * len(ids), "stop")]


def sampled(
    tokenizer: PreTrainedTokenizerFast, function: Callable[..., Any], most: int | None = None
) -> tuple[list[tuple[Prompt, Completion]], Echo]:
    generator = Echo()
    prompts = [Prompt(n, [50 + n], f"{n}", {"answer": n}) for n in range(2)]
    rollouts = TrlRollouts("mine:function", function, tokenizer, {2}, {}, most)
    request = Request(prompts, 2, Sampling(max_tokens=8), [4, 5])
    with rollouts.sample(generator, request) as groups:
        found = [pair for _, own, group in groups for pair in zip(own, group, strict=True)]
    return found, generator


def rows(number: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt_ids": [[5, 6]] * number,
        "completion_ids": [[7, 8, 2]] * number,
        "logprobs": [[-0.1, -0.2, -0.3]] * number,
        **more,
    }


def test_what_it_returns_is_the_rollouts(tokenizer: PreTrainedTokenizerFast) -> None:
    def function(prompts: list[str], trainer: Any) -> dict[str, Any]:
        assert prompts == ["0", "0", "1", "1"], "each prompt as often as its group is large"
        assert (trainer.num_generations, trainer.max_completion_length) == (2, 8)
        return rows(4, env_mask=[[1, 0, 1]] * 4, score=[0.0, 0.1, 0.2, 0.3], level="hard")

    found, _ = sampled(tokenizer, function)
    for n, (prompt, completion) in enumerate(found):
        assert (prompt.ids, prompt.row_ids, prompt.row) == ([5, 6], [50 + n // 2], n // 2)
        assert prompt.columns == {"answer": n // 2, "score": n / 10, "level": "hard"}
        assert completion.is_sampled == [True, False, True]
        assert completion.sampling_logprobs == [-0.1, 0.0, -0.3]
        assert completion.finish_reason == "stop"


def test_it_may_sample_with_the_runs_generator(tokenizer: PreTrainedTokenizerFast) -> None:
    def function(prompts: list[str], trainer: Any) -> dict[str, Any]:
        first = trainer.generate(prompts)
        again = trainer.generate([o["prompt_ids"] for o in first], max_tokens=3)
        assert [o["completion_ids"] for o in again] == [o["completion_ids"] for o in first]
        return {k: [o[k] for o in first] for k in ("prompt_ids", "completion_ids", "logprobs")}

    found, generator = sampled(tokenizer, function)
    assert [c.is_sampled for _, c in found] == [None] * 4
    first, again = generator.requests
    assert len({*first.seeds, *again.seeds}) == 8
    assert (first.sampling.max_tokens, again.sampling.max_tokens) == (8, 3)


def test_a_row_writes_no_control_token(tokenizer: PreTrainedTokenizerFast) -> None:
    given = Rows("rows.jsonl", ["prompt"], [{"prompt": "Hi<|im_end|>"}])
    for chat in (False, True):
        (prompt,), _ = make_prompts(given, Dataset(chat=chat), tokenizer)
        given_texts = [(prompt.text, prompt)]
        trainer = RolloutTrainer(Echo(), tokenizer, REQUEST, {}, given_texts)
        (output,) = trainer.generate([prompt.text])
        assert output["prompt_ids"] == prompt.ids
        assert prompt.ids.count(2) == chat, "that of the template"


def test_token_ids_of_a_prompt_with_images_are_refused() -> None:
    """The images do not come along with them."""

    class Seeing(Echo):
        accepts_images = True

    vision: Any = SimpleNamespace(token_ids=[9])
    given = [{"role": "user", "content": [{"type": "image"}]}]
    prompt = Prompt(0, [1, 9, 9], given, {}, images=(StoredImage(b"", ""),), vision=vision)
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: "")
    trainer = RolloutTrainer(Seeing(), tokenizer, REQUEST, {}, [(given, prompt)])
    (found,) = trainer.generate([given])
    assert found["prompt_ids"] == [1, 9, 9]
    with pytest.raises(TrainingError, match="as the function was given them, no copies and no tok"):
        trainer.generate([[*found["prompt_ids"], 5]])
    (found,) = trainer.generate([[1, 5]])
    assert found["prompt_ids"] == [1, 5]


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (None, "returned NoneType; it must return a dict"),
        ({"prompt_ids": []}, r"lacks \['completion_ids', 'logprobs'\]"),
        (rows(2), "2 values of prompt_ids for 4 prompts"),
        (rows(4) | {"logprobs": [[-0.1, -0.2]] * 4}, "row 0: logprobs must hold .* 3 tokens"),
        (rows(4) | {"logprobs": [[-0.1, -0.2, math.nan]] * 4}, "row 0: logprobs must hold"),
        (rows(4, env_mask=[[1, 1]] * 4), "row 0: env_mask must hold 0 or 1 for each of 3 tokens"),
        (rows(4) | {"completion_ids": [[7, 8, 2]] * 3 + [[]]}, "row 3: completion_ids must be"),
        (rows(4) | {"completion_ids": [[7, 8, 9999]] * 4}, "row 0: completion_ids must be .* 258"),
        (rows(4) | {"logprobs": [[-0.1, -0.2, -(10**400)]] * 4}, "row 0: logprobs must hold"),
        (rows(4, env_mask=[[[], 1, 1]] * 4), "row 0: env_mask must hold 0 or 1"),
        (
            rows(4) | {"completion_ids": [[7] * 9] * 4, "logprobs": [[-0.1] * 9] * 4},
            "row 0: completion_ids has 9 tokens, more than generation.max_completion_tokens = 8",
        ),
        (rows(4) | {"prompt_ids": "ids"}, "returned str as prompt_ids; must be a list"),
    ],
)
def test_rows_that_are_no_rollouts_are_named(
    tokenizer: PreTrainedTokenizerFast, result: Any, problem: str
) -> None:
    with pytest.raises(TrainingError, match=f"rollout = mine:function: .*{problem}"):
        sampled(tokenizer, lambda prompts, trainer: result)


def test_a_function_that_raises_ends_the_run(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TrainingError, match="mine:function raised ZeroDivisionError"):
        sampled(tokenizer, lambda prompts, trainer: 1 / 0)


def test_arrays_tensors_and_their_scalars_are_taken(tokenizer: PreTrainedTokenizerFast) -> None:
    result = {
        "prompt_ids": np.array([[5, 6]] * 4),
        "completion_ids": [torch.tensor([7, 8, 2])] * 4,
        "logprobs": [[np.float32(-0.5), torch.tensor(-0.25), -1]] * 4,
        "env_mask": [np.array([True, False, True])] * 4,
    }
    found, _ = sampled(tokenizer, lambda prompts, trainer: result)
    for prompt, completion in found:
        assert (prompt.ids, completion.ids) == ([5, 6], [7, 8, 2])
        assert all(type(i) is int for i in [*prompt.ids, *completion.ids])
        assert completion.sampling_logprobs == [-0.5, 0.0, -1.0]
        assert completion.is_sampled == [True, False, True]


def test_a_prompt_that_is_too_long_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    assert sampled(tokenizer, lambda prompts, trainer: rows(4), 2)
    with pytest.raises(TrainingError, match=r"row 0: prompt_ids has 2 .*max_prompt_tokens = 1\."):
        sampled(tokenizer, lambda prompts, trainer: rows(4), 1)
