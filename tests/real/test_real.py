"""A real chat model of 135 M parameters, in float32 and in bfloat16 (`make test-real`).

A random model has nearly flat distributions, which hide rounding: what is claimed of speed and of
exact resume is tried here on a model that people train.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_cli.generation.embedded.engine import Engine
from grpo_cli.generation.embedded.generator import TransformersGenerator
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.records import Completion, Prompt, Rollout
from tests import programs

sys.path.insert(0, str(programs.ROOT / "scripts"))
import check_self_checks
import half_products
import real_model

pytestmark = pytest.mark.real

MODEL = str(real_model.folder())
FLOAT32 = pytest.mark.xdist_group("float32")  # they share a trained run
PRECISIONS = pytest.mark.parametrize("precision", [pytest.param("no", marks=FLOAT32), "bf16"])
CLI = [str(programs.ROOT / "scripts" / "half_products.py"), "-m", "grpo_cli.cli"]
HALF = {"no": nullcontext, "bf16": functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)}
SMALL = [
    "recipe=chat_sums", f"model.path={MODEL}", "device=cpu", "steps=2", "prompts_per_step=2",
    "generation.num_generations=4", "generation.max_completion_tokens=16", "dataset.eval_limit=4",
    "eval.every=0", "checkpoint.every=1", "checkpoint.keep_last=5", "log.completions_every=1",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick_products() -> None:
    half_products.install()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def groups(model: PreTrainedModel, tokenizer: Any) -> list[list[Rollout]]:
    return check_self_checks.sample(model, tokenizer, 8, seed=3)


def chat(tokenizer: Any, *turns: str) -> list[int]:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return list(ids)


def grpo(*words: str, processes: int = 1) -> str:
    """Runs the command and returns what it has printed."""
    done = programs.run(programs.started(processes, *CLI, *words))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(folder: Path, *words: str, processes: int = 1) -> str:
    return grpo("train", *SMALL, f"output_dir={folder}", *words, processes=processes)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    timed = ("time", "per_second", "seconds", "memory", "bytes")
    return [
        {k: v for k, v in json.loads(s).items() if not any(t in k for t in timed)} for s in lines
    ]


def weights(folder: Path, step: int) -> dict[str, bytes]:
    path = folder / "checkpoints" / f"step-{step}"
    return {file.name: file.read_bytes() for file in sorted(path.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a run in a precision, trained without an interruption."""

    @functools.cache
    def trained(precision: str) -> Path:
        folder = tmp_path_factory.mktemp(precision)
        said = train(folder, f"mixed_precision={precision}", "overwrite=true")
        assert "note:" not in said, said
        return folder

    return trained


