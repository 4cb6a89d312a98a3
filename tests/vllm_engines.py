"""What the tests with real vLLM share: tiny models on disk, recipes, `grpo serve`, grpo runs."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import string
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.workers import Workers
from grpo_cli.environments.chat import Chat
from grpo_cli.environments.chat_template import ChatTemplate
from grpo_cli.environments.loop import EpisodeLoop
from grpo_cli.environments.sessions import Sessions
from grpo_cli.environments.settings import EnvironmentSettings, EpisodeSettings
from grpo_cli.generation.base import EngineSetup, Generator, Request
from grpo_cli.generation.sampling import Sampling
from grpo_cli.generation.vllm import server_key
from grpo_cli.generation.vllm.base import VllmGenerator
from grpo_cli.models import adapters
from grpo_cli.models.policy_logprobs import PolicyLogprobs, inference
from grpo_cli.records import Completion, Prompt, Rollout
from grpo_cli.scoring.settings import Reward
from tests import programs
from tests.conftest import as_prompts
from tests.programs import free_port

CACHE = {"kv_cache_memory_bytes": 2**26}
START_SECONDS = 600  # of several servers together, on a machine that may be busy
PROMPTS = [[70 + i, 80, 90 + i % 7, 66] for i in range(12)]
LONG = [[70 + (i * j) % 60 for i in range(140)] for j in range(1, 5)]  # more than a cached block
SEEDS = list(range(100, 112))
SAMPLING = Sampling(max_tokens=24)
CPU = {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, tied: bool, positions: int = 512
) -> PreTrainedModel:
    """A random Qwen2 whose distributions are far from uniform, so that a change shows."""
    config = Qwen2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=positions, vocab_size=len(tokenizer),
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=tied, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Qwen2ForCausalLM(config)


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, **how: Any) -> Path:
    make_model(tokenizer, **how).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def recipe_for(folder: Path, engine: str, **of_vllm: Any) -> Recipe:
    recipe = Recipe(device="cpu", reward={"length": Reward(function="length")})
    recipe.model.path = str(folder)
    recipe.generation.engine = engine
    recipe.generation.max_completion_tokens = SAMPLING.max_tokens
    recipe.generation.vllm.engine_args = {**CACHE}
    for name, value in of_vllm.items():
        setattr(recipe.generation.vllm, name, value)
    return recipe


def setup_for(
    recipe: Recipe,
    model: PreTrainedModel,
    longest_prompt: int = 40,
    say: Callable[[str], None] = print,
) -> EngineSetup:
    model.name_or_path = str(recipe.model.path)
    prompts = as_prompts([*PROMPTS, [70] * longest_prompt])
    return EngineSetup(recipe, model, None, [2], Workers("cpu"), prompts, say)


def with_adapter(recipe: Recipe, model: PreTrainedModel, sync: str, **of_adapter: Any) -> None:
    """Gives recipe and model a fresh adapter, which vLLM is sent by `sync`."""
    recipe.adapter.method, recipe.adapter.sync = "lora", sync
    for name, value in {"rank": 3, **of_adapter}.items():
        setattr(recipe.adapter, name, value)
    adapters.attach(model, adapters.config_of(recipe.adapter, str(recipe.model.path), None), 0)


def move(model: PreTrainedModel, step: int) -> None:
    """An optimizer step with a large learning rate, on any loss."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    ids = torch.tensor(PROMPTS) + step
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_never_stale(generator: VllmGenerator, policy: PreTrainedModel) -> None:
    """Checks that after each of five updates an engine samples with the newest weights."""
    for step in range(1, 6):
        before = copy.deepcopy(policy)
        move(policy, step)
        metrics = generator.update_weights(policy, step)
        groups = generator.generate(as_prompts(PROMPTS), 4, SAMPLING, SEEDS)
        assert difference(policy, groups) < 1e-3
        assert difference(before, groups) > 0.05
        assert metrics["weights/check_difference"] < 1e-4
        assert all(c.sampled_at == step for group in groups for c in group)


