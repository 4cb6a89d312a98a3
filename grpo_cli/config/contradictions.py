"""Finds contradictions in a recipe whose values are all of the right type."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator

from grpo_cli.config.interpolation import as_text, plain_secrets
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.schedules import at_step, steps_to_check
from grpo_cli.data.settings import HeldOut
from grpo_cli.errors import counted, listed, nearest
from grpo_cli.evaluation.settings import Benchmark, Eval
from grpo_cli.models.settings import ADAM, BUILT_CONTEXT
from grpo_cli.rewards import WITH_AN_ANSWER, has_votes

# bfloat16 has 8 bits of precision: a weight of 0.05 cannot change by less than 1e-4.
LOST_IN_BFLOAT16 = 1e-4
# from_pretrained's arguments for file locations, of all files and of weights only.
OF_FILES = ("subfolder", "cache_dir", "local_files_only", "force_download")
OF_WEIGHTS = ("variant", "use_safetensors")
# Arguments of from_pretrained that model.args must not set, and the alternative for each.
NOT_IN_ARGS = {
    "dtype": "write model.dtype",
    "torch_dtype": "write model.dtype",
    "revision": "write model.revision",
    "trust_remote_code": "write model.trust_remote_code",
    "attn_implementation": "write model.attn_implementation",
    "gradient_checkpointing": "write model.gradient_checkpointing",
    "router_aux_loss_coef": "write loss.router_aux_loss_coef",
    "device_map": "write device, or distributed=fsdp2 to divide the model",
    "tp_plan": "write distributed=fsdp2 to divide the model",
    "token": "set HF_TOKEN in the environment",
    "quantization_config": "write model.quantization",
    "load_in_4bit": "write model.quantization=nf4",
    "auto_map": "write model.trust_remote_code, which runs the model's own code",
    "use_kernels": "it would run code from the hub",
    "ignore_mismatched_sizes": "it would train weights that were drawn at random",
}
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
    yield from _of_objective(recipe)
    yield from _of_generation(recipe)
    yield from _of_model(recipe)
    yield from _of_episodes(recipe)
    yield from _of_training(recipe, given)
    yield from _of_evaluation(recipe, given)
    yield from _of_hub(recipe)
    yield from _no_votes(recipe)
    yield from _no_such_metric(recipe)
    for name, benchmark in recipe.benchmark.items():
        yield from _of_benchmark(f"benchmark.{name}", benchmark, recipe.eval.mode)


def _missing(recipe: Recipe) -> Iterator[str]:
    """Yields one message about the model, the rows and the reward that the recipe lacks."""
    model, dataset = recipe.model, recipe.dataset
    has_rows = dataset.train or dataset.mixture or dataset.eval or dataset.held_out
    lacks = {
        "model.path": model.path is None and model.build is None,
        "dataset.train": not has_rows and not recipe.benchmark,
        "reward": not recipe.reward and not recipe.benchmark,
    }
    missing = [key for key, lacking in lacks.items() if lacking]
    if missing:
        yield f"missing: {', '.join(missing)}. {EXAMPLE}"


def contradictions_by_step(recipe: Recipe) -> Iterator[str]:
    """Yields a message for the first step at which scalars, perhaps scheduled, lose their order."""
    for step in steps_to_check(recipe):
        now, _ = at_step(recipe, step)
        at = f" at step {step}" if recipe.schedules else ""
        loss = now.loss
        floor, cap = loss.sampling_floor, loss.sampling_cap
        if floor is not None and cap is not None and floor > cap:
            yield (f"loss.sampling_floor = {floor:g}: must be <= loss.sampling_cap = {cap:g}{at}.")
            return


def _of_objective(recipe: Recipe) -> Iterator[str]:
    loss = recipe.loss
    if loss.kl_bias_correction and loss.kl_in == "reward":
        yield "loss.kl_bias_correction: is only read with loss.kl_in = loss; it is reward."
    if loss.entropy_target is not None and loss.entropy_coef > 1:
        yield (
            f"loss.entropy_coef = {loss.entropy_coef}: must be <= 1, since loss.entropy_target "
            "moves it between 0 and 1."
        )
    if recipe.model.dtype != "auto":  # "auto" is checked once it is resolved
        yield from of_dtype(recipe)


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
    if "" in generation.stop:
        yield "generation.stop: holds an empty string, which every completion contains; drop it."


def _of_model(recipe: Recipe) -> Iterator[str]:
    model, dataset = recipe.model, recipe.dataset
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
        b = model.build
        if b.hidden_size % 8:
            yield (
                f"model.build.hidden_size = {b.hidden_size}: must be a multiple of 8, since each "
                "of the 4 attention heads turns pairs."
            )
        if b.warmup_steps and dataset.solution is None:
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
    if model.tokenizer is not None and recipe.generation.engine.startswith("vllm"):
        yield (
            f"model.tokenizer = {model.tokenizer}: vLLM reads the tokenizer from the model's "
            "folder; save it there, or use generation=transformers."
        )
    for name in model.args:
        if name in NOT_IN_ARGS:
            yield f"model.args.{name}: cannot be set: {NOT_IN_ARGS[name]}."
        elif name.endswith(("dropout", "pdrop")):
            yield f"model.args.{name}: cannot be set: write model.dropout."
        elif name not in OF_WEIGHTS and recipe.generation.engine.startswith("vllm"):
            yield (
                f"model.args.{name}: is not read by generation.engine = "
                f"{recipe.generation.engine}, which would sample from another model than is "
                "trained; use generation=transformers, or store the changed config with the model."
            )
    strategy = recipe.distributed.strategy
    if model.quantization != "none" and strategy == "fsdp2":
        yield (
            f"model.quantization = {model.quantization}: quantized weights cannot be sharded "
            f"(distributed.strategy = {strategy}); use distributed=ddp, or model.quantization=none."
        )
    has_vllm = recipe.generation.engine in ("vllm_colocate", "vllm_server")
    if recipe.adapter.sync == "adapter" and recipe.adapter.method == "none" and has_vllm:
        yield "adapter.sync = adapter: there is no adapter; choose one, such as adapter=lora."
    if recipe.adapter.sync == "adapter" and recipe.model.quantization != "none":
        yield (
            f"adapter.sync = adapter: with model.quantization = {recipe.model.quantization} vLLM "
            "would apply the adapter to weights that are not quantized; use adapter.sync=merge, "
            "which sends merged weights."
        )


def _of_episodes(recipe: Recipe) -> Iterator[str]:
    environment = recipe.environment
    ways = ("path", "by_name", "mcp")
    given = [f"environment.{name}" for name in ways if getattr(environment, name)]
    if len(given) > 1:
        yield f"{' and '.join(given)}: each names the environment; set one of them."
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
    yield from _of_streaming(recipe)
    backend = recipe.tracking.backend
    if not backend or ("none" in backend and len(backend) > 1) or len({*backend}) < len(backend):
        yield f"tracking.backend = {backend}: name each tracker once, or none."
    if not recipe.output_dir:
        yield "output_dir: is empty; name a folder."
    if recipe.reward and not any(r.weight for r in recipe.reward.values()):
        yield "reward: every weight is 0, so there is nothing to learn from."
    if recipe.eval.accuracy is not None and recipe.eval.accuracy not in recipe.reward:
        yield (
            f"eval.accuracy = {recipe.eval.accuracy!r}: must be one of the recipe's rewards, "
            f"{listed(recipe.reward)}."
        )
    if len(recipe.optimizer.betas) != 2:
        yield f"optimizer.betas = {recipe.optimizer.betas}: must be two numbers."
    # The recipe's own values are allowed, so that it can be tried with another optimizer.
    if recipe.optimizer.algorithm not in ADAM and "optimizer.betas" in given:
        yield (
            f"optimizer.betas: is only read with optimizer.algorithm = {' or '.join(ADAM)}; "
            f"it is {recipe.optimizer.algorithm}."
        )
    distributed = recipe.distributed
    if distributed.offload == "all" and distributed.strategy != "fsdp2":
        yield (
            "distributed.offload = all: is FSDP2's offload of sharded weights, and "
            f"distributed.strategy = {distributed.strategy}; use distributed=fsdp2, or "
            "distributed.offload=none."
        )
    if recipe.update.minibatches > recipe.prompts_per_step:
        yield (
            f"update.minibatches = {recipe.update.minibatches}: must be <= prompts_per_step = "
            f"{recipe.prompts_per_step}, since a minibatch holds whole groups."
        )
    if recipe.stop.max_kl is not None and not recipe.needs_reference:
        yield "stop.max_kl: there is no KL without a reference; set loss.beta above 0."


def _of_streaming(recipe: Recipe) -> Iterator[str]:
    dataset, build = recipe.dataset, recipe.model.build
    if not dataset.streaming:
        return
    if recipe.epochs is not None:
        yield (
            f"epochs = {recipe.epochs:g}: nobody knows the length of a stream before its end; set "
            "steps, or dataset.streaming=false."
        )
    needed = {
        "dataset.mixture": dataset.mixture,
        "dataset.test_split_size": dataset.test_split_size is not None,
        "model.build.warmup_steps": build is not None and build.warmup_steps,
    }
    for key in (key for key, is_set in needed.items() if is_set):
        yield f"{key}: needs all rows at the start; set dataset.streaming=false."


def _of_mixture(recipe: Recipe) -> Iterator[str]:
    dataset, parts = recipe.dataset, recipe.dataset.mixture
    for name, reward in recipe.reward.items():
        for wanted in reward.datasets if parts else ():
            if wanted not in parts:
                yield (
                    f"reward.{name}.datasets: {wanted!r} is no data set of dataset.mixture; there "
                    f"are {listed(parts)}.{nearest(wanted, parts)}"
                )
    if not parts:
        return
    for key in ("train", "train_limit", "test_split_size"):
        if getattr(dataset, key) is not None:
            yield (
                f"dataset.{key}: is not read with dataset.mixture, whose data sets have their own; "
                f"set dataset.{key}=null."
            )
    for name, part in parts.items():
        if not part.data:
            yield f"dataset.mixture.{name}.data: is missing; give a hub name or a file."


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
    if sets and (recipe.dataset.eval is not None or size is not None):
        other = "dataset.eval" if recipe.dataset.eval is not None else "dataset.test_split_size"
        yield (
            f"dataset.held_out = {listed(sets)}: the recipe has held-out rows already; set "
            f"{other}=null."
        )
    for name, held in sets.items():
        yield from _of_held_out(f"dataset.held_out.{name}", held, recipe)
    if size is not None and size > 1 and size % 1:
        yield (
            f"dataset.test_split_size = {size:g}: must be a fraction below 1 or a whole number of "
            "rows."
        )
    if size is not None and recipe.dataset.eval is not None:
        yield (
            f"dataset.test_split_size = {size:g}: the recipe has held-out rows already; set "
            "dataset.eval=null, or dataset.test_split_size=null."
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
    if not config.mode:
        yield "eval.mode: is empty; give one or more, such as cot,tir."
    for key in ("mode", "metric", "k"):
        values = getattr(config, key)
        if len(set(values)) < len(values):
            yield f"eval.{key} = {values}: names one of them twice."
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
    if not held.data:
        yield f"{key}.data: is missing; give a hub name or a file."
    for name in held.rewards:
        if name not in recipe.reward:
            yield (
                f"{key}.rewards: {name!r} is none of the recipe's rewards, {listed(recipe.reward)}."
                f"{nearest(name, recipe.reward)}"
            )
    judges = held.rewards or list(recipe.reward)
    if held.accuracy is not None and held.accuracy not in judges:
        yield f"{key}.accuracy = {held.accuracy!r}: must be one of its rewards, {listed(judges)}."


def _of_benchmark(key: str, benchmark: Benchmark, modes: Iterable[str]) -> Iterator[str]:
    if not benchmark.data:
        yield f"{key}.data: is missing; give a hub name or a file."
    for mode in modes:
        if mode not in (prompts := benchmark.prompts):
            yield (
                f"eval.mode = {mode}: {key} has no prompt for it; it has {listed(prompts)}. "
                f"Set {key}.modes.{mode}.prompt.{nearest(mode, prompts)}"
            )
    if not all(isinstance(example, dict) for example in benchmark.examples):
        yield (
            f"{key}.examples: must be mappings of columns, with the solution under the name of "
            "the mode."
        )
    elif benchmark.shots > len(benchmark.examples):
        yield (
            f"{key}.shots = {benchmark.shots}: there are {len(benchmark.examples)} examples; "
            f"add some to {key}.examples."
        )


def _no_votes(recipe: Recipe) -> Iterator[str]:
    """Yields a message if votes are requested without answers to vote on."""
    config, rewards = recipe.eval, {name: b.reward for name, b in recipe.benchmark.items()}
    if not rewards and recipe.reward:
        name = recipe.accuracies[0]
        rewards = {"the held-out rows": recipe.reward[name].function}
    voteless = [name for name, reward in rewards.items() if not has_votes(reward)]
    if (
        "maj" in config.metric
        and voteless
        and (config.metric == ["maj"] or len(voteless) == len(rewards))
    ):
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


def notices(recipe: Recipe) -> Iterator[str]:
    """Yields notices about settings that are allowed but have less effect than expected."""
    loss, g = recipe.loss, recipe.generation
    optimizer = recipe.optimizer
    if recipe.steps > 1 and optimizer.warmup_steps >= recipe.steps:
        yield (
            f"optimizer.warmup_steps = {optimizer.warmup_steps}: the warm-up is longer than the "
            f"run ({counted(recipe.steps, 'step')}), whose learning rate never reaches "
            f"{optimizer.learning_rate:g}."
        )
    late = [step for step in recipe.log.keep_steps if step > recipe.steps]
    if late:
        yield (
            f"log.keep_steps: the run has {counted(recipe.steps, 'step')}; there is no step "
            f"{', '.join(map(str, late))} to be kept."
        )
    dtype = recipe.model.dtype
    small = optimizer.learning_rate < LOST_IN_BFLOAT16
    if dtype != "float32" and small and recipe.adapter.method == "none":
        yield (
            f"model.dtype = {dtype}: updates with a learning rate of "
            f"{optimizer.learning_rate:g} are smaller than the weights' precision, and most are "
            "lost; use model.dtype=float32 with mixed_precision=bf16, or an adapter."
        )
    differs = []  # reasons for the sampler's probabilities to differ from the trainer's
    if g.top_p < 1 or g.top_k or g.min_p:
        differs.append(
            "with top_p, top_k or min_p the sampler's probabilities are those of the tokens it "
            "kept, higher than the trainer's by what that leaves out."
        )
    filters = ("top_p", "top_k", "min_p")
    if changed := [name for name in g.changed_by if name not in filters]:
        differs.append(
            f"with {listed(changed)} the sampler's probabilities are those after the change; the "
            "trainer's are of softmax(logits / temperature)."
        )
    if loss.ratio_level == "sequence" and loss.normalize in ("tokens", "constant"):
        yield (
            f"loss.ratio_level = sequence with loss.normalize = {loss.normalize}: completions "
            "count by their length; GSPO counts them alike (loss.normalize=completions)."
        )
    if loss.ratio_level == "token" and loss.normalize == "sums":
        yield (
            "loss.normalize = sums with loss.ratio_level = token: LUSPO sums with one ratio a "
            "completion (loss.ratio_level=sequence)."
        )
    is_scaled = recipe.advantage.rule == "group" and recipe.advantage.scale != "none"
    if loss.normalize == "constant" and is_scaled:
        yield "loss.normalize = constant is half of Dr. GRPO; advantage=centered is the other half."
    compared = {
        "loss.sampling_correction": loss.sampling_correction != "none",
        "loss.off_policy_mask": loss.off_policy_mask is not None,
    }
    for why in differs:
        yield from (f"{key}: {why}" for key, is_set in compared.items() if is_set)
    in_loss = recipe.needs_reference and loss.kl_in == "loss"
    if in_loss and loss.kl_estimator == "k1" and not loss.kl_bias_correction:
        yield (
            "loss.kl_estimator = k1: in the loss its gradient is 0 on average; use k2 or k3, "
            "loss.kl_in=reward or loss.kl_bias_correction=true."
        )