@PRECISIONS
def test_a_run_keeps_its_fast_modes_and_a_killed_one_ends_the_same(
    precision: str, straight: Callable[[str], Path], tmp_path: Path
) -> None:
    words = [f"mixed_precision={precision}"]
    whole = straight(precision)
    command = [*CLI, "train", *SMALL, *words, f"output_dir={tmp_path / 'killed'}"]
    process = subprocess.Popen(
        programs.alone(*command), cwd=programs.ROOT, env=programs.environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    first = tmp_path / "killed" / "checkpoints" / "step-1"
    deadline = time.monotonic() + programs.PATIENCE
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    said = train(tmp_path / "killed", *words, "resume=auto")
    assert "resuming from" in said
    assert "note:" not in said, said
    assert metrics(tmp_path / "killed") == metrics(whole)
    final = weights(whole, 2)
    assert final
    assert weights(tmp_path / "killed", 2) == final


@PRECISIONS
def test_the_engine_decodes_as_generate_does(
    precision: str, model: PreTrainedModel, tokenizer: Any
) -> None:
    prompts = [
        chat(tokenizer, "What is the capital of France?"),
        chat(tokenizer, "What is 7 + 5?", "7 + 5 is 12.", "And what is that plus one?"),
    ]
    said: list[str] = []
    generator = TransformersGenerator(
        model, [tokenizer.eos_token_id], say=said.append, autocast=HALF[precision]
    )
    found = generator.generate(
        [Prompt.from_ids(p) for p in prompts], 1, Sampling(max_tokens=32, temperature=0.0), [0, 0]
    )
    assert generator.decoder is Engine
    assert said == []
    for n, prompt in enumerate(prompts):
        (completion,) = found[n]
        with HALF[precision](), torch.no_grad():
            ids = model.generate(  # type: ignore[operator]
                torch.tensor([prompt]), max_new_tokens=32, do_sample=False
            )[0, len(prompt) :].tolist()
        if precision == "no":
            assert completion.ids == ids
        else:  # two tokens may be nearly as likely
            assert completion.ids[:4] == ids[:4]


def test_the_engine_reports_the_log_probabilities_of_the_model(
    model: PreTrainedModel, tokenizer: Any
) -> None:
    prompts = [Prompt.from_ids(chat(tokenizer, f"Tell me about the number {n}.")) for n in (3, 41)]
    generator = TransformersGenerator(model, [tokenizer.eos_token_id], say=pytest.fail)
    found = generator.generate(prompts, 4, Sampling(max_tokens=48), [1, 2])
    rollouts = [Rollout(p, c, "") for n, p in enumerate(prompts) for c in found[n]]
    with torch.no_grad():
        own, _ = PolicyLogprobs(model, packed=False, chunked=False)(rollouts, 1.0)
    for r, row in zip(rollouts, own, strict=True):
        reported = torch.tensor(r.completion.sampling_logprobs)
        assert (row[: len(reported)] - reported).abs().max() < 1e-3


def test_a_stop_string_ends_a_completion(model: PreTrainedModel, tokenizer: Any) -> None:
    prompt = Prompt.from_ids(chat(tokenizer, "Count from one to ten."))
    generator = TransformersGenerator(
        model, [tokenizer.eos_token_id], tokenizer=tokenizer, say=pytest.fail
    )
    sampling = Sampling(max_tokens=64, temperature=0.0, stop=("3",))
    completions: list[Completion] = generator.generate([prompt], 1, sampling, [0])[0]
    text = tokenizer.decode(completions[0].ids)
    assert text.rstrip().endswith("3"), text
    assert completions[0].finish_reason == "stop"


@pytest.mark.parametrize("precision", check_self_checks.PRECISIONS[:3])
@pytest.mark.parametrize("computation", check_self_checks.COMPUTATIONS)
def test_self_checks_accept_what_is_right(
    computation: str, precision: str, model: PreTrainedModel, groups: list[list[Rollout]]
) -> None:
    own = check_self_checks.in_precision(model, precision)
    for rollouts in check_self_checks.draws_of(groups, 5, seed=3):
        assert check_self_checks.reason(computation, precision, own, rollouts) == ""


@PRECISIONS
def test_an_adapter_is_trained_exported_and_generates(precision: str, tmp_path: Path) -> None:
    said = train(tmp_path / "run", "adapter=lora", f"mixed_precision={precision}")
    assert "note:" not in said, said
    grpo("export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([chat(tokenizer, "What is the capital of France?")])
    text = tokenizer.decode(merged.generate(ids, max_new_tokens=16, do_sample=False)[0])
    assert "Paris" in text


@FLOAT32
def test_a_run_of_two_processes_and_its_evaluation(
    straight: Callable[[str], Path], tmp_path: Path
) -> None:
    said = train(tmp_path / "two", processes=2)
    assert "note:" not in said, said
    one, two = metrics(straight("no"))[0], metrics(tmp_path / "two")[0]
    assert two["reward"] == pytest.approx(one["reward"], abs=1e-6), "the same completions"
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
    assert "accuracy" in grpo("eval", str(tmp_path / "two"))
