"""Finds contradictions in a recipe whose values are all of the right type."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator

from grpo_cli.config.interpolation import as_text, plain_secrets
from grpo_cli.config.keys import ENTRIES, KNOBS
from grpo_cli.config.knob import value_at
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.settings import NOT_STREAMED, HeldOut
from grpo_cli.errors import listed, nearest
from grpo_cli.evaluation.settings import Eval
from grpo_cli.models.settings import ADAM, BUILT_CONTEXT, OF_WEIGHTS
from grpo_cli.rewards import WITH_AN_ANSWER, has_votes

EXAMPLE = """A run needs a model, rows and a reward:

  grpo train model.path=HuggingFaceTB/SmolLM2-135M-Instruct dataset.train=rows.jsonl reward=[math]

or the same in a file, my.yaml, for `grpo train my.yaml`:

  defaults: [chat, _self_]
  model: {path: HuggingFaceTB/SmolLM2-135M-Instruct}
  dataset: {train: rows.jsonl, test_split_size: 0.1}
  reward: {mine: {function: my_rewards:mine}}

`grpo rewards` and `grpo recipes` list what ships; recipe=arithmetic_tiny needs nothing else."""


def contradictions(recipe: Recipe, given: Collection[str]) -> Iterator[str]:
    """Yields messages about values that would be ignored or would fail much later.

    Args:
        given: full keys set on the command line.
    """
    yield from _missing(recipe)
    yield from _of_sections(recipe)
    if recipe.model.dtype != "auto":  # "auto" is checked once it is resolved
        yield from of_dtype(recipe)
    yield from _of_generation(recipe)
    yield from _of_model(recipe)
    yield from _of_episodes(recipe)
    yield from _of_training(recipe, given)
    yield from _of_evaluation(recipe, given)
    yield from _of_hub(recipe)
    yield from _no_votes(recipe)
    yield from _no_such_metric(recipe)


def _of_sections(recipe: Recipe) -> Iterator[str]:
    """Yields the messages of the sections and entries that check themselves."""
    yield from recipe.problems()
    for key, f in KNOBS.items():
        if f.metadata["kind"] and hasattr(section := value_at(recipe, key), "problems"):
            yield from section.problems()
    for mapping in ENTRIES:
        for name, entry in value_at(recipe, mapping).items():
            if hasattr(entry, "problems"):
                yield from entry.problems(f"{mapping}.{name}")


def _missing(recipe: Recipe) -> Iterator[str]:
    """Yields one message about the model, the rows and the reward that the recipe lacks."""
    model, dataset = recipe.model, recipe.dataset
    has_rows = dataset.train or dataset.mixture or dataset.eval or dataset.held_out
    lacks = {
        "model.path": model.path is None and model.build is None,
        "dataset.train": not has_rows and not recipe.benchmark,
        "reward": not recipe.reward and not recipe.benchmark,
    }
    if missing := [key for key, lacking in lacks.items() if lacking]:
        yield f"missing: {', '.join(missing)}. {EXAMPLE}"


def of_dtype(recipe: Recipe) -> Iterator[str]:
    """Yields contradictions between a recipe and the resolved data type of the weights."""
    alpha, dtype = recipe.loss.reference_alpha, recipe.model.dtype
    if alpha < 1 and dtype != "float32":
        yield (
            f"loss.reference_alpha = {alpha}: small steps of a mixed reference are lost in "
            f"model.dtype = {dtype}; use float32, or 1.0."
        )


def _of_generation(recipe: Recipe) -> Iterator[str]:
    generation = recipe.generation
    limits = {
        "generation.max_completion_tokens": generation.max_completion_tokens,
        "eval.max_completion_tokens": recipe.eval.max_completion_tokens,
    }
    for name, benchmark in recipe.benchmark.items():
        limits[f"benchmark.{name}.max_completion_tokens"] = benchmark.max_completion_tokens
    for key, limit in limits.items():
        if limit is not None and generation.min_completion_tokens > limit:
            yield (
                f"generation.min_completion_tokens = {generation.min_completion_tokens}: must be "
                f"<= {key} = {limit}."
            )
            break


def _of_model(recipe: Recipe) -> Iterator[str]:
    model, dataset = recipe.model, recipe.dataset
    has_vllm = recipe.generation.engine.startswith("vllm")
    if model.path is not None and model.build is not None:
        yield (
            f"model.path = {model.path}: {recipe.recipe} is for the small model that it builds; "
            f"write recipe=chat model.path={model.path}, with dataset.train and a reward."
        )
    if model.freeze and recipe.adapter.method != "none":
        yield (
            f"model.freeze = {model.freeze}: an adapter leaves all weights of the model as they "
            "are; adapter.target_modules says where it is; set model.freeze=[]."
        )
    if model.build is not None:
        if model.build.warmup_steps and dataset.streaming:
            yield f"model.build.warmup_steps: {NOT_STREAMED}"
        if model.build.warmup_steps and dataset.solution is None:
            yield (
                "model.build.warmup_steps: the warm-up needs dataset.solution, a template over the "
                'row\'s columns such as "{solution}"; or set it to 0.'
            )
        longest = dataset.max_prompt_tokens + recipe.generation.max_completion_tokens
        if longest > BUILT_CONTEXT:
            yield (
                f"dataset.max_prompt_tokens + generation.max_completion_tokens = {longest}: must "
                f"be <= {BUILT_CONTEXT}, the longest sequence of a model that is built."
            )
    if model.tokenizer is not None and has_vllm:
        yield (
            f"model.tokenizer = {model.tokenizer}: vLLM reads the tokenizer from the model's "
            "folder; save it there, or use generation=transformers."
        )
    for name in model.args if has_vllm else ():
        if name not in {*OF_WEIGHTS, *model.refused_args}:
            yield (
                f"model.args.{name}: is not read by generation.engine = "
                f"{recipe.generation.engine}, which would sample from another model than is "
                "trained; use generation=transformers, or store the changed config with the model."
            )
    if model.quantization != "none" and recipe.distributed.strategy == "fsdp2":
        yield (
            f"model.quantization = {model.quantization}: quantized weights cannot be sharded "
            f"(distributed.strategy = fsdp2); use distributed=ddp, or model.quantization=none."
        )
    if recipe.adapter.sync == "adapter" and recipe.adapter.method == "none" and has_vllm:
        yield "adapter.sync = adapter: there is no adapter; choose one, such as adapter=lora."
    if recipe.adapter.sync == "adapter" and recipe.model.quantization != "none":
        yield (
            f"adapter.sync = adapter: with model.quantization = {recipe.model.quantization} vLLM "
            "would apply the adapter to weights that are not quantized; use adapter.sync=merge, "
            "which sends merged weights."
        )


def _of_episodes(recipe: Recipe) -> Iterator[str]:
    given = recipe.environment.given
    if recipe.rollout is not None and given:
        yield (
            f"rollout together with {listed(given)}: the rollout function makes complete "
            "rollouts; set one of them."
        )
    if not recipe.has_episodes:
        return
    if recipe.has_environment and not recipe.dataset.chat:
        yield (
            "dataset.chat = false: tools and environments take turns with the model in a "
            "conversation; set dataset.chat=true."
        )
    if recipe.dataset.final_assistant == "continue":
        yield (
            "dataset.final_assistant = continue: an episode begins with a turn of the model; use "
            "drop or refuse."
        )
    turn_tokens, limit = recipe.episode.turn_tokens, recipe.generation.max_completion_tokens
    if turn_tokens is not None and turn_tokens > limit:
        yield (
            f"episode.turn_tokens = {turn_tokens}: must be <= generation.max_completion_tokens = "
            f"{limit}, the limit of all turns and replies together."
        )


def _of_training(recipe: Recipe, given: Collection[str]) -> Iterator[str]:
    yield from _of_length(recipe, given)
    yield from _of_mixture(recipe)
    if recipe.reward and not any(r.weight for r in recipe.reward.values()):
        yield "reward: every weight is 0, so there is nothing to learn from."
    if recipe.eval.accuracy is not None and recipe.eval.accuracy not in recipe.reward:
        yield (
            f"eval.accuracy = {recipe.eval.accuracy!r}: must be one of the recipe's rewards, "
            f"{listed(recipe.reward)}."
        )
    # The recipe's own values are allowed, so that it can be tried with another optimizer.
    if recipe.optimizer.algorithm not in ADAM and "optimizer.betas" in given:
        yield (
            f"optimizer.betas: is only read with optimizer.algorithm = {' or '.join(ADAM)}; "
            f"it is {recipe.optimizer.algorithm}."
        )
    if recipe.update.minibatches > recipe.prompts_per_step:
        yield (
            f"update.minibatches = {recipe.update.minibatches}: must be <= prompts_per_step = "
            f"{recipe.prompts_per_step}, since a minibatch holds whole groups."
        )
    if recipe.stop.max_kl is not None and not recipe.needs_reference:
        yield "stop.max_kl: there is no KL without a reference; set loss.beta above 0."


def _of_mixture(recipe: Recipe) -> Iterator[str]:
    parts = recipe.dataset.mixture
    named = [(name, one) for name, reward in recipe.reward.items() for one in reward.datasets]
    for name, one in named if parts else ():
        if one not in parts:
            yield (
                f"reward.{name}.datasets: {one!r} is not a data set of dataset.mixture; there are "
                f"{listed(parts)}.{nearest(one, parts)}"
            )


def _of_length(recipe: Recipe, given: Collection[str]) -> Iterator[str]:
    """Yields contradictions with `epochs`; the recipe's own `steps` are not checked."""
    if recipe.epochs is None:
        return
    if {"steps", "epochs"} <= set(given):
        yield f"steps = {recipe.steps} and epochs = {recipe.epochs:g}: set only one of them."
    elif "steps" in given:
        yield (
            f"steps = {recipe.steps}: epochs = {recipe.epochs:g} of the recipe decides the number "
            "of steps; add epochs=null."
        )
    if recipe.dataset.streaming:
        yield (
            f"epochs = {recipe.epochs:g}: nobody knows the length of a stream before its end; set "
            "steps, or dataset.streaming=false."
        )
    if recipe.generation.dynamic_sampling:
        yield (
            f"epochs = {recipe.epochs:g}: with generation.dynamic_sampling a step takes as many "
            "prompts as it needs, so that epochs give no number of steps; set steps."
        )


