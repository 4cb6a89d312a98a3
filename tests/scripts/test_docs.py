"""The documents say what the code does: knobs, metrics, and the examples that can be run."""

import ast
import importlib
import json
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from grpo_cli.config.keys import KNOBS
from grpo_cli.config.knob import as_written, value_at
from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.workers import Workers
from grpo_cli.evaluation.settings import Eval
from grpo_cli.evaluation.summary import ProblemStats, summarize
from grpo_cli.records import Completion, Group, Prompt, Rollout, rollout_stats
from grpo_cli.reporting import rollout_metrics
from grpo_cli.reporting.progress import STAGES
from grpo_cli.reporting.stage_clock import Clock
from grpo_cli.scoring import scorer
from grpo_cli.scoring.calls import RewardExecutor
from grpo_cli.scoring.settings import Reward, Scoring
from grpo_cli.training import callbacks
from grpo_cli.training.callbacks import Event, HookOutcome, plain
from grpo_cli.training.settings import Callback
from tests import programs
from tests.conftest import score
from tests.programs import ROOT

DOCS = ROOT / "docs"


def undocumented(keys: Iterable[str]) -> list[str]:
    """Metrics that docs/metrics.md does not define; NAME there stands for one reward's name."""
    cells = re.findall(r"^\|([^|]*)\|", (DOCS / "metrics.md").read_text("utf-8"), re.MULTILINE)
    documented = [key for cell in cells for key in re.findall(r"`([^`]+)`", cell)]
    patterns = [re.escape(key).replace("NAME", "[^/]+") for key in documented]
    return [key for key in keys if not any(re.fullmatch(p, key) for p in patterns)]


def example(page: str, name: str) -> str:
    """The code block behind `<!-- example: name -->`."""
    _, mark, rest = (DOCS / page).read_text("utf-8").partition(f"<!-- example: {name} -->")
    assert mark, f"{page} has no example {name}"
    block = re.search(r"```\w+\n(.*?)```", rest, re.DOTALL)
    assert block is not None
    return block[1]


def group() -> Group:
    """One right completion and a wrong one that was cut off, scored by exact match."""
    prompt = Prompt(row=0, ids=[1, 2], text="2+3=", columns={"answer": "5"})
    right = Rollout(prompt, Completion([5, 9], [-0.5, -0.1], "stop"), "5")
    wrong = Rollout(prompt, Completion([7, 7, 7], [-0.5, -0.5, -0.5], "length"), "777")
    return Group(0, prompt, [right, wrong])


def scored_group(**rewards: Reward) -> Group:
    rollouts, _ = score(scorer.Scorer(rewards, ["answer"], "here"), group().rollouts)
    return replace(group(), rollouts=rollouts)


@pytest.mark.smoke
def test_tables_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    make_docs = importlib.import_module("make_docs")
    assert len(make_docs.TABLES) == 5
    for name, table in make_docs.TABLES.items():
        page = (DOCS / name).read_text("utf-8")
        assert make_docs.renewed(page, table()) == page, "run `make docs`"


def test_every_metric_is_defined() -> None:
    counted = Reward("tests.pool_rewards:does", timeout=30, on_error="count")
    executor = RewardExecutor(Scoring(workers=1))
    counting = scorer.Scorer({"r": counted}, ["answer"], "here", executor)
    _, session = score(counting, group().rollouts)
    executor.close()
    of_rewards = scorer.metrics_of([session], Workers("cpu"))
    assert len(of_rewards) == 3
    scored = scored_group(exact_match=Reward("exact_match"))
    step_stats = dict(rollout_stats([scored]))
    timed = Clock(torch.device("cpu"), STAGES, peak=1.0)
    for stage in ("generate", "forward_backward"):
        timed.count(stage, lambda: 1.0)
        with timed.stage(stage):
            pass
    facts = ProblemStats.of(scored, "exact_match")
    facts = replace(facts, answered=[True, False], calls=[1, 0], turns=[2, 1])
    of_evaluation = summarize([facts], Eval(), 1)
    del of_evaluation["n"]  # of benchmarks
    keys = {
        **rollout_metrics.rollout_metrics(step_stats),
        **timed.metrics(step_stats),
        **{f"eval/{k}": v for k, v in of_evaluation.items()},
        **of_rewards,
        **{f"eval/{key}": 0.0 for key in of_rewards if not key.startswith("time/")},
    }
    assert len([k for k in keys if k.startswith(("time/", "mfu/"))]) >= 10
    assert undocumented(keys) == []
    assert undocumented(["rewards/a/b/mean", "made_up"]) == ["rewards/a/b/mean", "made_up"]


Write = Callable[[str, str], ModuleType]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the example of a page as a module that can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def module(page: str, name: str) -> ModuleType:
        shipped = example(page, "my_rewards.py" if name == "readme_rewards.py" else name)
        (tmp_path / name).write_text(shipped, "utf-8")
        return importlib.import_module(name.removesuffix(".py"))

    return module


def test_example_rewards_run(write: Write) -> None:
    write("rewards.md", "my_rewards.py")
    scored = scored_group(near=Reward("my_rewards:near", weight=0.5, args={"scale": 1000}))
    assert [r.reward_parts["near"] for r in scored.rollouts] == [1.0, pytest.approx(0.228)]
    assert [r.reward for r in scored.rollouts] == [0.5, pytest.approx(0.114)]
    short = write("../README.md", "readme_rewards.py").short
    answers = [[{"role": "assistant", "content": text}] for text in ("Lima.", "It is Lima", "")]
    assert short(answers, words=2) == [1.0, pytest.approx(2 / 3), 0.0]


