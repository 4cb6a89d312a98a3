"""What every test shares: no network, one thread, a tiny random model, rollouts made by hand."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import gc
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
# Virtual machines that announce AMX and lack it end oneDNN's bfloat16 products with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ["GRPO_CACHE"] = tempfile.mkdtemp(prefix="grpo-tests-")  # this session's, then removed
os.environ["HF_DATASETS_CACHE"] = os.environ["GRPO_CACHE"] + "/datasets"  # read on import

import pytest
import torch
from hydra._internal.hydra import Hydra
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo_cli import cli
from grpo_cli.algorithm.settings import Loss
from grpo_cli.generation.vllm.prompts import ComparedPrompt
from grpo_cli.models import tiny
from grpo_cli.models.settings import Build
from grpo_cli.records import Completion, Group, Prompt, Rollout, WeightedSample
from grpo_cli.scoring.calls import RewardExecutor
from grpo_cli.scoring.scorer import Scorer, ScoringSession
from grpo_cli.scoring.settings import Scoring
from tests.composed import with_recipe
from tests.tiers import pytest_runtest_call  # noqa: F401

torch.set_num_threads(1)
# Hydra composes each configuration once more to read `hydra.mode`, which nothing here sets.
Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
atexit.register(shutil.rmtree, os.environ["GRPO_CACHE"], ignore_errors=True)

NO_TIME = "not begun: --until is over"
CPU = torch.device("cpu")
ALONE: Any = SimpleNamespace(sum=dict, maxima=dict)  # the only process: it reduces nothing
BUILD = Build(hidden_size=32, intermediate_size=64, num_layers=2, warmup_steps=0)


RECIPES = ("train", "plan", "probe", "explain")  # commands that need a recipe
Grpo = Callable[..., tuple[int, str, str]]
HAS_BWRAP = shutil.which("bwrap") is not None or bool(os.environ.get("CI"))


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "unix time after which no test is begun any more; those that are left are listed"
    parser.addoption("--until", type=float, help=said)


def pytest_collection_finish() -> None:
    """Takes what is imported out of the garbage collector's sight: full collections are quick."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("until")
    if until is not None and time.time() > until:
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    left = [report.nodeid for report in skipped if NO_TIME in str(report.longrepr)]
    if left:
        terminalreporter.section(f"{len(left)} tests not begun")
        terminalreporter.write("\n".join(left) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Skips a test that runs programs where bubblewrap is not installed, except in CI."""
    try:
        return (yield)
    except Exception as error:
        if HAS_BWRAP or "bubblewrap is not on PATH" not in str(error):
            raise
        pytest.skip("bubblewrap is not installed")


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """Hydra's --info leaves a handler that writes to what is a test's stdout."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = [h for h in root.handlers if h in handlers]
    root.setLevel(level)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and three special tokens: 259 ids, `<|endoftext|>` 0 (pad), `<|im_end|>` 2 (eos)."""
    return tiny.make_tokenizer(BUILD, [])


@pytest.fixture(scope="session")
def _model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tiny.make_model(BUILD, tokenizer)


@pytest.fixture
def model(_model: PreTrainedModel) -> PreTrainedModel:
    """A random Qwen2, the same in every test, each test's own to change."""
    return copy.deepcopy(_model)


@pytest.fixture(scope="module")
def executor() -> Iterator[RewardExecutor]:
    executor = RewardExecutor(Scoring(workers=2))
    yield executor
    executor.close()


@pytest.fixture
def grpo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Grpo:
    """Runs a command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["grpo"])  # Hydra replaces them

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.run_command(with_recipe(words) if words[0] in RECIPES else [*words])
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def lines() -> list[str]:
    """Returns a list for the lines that are printed for the user."""
    return []


def make_rollout(
    prompt_ids: Sequence[int] = (5, 6),
    completion_ids: Sequence[int] = (7, 8),
    *,
    logprobs: Sequence[float] | None = None,
    finish_reason: Literal["stop", "length"] = "stop",
    prompt: Any = "",
    text: str = "",
    columns: dict[str, Any] | None = None,
    row: int = 0,
    reward: float = 0.0,
    parts: dict[str, float | None] | None = None,
    is_sampled: list[bool] | None = None,
    **fields: Any,
) -> WeightedSample:
    """A `WeightedSample`, which is every kind of rollout; `fields` are others of its."""
    ids = list(completion_ids)
    completion = Completion(
        ids, list(logprobs or [0.0] * len(ids)), finish_reason, is_sampled=is_sampled
    )
    own = {"reward": reward, "outcome_reward": reward, "place": (0, 0), "weight": 0.0}
    own |= {"reward_parts": parts or {}} | fields
    return WeightedSample(
        Prompt(row, list(prompt_ids), prompt, columns or {}), completion, text, **own
    )


def score(
    scorer: Scorer, rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[list[Rollout], ScoringSession]:
    """The rollouts with their rewards, and the session that scored them."""
    session = scorer.begin()
    session.add(rollouts)
    return session.finish(rollouts, tokenizer), session


def make_loss(args: dict[str, Any] | None = None, **settings: Any) -> Loss:
    """A loss of these settings; those that are no fields of `Loss` are arguments of its own."""
    fields = {f.name for f in dataclasses.fields(Loss)}
    own = {name: value for name, value in settings.items() if name not in fields}
    knobs = {name: value for name, value in settings.items() if name in fields}
    return Loss(args=(args or {}) | own, **knobs)


def as_prompts(rows: Sequence[Sequence[int]]) -> list[Prompt]:
    """A prompt of each row of token ids."""
    return [Prompt.from_ids(ids) for ids in rows]


def as_scored(rows: Sequence[Sequence[int]]) -> list[ComparedPrompt]:
    """Each row of token ids, all of which except the first are compared."""
    return [ComparedPrompt(prompt, len(prompt.ids) - 1) for prompt in as_prompts(rows)]


def make_group(position: int, rollouts: Sequence[Rollout]) -> Group:
    return Group(position, rollouts[0].prompt, rollouts)