def _of_evaluation(recipe: Recipe, given: Collection[str]) -> Iterator[str]:
    config, size = recipe.eval, recipe.dataset.test_split_size
    sets = recipe.dataset.held_out
    has_rows = recipe.dataset.eval is not None or recipe.benchmark or size is not None or sets
    if config.every and not has_rows:
        yield (
            f"eval.every = {config.every}: needs held-out rows; set dataset.eval, "
            "dataset.test_split_size or benchmark, or eval.every=0."
        )
    for name, held in sets.items():
        yield from _of_held_out(f"dataset.held_out.{name}", held, recipe)
    for mode, (name, one) in itertools.product(config.mode, recipe.benchmark.items()):
        if mode not in (prompts := one.prompts):
            yield (
                f"eval.mode = {mode}: benchmark.{name} has no prompt for it; it has "
                f"{listed(prompts)}. Set benchmark.{name}.modes.{mode}.prompt."
                f"{nearest(mode, prompts)}"
            )
    if config.num_samples > 1 and recipe.evaluation_temperature == 0:
        section = "generation" if config.sampling == "training" else "eval"
        yield (
            f"eval.num_samples = {config.num_samples}: greedy completions are all the same; "
            f"set {section}.temperature above 0."
        )
    given_top_p = config.top_p < 1 or "eval.top_p" in given
    if given_top_p and config.sampling == "training":
        yield (
            f"eval.top_p = {config.top_p:g}: is only read with eval.sampling = own; it is training."
        )
    elif given_top_p and config.drawn_at == 0:
        yield f"eval.top_p = {config.top_p:g}: is only read when eval.temperature is above 0."
    if not recipe.benchmark and (config.mode != Eval().mode or config.limit is not None):
        key = "mode" if config.mode != Eval().mode else "limit"
        instead = "" if key == "mode" else "; dataset.eval_limit=N takes the first held-out rows"
        yield f"eval.{key}: is only read for benchmarks; add benchmark=NAME{instead}."