def difference(
    model: PreTrainedModel,
    groups: Sequence[Sequence[Completion]],
    prompts: Sequence[list[int]] = PROMPTS,
) -> float:
    """Mean |log-probability that was reported − what the model says|."""
    rollouts = [
        Rollout(Prompt.from_ids(p), c, "")
        for p, group in zip(prompts, groups, strict=True)
        for c in group
    ]
    return difference_of(model, rollouts)


def difference_of(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> float:
    """The same, over the tokens that were sampled."""
    with inference(model):
        found, _ = PolicyLogprobs(model, packed=False, chunked=False)(rollouts, 1.0)
    gaps = [
        (torch.tensor(r.completion.sampling_logprobs) - row[: len(r.completion.ids)]).abs()[
            r.completion.sampled_mask
        ]
        for r, row in zip(rollouts, found, strict=True)
    ]
    return torch.cat(gaps).mean().item()


def played(
    generator: Generator, tokenizer: PreTrainedTokenizerFast, order: str = "auto"
) -> list[Rollout]:
    """Episodes of three turns and more of a random policy, whose turns end at any letter."""
    settings = EnvironmentSettings(path="tests.kill_harness:Talks")
    sampling = Sampling(90, stop=tuple(string.ascii_letters + string.digits))
    prompts = [
        Prompt(n, ids, [{"role": "user", "content": tokenizer.decode(ids)}], {})
        for n, ids in enumerate(PROMPTS)
    ]
    with contextlib.closing(Sessions(settings)) as sessions:
        chat = Chat(ChatTemplate(tokenizer, [2]))
        loop = EpisodeLoop(sessions, {"": chat}, EpisodeSettings(order=order))
        with loop.sample(generator, Request(prompts, 2, sampling, SEEDS)) as sampled:
            return [
                Rollout(p, c, "")
                for _, own, group in sampled
                for p, c in zip(own, group, strict=True)
            ]


@dataclass
class Serving:
    """A `grpo serve` under way."""

    url: str
    process: subprocess.Popen[bytes]
    output: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        """As a machine that goes down: everything at once."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    def halt(self) -> None:
        """As a machine that hangs: it takes connections and answers none."""
        self.kill(signal.SIGSTOP)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve(folder: Path | None, output: Path, *words: str) -> Serving:
    """Starts `grpo serve`; does not wait."""
    port = free_port()
    command = [sys.executable, "-m", "grpo_cli.cli", "serve", f"port={port}"]
    command += [f"engine_args.{name}={value}" for name, value in CACHE.items()]
    command += words
    if folder is not None:
        command += [f"model={folder}", "max_model_len=128"]
    with output.open("wb") as out:
        process = subprocess.Popen(command, env={**os.environ, **CPU}, stdout=out, stderr=out)
    return Serving(f"http://127.0.0.1:{port}", process, output)


def wait_until_up(servings: Sequence[Serving]) -> None:
    deadline = time.monotonic() + START_SECONDS
    for serving in servings:
        while True:
            try:
                headers = server_key.headers(server_key.read_key())
                if httpx2.get(f"{serving.url}/health", headers=headers).status_code == 200:
                    break
            except (httpx2.HTTPError, FileNotFoundError):
                pass
            said = f"\n{serving.output.read_text('utf-8', 'replace')[-3000:]}"
            assert serving.process.poll() is None, f"grpo serve has ended:{said}"
            assert time.monotonic() < deadline, f"the server was not up in time:{said}"
            time.sleep(0.3)


def grpo_train(*words: str, processes: int = 1) -> None:
    """Runs `grpo train recipe=arithmetic_tiny WORDS`, under torchrun with several processes."""
    recipe = ["recipe=arithmetic_tiny", "eval.every=0", "dataset.eval=null", "overwrite=true"]
    grpo = ["-m", "grpo_cli.cli", "train", *recipe, "log.report=false", *words]
    done = programs.run(programs.started(processes, *grpo), **CPU, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"


def run_metrics(folder: Path) -> list[dict[str, float]]:
    """A run's metrics, one dict a step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
