"""Every knob of a recipe: its type, its default, what it does in one sentence, its range.

A composed YAML is turned into a `Recipe` once, by `parse`. After that, code passes these
dataclasses (or plain values) and never a raw config.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
    ValidationError,
)

from grpo_cli.errors import UserError, listed, nearest


def knob(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field with its sentence and its range: >= ge, > gt, <= le, < lt, choices."""
    metadata = {"doc": doc, "ge": ge, "gt": gt, "le": le, "lt": lt, "choices": choices}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, doc: str) -> Any:
    """A nested group of knobs."""
    return field(default_factory=kind, metadata={"doc": doc})


@dataclass
class Build:
    """A small Qwen2 built from scratch, with a byte-level tokenizer, warmed up by supervision."""

    hidden_size: int = knob(128, "Width of the residual stream.", ge=8)
    intermediate_size: int = knob(512, "Width of the feed-forward layers.", ge=8)
    num_layers: int = knob(4, "Number of decoder layers.", ge=1)
    num_heads: int = knob(4, "Number of attention heads; divides hidden_size.", ge=1)
    num_kv_heads: int = knob(2, "Number of key/value heads; divides num_heads.", ge=1)
    max_position_embeddings: int = knob(2048, "Longest sequence, in tokens.", ge=16)
    initializer_range: float = knob(
        0.06, "Standard deviation of the first weights; 0.02 is for widths of thousands.", gt=0
    )
    merges: int = knob(
        0, "Byte-pair merges learnt from the dataset, on top of the 256 bytes.", ge=0
    )
    warmup_steps: int = knob(300, "Most supervised steps on the dataset's own solutions.", ge=0)
    warmup_target_loss: float = knob(
        0.0, "The warm-up ends early at this loss, in nats a token; 0: it does not.", ge=0
    )
    warmup_batch: int = knob(64, "Rows in one supervised step.", ge=1)
    warmup_weight_decay: float = knob(1.0, "Weight decay of the supervised steps.", ge=0)
    warmup_learning_rate: float = knob(1e-3, "Peak learning rate of the supervised steps.", gt=0)


@dataclass
class Model:
    """The policy: a hub name, a folder, or a small model built on the spot."""

    path: str | None = knob(None, "Hub name or folder of a transformers causal language model.")
    revision: str | None = knob(None, "Branch, tag or commit on the hub.")
    build: Build | None = knob(None, "Build this small model instead of loading `path`.")
    dtype: str = knob(
        "float32",
        "Type that the weights are kept in; with mixed_precision the arithmetic is another matter.",
        choices=("float32", "bfloat16", "float16"),
    )
    attn_implementation: str | None = knob(
        None, "Attention kernel as transformers names it (sdpa, eager, flash_attention_2, ...)."
    )
    trust_remote_code: bool = knob(False, "Run modelling code that comes with the model.")
    chat_template: str | None = knob(
        None, "Jinja file, or template text, in place of the tokenizer's chat template."
    )
    gradient_checkpointing: bool = knob(False, "Recompute activations in the backward pass.")
    dropout: float | None = knob(
        0.0, "Every dropout rate of the model; null keeps the model's own.", ge=0, le=1
    )


@dataclass
class Dataset:
    """Rows, and how a row becomes a prompt."""

    train: str | None = knob(
        None, "Hub name, or a .json/.jsonl/.jsonl.gz/.csv/.parquet file, or pkg://package/file."
    )
    eval: str | None = knob(None, "The same for held-out rows; null: no evaluation.")
    subset: str | None = knob(None, "The hub data set's configuration (GSM8K has `main`).")
    train_split: str = knob("train", "Split to train on, where the data has splits.")
    eval_split: str = knob("test", "Split to evaluate on, where the data has splits.")
    columns: dict[str, str] = knob(
        {}, "Columns to rename, as new_name: old_name, before anything reads them."
    )
    prompt: str = knob(
        "{prompt}", "Prompt template over the row's columns; write a literal brace twice."
    )
    system: str | None = knob(None, "System prompt (chat only).")
    chat: bool = knob(
        False, "Wrap the prompt in the tokenizer's chat template; completions become messages."
    )
    solution: str | None = knob(
        None, "Template of a worked solution; only the warm-up of a built model reads it."
    )
    max_prompt_tokens: int = knob(512, "Longest training prompt, in tokens.", ge=1)
    overlong_prompts: str = knob(
        "drop",
        "What becomes of a longer one: drop the row, or cut tokens off its left end.",
        choices=("drop", "cut"),
    )
    shuffle: bool = knob(True, "New order each epoch, a function of (seed, epoch) alone.")
    train_limit: int | None = knob(None, "Use only the first N training rows.", ge=1)
    eval_limit: int | None = knob(None, "Use only the first N held-out rows.", ge=1)


