"""A checkpoint from elsewhere: what its stored recipe may make an evaluation do."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from grpo_cli import cli
from grpo_cli.checkpoints import provenance
from grpo_cli.commands import evaluation_run
from grpo_cli.config.saved_recipe import as_yaml
from grpo_cli.config.schema import Benchmark, Recipe, Reward
from grpo_cli.errors import UserError
from grpo_cli.training import prepare

ATTACK = {"stmt": "__import__('os').system('touch pwned')", "number": 1}
TIMEIT = {"function": "timeit:timeit", "args": ATTACK}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def checkpoint(folder: Path, **changes: Any) -> Path:
    """A checkpoint as it is downloaded: a model, and a recipe with these entries changed."""
    (folder / "training").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    rows = folder / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    recipe = Recipe(reward={"math": Reward(function="math")})
    recipe.dataset.eval = str(rows)
    tree = yaml.safe_load(as_yaml(recipe))
    for key, value in changes.items():
        *sections, name = key.split("__")
        node = tree
        for section in sections:
            node = node[section]
        node[name] = value
    (folder / "training" / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return folder


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """The recipes that come as far as an evaluation; nothing is loaded."""
    found: list[Recipe] = []

    def note(recipe: Recipe) -> Any:
        found.append(recipe)
        executor = SimpleNamespace(close=lambda: None)
        return SimpleNamespace(scorer=SimpleNamespace(executor=executor), close=lambda: None)

    monkeypatch.setattr(prepare, "for_evaluation", note)
    monkeypatch.setattr(evaluation_run, "evaluate_model", lambda *_: None)
    return found


ASKS: dict[str, tuple[dict[str, Any], str]] = {
    "reward": ({"reward": {"x": TIMEIT}}, "reward.x.function = timeit:timeit"),
    "name": ({"reward": {"timeit:timeit": {"args": ATTACK}}}, "timeit:timeit.function = timeit:"),
    "helper": ({"reward__math__function": "grpo_cli.rewards.judge:_client"}, "judge:_client"),
    "judge": ({"reward__math__function": "judge"}, "reward.math.function = judge"),
    "benchmark": (
        {"benchmark": {"own": {"data": "rows.jsonl", "reward": "timeit:timeit", "args": ATTACK}}},
        "benchmark.own.reward = timeit:timeit",
    ),
    "modules": ({"scoring__modules": ["this"]}, "scoring.modules[0] = this"),
    "remote code": ({"model__trust_remote_code": True}, "model.trust_remote_code = true"),
    "engine": ({"generation__engine": "timeit:timeit"}, "generation.engine = timeit:timeit"),
    "servers": ({"generation__vllm__servers": ["http://a:1"]}, "generation.vllm.servers[0] = http"),
    "engine arguments": (
        {"generation__vllm__engine_args": {"worker_cls": "a.B"}},
        "generation.vllm.engine_args.worker_cls = a.B",
    ),
    "sandbox": ({"reward__math__args": {"guards": "limits"}}, "reward.math.args.guards = limits"),
    "tools": (
        {
            "generation__tools__guards": "limits", "eval__mode": ["tir"],
            "benchmark": {"own": {"data": "rows.jsonl", "modes": {"tir": {"prompt": ""}}}},
        },
        "generation.tools.guards = limits",
    ),
    "kernel of the hub": (
        {"model__attn_implementation": "some/kernel"}, "model.attn_implementation = some/kernel",
    ),
    "environment": ({"description": "${oc.env:HOME}"}, "description = ${oc.env:HOME}"),
    "reference": (
        {"description": "limits", "reward__math__args": {"guards": "${description}"}},
        "reward.math.args.guards = limits",
    ),
    "hydra": ({"hydra": {"job": {"env_set": {"PWNED": "1"}}}}, "hydra"),
    "defaults": (
        {"defaults": ["schema", "_self_", {"override hydra/launcher": "x"}]}, "hydra/launcher",
    ),
    "no defaults": ({"defaults": ["schema"]}, "defaults"),
}  # fmt: skip


def asked(path: Path, *given: str) -> list[str]:
    tree = provenance.read(path)
    return [*provenance.unusual(tree), *provenance.what_runs_code(tree, given)]


@pytest.mark.parametrize("name", ASKS)
def test_what_a_recipe_can_do(name: str, tmp_path: Path) -> None:
    changes, said = ASKS[name]
    found = asked(checkpoint(tmp_path / "theirs", **changes))
    assert any(said in one for one in found), found


def test_what_only_describes_a_model_and_its_data(tmp_path: Path) -> None:
    reward = {"a": {"function": "grpo_cli.rewards.math:math"}, "code": {"args": {"seconds": 3}}}
    path = checkpoint(
        tmp_path / "theirs", reward=reward, model__path="some/model", dataset__eval="hub/name",
        benchmark={"own": {"data": "rows.jsonl", "reward": "choice"}}, seed=3,
    )  # fmt: skip
    assert asked(path) == []
    provenance.note_own(path)
    assert not (tmp_path / "cache").exists()  # there is nothing to note


def test_a_key_of_the_command_line_is_no_question(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "theirs", model__trust_remote_code=True, reward={"x": TIMEIT})
    assert len({*asked(path)}) == 2
    assert asked(path, "model.trust_remote_code", "reward.x.function") == []


@pytest.mark.parametrize("name", ["reward", "remote code", "hydra"])
def test_a_foreign_checkpoint_asks_before_it_runs_code(
    name: str, tmp_path: Path, evaluated: list[Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    changes, said = ASKS[name]
    path = checkpoint(tmp_path / "theirs", **changes)
    assert cli.run_command(["eval", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"grpo: checkpoint = {path}: no run of yours has made it here")
    assert err.endswith("If you trust who made it, add trust=true.\n")
    assert said in err
    assert len(err.splitlines()) == 1
    assert (evaluated, os.environ.get("PWNED")) == ([], None)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("how", ["trusted", "own", "changed"])
def test_it_is_obeyed_if_trusted_or_if_it_is_ones_own(
    how: str, tmp_path: Path, evaluated: list[Recipe]
) -> None:
    path = checkpoint(tmp_path / "run", reward={"x": TIMEIT}, model__trust_remote_code=True)
    if how != "trusted":
        provenance.note_own(path)
    if how == "changed":
        (path / "modeling.py").write_text("# other code than the run had")
    words = ["trust=true"] if how == "trusted" else []
    assert cli.run_command(["eval", str(path), *words]) == (2 if how == "changed" else 0)
    assert [r.reward["x"].function for r in evaluated] == ["timeit:timeit"] * (how != "changed")


def test_rewards_of_its_rows_are_no_question_for_a_benchmark(
    tmp_path: Path, evaluated: list[Recipe]
) -> None:
    path = checkpoint(tmp_path / "theirs", reward={"x": TIMEIT}, loss__policy="timeit:timeit")
    assert cli.run_command(["eval", str(path), "benchmark=gsm8k"]) == 0
    assert len(evaluated) == 1


@pytest.mark.parametrize(
    "text", ["a: [", "a: !!python/object/apply:os.system ['touch pwned']", "[" * 500]
)
def test_a_stored_recipe_that_is_no_yaml_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = checkpoint(tmp_path / "theirs")
    (path / "training" / "recipe.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        provenance.read(path)
    said = f"checkpoint = {path}: its recipe, training/recipe.yaml, cannot be read: "
    assert str(error.value).startswith(said)
    assert not (tmp_path / "pwned").exists()


def test_unusual_entries() -> None:
    stored = yaml.safe_load(as_yaml(Recipe(benchmark={"a": Benchmark()})))
    assert [*provenance.unusual(stored)] == []
    assert [*provenance.unusual({**stored, "hydra": {}, "x": 1})] == ["hydra", "x"]


@pytest.fixture(autouse=True)
def _no_traces() -> Iterator[None]:
    yield
    os.environ.pop("PWNED", None)
