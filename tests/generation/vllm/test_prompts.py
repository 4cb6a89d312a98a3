"""Prompts with images in the forms that vLLM takes; vLLM itself need not be installed."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from grpo_cli.errors import TrainingError
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.vllm import prompts
from grpo_cli.generation.vllm.requests import BANNED, sampling_params
from grpo_cli.images import StoredImage
from grpo_cli.records import Prompt
from tests.conftest import as_prompts, as_scored
from tests.models.test_vision import Loaded, load
from tests.vision_models import picture


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load("idefics3", tmp_path_factory.mktemp("vision"))


def test_each_image_is_one_placeholder_again(loaded: Loaded) -> None:
    placeholder = loaded.tokenizer.convert_tokens_to_ids(loaded.vision.placeholder)
    for prompt in loaded.mixed():
        given = prompts.given_ids(prompt)
        assert given.count(placeholder) == len(prompt.images)
        text = loaded.tokenizer.decode(given)
        assert loaded.vision.ids(text, prompt.images) == prompt.ids


def test_what_an_episode_adds_stays(loaded: Loaded) -> None:
    prompt = loaded.mixed()[0]
    given = prompts.given_ids(prompt)
    prompt.ids.extend([50, 51, 52])
    assert prompts.given_ids(prompt) == [*given, 50, 51, 52]


def test_joined_image_tokens_are_refused(loaded: Loaded) -> None:
    prompt = loaded.mixed()[0]
    with pytest.raises(TrainingError, match="picture 0: the image's tokens are joined with"):
        loaded.vision.collapsed(prompt.ids[: len(prompt.ids) // 3], prompt.images)


def test_server_gets_resized_images() -> None:
    stored = StoredImage(picture(0, (64, 64)), "picture", max_pixels=256)

    class Vision:
        def collapsed(self, ids: list[int], _: Any) -> list[int]:
            return ids

    prompt = Prompt(0, [5], "", {}, images=(stored,), vision=Vision())  # type: ignore[arg-type]
    sent = prompts.over_http(prompt)
    (part,) = sent["content_parts"]
    head, _, data = part["url"].partition(",")
    assert head == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as found:
        assert found.size == (16, 16)
        assert found.tobytes() == stored.open().tobytes()
    assert sent["return_token_ids"]
    assert prompts.over_http(Prompt.from_ids([5])) == {"token_ids": [5]}


def test_different_tokens_are_refused(loaded: Loaded) -> None:
    with_image, without, _ = loaded.mixed()
    prompts.check_ids(with_image, list(with_image.ids))
    prompts.check_ids(without, None)
    for found in (None, [], with_image.ids[:-1]):
        with pytest.raises(TrainingError, match="the prompt of row 0, and the trainer's processor"):
            prompts.check_ids(with_image, found)


def test_tokens_of_images_are_banned() -> None:
    sampling = Sampling(8, never=(7, 9), logit_bias=((7, 5.0), (3, 1.0)))
    assert sampling_params(sampling, 2, [2], 0, None)["logit_bias"] == {
        7: BANNED, 9: BANNED, 3: 1.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        ([[1, 2, 3], [4], [5, 6]], [[1, 2, 3], [5, 6]]),
        ([[7]], [[7, 7]]),
        ([[i, i] for i in range(20)], [[i, i] for i in range(4)]),
        ([[*range(100), 0]], [[*range(77, 100), 0]]),
    ],
    ids=lambda rows: str(len(rows)),
)
def test_the_fixed_tokens(ids: list[list[int]], rows: list[list[int]]) -> None:
    assert prompts.fixed_rows(as_prompts(ids), [9]) == as_scored(rows)


def test_the_fixed_tokens_of_images() -> None:
    """Prompts with images come first, whole; the tokens behind the image are compared.

    One whose image is broken is left out: dataset.bad_rows=drop lets the run go on without it.
    """
    image = StoredImage(Image.new("RGB", (4, 4)), "row 0")
    broken = Prompt(4, [1, 9, 5], "", {}, images=(StoredImage(b"GIF", "row 4"),))
    with_image = Prompt(0, [1, 9, 9, 5, 6], "", {}, images=(image,))
    at_the_end = Prompt(1, [1, 5, 9], "", {}, images=(image,))
    long = Prompt(2, [9, *range(10, 60)], "", {}, images=(image,))
    text = Prompt(3, [4, 9, 5, 6], "", {})  # its 9 is no image
    rows = prompts.fixed_rows([text, broken, with_image, at_the_end, long], [9])
    assert [(row.prompt.ids, row.num_tokens) for row in rows] == [
        (with_image.ids, 2),
        (long.ids, 24),
        ([5, 6], 1),
    ]
    assert [bool(row.prompt.images) for row in rows] == [True, True, False]
    assert prompts.fixed_rows([at_the_end], [9]) == as_scored([[1, 1]])
