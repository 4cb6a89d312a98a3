"""Makes the plan of a recipe, and records a run's measurements beside it (plan.json)."""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo_cli import data
from grpo_cli.config import parsing, sources
from grpo_cli.config.schema import Recipe
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import UserError
from grpo_cli.models import loading, tiny
from grpo_cli.planning import devices
from grpo_cli.planning.memory import Job, Lengths
from grpo_cli.planning.plan import Plan, predict, rounded
from grpo_cli.planning.sizes import sizes_of
from grpo_cli.records import Prompt
from grpo_cli.reporting.memory_meter import MemoryMeter
from grpo_cli.reporting.stage_clock import STAGES
from grpo_cli.reporting.status import write_text
from grpo_cli.training import prepare

NAME = "plan.json"
SOME_ROWS = 200  # rows whose prompts are measured
STEPS = 200  # newest steps of a run that the statistics cover


def plan_of(
    recipe: Recipe,
    gpu: str | None = None,
    gpus: int = 1,
    mean_tokens: float | None = None,
    prompt_tokens: int | None = None,
) -> tuple[Plan, list[str]]:
    """Returns the plan of a recipe and notes on its assumptions, without loading a model.

    Args:
        gpu: name or GB of a GPU; None: this machine.
        mean_tokens: mean length of completions; None: all have the maximal length.
        prompt_tokens: length of a prompt; None: the mean of the training rows, if local.

    Raises:
        UserError: the model's config cannot be read, or the GPU is not listed.
    """
    notes: list[str] = []
    rows, tokenizer = local_rows(recipe), None
    if (build := recipe.model.build) is not None:
        read = data.solution_pairs(rows, recipe.dataset) if rows and build.merges else ()
        pairs = [tiny.Pair(*pair) for pair in read]
        tokenizer = tiny.tokenizer_of(build, pairs)
        config = tiny.config_of(build, len(tokenizer), tokenizer.eos_token_id)  # no vision tower
    else:
        config = config_of(recipe)
    dtype = getattr(torch, recipe.arithmetic_dtype)
    if gpu is None:
        workers = Workers(recipe.device, recipe.mixed_precision)
        device = devices.of_machine(workers.device, dtype)
    else:
        device = devices.named(gpu, dtype, gpus)
    prompt: float = prompt_tokens or measured_prompt(recipe, rows, tokenizer, notes)
    if rows is not None:
        recipe = parsing.with_steps(recipe, len(rows.rows))
    elif recipe.epochs is not None:
        notes.append(f"epochs: the rows are not here; steps = {recipe.steps:,} is assumed")
    longest = recipe.generation.max_completion_tokens
    lengths = Lengths(prompt, min(mean_tokens or longest, longest), longest)
    plan = predict(Job(recipe, sizes_of(config, recipe), device, gpus, lengths))
    return plan, [*notes, *left_out(plan)]


def config_of(recipe: Recipe) -> PretrainedConfig:
    """Returns the config of the model that the recipe names.

    Raises:
        UserError: it cannot be read, in the folder or from the hub.
    """
    path = recipe.model.path
    assert path is not None, "checked when the recipe was parsed"
    base, source = loading.base_of(recipe.model, path)
    try:
        return loading.read_config(base, source)
    except loading.FAILURES as error:
        instead = "give a folder that holds the file"
        if not sources.is_local(source):
            instead = (
                f"run `hf download {source} config.json` where there is a network, or {instead}"
            )
        raise UserError(
            f"model.path = {path}: its config.json, which is all that a plan reads, cannot be "
            f"read; {instead}."
        ) from error


def local_rows(recipe: Recipe) -> data.Rows | None:
    """Returns the training rows if they are local files; None if they are on the hub."""
    parts = [part.data for part in recipe.dataset.mixture.values()]
    named = parts or [recipe.dataset.train or ""]
    if recipe.dataset.streaming or not all(map(sources.is_local, named)):
        return None
    train, _ = prepare.train_rows_of(recipe)
    return next(iter(train.values())).rows


