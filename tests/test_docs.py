"""The documents say what the code does: knobs, metrics, and the examples that can be run."""

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from grpo_cli import cli, evaluate, metrics, scoring
from grpo_cli.clock import STAGES, Clock
from grpo_cli.config import Eval, Reward, Scoring
from grpo_cli.distributed import Workers
from grpo_cli.outcomes import outcomes
from grpo_cli.reward_calls import Crew
from grpo_cli.rollouts import Completion, Group, Prompt, Rollout

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def score(scored: Group, **rewards: Reward) -> None:
    scoring.Scorer(rewards, ["answer"], "here").score(scored.rollouts)


def test_table_of_knobs_is_up_to_date() -> None:
    page = (DOCS / "recipes.md").read_text("utf-8")
    assert script("make_docs").renewed(page) == page, "run `make docs`"


def test_every_metric_is_defined() -> None:
    scored = group()
    counted = Reward("tests.pool_rewards:does", timeout=30, on_error="count")
    crew = Crew(Scoring(workers=1))
    sheet = scoring.Scorer({"r": counted}, ["answer"], "here", crew).score(scored.rollouts)
    crew.close()
    of_rewards = scoring.metrics_of([sheet], Workers("cpu"))
    assert len(of_rewards) == 3
    score(scored, exact_match=Reward("exact_match"))
    whole_step = dict(outcomes([scored]))
    timed = Clock(torch.device("cpu"), STAGES, peak=1.0)
    for stage in ("generate", "forward_backward"):
        timed.count(stage, 1.0)
        with timed.stage(stage):
            pass
    facts = evaluate.Facts.of(scored, "exact_match")
    of_evaluation = evaluate.summarize([facts], Eval(), 1)
    del of_evaluation["n"]  # of benchmarks
    keys = {
        **metrics.rollout_metrics(whole_step),
        **timed.metrics(whole_step),
        **{f"eval/{k}": v for k, v in of_evaluation.items()},
        **of_rewards,
        **{f"eval/{key}": 0.0 for key in of_rewards if not key.startswith("time/")},
    }
    assert len([k for k in keys if k.startswith(("time/", "mfu/"))]) >= 10
    assert undocumented(keys) == []
    assert undocumented(["rewards/a/b/mean", "made_up"]) == ["rewards/a/b/mean", "made_up"]


def test_example_reward_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(example("rewards.md", "my_rewards.py"), "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    scored = group()
    score(scored, near=Reward("my_rewards:near", weight=0.5, args={"scale": 1000}))
    assert [r.reward_parts["near"] for r in scored.rollouts] == [1.0, pytest.approx(0.228)]
    assert [r.reward for r in scored.rollouts] == [0.5, pytest.approx(0.114)]


def test_example_recipe_composes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").write_text(example("recipes.md", "my.yaml"), "utf-8")
    monkeypatch.chdir(tmp_path)
    assert cli.run_command(["train", "recipe=./my.yaml", "--cfg", "job"]) == 0
    printed = capsys.readouterr().out
    assert "steps: 200" in printed
    assert "beta: 0.04" in printed
