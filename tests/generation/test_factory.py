"""The engines by name, and an engine of one's own: one Python file and one YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_cli.config.command_line import recipe_files
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError
from grpo_cli.files import read_yaml
from grpo_cli.generation.base import Generator
from grpo_cli.generation.factory import ENGINES, check_settings, engine_class
from tests.training.test_train import metrics, trained

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

    def sample(self, request):
        for number in range(len(request.prompts)):
            ids = ([1, 2, 3, j] for j in range(request.num_generations))
            yield number, [Completion(i, [-3.0] * 4, "length") for i in ids]
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


def test_every_engine_exists_and_every_name_has_a_recipe() -> None:
    files = (recipe_files()[0].parent / "generation").glob("*.yaml")
    named = {read_yaml(file)["engine"] for file in files}
    assert {*ENGINES} <= named
    assert all(issubclass(engine_class(name), Generator) for name in named)


@pytest.mark.usefixtures("_my_engine")
def test_custom_engine_trains(tmp_path: Path) -> None:
    run = trained(
        tmp_path,
        generation__engine="my_engine:Counts",
        generation__max_logp_difference=None,
        steps=1,
        dataset__eval=None,
        checkpoint__every=0,
        model__build__warmup_steps=0,
    )
    assert metrics(run)[0]["completions/mean_length"] == 4
    assert run.generator.prefetch_steps == 0


@pytest.mark.usefixtures("_my_engine")
def test_custom_engine_checks_its_settings() -> None:
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
def test_unknown_engine(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^generation\.engine = {name}: |{sentence}") as error:
        engine_class(name)
    assert error.match(sentence)
