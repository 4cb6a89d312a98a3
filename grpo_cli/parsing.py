"""A composed config as a checked `Recipe`, and what is wrong with it in the user's words."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
    ValidationError,
)

from grpo_cli import benchmarks, data, vllm_settings
from grpo_cli.config import Benchmark, Recipe, Reward, Schedule, allowed, knobs
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.schedules import at_step

E = TypeVar("E", Reward, Benchmark, Schedule)

# What may follow the step: it acts on the objective, and nothing is built from its first value.
SCHEDULABLE = (
    "generation.temperature", "generation.top_p", "generation.top_k", "generation.min_p",
    "generation.num_generations",
    "loss.epsilon", "loss.epsilon_high", "loss.delta", "loss.ratio_cap",
    "loss.sapo_temperature_pos", "loss.sapo_temperature_neg",
    "loss.vespo_k_pos", "loss.vespo_lambda_pos", "loss.vespo_k_neg", "loss.vespo_lambda_neg",
    "loss.cov_share", "loss.cov_low", "loss.cov_high", "loss.cov_kl",
    "loss.beta", "loss.entropy_coef", "loss.top_entropy",
    "loss.sampling_cap", "loss.sampling_floor", "loss.off_policy_mask",
)  # fmt: skip
SCHEDULED_SECTIONS = {key.partition(".")[0] for key in SCHEDULABLE}


def parse(cfg: DictConfig | dict[str, Any], given: Collection[str] = ()) -> Recipe:
    """A composed config as a checked `Recipe`.

    Args:
        given: full keys set on the command line: one that nothing reads is an error even with its
            default value.

    Raises:
        UserError: an unknown key, a value of another type, a value out of its range, a knob that
            nothing reads, or values that contradict one another. Every violation is named.
    """
    try:
        # As plain values first: a config composed by Hydra lets a key added with `+` through.
        tree = OmegaConf.to_container(OmegaConf.create(cfg), resolve=True)
        typed = OmegaConf.merge(OmegaConf.structured(Recipe), OmegaConf.create(tree))
        recipe = cast(Recipe, OmegaConf.to_object(typed))
    except OmegaConfBaseException as error:
        raise UserError(explain(error) or str(error)) from error
    recipe.reward = {
        name: _entry(Reward, f"reward.{name}", value)
        for name, value in recipe.reward.items()
        if value is not None
    }
    for name, reward in recipe.reward.items():
        reward.function = reward.function or name
    recipe.benchmark = {
        name: _entry(Benchmark, f"benchmark.{name}", value)
        for name, value in recipe.benchmark.items()
        if value is not None
    }
    schedules = {k: v for k, v in _by_knob(recipe.schedules).items() if v is not None}
    recipe.schedules = {k: _entry(Schedule, f"schedules.{k}", v) for k, v in schedules.items()}
    for key, value in schedules.items():
        if "to" not in value:
            raise UserError(f"schedules.{key}.to: is missing; it is the value to end at.")
    problems = [*_range_violations(recipe), *_schedule_violations(recipe)]
    if not problems:
        problems += _contradictions_by_step(recipe)
    problems += [*_unread(recipe, given), *_unread_of_files(recipe, given)]
    problems += [*_contradictions(recipe), *_contradictions_of_evaluation(recipe, given)]
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return recipe


def _by_knob(tree: dict[str, Any]) -> dict[str, Any]:
    """Schedules by full key, from {loss: {beta: {to: 0}}} and {loss.beta: {to: 0}} alike.

    A file's dotted entry is found before what the command line adds by section, which goes on top.

    Raises:
        UserError: a key that cannot be scheduled, or one given a second time by its dotted name.
    """
    out: dict[str, Any] = {}
    entries = ((name, e) for name in tree for e in _schedule_entries({name: tree[name]}))
    for name, (key, value) in entries:
        if key not in SCHEDULABLE:
            beside = [k for k in SCHEDULABLE if k.partition(".")[0] == key.partition(".")[0]]
            raise UserError(
                f"schedules.{key}: is no scalar that can follow the step; there are "
                f"{listed(beside or SCHEDULABLE)}.{nearest_key(key, SCHEDULABLE)}"
            )
        if key in out and key == name:
            raise UserError(f"schedules.{key}: is there twice; write it by section, once.")
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = out[key] | value if both else value
    return out


def _schedule_entries(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    fields = {f.name for f in dataclasses.fields(Schedule)}
    for name, value in tree.items():
        key = prefix + str(name)
        is_entry = key in SCHEDULABLE or not isinstance(value, dict)
        if not is_entry and not (value and value.keys() <= fields):
            yield from _schedule_entries(value, key + ".")
        elif value is not None or key not in SCHEDULED_SECTIONS:  # loss=null: none of its knobs
            yield key, value


def _entry(kind: type[E], key: str, value: Any) -> E:
    """An entry of a mapping whose names are the user's own: a reward, a benchmark, a schedule."""
    fields = [f.name for f in dataclasses.fields(kind)]
    if not isinstance(value, dict):
        raise UserError(f"{key} = {value!r}: must be a mapping of {listed(fields)}.")
    if unknown := sorted(value.keys() - set(fields)):
        raise UserError(
            f"{key}.{unknown[0]}: there is no such key; a {kind.__name__.lower()} has "
            f"{listed(fields)}.{nearest(unknown[0], fields)}"
        )
    try:
        return cast(E, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), value)))
    except OmegaConfBaseException as error:
        raise UserError(f"{key}.{explain(error)}") from error


