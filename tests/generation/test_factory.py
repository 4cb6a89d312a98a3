"""The engines by name, and an engine of one's own: one Python file and one YAML."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grpo_cli.config.schema import Generation, Recipe
from grpo_cli.errors import UserError
from grpo_cli.generation.base import Generator
from grpo_cli.generation.factory import ENGINES, check_settings, check_tokens, engine_class
from grpo_cli.training import build, prepare
from tests.training.test_train import metrics, recipe, trained

ENGINE = '''
from grpo_cli.generation.base import Generator
from grpo_cli.records import Completion


class Counts(Generator):
    """Completes every prompt with 1, 2, 3 and the index of the completion."""

    @classmethod
    def contradictions(cls, recipe):
        if recipe.generation.top_k:
            yield "generation.top_k: Counts does not sample; leave it at 0."

    @classmethod
    def make(cls, setup):
        return cls()

    def sample(self, request, hand_over):
        for number in range(len(request.prompts)):
            ids = ([1, 2, 3, j] for j in range(request.num_generations))
            hand_over(number, [Completion(i, [-3.0] * 4, "length") for i in ids])
'''


def named(engine: str, **settings: int) -> Recipe:
    found = Recipe()
    found.generation.engine = engine
    for name, value in settings.items():
        setattr(found.generation, name, value)
    return found


@pytest.fixture
def _my_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_engine.py").write_text(ENGINE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_of_the_table_is_there(name: str) -> None:
    assert issubclass(engine_class(name), Generator)


@pytest.mark.usefixtures("_my_engine")
def test_an_engine_of_ones_own_trains(tmp_path: Path) -> None:
    run = trained(
        tmp_path,
        generation__engine="my_engine:Counts",
        generation__max_logp_difference=None,
        steps=1,
    )
    assert metrics(run)[0]["completions/mean_length"] == 4
    assert run.generator.prefetch_steps == 0


@pytest.mark.usefixtures("_my_engine")
def test_an_engine_of_ones_own_checks_its_settings() -> None:
    check_settings(named("my_engine:Counts"))
    with pytest.raises(UserError, match=r"^generation\.top_k: Counts does not sample"):
        check_settings(named("my_engine:Counts", top_k=2))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("vlm_server", r"vlm_server: there is no such engine; there are .* mean vllm_server\?"),
        ("no_such_module:A", r"cannot import no_such_module: ModuleNotFoundError"),
        ("my_engine:Count", r"my_engine has no subclass 'Count' of grpo_cli\.generation\.base\.G"),
        ("math:sqrt", r"math has no subclass 'sqrt'"),
    ],
)
@pytest.mark.usefixtures("_my_engine")
def test_an_engine_that_is_not_there(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^generation\.engine = {name}: |{sentence}") as error:
        engine_class(name)
    assert error.match(sentence)


def test_a_recipe_may_name_any_engine(tmp_path: Path) -> None:
    assert recipe(tmp_path, generation__engine="my_engine:Counts").generation.num_generations == 4


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_a_token_that_the_model_lacks_is_refused(name: str) -> None:
    tokens: Any = {9: 1.0} if name == "logit_bias" else [0, 9]
    check_tokens(Generation(**{name: tokens}), 10, [2])
    with pytest.raises(UserError, match=rf"generation\.{name}: 9 is no token .* 0 to 8\."):
        check_tokens(Generation(**{name: tokens}), 9, [2])


@pytest.mark.parametrize(
    ("allowed", "at_least", "message"),
    [
        ([], 3, None),
        ([3, 4], 0, None),
        ([2, 3], 3, None),
        ([2], 1, "min_completion_tokens = 1: every token of generation.allowed_token_ids ends"),
    ],
)
def test_settings_that_leave_no_token_are_refused(
    allowed: list[int], at_least: int, message: str | None
) -> None:
    config = Generation(allowed_token_ids=allowed, min_completion_tokens=at_least)
    with pytest.raises(UserError) if message else contextlib.nullcontext() as error:
        check_tokens(config, 10, [2])
    if message:
        assert str(error.value).startswith(f"generation.{message}")


@pytest.mark.parametrize("is_built", [True, False])
def test_such_settings_are_refused_before_the_model_is_there(
    tmp_path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    is_built: bool,
) -> None:
    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is loaded or warmed up by now")

    changes: dict[str, Any] = {}
    if not is_built:
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        changes["model"] = {"path": str(tmp_path / "model")}
    monkeypatch.setattr("grpo_cli.models.tiny.build", too_late)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", too_late)
    made = recipe(tmp_path, generation__allowed_token_ids=[259], **changes)
    with pytest.raises(UserError, match=r"allowed_token_ids: 259 is no token .* 0 to 258\."):
        build.build(prepare.for_training(made), ["grpo", "train"])
    made.generation.allowed_token_ids = [258]  # which is in the model's vocabulary
    with pytest.raises(AssertionError, match="by now"):
        build.build(prepare.for_training(made), ["grpo", "train"])
