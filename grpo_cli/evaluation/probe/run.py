"""Runs a probe: samples completions as training does, scores them, and computes its numbers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from grpo_cli.algorithm.advantages import rule_function, settle
from grpo_cli.algorithm.variants import parameters
from grpo_cli.config.interpolation import masked
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.prompts import PromptStream
from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.workers import Workers
from grpo_cli.environments.rollouter import Rollouter
from grpo_cli.evaluation.estimates import quantile
from grpo_cli.evaluation.probe.signal import SIZES, over_prompts, signal_share, without_signal
from grpo_cli.evaluation.probe.verdict import Measured, RewardStats, Verdict, judge
from grpo_cli.generation.base import Generator
from grpo_cli.generation.sampling import Sampling
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Group, Prompt, Rollout, regrouped
from grpo_cli.scoring.bound_reward import TrainerState
from grpo_cli.scoring.scorer import Scorer, metrics_of

STREAM = "probe"  # random stream of the probe; training's are numbered by prompt index
LENGTHS = (0.1, 0.5, 0.9, 0.99)  # quantiles
FILE = "probe.json"


@dataclass(frozen=True)
class ProbeParts:
    """The objects of a run that a probe samples and scores with."""

    recipe: Recipe
    workers: Workers
    tokenizer: PreTrainedTokenizerBase
    generator: Generator
    stream: PromptStream
    scorer: Scorer
    rollouter: Rollouter = field(default_factory=Rollouter)
    state: TrainerState = field(default_factory=TrainerState)


@dataclass(frozen=True)
class ProbeResult:
    """The numbers of a probe and its verdict; the same on every process."""

    measured: Measured
    verdict: Verdict
    groups: list[Group]

    def as_json(self) -> str:
        """Returns the content of probe.json; secrets, as in a reward's arguments, are masked."""
        verdict = self.verdict
        data = {
            "can_learn": verdict.can_learn,
            "verdict": verdict.sentence,
            "findings": [asdict(finding) for finding in verdict.findings],
            **asdict(self.measured),
        }
        return masked(json.dumps(data, indent=2, ensure_ascii=False)) + "\n"


def run_probe(
    parts: ProbeParts,
    prompts: int,
    samples: int,
    *,
    progress: Callable[[int, str], None] = lambda done, text: None,
) -> ProbeResult:
    """Probes `prompts` prompts with `samples` completions each; collective.

    Args:
        progress: called with (number of prompts done, name of the phase).

    Raises:
        TrainingError: the engine, a sandbox or the event loop of a reward failed.
    """
    recipe, workers = parts.recipe, parts.workers
    chosen, own = choose_prompts(recipe, parts.stream, prompts), list[Group]()
    session = parts.scorer.begin(parts.state)
    # An error is a finding: it does not end the probe, whatever the recipe says.
    session.rewards = {name: replace(r, on_error="count") for name, r in session.rewards.items()}
    sampling, seed = Sampling.of(recipe.generation), derive_seed(recipe.seed, STREAM)
    with heartbeat.inside("probe"):
        shard = chosen[workers.rank :: workers.size]
        engine = (parts.generator, parts.tokenizer)
        with parts.rollouter.groups(*engine, shard, samples, sampling, seed) as sampled:
            for group in sampled:
                own.append(group)
                progress(min(len(own) * workers.size, len(chosen)), "prompts completed")
                session.add(group.rollouts)
        own.sort(key=lambda group: group.prompt_index)
        with workers.raise_together():
            scored = session.finish([r for g in own for r in g.rollouts], parts.tokenizer)
        own = settle(regrouped(own, scored), recipe.reward_weights, recipe.loss.mask_truncated)
        gathered = workers.gather((own, session.errors))
        counts = metrics_of([session], workers)
        groups = [group for part, _ in gathered for group in part]
        groups.sort(key=lambda g: g.prompt_index)
    errors = {name: text for _, found in reversed(gathered) for name, text in found.items()}
    measured = measure(recipe, groups, samples, counts, errors)
    return ProbeResult(measured, judge(recipe, measured), groups)