def _range_violations(node: Any, prefix: str = "") -> Iterator[str]:
    for f in dataclasses.fields(node):
        value, key = getattr(node, f.name), prefix + f.name
        if dataclasses.is_dataclass(value):
            yield from _range_violations(value, key + ".")
        elif key in ("reward", "benchmark", "schedules"):
            for name, entry in value.items():
                yield from _range_violations(entry, f"{key}.{name}.")
        else:
            for v in value if isinstance(value, list) else [value]:
                yield from _violation(key, v, f)


def _violation(key: str, value: Any, f: dataclasses.Field[Any]) -> Iterator[str]:
    meta = f.metadata
    if meta.get("choices"):
        if value not in meta["choices"]:
            hint = nearest(str(value), meta["choices"])
            yield f"{key} = {value!r}: must be {allowed(f)}.{hint}"
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        ge, gt, le, lt = (meta.get(bound) for bound in ("ge", "gt", "le", "lt"))
        inside = (
            math.isfinite(value)
            and (ge is None or value >= ge)
            and (gt is None or value > gt)
            and (le is None or value <= le)
            and (lt is None or value < lt)
        )
        if not inside:
            yield f"{key} = {value}: must be {allowed(f) or 'a finite number'}."


def value_at(recipe: Recipe, key: str) -> Any:
    """The value of a full key."""
    return functools.reduce(getattr, key.split("."), recipe)


def _schedule_violations(recipe: Recipe) -> Iterator[str]:
    fields = dict(knobs())
    for key, schedule in recipe.schedules.items():
        first = value_at(recipe, key)
        if first is None:
            yield f"schedules.{key}: {key} is null; give it the value to begin with."
        yield from _violation(f"schedules.{key}.to", schedule.to, fields[key])
        if fields[key].type == "int" and math.isfinite(schedule.to) and schedule.to % 1:
            yield f"schedules.{key}.to = {schedule.to}: must be a whole number."
        end = recipe.steps - 1 if schedule.end is None else schedule.end
        if schedule.begin >= recipe.steps:
            yield (
                f"schedules.{key}.begin = {schedule.begin}: the run ends before; must be < steps = "
                f"{recipe.steps}."
            )
        elif schedule.shape == "jump":
            if schedule.end is not None:
                yield f"schedules.{key}.end: a jump happens at `begin`; it has no end."
        elif end <= schedule.begin and recipe.steps > 1:
            yield f"schedules.{key}.end = {end}: must be after begin = {schedule.begin}."
        if key == "generation.top_k" and schedule.shape != "jump" and 0 in (first, schedule.to):
            yield f"schedules.{key}: 0 keeps all tokens and lies next to no number; use shape=jump."
    adapted = {"loss.beta": "loss.kl_target", "loss.entropy_coef": "loss.entropy_target"}
    for key, target in adapted.items():
        if key in recipe.schedules and value_at(recipe, target) is not None:
            yield f"schedules.{key}: {target} adapts it already; set one of the two."


