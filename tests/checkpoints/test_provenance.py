"""A checkpoint from elsewhere: what its stored recipe may make an evaluation do."""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from grpo_cli import cli
from grpo_cli.checkpoints import provenance
from grpo_cli.commands import evaluation_run, replay
from grpo_cli.config.command_line import recipe_files
from grpo_cli.config.compose import shipped
from grpo_cli.config.keys import ENTRIES, KNOBS
from grpo_cli.config.knob import flags_of
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.saved_recipe import as_yaml
from grpo_cli.errors import UserError
from grpo_cli.evaluation.knobs import OF_TRAINING, without_unread_data
from grpo_cli.evaluation.settings import Benchmark
from grpo_cli.files import read_yaml
from grpo_cli.scoring import registry
from grpo_cli.scoring.bound_reward import Signature
from grpo_cli.scoring.settings import Reward
from grpo_cli.training import build, prepare
from tests.tables import rows_of

ATTACK = {"stmt": "__import__('os').system('touch pwned')", "number": 1}
TIMEIT = {"function": "timeit:timeit", "args": ATTACK}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield
    os.environ.pop("PWNED", None)


def checkpoint(folder: Path, **changes: Any) -> Path:
    """A checkpoint as it is downloaded: a model, and a recipe with these entries changed."""
    (folder / "training").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    rows = folder / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    recipe = Recipe(reward={"math": Reward(function="math")})
    recipe.dataset.eval, recipe.dataset.chat = str(rows), False
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


# What a recipe may ask for, and the words in which it is named.
ASKS = {row["name"]: (row["changes"], row["said"]) for row in rows_of("checkpoints/asks.jsonl")}


def asked(path: Path, *given: str) -> list[str]:
    tree = read_yaml(path / provenance.RECIPE)
    recipe = {key: value for key, value in tree.items() if key != "defaults"}
    return [*provenance.unusual(tree), *provenance.refused(recipe, path, given)]


@pytest.mark.parametrize("name", ASKS)
def test_what_a_recipe_asks_for(name: str, tmp_path: Path) -> None:
    changes, said = ASKS[name]
    found = asked(checkpoint(tmp_path / "theirs", **changes))
    assert any(said in one for one in found), found


def every_knob() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """All knobs of the schema, with those of an entry `x` of each mapping of entries."""
    sections = {key.rpartition(".")[0] for key in KNOBS}
    for key, field in KNOBS.items():
        if key not in sections and key not in ENTRIES:
            yield key, field
    for key, kind in ENTRIES.items():
        for field in dataclasses.fields(kind):
            yield f"{key}.x.{field.name}", field


HOSTILE = ("timeit:timeit", "/etc/passwd", "private.json", "http://a:1")


def found_at(key: str, value: Any, folder: Path) -> list[str]:
    """What is refused of a recipe that sets only this key."""
    tree: Any = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return [one for one in provenance.refused(tree, folder) if one.startswith(key)]


def test_no_knob_names_code_files_or_addresses(tmp_path: Path) -> None:
    (tmp_path / "private.json").write_text("{}")
    for key, field in every_knob():
        rule = flags_of(field).trusted
        assert rule in ("", *provenance.RULES), key
        for value in HOSTILE if rule != "anything" else ():
            shaped = {"dict": {"x": value}, "list": [value]}.get(str(field.type)[:4], value)
            assert found_at(key, shaped, tmp_path / "theirs"), (key, shaped)


def test_numbers_and_choices_need_no_trust(tmp_path: Path) -> None:
    refused = set()
    for key, field in every_knob():
        if choices := field.metadata["choices"]:
            values = [[one] if str(field.type).startswith("list") else one for one in choices]
        elif {*re.findall(r"\w+", str(field.type))} <= {"int", "float", "bool", "None"}:
            values = [True, 7, 0.5]
        else:
            continue
        if any(found_at(key, value, tmp_path) for value in values):
            refused.add(key)
    own = ("overwrite", "resume_changed", "model.trust_remote_code", "generation.tools.guards")
    assert refused == {*own, "generation.vllm.transfer", "tracking.backend"}


