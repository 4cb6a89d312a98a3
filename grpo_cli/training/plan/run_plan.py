"""Makes the plan of a recipe: from its model's config, and rates of a GPU or of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import psutil
import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo_cli import data
from grpo_cli.config import parsing, sources
from grpo_cli.config.schema import Recipe
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.generation.embedded.products import is_faster_here
from grpo_cli.models import loading, tiny
from grpo_cli.models.attention import UnsupportedModelError
from grpo_cli.models.flops import peak_flops
from grpo_cli.models.memory import free_memory
from grpo_cli.planning import devices
from grpo_cli.planning.devices import Device
from grpo_cli.planning.plan import Change, Extent, Plan, changes, kept_checkpoints, predict
from grpo_cli.planning.seconds import Speeds, listed_speeds
from grpo_cli.planning.settings import Settings
from grpo_cli.planning.shapes import Shape
from grpo_cli.training import prepare

SOME_ROWS = 200  # of the data, whose prompts are measured


@dataclass(frozen=True)
class Request:
    """The figures that a plan is made for; None where it finds its own."""

    gpu: str | None = None  # a listed GPU; None: this machine
    gpus: int = 1
    nodes: int = 1
    mean_tokens: float | None = None
    longest_tokens: int | None = None
    prompt_tokens: int | None = None
    signal: float = 1.0
    utilisation: float | None = None


@dataclass(frozen=True)
class Planned:
    """A plan with what was assumed for it and what would lower its peak."""

    recipe: Recipe
    plan: Plan
    changes: Sequence[Change]
    notes: Sequence[str]


def plan_of(recipe: Recipe, request: Request) -> Planned:
    """Returns the plan of a recipe, without loading a model.

    Raises:
        UserError: the model's config cannot be read or is not described; the GPU is not listed.
    """
    notes: list[str] = []
    rows, tokenizer = local_rows(recipe), None
    if recipe.model.build is not None:
        config, tokenizer = built(recipe, rows)
    else:
        config = config_of(recipe)
    shape = Shape.of(config)
    dtype = getattr(torch, recipe.arithmetic_dtype)
    workers = None
    if request.gpu is None:
        workers = Workers(recipe.device, recipe.mixed_precision)
        device = this_device(workers.device, dtype)
    else:
        device = devices.named(request.gpu, dtype, request.nodes)
    if request.utilisation is not None:
        device = replace(device, utilisation=request.utilisation)
    prompt_tokens = request.prompt_tokens
    if prompt_tokens is None:
        prompt_tokens = measured_prompt(recipe, rows, tokenizer, notes)
    limit = recipe.generation.max_completion_tokens
    longest = min(request.longest_tokens or limit, limit)
    known: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": min(request.mean_tokens or longest, longest),
        "max_completion_tokens": longest,
        "decoded_rows": recipe.generation.max_num_seqs,
        "signal_share": request.signal,
        "prepacks": device.kind == "cpu" and is_faster_here(),
    }
    settings = settings_of(recipe, known)
    if rows is not None:
        recipe = parsing.with_steps(recipe, len(rows.rows))
    elif recipe.epochs is not None:
        notes.append(f"epochs: the rows are not here; steps = {recipe.steps:,} is assumed")
    extent = Extent(recipe.steps, kept_checkpoints(recipe))
    derive = recipe.update.tokens_per_micro_batch is None
    measured: list[Speeds] = []

    def speeds_of(shape: Shape, s: Settings, device: Device, gpus: int) -> Speeds:
        if workers is None or not can_be_timed(recipe):
            return listed_speeds(shape, s, device, gpus)
        if not measured:
            measured.append(time_model(recipe, config, s, gpus, device, workers, notes))
        return measured[0]

    plan = predict(shape, settings, device, request.gpus, extent, speeds_of, derive=derive)

    def again(changed: Settings) -> Plan:
        is_given = changed.micro_tokens != plan.settings.micro_tokens
        s = replace(changed, decoded_rows=recipe.generation.max_num_seqs)
        return predict(
            shape, s, device, request.gpus, extent, speeds_of, derive=derive and not is_given
        )

    found = changes(plan, again) if not plan.fits else []
    return Planned(recipe, plan, found, [*notes, *left_out(recipe)])


def settings_of(recipe: Recipe, known: Mapping[str, object]) -> Settings:
    """Returns the settings of a recipe whose micro-batches may still have to be derived."""
    if recipe.update.tokens_per_micro_batch is None:
        known = {**known, "micro_tokens": 1}
    return Settings.of(recipe, **known)


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
        where, instead = "the hub or its cache here", "give a folder that holds the file"
        if sources.is_local(source):
            where = "its folder"
        else:
            instead = (
                f"run `hf download {source} config.json` where there is a network, or {instead}"
            )
        raise UserError(
            f"model.path = {path}: its config.json, which is all that a plan reads, cannot be read "
            f"from {where}; {instead}."
        ) from error


def built(
    recipe: Recipe, rows: data.Rows | None
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Returns config and tokenizer of the model that the recipe builds."""
    build = recipe.model.build
    assert build is not None
    if build.vision_layers:
        raise UserError(
            "model.build.vision_layers: the parameters of a vision tower are not described, so "
            "that a model that reads images cannot be planned; its first steps show what it needs."
        )
    pairs = list(data.solution_pairs(rows, recipe.dataset)) if rows and build.merges else []
    tokenizer = tiny.tokenizer_of(build, pairs)
    return tiny.config_of(build, len(tokenizer), tokenizer.eos_token_id), tokenizer