def test_example_callback_runs(write: Write, tmp_path: Path) -> None:
    write("callbacks.md", "my_callbacks.py")
    config = Callback("my_callbacks:Unsolved", {"file": "unsolved.jsonl"})
    callback = callbacks.load({"unsolved": config})[0].target
    absent, outcome = cast(Any, None), HookOutcome()
    for step, reward in enumerate((0.5, 1.0, 1.0, 1.0), start=1):
        pairs = zip(group().rollouts, (reward, 0.0), strict=True)
        scored = replace(group(), rollouts=[replace(r, reward=value) for r, value in pairs])
        event = Event(
            name="unsolved",
            hook="on_step",
            step=step,
            steps=9,
            recipe={},
            folder=tmp_path,
            metrics={},
            groups=(scored,),
            policy=absent,
            tokenizer=absent,
            rank=0,
            _outcome=outcome,
        )
        assert outcome.stop is None
        callback.on_step(event)
        assert outcome.metrics == {"callbacks/unsolved/share": float(reward < 1)}
    assert outcome.stop == "callbacks.unsolved: three steps with less than 5% unsolved prompts"
    lines = (tmp_path / "unsolved.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "row": 0, "prompt": "2+3="}]
    assert plain(callback.state_dict()) == {"steps": 3}


def test_example_loss_of_the_tutorial(write: Write) -> None:
    write("tutorial.md", "my_losses.py")
    soft = importlib.import_module("my_losses").soft
    ratio, advantages = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.tensor([[1.0, -1.0]])
    loss = soft(ratio, advantages, width=0.1)
    assert loss.tolist() == [[0.0, pytest.approx(0.1)]]
    loss.sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [[-1.0, pytest.approx(0.0, abs=1e-6)]]


def test_links_and_named_files_exist() -> None:
    """Relative links of all pages, and the paths of code that they name."""
    missing = []
    for page in [*ROOT.glob("*.md"), *DOCS.glob("*.md")]:
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if ":" not in link]
        missing += [f"{page.name}: {link}" for link in links if not (page.parent / link).exists()]
        if page.name == "CHANGELOG.md":  # which names files of former versions
            continue
        code = re.findall(r"`((?:grpo_cli|tests|scripts|recipes|rewards)/[\w./-]*[.]\w+)`", text)
        code = [path for path in code if "NAME" not in path]
        missing += [f"{page.name}: {path}" for path in code if not (ROOT / path).exists()]
    assert missing == []


def test_every_knob_on_a_page_exists() -> None:
    keys = list(KNOBS)
    sections = "|".join(sorted({key.partition(".")[0] for key in keys if "." in key}))
    free = ("dataset.columns.", "model.chat_template_kwargs.", "model.args.")
    free += ("loss.args.", "advantage.args.", "optimizer.args.", "environment.args.")
    free += ("adapter.args.", "generation.vllm.engine_args.")
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for name in re.findall(
            rf"`((?:{sections})\.[a-z_.]+)(?:=[^`]*)?`", page.read_text("utf-8")
        ):
            known = name in keys or any(key.startswith(f"{name}.") for key in keys)
            is_other = name == "model.generate" or name.endswith((".json", ".safetensors"))
            assert known or is_other or name.startswith(free), f"{page.name}: {name}"


def test_the_defaults_beside_those_of_trl_are_this_projects() -> None:
    page = (DOCS / "coming_from_trl.md").read_text("utf-8")
    section = page.partition("## Defaults that differ\n")[2].partition("\n## ")[0]
    found = dict(re.findall(r"`([a-z_.]+)=([^`]*)`", section.partition("\n| ---")[2]))
    assert len(found) > 50
    defaults = Recipe()
    for key, value in found.items():
        if not key.startswith(("loss_type", "scale_rewards")):  # TRL's
            assert value == as_written(value_at(defaults, key)), key


def test_api_pages_name_modules_that_exist() -> None:
    pages = "".join(page.read_text("utf-8") for page in (DOCS / "api").glob("*.md"))
    modules = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert len(modules) > 8
    paths = [ROOT / module.replace(".", "/") for module in modules]
    assert [str(p) for p in paths if not (p.is_dir() or p.with_suffix(".py").exists())] == []


NO_SUBJECT = re.compile(r"(Of|What|Those|How|That|Whose|Where|As|The same|But)\b")


def test_docstrings_begin_with_their_subject() -> None:
    """A first line such as "What is known of a step." is no sentence."""
    found = []
    for folder in ("grpo_cli", "rewards", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    text = ast.get_docstring(node) or ""
                    if NO_SUBJECT.match(text):
                        found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert found == []


@pytest.mark.programs
def test_debugger_session_of_the_tutorial(tmp_path: Path) -> None:
    """The commands of the session work; their numbers depend on the machine's rounding."""
    session = (DOCS / "tutorial.md").read_text("utf-8").partition("## One step in a debugger")[2]
    blocks = re.findall(r"```\n(.*?)```", session, re.DOTALL)
    python, *words = blocks[0].replace("\\\n", " ").split()
    assert python == "python"
    words = [w if not w.startswith("output_dir=") else f"output_dir={tmp_path}" for w in words]
    commands = re.findall(r"^\(Pdb\) (.*)$", session, re.MULTILINE)
    assert len(commands) > 8
    done = subprocess.run(
        programs.alone(*words),
        input="\n".join([*commands, "q\n"]),
        capture_output=True,
        text=True,
        timeout=programs.PATIENCE,
        cwd=ROOT,
        env=programs.environment(),
    )
    assert "***" not in done.stdout, done.stdout
    assert "(2, 4)" in done.stdout
    assert "('13+23=', [19, 21, 13, 20, 21, 31])" in done.stdout
