"""Whether engine and trainer are the same policy: the weight check, and each step's metrics."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import TrainingError
from grpo_cli.generation.base import EngineSetup
from grpo_cli.generation.settings import Generation
from grpo_cli.generation.vllm.weight_check import WeightCheck, make_weight_check
from grpo_cli.records import Prompt
from grpo_cli.training.step import check_sampler
from tests.conftest import as_scored
from tests.fake_vllm import FakeVllm, Process, generator_for, recipe_for, serving, toy_logprobs
from tests.generation.vllm.test_server import move

ROWS = [[3, 4, 5], [6, 7]]


def weight_check(dtype: str = "float32") -> WeightCheck:
    return WeightCheck(as_scored(ROWS), lambda: [[-1.0, -2.0], [-3.0]], dtype)


# What it compares.


@pytest.mark.parametrize(
    ("engine", "difference"),
    [
        ([[-1.0, -2.0], [-3.0]], 0.0),
        ([[-1.5, -2.0], [-3.0]], 0.5 / 3),
        ([[-0.5, -2.25], [-2.0]], 1.75 / 3),  # up and down do not cancel
        ([[-1.0, math.nan], [-3.0]], math.inf),
        ([[-1.0, -math.inf], [-3.0]], math.inf),
    ],
    ids=str,
)
def test_the_mean_difference_of_all_tokens(engine: list[list[float]], difference: float) -> None:
    found = weight_check().difference([[-1.0, -2.0], [-3.0]], engine)
    assert found == pytest.approx(difference, abs=1e-12)


@pytest.mark.parametrize(
    ("dtype", "at_start", "allowed"),
    [
        ("float32", [0.0], 5e-5),
        ("float32", [4e-4], 1.6e-3),
        ("float32", [4e-4, 1e-3], 1.6e-3),  # of each engine its own
        ("float16", [6e-3], 2.4e-2),
    ],
)
def test_allowed_difference(dtype: str, at_start: list[float], allowed: float) -> None:
    check = weight_check(dtype)
    for number, difference in enumerate(at_start):
        assert check.agrees(f"server {number}", difference)
    assert check.allowed("server 0") == pytest.approx(allowed)
    assert check.agrees("server 0", allowed * 0.999)
    assert not check.agrees("server 0", allowed * 1.001)
    assert not check.agrees("server 0", math.inf)
    assert check.allowed("server 0") == pytest.approx(allowed), "only the start sets it"


@pytest.mark.parametrize(("dtype", "most"), [("float32", "0.001"), ("bfloat16", "0.5")])
def test_first_difference_too_large(dtype: str, most: str) -> None:
    check = weight_check(dtype)
    assert check.agrees("server a", float(most))
    for too_large in (float(most) + 0.01, math.inf):
        pattern = rf"server b and the trainer differ by {too_large:.3g} .* at most {most} is"
        with pytest.raises(TrainingError, match=pattern):
            check.agrees("server b", too_large)
    assert "server b" not in check.measured


def test_trainer_logprobs_follow_the_policy(model: PreTrainedModel) -> None:
    prompts = [Prompt(i, ids, "", {}) for i, ids in enumerate([[5, 6, 7, 8], [9, 10]])]
    recipe = Recipe(device="cpu")
    recipe.mixed_precision = "bf16"
    process: Any = Process()
    process.autocast = lambda: torch.autocast("cpu", enabled=False)
    check = make_weight_check(EngineSetup(recipe, model, None, [], process, prompts, print))
    assert check.rows == as_scored([[5, 6, 7, 8], [9, 10]])
    assert check.dtype == "bfloat16"
    model.train()
    for _ in range(2):
        found = check.trainer_logprobs()
        assert [len(row) for row in found] == [3, 1]
        for ids, row in zip([[5, 6, 7, 8], [9, 10]], found, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, :-1]
            expected = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].tolist()
            assert row == pytest.approx(expected, abs=1e-5)
        before = found
        move(model)
    assert check.trainer_logprobs() != before
    assert model.training, "as it was"


# With servers.


@pytest.fixture
def fakes(model: PreTrainedModel) -> Iterator[list[FakeVllm]]:
    config = model.config.get_text_config().to_dict()
    servers = [FakeVllm(config, dict(model.named_parameters())) for _ in range(2)]
    with serving(*servers):
        yield servers


def watching(fakes: list[FakeVllm], policy: PreTrainedModel, **of_vllm: Any) -> Any:
    """A generator with a weight check that knows the servers' rule."""

    def trainer_logprobs() -> list[list[float]]:
        weights = dict(policy.named_parameters())
        return [toy_logprobs(weights, row) for row in ROWS]

    check = WeightCheck(as_scored(ROWS), trainer_logprobs, "float32")
    return generator_for(fakes, policy, check, recipe=recipe_for(fakes, **of_vllm))


