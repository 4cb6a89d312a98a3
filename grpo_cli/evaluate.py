"""Held-out evaluation: complete every row, score, and say how sure the accuracy is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_cli.config import Recipe
from grpo_cli.distributed import Workers
from grpo_cli.generation import Generator, sample
from grpo_cli.metrics import mean
from grpo_cli.registry import TrainerState
from grpo_cli.rollouts import Group, Prompt, Rollout, derive_seed
from grpo_cli.sampling import Sampling
from grpo_cli.scoring import Scorer, metrics_of

Z_95 = 1.959964  # 97.5 % point of the normal distribution
STREAM = -1  # apart from the streams of training, which are numbered by position


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found, the same on every process."""

    metrics: dict[str, float]  # eval/accuracy, eval/reward, ...
    rows: list[dict[str, Any]]  # one for each completion, in the order of the data
    name: str  # of the held-out data, short


@dataclass(frozen=True)
class Evaluator:
    """Evaluates whatever `generator` samples from."""

    recipe: Recipe
    workers: Workers
    tokenizer: PreTrainedTokenizerBase
    generator: Generator
    scorer: Scorer
    prompts: Sequence[Prompt]

    def run(
        self,
        progress: Callable[[int, str], None] = lambda done, text: None,
        state: TrainerState | None = None,
    ) -> Evaluation:
        """Completes and scores every held-out row; rows are divided over the processes.

        Args:
            state: what functions are told of the run, where there is one.
            progress: called with (rows done, a word about them).

        Raises:
            TrainingError: a reward function failed.
        """
        config, generation = self.recipe.eval, self.recipe.generation
        sampling = Sampling(
            max_tokens=config.max_completion_tokens or generation.max_completion_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            repetition_penalty=generation.repetition_penalty,
            min_tokens=generation.min_completion_tokens,
            stop=tuple(generation.stop),
        )
        sheet = self.scorer.begin(state)
        own = list(enumerate(self.prompts))[self.workers.rank :: self.workers.size]
        done = 0

        def arrived(rollouts: list[Rollout]) -> None:
            nonlocal done
            done += 1
            progress(min(done * self.workers.size, len(self.prompts)), "rows completed")
            sheet.add(rollouts)

        groups = sample(
            self.generator,
            self.tokenizer,
            own,
            config.num_samples,
            sampling,
            derive_seed(self.recipe.seed, STREAM),
            arrived,
        )
        with self.workers.together():
            sheet.finish([r for g in groups for r in g.rollouts], self.tokenizer)
        of_rewards = {
            f"eval/{key}": value
            for key, value in metrics_of([sheet], self.workers).items()
            if not key.startswith("time/")
        }
        everyones = [g for part in self.workers.gather(groups) for g in part]
        everyones.sort(key=lambda g: g.position)
        name = config.accuracy or next(iter(self.recipe.reward))
        return Evaluation(
            metrics=summarize(everyones, name) | of_rewards,
            rows=[row for g in everyones for row in _rows(g, name)],
            name=Path(self.recipe.dataset.eval or "").name.split(".")[0],
        )


def summarize(groups: Sequence[Group], accuracy: str) -> dict[str, float]:
    """Metrics of an evaluation; `accuracy` is the reward of which 1 counts as correct."""
    rollouts = [r for g in groups for r in g.rollouts]
    shares = [mean([float(r.reward_parts[accuracy] == 1) for r in g.rollouts]) for g in groups]
    low, high = interval_95(shares, single=all(len(g.rollouts) == 1 for g in groups))
    metrics = {
        "eval/accuracy": mean(shares),
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/reward": mean([r.reward for r in rollouts if not math.isnan(r.reward)]),
        "eval/mean_length": mean([len(r.completion.ids) for r in rollouts]),
        "eval/clipped_ratio": mean(
            [float(r.completion.finish_reason == "length") for r in rollouts]
        ),
    }
    for name in rollouts[0].reward_parts:
        values = [v for r in rollouts if (v := r.reward_parts[name]) is not None]
        metrics[f"eval/rewards/{name}/mean"] = mean(values)
    return metrics


def interval_95(shares: Sequence[float], single: bool) -> tuple[float, float]:
    """95 % interval of the mean share of correct completions over n problems.

    Args:
        shares: each problem's share, in [0, 1]. single: one completion a problem, so that shares
            are 0 or 1; then Wilson's interval (Wilson 1927), which holds at 0 and 1 too. Otherwise
            the normal interval over problems, since completions of one problem hang together.
    """
    n, p = len(shares), mean(shares)
    if single:
        centre = (p + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
        half = Z_95 / (1 + Z_95**2 / n) * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n**2))
        return max(0.0, centre - half), min(1.0, centre + half)
    if n < 2:
        return 0.0, 1.0
    variance = math.fsum((s - p) ** 2 for s in shares) / (n - 1)
    half = Z_95 * math.sqrt(variance / n)
    return max(0.0, p - half), min(1.0, p + half)


def _rows(group: Group, accuracy: str) -> list[dict[str, Any]]:
    return [
        {
            "row": group.prompt.row,
            "sample": i,
            "prompt": group.prompt.text,
            "completion": r.text,
            "correct": r.reward_parts[accuracy] == 1,
            "reward": None if math.isnan(r.reward) else r.reward,
            "rewards": r.reward_parts,
            "extras": r.extras,
            "finish_reason": r.completion.finish_reason,
            "columns": group.prompt.columns,
            "prompt_ids": group.prompt.ids,
            "completion_ids": r.completion.ids,
            "sampling_logprobs": r.completion.logprobs,
        }
        for i, r in enumerate(group.rollouts)
    ]
