"""What README and docs/ tell a user to type: every command, recipe and Python block, as written."""

import json
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import transformers

from grpo_cli import cli
from grpo_cli.commands import doctor_nodes, probe_run, replay, serve
from grpo_cli.data import rows
from grpo_cli.models import loading
from grpo_cli.training import plan
from tests.composed import composed
from tests.programs import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TINY = (
    "device=cpu steps=1 prompts_per_step=2 dataset.train_limit=20 "
    "dataset.eval_limit=2 model.build.warmup_steps=0 model.build.hidden_size=32 "
    "generation.num_generations=2 generation.max_completion_tokens=4 eval.at_start=false "
    "log.report=false"
)


class Reached(Exception):  # noqa: N818
    """A command is understood; its next step needs the hub or a GPU."""


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks of a page in one of the languages; "" is a block without any."""
    text = page.read_text("utf-8")
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, language, block in found if language in languages]


def commands() -> list[tuple[str, list[str]]]:
    """Every `grpo VERB ...` of a page, with the page: lines of blocks, and code within a text.

    Forms, such as `grpo eval CHECKPOINT` and `grpo eval ...`, are no commands.
    """
    found = []
    for page in PAGES:
        lines = "".join(blocks(page, "", "bash", "sh")).replace("\\\n", " ").splitlines()
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.DOTALL | re.M)
        lines += re.findall(r"`(grpo [a-z]+ [^`]+)`", text)
        for line in lines:
            if not re.search(r"(^|\s)grpo [a-z]", line.partition("#")[0]):
                continue
            words = shlex.split(line, comments=True)
            words = words[words.index("grpo") + 1 :]
            words = words[: words.index("|")] if "|" in words else words
            if "..." not in words and not any(re.search(r"\b[A-Z]{3,}\b", w) for w in words):
                found.append((page.name, words))
    assert len(found) > 70
    return found


def named(is_asked: Callable[[str], bool]) -> pytest.MarkDecorator:
    cases = [(page, words) for page, words in commands() if is_asked(words[0])]
    return pytest.mark.parametrize(
        ("page", "words"), cases, ids=lambda v: v if isinstance(v, str) else " ".join(v)[:60]
    )


def each_block(language: str) -> pytest.MarkDecorator:
    cases = [(page.name, text) for page in PAGES for text in blocks(page, language)]
    return pytest.mark.parametrize(("page", "text"), cases, ids=lambda v: v[:30])


def write_named_files(folder: Path) -> None:
    """Writes the files that the pages take as given: data, modules and recipes of the user."""
    for page in PAGES:
        text = page.read_text("utf-8")
        for name, code in re.findall(r"<!-- example: (\S+) -->\n```\w+\n(.*?)```", text, re.DOTALL):
            with (folder / name).open("a" if name.endswith(".py") else "w") as file:
                file.write(code)
    (folder / "recipes_of_mine").mkdir()
    (folder / "recipes_of_mine" / "exp.yaml").write_text("defaults: [gsm8k_tiny, _self_]\n")
    (folder / "answer.json").write_text("{}")
    for name in ("my/train.jsonl", "my/test.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"question": "2+3?", "answer": "#### 5"}\n')
    for name in ("answers.jsonl", "labelled.jsonl", "some.jsonl", "gsm8k/test.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        row = {"prompt": "2+3?", "completion": "It is 5.", "answer": "5", "solution": "#### 5"}
        (folder / name).write_text(json.dumps({**row, "correct": True}) + "\n")


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes to a folder, whose modules are imported instead of another test's."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for module in folder.glob("*.py"):
        monkeypatch.setitem(sys.modules, module.stem, sys)  # so that the import is undone too
        del sys.modules[module.stem]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files, runs and evaluations that the pages name."""
    folder = tmp_path_factory.mktemp("workplace")
    write_named_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for recipe in ("gsm8k_tiny", "arithmetic_tiny_lora"):
            assert cli.run_command(["train", f"recipe={recipe}", *TINY.split()]) == 0
        assert cli.run_command(["eval", "outputs/gsm8k_tiny", "output_dir=A"]) == 0
    shutil.copytree(folder / "A", folder / "B")
    run = folder / "outputs" / "gsm8k_tiny"
    shutil.copytree(run / "checkpoints/step-1", run / "checkpoints/step-100")
    shutil.copytree(run, folder / "outputs" / "run")
    shutil.copytree(run / "checkpoints/step-1", folder / "outputs/run/checkpoints/step-200")
    for name in ("demo", "short", "close", "a", "b", "../sums"):
        shutil.copytree(run, folder / "outputs" / name)
    (folder / "bin").mkdir()
    (folder / "bin" / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (folder / "bin" / "sbatch").chmod(0o755)
    return folder


@pytest.mark.programs
@named(lambda verb: verb == "train")
def test_every_recipe_on_a_page_composes(
    page: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_named_files(tmp_path)
    enter(tmp_path, monkeypatch)
    if {"--cfg", "--info", "--help"} & {*words}:
        assert cli.run_command(words) == 0, page
    else:
        named = [word for word in words[1:] if not word.startswith("resume=")]
        assert composed(*named), page


@pytest.mark.programs
@each_block("yaml")
def test_every_yaml_block_composes(
    page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a recipe, or as a part of one."""
    enter(tmp_path, monkeypatch)
    if "defaults:" not in text:
        text = f"defaults: [arithmetic_tiny, _self_]\n{text}"
    (tmp_path / "block.yaml").write_text(text, "utf-8")
    assert composed("recipe=./block.yaml"), page


@pytest.mark.runs
@named(lambda verb: verb != "train")
def test_every_other_command_on_a_page_runs(
    page: str, words: list[str], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it ends, or until it asks the hub, starts a server, samples or meets other nodes."""
    enter(workplace, monkeypatch)
    monkeypatch.setenv("PATH", f"{workplace}/bin", prepend=":")
    monkeypatch.setenv("GRPO_DEBUG", "1")  # `Reached` is no internal error

    def stop(*_: Any, **__: Any) -> NoReturn:
        raise Reached

    def make_plan(settings: serve.ServerSettings, recipe: Any, _: Any) -> NoReturn:
        serve.make_plan(settings, recipe, gpus=8)
        raise Reached

    monkeypatch.setattr(rows, "load_hub", stop)
    monkeypatch.setattr(loading, "has_chat_template", stop)
    monkeypatch.setattr(serve, "serve", make_plan)
    monkeypatch.setattr(probe_run, "probe", stop)
    monkeypatch.setattr(replay, "find", stop)  # a step that the run has kept
    if "_qwen" in " ".join(words):
        monkeypatch.setattr(plan, "config_of", stop)
    monkeypatch.setattr(doctor_nodes, "main", doctor_nodes.settings_of)  # the nodes are not there
    if words[0] == "slurm":  # whose rows may be on the hub
        words = [*words, "check=false"]
    codes = (0, 1) if words[0] == "doctor" else (0,)  # 1: the recipe lacks something here
    try:
        assert cli.run_command(words) in codes, page
    except Reached:
        is_asked = re.search("benchmark=|_qwen", " ".join(words))
        assert words[0] in ("serve", "probe", "replay") or is_asked, page


@pytest.mark.programs
@each_block("python")
def test_every_python_block_runs(
    page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each on its own, with the values that its comments give; only the hub is not asked."""
    monkeypatch.chdir(tmp_path)
    for package in re.findall(r"^(?:from|import) (skyrl_gym|openenv)", text, re.MULTILINE):
        pytest.importorskip(package)  # packages of others, which grpo does not install
    config = transformers.AutoConfig.for_model("qwen2")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda _: config)
    names: dict[str, Any] = {"__name__": page}
    exec(compile(text, page, "exec"), names)
    for expression, value in re.findall(r"^(.+?)  # (\(.*\))$", text, re.MULTILINE):
        assert eval(expression, names) == eval(value), page