def _of_hub(recipe: Recipe) -> Iterator[str]:
    hub = recipe.hub
    if hub.repo is None:
        return
    if recipe.checkpoint.model == "never":
        yield f"checkpoint.model = never: hub.repo = {hub.repo} needs a model folder; use auto."
    if hub.strategy == "checkpoint":
        for key in plain_secrets(as_text(dataclasses.asdict(recipe))):
            yield (
                f"{key}: is a secret written as text, and hub.strategy = checkpoint pushes the "
                "recipe; write ${oc.env:NAME}, which stays this text."
            )


def _of_held_out(key: str, held: HeldOut, recipe: Recipe) -> Iterator[str]:
    for name in held.rewards:
        if name not in recipe.reward:
            yield (
                f"{key}.rewards: {name!r} is none of the recipe's rewards, {listed(recipe.reward)}."
                f"{nearest(name, recipe.reward)}"
            )
    judges = held.rewards or list(recipe.reward)
    if held.accuracy is not None and held.accuracy not in judges:
        yield f"{key}.accuracy = {held.accuracy!r}: must be one of its rewards, {listed(judges)}."


def _no_votes(recipe: Recipe) -> Iterator[str]:
    """Yields a message if votes are requested without answers to vote on."""
    config, rewards = recipe.eval, {name: b.reward for name, b in recipe.benchmark.items()}
    if not rewards and recipe.reward:
        name = recipe.accuracies[0]
        rewards = {"the held-out rows": recipe.reward[name].function}
    voteless = [name for name, reward in rewards.items() if not has_votes(reward)]
    only_votes = config.metric == ["maj"] or len(voteless) == len(rewards)
    if "maj" in config.metric and voteless and only_votes:
        yield (
            f"eval.metric = maj: completions of {listed(voteless)} have no final answers to vote "
            f"on; the rewards that judge such are {listed(WITH_AN_ANSWER)}."
        )


def _no_such_metric(recipe: Recipe) -> Iterator[str]:
    """Yields a message if `eval.best` names a metric that no evaluation has."""
    config, name = recipe.eval, recipe.eval.best
    first, _, rest = name.rpartition("/")
    known = ["accuracy", "reward", "mean_length", "clipped_ratio", "no_answer", "completions"]
    named = recipe.benchmark or recipe.dataset.held_out
    if config.num_samples > 1:
        known += [f"{kind}@{config.num_samples}" for kind in ("mean", "pass", "maj")]
    free = "rewards/" in name or "clip_ratio" in name or "tool_" in name or name.count("/") > 1
    is_sampled = config.num_samples > 1 and rest.startswith(("mean@", "pass@", "maj@"))
    if not free and not is_sampled and rest not in known:
        yield f"eval.best = {name}: there is no such number; there are {listed(known)}."
    elif first and not free and first not in named:
        kind = "held-out set" if recipe.dataset.held_out and not recipe.benchmark else "benchmark"
        yield f"eval.best = {name}: {first} is no {kind} of the recipe; there are {listed(named)}."