@dataclass
class Reward:
    """One reward function of a recipe."""

    function: str = knob("", "Short name (`grpo rewards` lists them) or my_package.my_module:name.")
    weight: float = knob(1.0, "Factor in the sum that is the reward.")
    args: dict[str, Any] = knob({}, "Keyword arguments for the function.")


@dataclass
class Generation:
    """How completions are sampled."""

    engine: str = knob("transformers", "Which generator makes them.", choices=("transformers",))
    num_generations: int = knob(8, "Completions for each prompt: the group.", ge=2)
    max_completion_tokens: int = knob(256, "Longest completion, in tokens.", ge=1)
    temperature: float = knob(1.0, "Sampling temperature; also that of the log-probs.", gt=0)
    top_p: float = knob(1.0, "Keep the likeliest tokens up to this share.", gt=0, le=1)
    top_k: int = knob(0, "Keep the K likeliest tokens; 0 keeps all.", ge=0)
    min_p: float = knob(0.0, "Drop tokens below this share of the likeliest one's.", ge=0, le=1)
    max_rows: int = knob(
        512,
        "Completions decoded at the same time, for memory's sake; a group is never split.",
        ge=1,
    )


@dataclass
class Loss:
    """The objective, as a policy term and a KL term. docs/algorithm.md has the formulas."""

    policy: str = knob("clipped", "Policy term.", choices=("clipped",))
    normalize: str = knob(
        "tokens",
        "What is averaged: all tokens of the batch, or each completion's mean.",
        choices=("tokens", "completions"),
    )
    epsilon: float = knob(0.2, "The ratio is clipped below at 1 - epsilon.", ge=0, le=1)
    epsilon_high: float | None = knob(
        None, "The ratio is clipped above at 1 + epsilon_high; null: epsilon.", ge=0
    )
    beta: float = knob(0.0, "Weight of the k3 KL to the reference; 0 loads no reference.", ge=0)


@dataclass
class Advantage:
    """Rewards to advantages."""

    scale: str = knob(
        "group",
        "Divide by the group's standard deviation, or not at all.",
        choices=("group", "none"),
    )


