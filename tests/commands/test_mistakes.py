"""Mistakes on the command lines of the verbs: one sentence, exit code 2, and nothing is written.

A row of mistakes.jsonl is a command line and parts of what is said of it. test_cli.py has those of
`grpo train`.
"""

import json
import shlex
from pathlib import Path

import pytest

from grpo_cli.checkpoints import paths
from tests.conftest import Grpo
from tests.report_runs import write_run
from tests.tables import rows_of


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, of which one has kept two steps, files of rows and completions, and a model."""
    folder = tmp_path_factory.mktemp("world")
    write_run(folder / "run")
    for step in (12, 20):
        paths.kept_path(folder / "run", step).mkdir(parents=True)
    (folder / "old").mkdir()
    (folder / "old" / "recipe.yaml").write_text("recipe: test\n")
    (folder / "empty").mkdir()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_text("")
    (folder / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    (folder / "c.jsonl").write_text(json.dumps({"text": "4", "answer": "4", "right": True}) + "\n")
    return folder


@pytest.mark.parametrize(
    ("words", "said"), [(row["words"], row["said"]) for row in rows_of("commands/mistakes.jsonl")]
)
def test_a_mistake_is_one_sentence(
    words: str, said: list[str], grpo: Grpo, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    before = sorted(world.rglob("*"))
    code, out, err = grpo(*shlex.split(words))
    assert [part for part in said if part not in err] == [], err
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("grpo: ")
    assert sorted(world.rglob("*")) == before, "nothing is written"


@pytest.mark.parametrize("words", ["watch", "report", "report --help"])
def test_a_verb_without_words_says_what_it_takes(words: str, grpo: Grpo) -> None:
    code, out, err = grpo(*words.split())
    assert (code, err) == (0, "")
    assert f"grpo {words.split()[0]} RUN" in out
    assert "\n  --" in out, "its options"