def choose_prompts(recipe: Recipe, stream: PromptStream, number: int) -> list[tuple[int, Prompt]]:
    """Chooses training prompts at random; returns (position, prompt) pairs.

    Each prompt occurs once. With streaming these are the first prompts, the only ones read.
    """
    if recipe.dataset.streaming:
        positions = list(range(min(number, len(stream.prompts))))
    else:
        total = min(recipe.steps * recipe.prompts_per_step, len(stream.prompts))
        chosen = random.Random(derive_seed(recipe.seed, STREAM))
        positions = sorted(chosen.sample(range(total), min(number, total)))
    found: dict[int, tuple[int, Prompt]] = {}
    for position in positions:
        prompt = stream.prompt_at(position)
        found.setdefault(prompt.row, (position, prompt))
    return list(found.values())


def measure(
    recipe: Recipe,
    groups: Sequence[Group],
    samples: int,
    counts: Mapping[str, float],
    errors: Mapping[str, str],
) -> Measured:
    """Computes the numbers of a probe from its scored groups.

    Args:
        counts: metrics of the scoring session, such as rewards/NAME/errors.
        errors: the first error by reward.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    completions = [r.completion for r in rollouts]
    rewards = {}
    for name in recipe.reward:
        values = reward_values(rollouts, name)
        rewards[name] = RewardStats(
            mean=fmean(values) if values else None,
            none=len(rollouts) - len(values),
            errors=int(counts.get(f"rewards/{name}/errors", 0)),
            timeouts=int(counts.get(f"rewards/{name}/timeouts", 0)),
            error=errors.get(name),
            constant=values[0] if len({*values}) == 1 else None,
            seconds=counts.get(f"time/rewards/{name}", 0.0) / len(rollouts),
        )
    right = recipe.accuracies[0]
    is_graded = not {*reward_values(rollouts, right)} <= {0.0, 1.0}
    rates, number = list[tuple[int, float]](), 0
    for g in groups:
        scored = [r.reward for r in g.rollouts if r.is_scored]
        if own := scored if is_graded else reward_values(g.rollouts, right):
            rates.append((g.prompt.row, fmean(own)))
            number += len(own)
    total = [r.reward for r in rollouts if r.is_scored]
    prompts = [
        ([signal_key(recipe, r) for r in g.rollouts], [r.excluded for r in g.rollouts])
        for g in groups
    ]
    sizes = {n for n in SIZES if n <= samples} | {min(recipe.generation.num_generations, samples)}
    lengths = sorted(c.sampled_tokens for c in completions)
    failed = [c for c in completions if c.environment_failed]
    stops = Counter(c.stop_reason for c in completions if c.stop_reason)
    return Measured(
        prompts=len(groups),
        samples=samples,
        completions=len(rollouts),
        num_generations=recipe.generation.num_generations,
        right=right,
        pass_rate=over_prompts([r for _, r in rates], number) if rates and not is_graded else None,
        reward_mean=fmean(total) if total else None,
        rates=rates,
        signal={n: signal_share(prompts, n) for n in sorted(sizes)},
        differing=sum(without_signal(*own, samples) < 1 for own in prompts),
        is_constant=len({key for keys, _ in prompts for key in keys}) == 1,
        identical=fmean(len({tuple(r.completion.ids) for r in g.rollouts}) == 1 for g in groups),
        truncated=fmean(c.finish_reason == "length" for c in completions),
        stop_reasons={name: n / stops.total() for name, n in stops.most_common()},
        failed_environments=len(failed) / len(rollouts),
        environment_error=(failed[-1].env_error or failed[-1].stop_reason) if failed else None,
        lengths={f"p{100 * q:g}": float(quantile(lengths, q)) for q in LENGTHS}
        | {"mean": sum(lengths) / len(lengths), "max": float(lengths[-1])},
        rewards=rewards,
    )


def reward_values(rollouts: Iterable[Rollout], name: str) -> list[float]:
    """Returns the values of a reward function where it applies."""
    return [v for r in rollouts if (v := r.reward_parts[name]) is not None]


def signal_key(recipe: Recipe, rollout: Rollout) -> Hashable | None:
    """Returns the reward key of a rollout; a group whose keys are equal has zero advantages.

    The key holds the reward (or each function's reward, for rules that normalise them separately)
    and the rewarded steps. It is None if no reward function applied.
    """
    if not rollout.is_scored:
        return None
    steps = tuple(
        (name, tuple(value for _, value in of)) for name, of in rollout.step_rewards.items()
    )
    if "parts" in parameters(rule_function(recipe.advantage))[0]:
        return tuple(rollout.reward_parts.items()), steps
    return rollout.outcome_reward, steps