def test_arguments_of_the_shipped_rewards(tmp_path: Path) -> None:
    (tmp_path / "private.json").write_text("{}")
    for name in registry.shipped():
        signature = Signature.of(registry.resolve(name))
        for argument in signature.named:
            key = f"reward.{name}.args.{argument}"
            for value in HOSTILE[1:]:
                assert found_at(key, value, tmp_path / "theirs"), (key, value)
            is_trusted = name != "judge" and argument in signature.arguments
            never = ("guards", "trust_remote_code")
            assert bool(found_at(key, 1, tmp_path)) != (is_trusted and argument not in never), key


def test_what_only_describes_a_model_and_its_data(tmp_path: Path) -> None:
    reward = {"a": {"function": "grpo_cli.rewards.math:math"}, "code": {"args": {"seconds": 3}}}
    path = checkpoint(
        tmp_path / "theirs", reward=reward, model__path="some/model", dataset__eval="hub/name",
        dataset__train="pkg://grpo_cli/samples/arithmetic_train.jsonl", steps=7, seed=3,
        benchmark={"own": {"data": str(tmp_path / "theirs" / "rows.jsonl"), "reward": "choice"}},
        loss__policy="cispo", optimizer__args={"a": 1},
        model__chat_template="{{ messages }}", model__attn_implementation="sdpa",
    )  # fmt: skip
    assert asked(path) == []


@pytest.mark.parametrize("name", [p.stem for p in recipe_files()])
def test_shipped_recipes_ask_for_nothing(name: str, tmp_path: Path) -> None:
    recipe = shipped(name)
    read = {key: value for key, value in recipe.items() if key not in OF_TRAINING}
    found = [*provenance.refused(read, tmp_path)]
    assert all(one.startswith(("environment.", "tools.")) for one in found), found


def test_a_link_in_the_folder_is_no_way_out(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "theirs")
    (tmp_path / "private.jsonl").write_text("{}")
    (path / "rows.jsonl").unlink()
    (path / "rows.jsonl").symlink_to(tmp_path / "private.jsonl")
    assert asked(path) == [f"dataset.eval = {path / 'rows.jsonl'}"]


def test_a_key_of_the_command_line_is_no_question(tmp_path: Path) -> None:
    path = checkpoint(
        tmp_path / "theirs", model__trust_remote_code=True, reward={"x": {"function": "a:b"}}
    )
    assert len({*asked(path)}) == 2
    assert asked(path, "model.trust_remote_code", "reward.x.function") == []


@pytest.mark.parametrize("name", ["mcp", "package", "reward", "hydra"])
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
def test_trusted_or_own_is_obeyed(how: str, tmp_path: Path, evaluated: list[Recipe]) -> None:
    path = checkpoint(tmp_path / "run", reward={"x": TIMEIT}, model__trust_remote_code=True)
    if how != "trusted":
        provenance.note_own(path)
    if how == "changed":
        (path / "modeling.py").write_text("# other code than the run had")
    words = ["trust=true"] if how == "trusted" else []
    assert cli.run_command(["eval", str(path), *words]) == (2 if how == "changed" else 0)
    assert [r.reward["x"].function for r in evaluated] == ["timeit:timeit"] * (how != "changed")


def test_a_benchmark_needs_no_row_rewards(tmp_path: Path, evaluated: list[Recipe]) -> None:
    path = checkpoint(tmp_path / "theirs", reward={"x": TIMEIT}, loss__policy="timeit:timeit")
    assert cli.run_command(["eval", str(path), "benchmark=gsm8k"]) == 0
    assert len(evaluated) == 1


def test_data_of_its_rows_is_no_question_for_a_benchmark(tmp_path: Path) -> None:
    cfg = OmegaConf.create(dataclasses.asdict(Recipe()))
    cfg.dataset.train, cfg.dataset.eval = "/theirs/train.jsonl", "/theirs/test.jsonl"
    cfg.dataset.mixture = {"a": {"data": "/theirs/a.jsonl"}}

    def names() -> list[str]:
        found = provenance.refused(without_unread_data(cfg), tmp_path)
        return [one.partition(" = ")[0] for one in found]

    assert names() == ["dataset.eval"]
    cfg.dataset.test_split_size = 0.1
    assert names() == ["dataset.train", "dataset.eval", "dataset.mixture.a.data"]
    cfg.benchmark = {"own": {"data": "a/b"}}
    assert names() == []