def local_rows(recipe: Recipe) -> data.Rows | None:
    """Returns the training rows if they are files here; None if they are on the hub."""
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
) -> int:
    """Returns the mean length of some prompts; the limit of their length if they are not here."""
    most = recipe.dataset.max_prompt_tokens
    assumed = f"prompts are assumed to be as long as dataset.max_prompt_tokens = {most}"
    if rows is None:
        notes.append(f"{assumed}, since the rows are not here; prompt_tokens=N says otherwise")
        return most
    try:
        if tokenizer is None:
            assert recipe.model.path is not None
            _, tokenizer = loading.load_config(recipe.model, recipe.model.path)
        some = replace(rows, rows=[rows.rows[i] for i in range(min(SOME_ROWS, len(rows.rows)))])
        prompts, _ = data.make_prompts(
            some, recipe.dataset, tokenizer, template_kwargs=recipe.model.chat_template_kwargs
        )
    except UserError:
        notes.append(f"{assumed}, since the tokenizer is not here; prompt_tokens=N says otherwise")
        return most
    return max(round(sum(len(p.ids) for p in prompts) / len(prompts)), 1)


def this_device(device: torch.device, dtype: torch.dtype) -> Device:
    """Returns the device of this machine that a run would take."""
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        memory = float(min(free_memory(device), psutil.virtual_memory().total))
    return devices.of_machine(device, peak_flops(device, dtype), memory)


def can_be_timed(recipe: Recipe) -> bool:
    """Whether a trial with random weights tells the time of a run of this recipe."""
    return recipe.model.quantization == "none" and recipe.generation.engine == "transformers"


def time_model(
    recipe: Recipe,
    config: PretrainedConfig,
    settings: Settings,
    gpus: int,
    device: Device,
    workers: Workers,
    notes: list[str],
) -> Speeds:
    """Returns the rates of a model of this shape, timed; assumed ones if it cannot be timed."""
    from grpo_cli.training.plan.trial import Trial  # late: it imports the engine

    try:
        trial = Trial(recipe, config, workers)
        found = trial.speeds(settings, gpus, device)
    except (TrainingError, UserError, UnsupportedModelError) as error:
        notes.append(f"times are assumed, not measured: {error}")
        return listed_speeds(Shape.of(config), settings, device, gpus)
    if trial.shape.layers < trial.whole.layers:
        notes.append(
            f"timed with {trial.shape.layers} of its {trial.whole.layers} layers, and scaled"
        )
    return found


def left_out(recipe: Recipe) -> list[str]:
    """Returns what the plan of a recipe leaves out, a sentence each."""
    found = ["rewards, evaluations and the writing of checkpoints take no time in it"]
    if recipe.has_episodes:
        found.append(
            "an episode counts as one completion of generation.max_completion_tokens sampled "
            "tokens; the time of environments and tools is left out"
        )
    if recipe.generation.vllm.prefetch_steps:
        found.append("sampling and updates are added up, though they overlap with prefetch_steps")
    if recipe.generation.dynamic_sampling:
        found.append("dynamic sampling samples more prompts than it counts")
    if recipe.adapter.method in ("dora", "rslora") or recipe.adapter.modules_to_save:
        found.append("the adapter is counted as a LoRA on all linear layers")
    return found