def updates(fake: FakeVllm) -> int:
    return fake.calls.count("/finish_weight_update")


def test_ignored_update_is_repeated(fakes: list[FakeVllm], model: PreTrainedModel) -> None:
    generator = watching(fakes, model)
    assert generator.update_weights(model, 0)["weights/check_difference"] < 1e-6
    move(model)
    fakes[1].deaf = 1
    assert generator.update_weights(model, 1)["weights/check_difference"] < 1e-6
    assert [updates(fake) for fake in fakes] == [3, 3]
    generator.close()


def test_update_ignored_twice_stops_the_run(fakes: list[FakeVllm], model: PreTrainedModel) -> None:
    generator = watching(fakes, model)
    generator.update_weights(model, 0)
    before = toy_logprobs(dict(model.named_parameters()), [0, 0])[0]
    move(model)
    moved = before - toy_logprobs(dict(model.named_parameters()), [0, 0])[0]
    assert moved > 1e-2
    fakes[1].deaf = 9
    pattern = rf"{fakes[1].url} does not compute with the weights of step 1: .* by {moved:.3g} .*"
    with pytest.raises(TrainingError, match=rf"{pattern}at most 5e-05 is rounding\. .* twice"):
        generator.update_weights(model, 1)
    assert [updates(fake) for fake in fakes] == [3, 3]
    generator.close()


def test_server_dies_in_weight_check(fakes: list[FakeVllm], model: PreTrainedModel) -> None:
    generator = watching(fakes, model)
    generator.update_weights(model, 0)
    fakes[0].score = lambda ids: fakes[0].die()  # type: ignore[return-value, func-returns-value]
    assert generator.update_weights(model, 1)["weights/servers"] == 1
    assert generator.live == {fakes[1].url}
    fakes[1].score = lambda ids: fakes[1].die()  # type: ignore[return-value, func-returns-value]
    with pytest.raises(
        TrainingError, match=r"no server is left[\s\S]*generate failed: (the c|noth)"
    ):
        generator.update_weights(model, 2)
    generator.close()


def test_server_back_in_a_narrower_dtype(
    fakes: list[FakeVllm], model: PreTrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = watching(fakes, model)
    generator.update_weights(model, 0)
    fakes[0].end()
    assert generator.update_weights(model, 1)["weights/servers"] == 1
    fakes[0].state["dtype"] = "bfloat16"
    fakes[0].start()
    assert generator.update_weights(model, 2)["weights/servers"] == 1
    assert "computes in bfloat16 now, and the run began in float32" in capsys.readouterr().out
    generator.close()


# In every step.


def test_large_sampler_difference() -> None:
    check_sampler(Generation(max_logp_difference=None), 9.0, 4)
    config = Generation(max_logp_difference=0.5)
    check_sampler(config, 0.5, 4)
    pattern = r"step 5: .* by 0\.75 in the mean, more than .*max_logp_difference = 0\.5; st"
    with pytest.raises(TrainingError, match=pattern):
        check_sampler(config, 0.75, 4)
    config = dataclasses.replace(config, top_k=3, presence_penalty=0.5)
    with pytest.raises(TrainingError, match=r"step\. presence_penalty, top_k \(of generation\)"):
        check_sampler(config, 0.75, 4)