def measured_prompt(
    recipe: Recipe,
    rows: data.Rows | None,
    tokenizer: PreTrainedTokenizerBase | None,
    notes: list[str],
) -> float:
    """Returns the mean length of the first prompts; the limit without rows or tokenizer."""
    most = recipe.dataset.max_prompt_tokens
    try:
        if rows is None:
            raise UserError("the rows are not here")
        if tokenizer is None:
            assert recipe.model.path is not None
            _, tokenizer = loading.load_config(recipe.model, recipe.model.path)
        some = replace(rows, rows=[rows.rows[i] for i in range(min(SOME_ROWS, len(rows.rows)))])
        prompts, _ = data.make_prompts(
            some, recipe.dataset, tokenizer, template_kwargs=recipe.model.chat_template_kwargs
        )
    except UserError:
        notes.append(
            f"prompts are assumed to be as long as dataset.max_prompt_tokens = {most}, since rows "
            "or tokenizer are not here; prompt_tokens=N says otherwise"
        )
        return most
    return statistics.fmean(len(p.ids) for p in prompts)


def left_out(plan: Plan) -> list[str]:
    """Returns one sentence for each thing that the plan leaves out."""
    recipe = plan.job.recipe
    found = ["rewards, environments, evaluations, images and checkpoints take no time or memory"]
    if plan.job.sizes.activations is None:
        found.append("activations of this model are unknown; a run of one step measures them")
    if recipe.has_episodes:
        found.append("an episode counts as one completion of generation.max_completion_tokens")
    if recipe.generation.vllm.prefetch_steps:
        found.append("sampling and updates are added up, though they overlap with prefetch_steps")
    if recipe.generation.dynamic_sampling:
        found.append("dynamic sampling samples more prompts than it counts")
    return found


class PlanRecord:
    """This process's measurements of a run's memory and time, with the plan beside them.

    plan.json is {"measured": ..., "predicted": ...}, written with each checkpoint and at the end.
    The prediction is for the measured lengths and groups with a gradient. "unpredicted" replaces it
    with the reason if the model cannot be planned.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        config: PretrainedConfig,
        workers: Workers,
        prompts: Sequence[Prompt],
    ) -> None:
        dtype = getattr(torch, recipe.arithmetic_dtype)
        self.path, self.recipe, self.config = folder / NAME, recipe, config
        self.device = devices.of_machine(workers.device, dtype)
        self.processes = workers.size
        self.prompt_tokens = statistics.fmean(len(p.ids) for p in prompts)
        self.meter = MemoryMeter(workers.device)
        self.metrics: deque[Mapping[str, float]] = deque(maxlen=STEPS)  # of the newest steps

    def write(self, micro_tokens: int | None) -> None:
        """Writes plan.json once a step is complete; a full disk does not end the run.

        Args:
            micro_tokens: the derived number of tokens in a micro-batch.
        """
        if not self.metrics:
            return
        measured = self._measured(micro_tokens)
        lengths = Lengths(
            self.prompt_tokens,
            max(measured["completion_tokens"], 1.0),
            max(measured["longest_tokens"], 1),
            measured["signal"],
        )
        written: dict[str, Any] = {"measured": measured}
        try:
            sizes = sizes_of(self.config, self.recipe)
            plan = predict(Job(self.recipe, sizes, self.device, self.processes, lengths))
            written["predicted"] = plan.as_json()
        except Exception as error:  # from a model's own code, which must not end the run
            written["unpredicted"] = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            write_text(self.path, json.dumps(written, indent=2) + "\n")

    def _measured(self, micro_tokens: int | None) -> dict[str, Any]:
        steps = list(self.metrics)
        steps = steps[1:] if len(steps) > 1 else steps  # the first also sets up and checks

        def median(name: str) -> float:
            return rounded(statistics.median(m.get(name, 0.0) for m in steps))

        def mean(name: str) -> float:
            return statistics.fmean(m.get(name, 0.0) for m in steps)

        memory = {stage: self.meter.peaks[stage] for stage in STAGES if stage in self.meter.peaks}
        time = {s: median(f"time/{s}") for s in STAGES if f"time/{s}" in steps[0]}
        return {
            "memory": memory,
            "peak": max(memory.values(), default=None),
            "peak_stage": max(memory, key=lambda stage: memory[stage], default=None),
            "time": {stage: seconds for stage, seconds in time.items() if seconds},
            "step_seconds": median("step_time"),
            "run_seconds": rounded(self.recipe.steps * median("step_time")),
            "tokens_per_step": rounded(
                statistics.median(m["step_time"] * m["tokens_per_second"] for m in steps)
            ),
            "tokens_per_micro_batch": micro_tokens,
            "completion_tokens": rounded(mean("completions/mean_length")),
            "longest_tokens": round(max(m.get("completions/max_length", 0.0) for m in steps)),
            "signal": rounded(max(1 - mean("frac_reward_zero_std"), 0.01)),
            "steps_measured": len(steps),
        }
