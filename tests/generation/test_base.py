"""The base class of the engines: its defaults, and the refusal of inputs that an engine ignores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grpo_cli.environments.programs import program_loop
from grpo_cli.errors import TrainingError
from grpo_cli.generation.base import Generator, Request
from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.settings import Tools
from grpo_cli.images import StoredImage
from grpo_cli.records import Completion, Prompt

PROMPT = replace(Prompt.from_ids([5, 6]), row=7, images=(StoredImage(b"", "row 7"),))


class Notes(Generator):
    """Completes every prompt with its eos, and notes the prompts."""

    accepts_images = True

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []

    def sample(self, request: Request) -> Iterator[tuple[int, list[Completion]]]:
        self.prompts += request.prompts
        for number in range(len(request.prompts)):
            yield number, [Completion([2], [0.0], "stop")] * request.num_generations


class IdsOnly(TransformersGenerator):
    accepts_images = False


def test_engine_without_images_refuses_them(model: PreTrainedModel) -> None:
    engine = IdsOnly(model, [])
    with pytest.raises(TrainingError, match=r"row 7 has images; IdsOnly takes") as e:
        engine.generate([Prompt.from_ids([5]), PROMPT], 1, Sampling(2), [0, 1])
    assert e.value.alone
    assert engine.generate([replace(PROMPT, images=())], 1, Sampling(2), [0])


def test_images_reach_the_engine(tokenizer: PreTrainedTokenizerFast) -> None:
    inner = Notes()
    inner.generate([PROMPT], 1, Sampling(4), [0])
    loop = program_loop(tokenizer, Tools())
    with loop.sample(inner, Request([PROMPT], 1, Sampling(4), [0])) as sampled:
        assert len(list(sampled)) == 1
    assert [prompt.images is PROMPT.images for prompt in inner.prompts] == [True, True]
