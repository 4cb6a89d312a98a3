"""Makes the plan of a recipe, and records a run's measurements beside it (plan.json)."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo_cli.config import parsing, sources
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.prompts import make_prompts, solution_pairs
from grpo_cli.data.rows import Rows
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import UserError
from grpo_cli.files import write_text
from grpo_cli.models import loading, tiny
from grpo_cli.planning import devices
from grpo_cli.planning.memory import Job, Lengths
from grpo_cli.planning.plan import Plan, predict
from grpo_cli.planning.sizes import sizes_of
from grpo_cli.records import Prompt
from grpo_cli.reporting.progress import STAGES
from grpo_cli.reporting.stage_clock import MemoryMeter
from grpo_cli.training import prepare

if TYPE_CHECKING:
    from grpo_cli.training.callbacks import Event
    from grpo_cli.training.run import Run

SOME_ROWS = 200  # rows whose prompts are measured
STEPS = 200  # newest steps of a run that the statistics cover


def plan_of(
    recipe: Recipe, gpu: str | None = None, gpus: int = 1, prompt_tokens: int | None = None
) -> tuple[Plan, list[str]]:
    """Returns the plan of a recipe and notes on its assumptions, without loading a model.

    Args:
        gpu: name or GB of a GPU; None: this machine.
        prompt_tokens: length of a prompt; None: the mean of the training rows, if local.

    Raises:
        UserError: the model's config cannot be read, or the GPU is not listed.
    """
    notes = ["rewards, environments, evaluations and images are not counted"]
    parts = [part.data for part in recipe.dataset.mixture.values()] or [recipe.dataset.train or ""]
    rows, dataset = None, recipe.dataset
    tokenizer: PreTrainedTokenizerBase | None = None
    if not recipe.dataset.streaming and all(map(sources.is_local, parts)):
        train = [*prepare.train_rows_of(recipe)[0].values()]
        rows, dataset = train[0].rows, train[0].dataset
        recipe = parsing.with_steps(recipe, sum(len(part.rows.rows) for part in train))
    elif recipe.epochs is not None:
        notes.append(f"epochs: the rows are not here; steps = {recipe.steps:,} is assumed")
    if (build := recipe.model.build) is not None:
        read = solution_pairs(rows, dataset) if rows and build.merges else ()
        tokenizer = tiny.tokenizer_of(build, [tiny.Pair(*pair) for pair in read])
        config = tiny.config_of(build, len(tokenizer), tokenizer.eos_token_id)  # no vision tower
    else:
        config = config_of(recipe)
    if gpu is None:
        device = devices.of_machine(Workers(recipe.device, recipe.mixed_precision).device)
    else:
        device = devices.named(gpu, getattr(torch, recipe.arithmetic_dtype))
    prompt: float | None = prompt_tokens
    if prompt is None and rows is not None:
        prompt = mean_prompt(replace(recipe, dataset=dataset), rows, tokenizer)
    if prompt is None:
        prompt = recipe.dataset.max_prompt_tokens
        notes.append(
            f"prompts are assumed to be as long as dataset.max_prompt_tokens = {prompt}, since "
            "rows or tokenizer are not here; prompt_tokens=N says otherwise"
        )
    sizes = sizes_of(config, recipe)
    if sizes.activations is None:
        notes.append("activations of this model are unknown; a run of one step measures them")
    if recipe.has_episodes:
        notes.append("an episode counts as one completion of generation.max_completion_tokens")
    longest = recipe.generation.max_completion_tokens
    return predict(Job(recipe, sizes, device, gpus, Lengths(prompt, longest, longest))), notes


def config_of(recipe: Recipe) -> PretrainedConfig:
    """Returns the config of the model that the recipe names; a UserError if it cannot be read."""
    assert recipe.model.path is not None, "checked when the recipe was parsed"
    base, source = loading.base_of(recipe.model, recipe.model.path)
    try:
        return loading.read_config(base, source)
    except loading.FAILURES as error:
        raise UserError(
            f"model.path = {source}: its config.json cannot be read; give a folder that holds it, "
            f"or run `hf download {source} config.json` where there is a network."
        ) from error


def mean_prompt(
    recipe: Recipe, rows: Rows, tokenizer: PreTrainedTokenizerBase | None
) -> float | None:
    """Returns the mean length of the first prompts; None if the tokenizer is not here."""
    some = replace(rows, rows=[rows.rows[i] for i in range(min(SOME_ROWS, len(rows.rows)))])
    try:
        if tokenizer is None:
            assert recipe.model.path is not None
            _, tokenizer = loading.load_config(recipe.model, recipe.model.path)
        prompts, _ = make_prompts(
            some, recipe.dataset, tokenizer, template_kwargs=recipe.model.chat_template_kwargs
        )
    except UserError:
        return None
    return statistics.fmean(len(p.ids) for p in prompts)


class PlanRecord:
    """Records what the main process measures of a run's memory, and the plan for it.

    plan.json is {"measured": ..., "predicted": ...}, written after each checkpoint and at the end.
    The prediction is for the measured lengths and groups with a gradient. "unpredicted" replaces it
    with the reason if the model cannot be planned.
    """

    def __init__(self, run: Run, prompts: Sequence[Prompt]) -> None:
        self.policy, self.recipe, self.path = run.policy, run.recipe, run.folder / "plan.json"
        self.device, self.processes = devices.of_machine(run.workers.device), run.workers.size
        self.prompt_tokens = statistics.fmean(len(p.ids) for p in prompts)
        self.meter = MemoryMeter(run.workers.device)
        if run.workers.is_main and run.workers.device.type == "cuda":
            run.reporter.meter = self.meter
        self.metrics: deque[Mapping[str, float]] = deque(maxlen=STEPS)  # of the newest steps

    def on_log(self, event: Event) -> None:
        if event.rank == 0:
            self.metrics.append(event.metrics)

    def on_end(self, event: Event) -> None:
        """Writes plan.json once a step is complete; a full disk does not end the run."""
        if not self.metrics:
            return
        steps = list(self.metrics)[1:] or list(self.metrics)  # the first also sets up and checks

        def mean(name: str) -> float:
            return statistics.fmean(m.get(name, 0.0) for m in steps)

        length = mean("completions/mean_length")
        signal = max(1 - mean("frac_reward_zero_std"), 0.01)
        longest = round(max(m.get("completions/max_length", 0.0) for m in steps))
        tokens = (m["step_time"] * m["tokens_per_second"] for m in steps)
        memory = {stage: self.meter.peaks[stage] for stage in STAGES if stage in self.meter.peaks}
        measured = {
            "memory": memory,
            "peak": max(memory.values(), default=None),
            "tokens_per_step": round(statistics.median(tokens)),
            "tokens_per_micro_batch": self.policy.micro_batches.budget.tokens,
            "completion_tokens": round(length, 2),
            "longest_tokens": longest,
            "signal": round(signal, 4),
            "steps_measured": len(steps),
        }
        written: dict[str, Any] = {"measured": measured}
        lengths = Lengths(self.prompt_tokens, max(length, 1.0), max(longest, 1), signal)
        try:
            sizes = sizes_of(self.policy.model.config, self.recipe)
            plan = predict(Job(self.recipe, sizes, self.device, self.processes, lengths))
            written["predicted"] = plan.as_json()
        except Exception as error:  # from a model's own code, which must not end the run
            written["unpredicted"] = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            write_text(self.path, json.dumps(written, indent=2) + "\n")

    on_checkpoint = on_end