def _unread(recipe: Recipe, given: Collection[str]) -> Iterator[str]:
    """Knobs that are set although nothing reads them with the others as they are."""
    defaults, fields = Recipe(), dict(knobs())
    for key, f in fields.items():
        if not f.metadata.get("read_if") or key.startswith("model.build."):
            continue
        if key == "model.chat_template" and recipe.benchmark:
            continue  # a benchmark's prompt is a chat too
        value, (other, *values) = value_at(recipe, key), f.metadata["read_if"]
        default = value_at(defaults, key)
        scheduled = key in recipe.schedules
        if value == default and key not in given and not scheduled:
            continue
        found = value_at(recipe, other)
        ways = [*found] if isinstance(found, list) else [found]
        choices = fields[other].metadata.get("choices")
        if choices and any(way not in choices for way in ways):
            continue  # that is the mistake
        if other in recipe.schedules:
            ways.append(recipe.schedules[other].to)
        if any(v in values if values else v not in (None, False, 0, "none") for v in ways):
            continue
        shown = f"schedules.{key}" if scheduled else f"{key} = {as_written(value)}"
        shown_other = ", ".join(map(str, found)) if isinstance(found, list) else found
        when = (
            f"{other} = {' or '.join(values)}; it is {shown_other}" if values else f"{other} is set"
        )
        word = "with" if values else "when"
        back = f" {key}={as_written(default)} takes it back." if key not in given else ""
        yield f"{shown}: is only read {word} {when}.{'' if scheduled else back}"