def test_only_the_recipe_is_read_in_its_folder(tmp_path: Path, evaluated: list[Recipe]) -> None:
    path = checkpoint(tmp_path / "theirs")
    for name in ("schema", "_stored"):  # names that Hydra looks for in the folder of a recipe
        (path / "training" / f"{name}.yaml").write_text(
            "# @package _global_\nhydra: {job: {env_set: {PWNED: '1'}}}\nseed: 8\n"
        )
    assert cli.run_command(["eval", str(path)]) == 0
    assert ([r.seed for r in evaluated], os.environ.get("PWNED")) == ([0], None)


@pytest.mark.parametrize("trust", [[], ["trust=true"]])
def test_the_working_folder_is_off_the_import_path(
    trust: list[str], tmp_path: Path, evaluated: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / "theirs")
    paths = ["", str(tmp_path), *sys.path]
    monkeypatch.setattr(sys, "path", paths)
    seen: list[bool] = []

    def evaluate(*_: Any) -> None:
        registry.resolve("math")
        seen.append(any(Path(p or ".").resolve() == tmp_path for p in sys.path))

    monkeypatch.setattr(evaluation_run, "evaluate_model", evaluate)
    assert cli.run_command(["eval", str(path), *trust]) == 0
    assert seen == [bool(trust)]
    assert sys.path[:2] == ["", str(tmp_path)]


