"""A checkpoint from elsewhere: its stored recipe is read only if it is trusted."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from grpo_cli import cli
from grpo_cli.checkpoints import provenance
from grpo_cli.commands import evaluation_run
from grpo_cli.config.saved_recipe import as_yaml
from grpo_cli.config.schema import Recipe, Reward
from grpo_cli.errors import UserError
from grpo_cli.training import build, prepare

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


def test_a_foreign_checkpoint_asks_before_its_recipe_is_read(
    tmp_path: Path, evaluated: list[Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(tmp_path / "theirs", reward={"x": TIMEIT})
    assert cli.run_command(["eval", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"grpo: checkpoint = {path}: no run of yours has made it here")
    assert err.endswith("if you trust who made it, add trust=true.\n")
    assert len(err.splitlines()) == 1
    assert evaluated == []
    words = ["recipe=arithmetic_tiny", "benchmark=gsm8k"]  # in place of its own
    assert cli.run_command(["eval", str(path), *words]) == 0
    assert "x" not in evaluated[0].reward


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