@dataclass
class Optimizer:
    """AdamW and its schedule."""

    learning_rate: float = knob(1e-6, "Peak learning rate.", ge=0)
    betas: list[float] = knob([0.9, 0.999], "Decay rates of the two moments.", ge=0, lt=1)
    eps: float = knob(1e-8, "Added to the root of the second moment.", gt=0)
    weight_decay: float = knob(0.0, "Decoupled weight decay.", ge=0)
    max_grad_norm: float = knob(1.0, "Gradients are scaled down to this norm.", gt=0)
    schedule: str = knob(
        "constant",
        "Learning rate after the warm-up, over the steps left.",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: int = knob(0, "Steps over which the learning rate rises from 0.", ge=0)
    min_learning_rate: float = knob(0.0, "Where linear and cosine end.", ge=0)


@dataclass
class Update:
    """What happens to one step's batch of completions."""

    num_iterations: int = knob(1, "Passes over the step's completions.", ge=1)
    minibatches: int = knob(1, "Optimizer steps in one pass, each on whole groups.", ge=1)
    tokens_per_micro_batch: int = knob(
        8192, "Tokens in one backward, padding included. Moves memory, never the gradient.", ge=1
    )


@dataclass
class Eval:
    """Held-out evaluation, during training and by `grpo eval`."""

    every: int = knob(0, "Evaluate every N steps; 0: not while training.", ge=0)
    at_ends: bool = knob(True, "Evaluate before the first and after the last step.")
    accuracy: str | None = knob(
        None, "The reward of which a value of 1 counts as correct; null: the recipe's first."
    )
    num_samples: int = knob(1, "Completions for each row.", ge=1)
    temperature: float = knob(0.0, "Sampling temperature; 0 is greedy.", ge=0)
    top_p: float = knob(1.0, "Keep the likeliest tokens up to this share.", gt=0, le=1)
    max_completion_tokens: int | None = knob(
        None, "Longest completion; null: that of generation.", ge=1
    )


@dataclass
class Checkpoint:
    """When weights are saved, and for how long they are kept."""

    every: int = knob(100, "Save every N steps; 0: only when the run ends.", ge=0)
    keep_last: int = knob(2, "Newest checkpoints kept; the best one is kept besides.", ge=1)


@dataclass
class Log:
    """What is written while training, besides metrics.jsonl."""

    completions_every: int = knob(20, "Write a step's completions every N steps; 0: never.", ge=0)
    completions_shown: int = knob(1, "Of these, how many are also printed.", ge=0)
    plots: bool = knob(True, "Draw curves.png when the run ends.")


@dataclass
class Tracking:
    """Where metrics go besides metrics.jsonl."""

    backend: str = knob("none", "Tracker.", choices=("none", "tensorboard", "wandb", "trackio"))
    project: str = knob("grpo", "Project name (wandb, trackio).")
    name: str | None = knob(None, "Run name (wandb, trackio); null: the output folder's.")


@dataclass
class Recipe:
    """One run."""

    recipe: str = knob("", "Name of the recipe; the command line sets it.")
    description: str = knob("", "One line for `grpo recipes`.")
    output_dir: str = knob("outputs/${recipe}", "Folder of the run.")
    overwrite: bool = knob(False, "Discard the run that output_dir holds.")
    resume: str | None = knob(
        None, "`auto`: go on from output_dir's newest checkpoint, if any; or a checkpoint's path."
    )
    seed: int = knob(0, "Seed of everything that is drawn.", ge=0)
    steps: int = knob(100, "Batches of completions to sample and train on.", ge=1)
    prompts_per_step: int = knob(32, "Prompts in one step, over all processes.", ge=1)
    device: str = knob(
        "auto", "auto: CUDA, else MPS, else CPU.", choices=("auto", "cpu", "cuda", "mps")
    )
    mixed_precision: str = knob(
        "no", "Arithmetic of forward and backward: no is the weights' own.", choices=("no", "bf16")
    )
    model: Model = section(Model, Model.__doc__ or "")
    dataset: Dataset = section(Dataset, Dataset.__doc__ or "")
    reward: dict[str, Any] = knob({}, "Rewards by name; each has function, weight and args.")
    generation: Generation = section(Generation, Generation.__doc__ or "")
    loss: Loss = section(Loss, Loss.__doc__ or "")
    advantage: Advantage = section(Advantage, Advantage.__doc__ or "")
    optimizer: Optimizer = section(Optimizer, Optimizer.__doc__ or "")
    update: Update = section(Update, Update.__doc__ or "")
    eval: Eval = section(Eval, Eval.__doc__ or "")
    checkpoint: Checkpoint = section(Checkpoint, Checkpoint.__doc__ or "")
    log: Log = section(Log, Log.__doc__ or "")
    tracking: Tracking = section(Tracking, Tracking.__doc__ or "")


def parse(cfg: DictConfig | dict[str, Any]) -> Recipe:
    """A composed config as a checked `Recipe`.

    Raises:
        UserError: an unknown key, a value of another type, a value out of its range, or values that
            contradict one another. All ranges are checked, and every violation is named.
    """
    try:
        # As plain values first: a config composed by Hydra lets a key added with `+` through.
        tree = OmegaConf.to_container(OmegaConf.create(cfg), resolve=True)
        typed = OmegaConf.merge(OmegaConf.structured(Recipe), OmegaConf.create(tree))
        recipe = cast(Recipe, OmegaConf.to_object(typed))
        recipe.reward = {
            name: _reward(name, value) for name, value in recipe.reward.items() if value is not None
        }
    except OmegaConfBaseException as error:
        raise UserError(explain(error) or str(error)) from error
    problems = [*_range_violations(recipe), *_contradictions(recipe)]
    if problems:
        raise UserError("\n".join(problems))
    return recipe


def _reward(name: str, value: Any) -> Reward:
    if not isinstance(value, dict):
        raise UserError(f"reward.{name} = {value!r}: must be a mapping with a `function`.")
    unknown = value.keys() - {f.name for f in dataclasses.fields(Reward)}
    if unknown:
        key = sorted(unknown)[0]
        raise UserError(
            f"reward.{name}.{key}: there is no such key; "
            f"a reward has {listed(f.name for f in dataclasses.fields(Reward))}."
        )
    try:
        typed = OmegaConf.merge(OmegaConf.structured(Reward), value)
        reward = cast(Reward, OmegaConf.to_object(typed))
    except OmegaConfBaseException as error:
        raise UserError(f"reward.{name}.{explain(error)}") from error
    reward.function = reward.function or name
    return reward


def knobs(node: Any = Recipe, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """(full key, field) of every knob below a dataclass, sections before what they hold."""
    for f in dataclasses.fields(node):
        yield prefix + f.name, f
        kind = _SECTIONS.get(str(f.type).removesuffix(" | None"))
        if kind is not None:
            yield from knobs(kind, f"{prefix}{f.name}.")


_SECTIONS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Build, Model, Dataset, Generation, Loss, Advantage, Optimizer, Update, Eval, Checkpoint,
        Log, Tracking,
    )
}  # fmt: skip