@pytest.mark.parametrize(
    ("base", "is_refused"),
    [("Qwen/Qwen3-0.6B", False), ("gpt2", False), ("/home/me/model", True), ("../model", True)],
)
def test_the_model_under_an_adapter(base: str, is_refused: bool, tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": base}))
    said = [f"adapter_config.json: base_model_name_or_path = {base}"]
    assert [*provenance.refused_base(tmp_path)] == (said if is_refused else [])


def test_an_adapter_with_a_base_of_the_hub_needs_no_trust(
    tmp_path: Path, evaluated: list[Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(tmp_path / "theirs", adapter__method="lora", model__path="some/model")
    (path / "config.json").unlink()
    (path / "model.safetensors").rename(path / "adapter_model.safetensors")
    config = path / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": "some/model"}))
    assert cli.run_command(["eval", str(path)]) == 0
    config.write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    assert cli.run_command(["eval", str(path)]) == 2
    assert f"base_model_name_or_path = {tmp_path}. If you trust" in capsys.readouterr().err
    assert len(evaluated) == 1


def test_a_moved_checkpoint_stays_ones_own(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "run", reward={"x": TIMEIT})
    assert not provenance.is_own(path)
    provenance.note_own(path)
    moved = path.rename(tmp_path / "moved")
    assert provenance.is_own(moved)
    (moved / "recipe.yaml").write_text((moved / "training" / "recipe.yaml").read_text())
    (moved / "training" / "recipe.yaml").write_text("other: 1")
    assert not provenance.is_own(moved)


@pytest.mark.parametrize(
    "name",
    ["processor_config.json", "generation_config.json", "part/config.json", "code.py",
     "training/model/config.json"],
)  # fmt: skip
def test_a_file_that_may_name_code_makes_another_checkpoint(tmp_path: Path, name: str) -> None:
    path = checkpoint(tmp_path / "run")
    provenance.note_own(path)
    for unread in ("model.safetensors.index.json", "training/manifest.json", "README.md"):
        (path / unread).write_text("{}")
    assert provenance.is_own(path)
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_text('{"auto_map": {"AutoProcessor": "a/b--code.Own"}}')
    assert not provenance.is_own(path)


@pytest.mark.parametrize(
    ("schema", "is_allowed"),
    [
        (None, True), ({"type": "object"}, True), ('{"type": "object"}', True),
        ("theirs/own.json", True), ("theirs/link.json", False), ("private.json", False),
        ("/etc/passwd", False), ("theirs/../private.json", False), ("not_there.json", False),
    ],
)  # fmt: skip
def test_the_schema_of_a_reward(tmp_path: Path, schema: Any, is_allowed: bool) -> None:
    path = checkpoint(
        tmp_path / "theirs", reward={"j": {"function": "json_schema", "args": {"schema": schema}}}
    )
    for name in ("theirs/own.json", "private.json"):
        (tmp_path / name).write_text("{}")
    (path / "link.json").symlink_to(tmp_path / "private.json")
    said = [] if is_allowed else [f"reward.j.args.schema = {schema}"]
    assert asked(path) == said


def test_a_run_with_the_recipe_of_ones_own_is_not_ones_own(tmp_path: Path) -> None:
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    for run in (own, theirs):
        run.mkdir()
    build.record_command(own, Recipe(), ["grpo", "train"])
    (theirs / "recipe.yaml").write_bytes((own / "recipe.yaml").read_bytes())
    (tmp_path / "private").write_text("secret")
    name = (own / ".run_id").read_bytes()
    build.record_command(own, Recipe(), ["grpo", "train", "resume=auto"])
    assert (own / ".run_id").read_bytes() == name
    moved = own.rename(tmp_path / "moved")
    for run in (moved, theirs):
        (run / "link").symlink_to(tmp_path / "private")
    provenance.check_links(moved, "RUN")
    for content in (None, b"", b"another\n"):
        if content is not None:
            (theirs / ".run_id").write_bytes(content)
        with pytest.raises(UserError, match="its link link leads out of it"):
            provenance.check_links(theirs, "RUN")


def test_links_of_a_foreign_model(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "models--a--b" / "snapshots" / "1f2e")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    (blobs / "77").write_text("{}")
    (model / "vocab.json").symlink_to("../../blobs/77")
    provenance.check_model_links(model)
    (tmp_path / "private").write_text("secret")
    (model / "notes.txt").symlink_to(tmp_path / "private")
    said = f"its link notes.txt leads out of it, to {tmp_path}/private; if you trust who made it"
    with pytest.raises(UserError, match=re.escape(said)):
        provenance.check_model_links(model)
    (model / "notes.txt").unlink()
    plain = model.rename(tmp_path / "models--a--b" / "plain")  # the same links, in no cache
    (plain / "vocab.json").unlink()
    (plain / "vocab.json").symlink_to("../blobs/77")
    with pytest.raises(UserError, match=r"its link vocab\.json leads out of it"):
        provenance.check_model_links(plain)


def test_links_out_of_a_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "completions").mkdir(parents=True)
    (run / "recipe.yaml").write_text("seed: 1")
    (tmp_path / "private").write_text("secret")
    (run / "newest").symlink_to("completions")
    provenance.check_links(run, "RUN")
    (run / "completions" / "step-1.parquet").symlink_to(tmp_path / "private")
    with pytest.raises(UserError, match=r"its link completions/step-1\.parquet leads out of it"):
        provenance.check_links(run, "RUN")
    build.record_command(run, Recipe(), ["grpo", "train"])  # as a run of one's own begins
    provenance.check_links(run, "RUN")


def test_what_a_replay_reads(tmp_path: Path) -> None:
    unread = {"dataset__eval": "/theirs/x.jsonl", "reward": {"x": TIMEIT}, "hub__repo": "a/b"}
    replay.check_recipe(checkpoint(tmp_path / "sound", **unread))
    for number, name in enumerate(("policy", "optimizer", "tools", "mcp", "servers", "hydra")):
        changes, said = ASKS[name]
        with pytest.raises(UserError, match=re.escape(said)):
            replay.check_recipe(checkpoint(tmp_path / str(number), **changes))
    assert [*provenance.refused_model("model", "a/b", tmp_path)] == []
    assert [*provenance.refused_model("model", "/a/b", tmp_path)] == ["model = /a/b"]


def test_unusual_entries() -> None:
    stored = yaml.safe_load(as_yaml(Recipe(benchmark={"a": Benchmark()})))
    assert [*provenance.unusual(stored)] == []
    assert [*provenance.unusual({**stored, "hydra": {}, "x": 1})] == ["hydra", "x"]