def as_written(value: Any) -> str:
    """A knob's value as YAML and the command line write it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unread_of_files(recipe: Recipe, given: Collection[str]) -> Iterator[str]:
    """Knobs of a hub data set, set on the command line for files, which have no such thing."""
    sources = {"train": recipe.dataset.train, "eval": recipe.dataset.eval}
    readers = {"subset": ("train", "eval"), "train_split": ("train",), "eval_split": ("eval",)}
    for name, splits in readers.items():
        read = [s for split in splits if (s := sources[split]) is not None]
        if f"dataset.{name}" in given and all(map(data.is_local, read)):
            there = f"the recipe has files: {listed(read)}" if read else "the recipe has none"
            yield (
                f"dataset.{name} = {as_written(getattr(recipe.dataset, name))}: is only read for a "
                f"hub data set; {there}."
            )
    for benchmark, entry in recipe.benchmark.items():
        for name in ("subset", "split"):
            key = f"benchmark.{benchmark}.{name}"
            if key in given and entry.data and data.is_local(entry.data):
                yield (
                    f"{key} = {as_written(getattr(entry, name))}: is only read for a hub data set; "
                    f"benchmark.{benchmark}.data is a file: {entry.data}."
                )


def _contradictions_by_step(recipe: Recipe) -> Iterator[str]:
    """Scalars that must keep an order, also where a schedule moves them."""
    # Not every one of a long run: what a schedule does between two of these it does to them too.
    some = set(range(0, recipe.steps, max(1, recipe.steps // 500))) | {recipe.steps - 1}
    some |= {s.begin for s in recipe.schedules.values()}
    for step in sorted(some) if recipe.schedules else [0]:
        now, _ = at_step(recipe, step)
        at = f" at step {step}" if recipe.schedules else ""
        loss, k, size = now.loss, now.advantage.k, now.generation.num_generations
        high = loss.epsilon if loss.epsilon_high is None else loss.epsilon_high
        problems = []
        if loss.policy == "clip_cov" and loss.cov_low >= loss.cov_high:
            problems.append(
                f"loss.cov_low = {loss.cov_low:g}: must be below loss.cov_high = "
                f"{loss.cov_high:g}{at}."
            )
        if loss.sampling_floor is not None and loss.sampling_floor > loss.sampling_cap:
            problems.append(
                f"loss.sampling_floor = {loss.sampling_floor:g}: must be <= loss.sampling_cap = "
                f"{loss.sampling_cap:g}{at}."
            )
        if loss.policy == "clipped" and loss.delta is not None and loss.delta < 1 + high:
            problems.append(
                f"loss.delta = {loss.delta:g}: must be >= 1 + epsilon_high = {1 + high:g}{at}; "
                "a lower one would also cut what positive advantages may gain."
            )
        if now.advantage.rule == "pass_at_k" and k >= size:
            problems.append(
                f"advantage.k = {k}: must be below generation.num_generations = {size}{at}; "
                "with all completions in one subset none is better than another."
            )
        if problems:
            yield from problems
            return


def _contradictions_of_objective(recipe: Recipe) -> Iterator[str]:
    loss, advantage, generation = recipe.loss, recipe.advantage, recipe.generation
    if loss.kl_bias_correction and loss.kl_in == "reward":
        yield "loss.kl_bias_correction: is only read with loss.kl_in = loss; it is reward."
    if loss.entropy_target is not None and loss.entropy_coef_min >= loss.entropy_coef_max:
        yield (
            f"loss.entropy_coef_min = {loss.entropy_coef_min}: must be below entropy_coef_max = "
            f"{loss.entropy_coef_max}, since entropy_target moves entropy_coef between them."
        )
    elif loss.entropy_target is not None and not (
        loss.entropy_coef_min <= loss.entropy_coef <= loss.entropy_coef_max
    ):
        yield (
            f"loss.entropy_coef = {loss.entropy_coef}: must lie between entropy_coef_min = "
            f"{loss.entropy_coef_min} and entropy_coef_max = {loss.entropy_coef_max}."
        )
    if loss.policy == "vespo" and loss.sampling_correction.startswith("sequence_mean"):
        yield (
            f"loss.sampling_correction = {loss.sampling_correction}: vespo's ratio is a product "
            "over tokens, which a mean by length does not correct; use a token or sequence mode."
        )
    if loss.reference_alpha < 1 and recipe.model.dtype != "float32":
        yield (
            f"loss.reference_alpha = {loss.reference_alpha}: small steps of a mixed reference are "
            f"lost in model.dtype = {recipe.model.dtype}; use float32, or 1.0."
        )
    if recipe.needs_reference and loss.kl_in == "reward" and advantage.rule in ("gdpo", "max_rl"):
        why = "takes each function's reward" if advantage.rule == "gdpo" else "needs rewards >= 0"
        yield f"loss.kl_in = reward: advantage.rule={advantage.rule} {why}; use loss.kl_in=loss."
    if generation.dynamic_sampling and (advantage.rule, advantage.baseline) == (
        "reinforce_pp",
        "none",
    ):
        yield (
            "generation.dynamic_sampling: drops groups of equal rewards, which do have a signal "
            "with advantage.baseline=none; set one of the two."
        )


def _contradictions_of_generation(recipe: Recipe) -> Iterator[str]:
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
    yield from vllm_settings.contradictions(recipe)
    if "" in generation.stop:
        yield "generation.stop: holds an empty string, which every completion contains; drop it."


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """Combinations that would be ignored or would fail much later."""
    yield from _contradictions_of_objective(recipe)
    yield from _contradictions_of_generation(recipe)
    model, dataset = recipe.model, recipe.dataset
    if model.path is None and model.build is None:
        yield "model.path: set it to a hub name or a folder, or choose model=tiny_qwen."
    if model.path is not None and model.build is not None:
        yield f"model.path = {model.path}: the recipe builds a model; add model.build=null."
    if not recipe.output_dir:
        yield "output_dir: is empty; name a folder."
    if model.build is not None:
        b = model.build
        # max: a 0 is out of range, and is reported as that
        if b.hidden_size % max(1, b.num_heads) or b.num_heads % max(1, b.num_kv_heads):
            yield (
                f"model.build: num_heads = {b.num_heads} must divide hidden_size = {b.hidden_size} "
                f"and be a multiple of num_kv_heads = {b.num_kv_heads}."
            )
        elif b.hidden_size // max(1, b.num_heads) % 2:
            yield (
                f"model.build.hidden_size = {b.hidden_size}: must be an even multiple of num_heads "
                f"= {b.num_heads}, since rotary embeddings turn pairs."
            )
        if b.warmup_steps and dataset.solution is None:
            yield (
                "model.build.warmup_steps: the warm-up needs dataset.solution, a template over the "
                'row\'s columns such as "{solution}"; or set it to 0.'
            )
        longest = dataset.max_prompt_tokens + recipe.generation.max_completion_tokens
        if longest > b.max_position_embeddings:
            yield (
                f"dataset.max_prompt_tokens + generation.max_completion_tokens = {longest}: must "
                f"be <= model.build.max_position_embeddings = {b.max_position_embeddings}."
            )
    if not recipe.reward and not recipe.benchmark:
        yield "reward: at least one is needed, such as reward=[math]; `grpo rewards` lists them."
    elif recipe.reward and not any(r.weight for r in recipe.reward.values()):
        yield "reward: every weight is 0, so there is nothing to learn from."
    if recipe.eval.accuracy is not None and recipe.eval.accuracy not in recipe.reward:
        yield (
            f"eval.accuracy = {recipe.eval.accuracy!r}: must be one of the recipe's rewards, "
            f"{listed(recipe.reward)}."
        )
    if len(recipe.optimizer.betas) != 2:
        yield f"optimizer.betas = {recipe.optimizer.betas}: must be two numbers."
    if recipe.update.minibatches > recipe.prompts_per_step:
        yield (
            f"update.minibatches = {recipe.update.minibatches}: must be <= prompts_per_step = "
            f"{recipe.prompts_per_step}, since a minibatch holds whole groups."
        )


def _contradictions_of_evaluation(recipe: Recipe, given: Collection[str]) -> Iterator[str]:
    config = recipe.eval
    if config.every and recipe.dataset.eval is None and not recipe.benchmark:
        yield (
            f"eval.every = {config.every}: needs held-out rows; set dataset.eval, or benchmark, or "
            "eval.every=0."
        )
    if config.num_samples > 1 and config.temperature == 0:
        yield (
            f"eval.num_samples = {config.num_samples}: greedy completions are all the same; "
            "set eval.temperature above 0."
        )
    if (config.top_p < 1 or "eval.top_p" in given) and config.drawn_at == 0:
        yield f"eval.top_p = {config.top_p:g}: is only read when eval.temperature is above 0."
    for key, value in (("metric", config.metric), ("k", config.k)):
        if value and config.num_samples == 1:
            yield f"eval.{key} = {value}: is only read with eval.num_samples above 1."
    if too_large := [k for k in config.k if k > config.num_samples > 1]:
        yield (
            f"eval.k = {too_large[0]}: must be <= eval.num_samples = {config.num_samples}, the "
            "completions that there are."
        )
    if config.k and config.metric == ["mean"]:
        yield "eval.k: is only read with eval.metric = pass or maj; it is mean."
    yield from _no_votes(recipe)
    yield from _no_such_metric(recipe)
    if config.patience and not config.every:
        yield f"eval.patience = {config.patience}: is only read with eval.every; set it above 0."
    if not config.mode:
        yield "eval.mode: is empty; give cot, tir or both."
    for key in ("mode", "metric", "k"):
        values = getattr(config, key)
        if len(set(values)) < len(values):
            yield f"eval.{key} = {values}: names one of them twice."
    if not recipe.benchmark and (config.mode != ["cot"] or config.limit is not None):
        key = "mode" if config.mode != ["cot"] else "limit"
        yield f"eval.{key}: is only read for benchmarks; add benchmark=NAME."
    vllm = recipe.generation.vllm
    if "tir" in config.mode and vllm.tensor_parallel > 1:
        yield (
            f"eval.mode = tir: programs are not run with generation.vllm.tensor_parallel = "
            f"{vllm.tensor_parallel}; set it to 1, or use generation=vllm_server."
        )
    for name, benchmark in recipe.benchmark.items():
        key = f"benchmark.{name}"
        if not benchmark.data:
            yield f"{key}.data: is missing; give a hub name or a file."
        for mode in config.mode:
            if getattr(benchmark, mode, "") is None:
                there = [m for m in ("cot", "tir") if getattr(benchmark, m) is not None]
                yield (
                    f"eval.mode = {mode}: {key} has no prompt for it; it has {listed(there)}. "
                    f"Set {key}.{mode}."
                )
        fitting = [e for e in benchmark.examples if isinstance(e, dict)]
        if len(fitting) < len(benchmark.examples):
            yield f"{key}.examples: must be mappings of columns, with the solution as cot or tir."
        elif benchmark.shots > len(benchmark.examples):
            yield (
                f"{key}.shots = {benchmark.shots}: there are {len(benchmark.examples)} examples; "
                f"add some to {key}.examples."
            )


def _no_votes(recipe: Recipe) -> Iterator[str]:
    """Votes that were asked for where there is nothing to vote on."""
    config, rewards = recipe.eval, {name: b.reward for name, b in recipe.benchmark.items()}
    if not rewards and recipe.reward:
        name = config.accuracy or next(iter(recipe.reward))
        if name not in recipe.reward:
            return  # that is the mistake
        rewards = {"the held-out rows": recipe.reward[name].function}
    silent = [name for name, reward in rewards.items() if not benchmarks.has_votes(reward)]
    if (
        "maj" in config.metric
        and silent
        and (config.metric == ["maj"] or len(silent) == len(rewards))
    ):
        yield (
            f"eval.metric = maj: completions of {listed(silent)} have no final answers to vote on; "
            f"the rewards that judge such are {listed(benchmarks.WITH_AN_ANSWER)}."
        )


def _no_such_metric(recipe: Recipe) -> Iterator[str]:
    """What `eval.best` names that no evaluation can give."""
    config, name = recipe.eval, recipe.eval.best
    first, _, rest = name.rpartition("/")
    known = ["accuracy", "reward", "mean_length", "clipped_ratio", "no_answer", "completions"]
    if config.num_samples > 1:
        known += [f"{kind}@{config.num_samples}" for kind in ("mean", "pass", "maj")]
    free = "rewards/" in name or "tool_" in name or name.count("/") > 1
    is_sampled = config.num_samples > 1 and rest.startswith(("mean@", "pass@", "maj@"))
    if not free and not is_sampled and rest not in known:
        yield f"eval.best = {name}: there is no such number; there are {listed(known)}."
    elif first and not free and first not in recipe.benchmark:
        there = listed(recipe.benchmark) if recipe.benchmark else "none"
        yield f"eval.best = {name}: {first} is no benchmark of the recipe; there are {there}."


def notices(recipe: Recipe) -> Iterator[str]:
    """What is allowed and does less than it seems to."""
    loss, update = recipe.loss, recipe.update
    if loss.policy == "kl_cov" and update.num_iterations * update.minibatches == 1:
        yield (
            "loss.policy = kl_cov: its KL acts from a step's second update on; with one update a "
            "step it does nothing. Set update.minibatches or update.num_iterations above 1."
        )
    g = recipe.generation
    compared = {
        "loss.sampling_correction": loss.sampling_correction != "none",
        "loss.off_policy_mask": loss.off_policy_mask is not None,
    }
    if g.top_p < 1 or g.top_k or g.min_p:
        for key in (key for key, is_set in compared.items() if is_set):
            yield (
                f"{key}: with top_p, top_k or min_p the sampler's probabilities are those of the "
                "tokens it kept, higher than the trainer's by what that leaves out."
            )
    if g.repetition_penalty != 1 or g.min_completion_tokens:
        for key in (key for key, is_set in compared.items() if is_set):
            yield (
                f"{key}: with repetition_penalty or min_completion_tokens the sampler's "
                "probabilities are those after the penalty, without an eos before its time; the "
                "trainer's know neither."
            )
    if g.vllm.regex is not None or g.vllm.json_schema is not None:
        for key in (key for key, is_set in compared.items() if is_set):
            yield (
                f"{key}: with generation.vllm.regex or json_schema the sampler's probabilities are "
                "those of the tokens that it allowed; the trainer's are of all."
            )
    in_loss = recipe.needs_reference and loss.kl_in == "loss"
    if in_loss and loss.kl_estimator == "k1" and not loss.kl_bias_correction:
        yield (
            "loss.kl_estimator = k1: in the loss its gradient is 0 on average; use k2 or k3, "
            "loss.kl_in=reward or loss.kl_bias_correction=true."
        )


def explain(error: BaseException) -> str | None:
    """What OmegaConf found wrong, as one message; None if the error is of another kind."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    for e in reversed(chain):
        key = str(getattr(e, "full_key", None) or "")
        if key == "recipe":
            return "the recipe lacks `schema`, the first entry of every recipe's defaults."
        if isinstance(e, (ConfigKeyError, ConfigAttributeError)) and key:
            return f"{key}: there is no such key.{nearest_key(key)}"
        if isinstance(e, ValidationError) and key:
            return f"{key}: {first_line(e)}."
    return first_line(error) if isinstance(error, OmegaConfBaseException) else None


def nearest_key(key: str, known: Collection[str] = ()) -> str:
    """A sentence that offers the knob meant by a misspelt full key; of all, unless `known` says."""
    known = known or [name for name, _ in knobs()]
    section, _, last = key.rpartition(".")
    beside = [k for k in known if k.rpartition(".")[0] == section]
    same = [k for k in known if k.rpartition(".")[2] == last]  # in another section
    short = [k for k in known if _initials(k.rpartition(".")[2]) == last]  # lr: learning_rate
    chosen = same or [k for k in short if k in beside] or short
    if chosen:
        return f" Did you mean {' or '.join(chosen)}?"
    return nearest(key, beside) or nearest(key, known)


def _initials(name: str) -> str:
    return "".join(word[0] for word in name.split("_"))


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".")