def allowed(f: dataclasses.Field[Any]) -> str:
    """What a knob accepts, in words; "" when its type says it all."""
    meta = f.metadata
    if meta.get("choices"):
        return "one of " + ", ".join(meta["choices"])
    bounds = [
        f"{sign} {meta[key]:g}"
        for key, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if meta.get(key) is not None
    ]
    return " and ".join(bounds)


def _range_violations(node: Any, prefix: str = "") -> Iterator[str]:
    for f in dataclasses.fields(node):
        value, key, meta = getattr(node, f.name), prefix + f.name, f.metadata
        if dataclasses.is_dataclass(value):
            yield from _range_violations(value, key + ".")
            continue
        if key == "reward":
            for name, reward in value.items():
                yield from _range_violations(reward, f"reward.{name}.")
            continue
        for v in value if isinstance(value, list) else [value]:
            if meta.get("choices"):
                if v not in meta["choices"]:
                    hint = nearest(str(v), meta["choices"])
                    yield f"{key} = {v!r}: must be {allowed(f)}.{hint}"
            elif isinstance(v, (int, float)) and not isinstance(v, bool):
                ge, gt, le, lt = (meta.get(bound) for bound in ("ge", "gt", "le", "lt"))
                inside = (
                    math.isfinite(v)
                    and (ge is None or v >= ge)
                    and (gt is None or v > gt)
                    and (le is None or v <= le)
                    and (lt is None or v < lt)
                )
                if not inside:
                    yield f"{key} = {v}: must be {allowed(f) or 'a finite number'}."


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """Combinations that would be ignored or would fail much later."""
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
    if dataset.system is not None and not dataset.chat:
        yield "dataset.system: is only read with dataset.chat=true."
    if model.chat_template is not None and not dataset.chat:
        yield "model.chat_template: is only read with dataset.chat=true."
    if not recipe.reward:
        yield "reward: at least one is needed, such as reward=[math]; `grpo rewards` lists them."
    elif not any(r.weight for r in recipe.reward.values()):
        yield "reward: every weight is 0, so there is nothing to learn from."
    if recipe.eval.accuracy is not None and recipe.eval.accuracy not in recipe.reward:
        yield (
            f"eval.accuracy = {recipe.eval.accuracy!r}: must be one of the recipe's rewards, "
            f"{listed(recipe.reward)}."
        )
    if recipe.eval.every and dataset.eval is None:
        yield (
            f"eval.every = {recipe.eval.every}: needs held-out rows; set dataset.eval, or "
            "eval.every=0."
        )
    if recipe.eval.num_samples > 1 and recipe.eval.temperature == 0:
        yield (
            f"eval.num_samples = {recipe.eval.num_samples}: greedy completions are all the same; "
            "set eval.temperature above 0."
        )
    if len(recipe.optimizer.betas) != 2:
        yield f"optimizer.betas = {recipe.optimizer.betas}: must be two numbers."
    if recipe.optimizer.min_learning_rate and recipe.optimizer.schedule == "constant":
        yield "optimizer.min_learning_rate: the constant schedule does not read it."
    if recipe.update.minibatches > recipe.prompts_per_step:
        yield (
            f"update.minibatches = {recipe.update.minibatches}: must be <= prompts_per_step = "
            f"{recipe.prompts_per_step}, since a minibatch holds whole groups."
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


def nearest_key(key: str) -> str:
    """A sentence that offers the knob meant by a misspelt full key."""
    known = [name for name, _ in knobs()]
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
