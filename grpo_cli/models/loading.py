"""Loads models and tokenizers, and makes the copies that a run needs of its policy."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli.config import sources
from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import UserError, first_line, nearest
from grpo_cli.files import read_json, read_text, reading
from grpo_cli.models import adapters, output_head, quantization, vision
from grpo_cli.models.families import reads_both_directions
from grpo_cli.models.settings import DROPOUTS, OF_FILES, OF_WEIGHTS, Model
from grpo_cli.models.vision import UnloadedProcessor, VisionProcessor
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Prompt

# Exceptions that transformers raises for an invalid model or argument.
FAILURES = (
    OSError, ValueError, TypeError, AttributeError, ImportError, KeyError, RuntimeError,
    SafetensorError, StrictDataclassError,
)  # fmt: skip
LONGEST = 100_000  # characters of a chat template
NO_TOKENIZER = "holds no tokenizer; save one in the folder, or name one with model.tokenizer."
TRAINABLE = ("float32", "bfloat16", "float16")

transformers.utils.logging.disable_progress_bar()  # the run has its own progress display


class LoadedModel(NamedTuple):
    """A model on the host, with what turns text and images into its inputs."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    vision: VisionProcessor | None  # None: the model reads text only
    processor: Any  # saved in checkpoints: the image processor, or the tokenizer of a text model


def load_model(
    path: str, recipe: Recipe, workers: Workers, say: Callable[[str], None], *, trains: bool
) -> LoadedModel:
    """Loads the recipe's model from a folder or the hub, with its adapter.

    If the model is to be sharded, only the main process loads weights.

    Args:
        trains: whether the model is trained, so that parts of it are frozen.
    """
    model, tokenizer = load(
        recipe.model,
        path,
        weights=workers.is_main or not workers.runs_in_lockstep,
        trains=trains,
        half_type=workers.half_type,
    )
    vision = None
    processor: Any = tokenizer
    try:
        vision = load_vision(recipe.model, path, tokenizer)
    except UserError as error:  # a text-only run does not need it
        say(f"note: {error} The model reads text only.")
        processor = UnloadedProcessor(base_of(recipe.model, path)[1], tokenizer)
    if recipe.model.freeze and trains:
        frozen = freeze(model, recipe.model.freeze)
        say(f"{frozen / 1e6:.4g} M parameters are frozen (model.freeze)")
    if recipe.adapter.path is not None:
        folder = Path(recipe.adapter.path).expanduser()
        adapters.load(model, folder, trained=True)
        base = read_json(folder / adapters.CONFIG).get("base_model_name_or_path")
        if base and sources.absolute(base) != sources.absolute(path):
            say(
                f"note: adapter.path = {folder}: was trained on {base}, and is now trained on "
                f"model.path = {path}; the shapes agree, the weights may differ"
            )
    else:
        seed = derive_seed(recipe.seed, "adapter") % 2**32
        config = adapters.config_of(recipe.adapter, path, recipe.model.revision)
        adapters.attach(model, config, seed)
    return LoadedModel(model, tokenizer, vision, vision or processor)


def load(
    config: Model,
    path: str | Path,
    *,
    weights: bool = True,
    trains: bool = False,
    half_type: torch.dtype | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model (on the CPU, in training mode) and its tokenizer from a folder or the hub.

    An adapter's folder is loaded with the base model that its config names, and is not trained.

    Args:
        path: a folder or a hub name.
        weights: False: load only the model's structure, on the meta device.
        trains: whether the model is to be trained, so that its files must not be quantized.
        half_type: compute dtype of mixed precision, for a quantized model.

    Raises:
        UserError: the model or the tokenizer is missing, transformers cannot load it, weights are
            missing or not finite, or the model is not a decoder.
    """
    adapter = Path(path)
    if sources.is_adapter(adapter):
        base = base_of(config, path)
        model, tokenizer = load(*base, weights=weights, half_type=half_type)
        adapters.load(model, adapter, trained=False)
        return model, tokenizer
    model_config, tokenizer = load_config(config, path)
    stored = model_config.dtype or model_config.get_text_config(decoder=True).dtype
    shared = of_source(config)
    dtype = getattr(torch, config.dtype)
    quantized = quantization.load_options(config, half_type or dtype)
    if quantized or trains:
        quantization.check_stored(model_config, str(path))
    with explained(path):
        if config.dropout is not None:
            set_dropout(model_config, config.dropout)
        options = {"dtype": dtype, "attn_implementation": config.attn_implementation}
        auto_model = auto_class(model_config)
        if weights:
            of_weights = {k: v for k, v in config.args.items() if k in OF_WEIGHTS}
            model, info = auto_model.from_pretrained(
                str(path),
                config=model_config,
                output_loading_info=True,
                **options,
                **shared,
                **of_weights,
                **quantized,
            )
            if quantized:
                quantization.prepare(model)
            check_weights(model, info["missing_keys"])
        else:
            with torch.device("meta"):
                code = {"trust_remote_code": config.trust_remote_code}
                model = auto_model.from_config(model_config, **options, **code)
            model.generation_config = generation_config(config, path, model_config)
    # Checkpoints' model folders have it again, if training computes in it: otherwise they would
    # lose changes that are smaller than its precision.
    model.stored_dtype = stored if stored == half_type else None
    if (template := config.chat_template) is not None:  # `hermes` (built in), a file or a string
        file = sources.template_file(template)
        tokenizer.chat_template = template if file is None else read_text(file, LONGEST)
    prepare_for_training(model, config)
    return model, tokenizer


def auto_class(model_config: PretrainedConfig) -> Any:
    """Returns transformers' auto class for a model."""
    if vision.takes_images(model_config):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def load_vision(
    config: Model, path: str | Path, tokenizer: PreTrainedTokenizerBase
) -> VisionProcessor | None:
    """Loads the processor of a vision-language model; returns None for a text model.

    Raises:
        UserError: the processor is missing, or a package that it needs is not installed.
    """
    config, path = base_of(config, path)
    with explained(path):
        if not vision.takes_images(read_config(config, path)):
            return None
    return vision.load_processor(config.tokenizer or path, tokenizer, of_source(config))


def load_config(
    config: Model, path: str | Path
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Loads a model's config and its tokenizer.

    Raises:
        UserError: the model or the tokenizer is missing, or the model is not a decoder.
    """
    config, path = base_of(config, path)
    shared = of_source(config)
    with explained(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(config.tokenizer or path), **shared
        )
        model_config = read_config(config, path)
        if reads_both_directions(model_config):
            raise ValueError(
                f"a {model_config.model_type} model reads in both directions and cannot generate"
            )
    if not tokenizer("a")["input_ids"]:  # transformers makes an empty one if files are missing
        raise UserError(f"model.path = {path}: {NO_TOKENIZER}")
    if len(str(tokenizer.chat_template)) > LONGEST:  # each prompt would be as long
        raise UserError(f"model.path = {path}: its chat template is longer than {LONGEST:,}.")
    return model_config, tokenizer


def has_chat_template(config: Model, path: str | Path) -> bool:
    """Returns whether a model's tokenizer has a chat template.

    Raises:
        UserError: the tokenizer is missing.
    """
    _, tokenizer = load_config(config, path)
    load_vision(config, path, tokenizer)  # a processor may have the template
    return bool(tokenizer.chat_template)


def generation_config(
    config: Model, path: str | Path, model_config: PretrainedConfig
) -> transformers.GenerationConfig:
    """Loads a model's generation config, or derives it from the model config if it has none."""
    config, path = base_of(config, path)
    of_files = {k: v for k, v in of_source(config).items() if k != "trust_remote_code"}
    try:
        return transformers.GenerationConfig.from_pretrained(str(path), **of_files)
    except OSError:
        return transformers.GenerationConfig.from_model_config(model_config)


def of_source(config: Model) -> dict[str, Any]:
    """Returns the arguments for loading any file of a model."""
    return {
        "revision": config.revision or "main",
        "trust_remote_code": config.trust_remote_code,
        **{name: value for name, value in config.args.items() if name in OF_FILES},
    }


def read_config(config: Model, path: str | Path) -> PretrainedConfig:
    """Returns a model's config with the fields that `model.args` sets.

    Raises:
        UserError: an argument is not a field of the config.
    """
    fields = {k: v for k, v in config.args.items() if k not in (*OF_FILES, *OF_WEIGHTS)}
    known: PretrainedConfig = transformers.AutoConfig.from_pretrained(
        str(path), **of_source(config)
    )
    public = [name for name in known.to_dict() if not name.startswith("_")]
    for name in fields:
        if name not in public:
            allowed = [*public, *OF_FILES, *OF_WEIGHTS]
            raise UserError(
                f"model.args.{name}: is not a field of the config of {path} and no argument that "
                f"says where its files are.{nearest(name, allowed)}"
            )
    if not fields:
        return known
    changed: PretrainedConfig = transformers.AutoConfig.from_pretrained(
        str(path), **of_source(config), **fields
    )
    return changed


@contextlib.contextmanager
def explained(path: str | Path) -> Iterator[None]:
    """Converts errors while loading a model into a UserError."""
    try:
        yield
    except FAILURES as error:
        check_files(Path(path))
        reason = f"{first_line(error)}."
        if reason.startswith("Couldn't instantiate the backend tokenizer"):  # seven lines follow
            raise UserError(f"model.path = {path}: {NO_TOKENIZER}") from error
        if Path(path).is_absolute() and not (Path(path) / "config.json").exists():
            reason = "it is gone; a run keeps its last checkpoint.keep_last checkpoints only."
        elif reason.startswith("We couldn't connect"):
            reason += f" Give a folder, or run `hf download {path}` where there is a network."
        raise UserError(f"model.path = {path}: cannot be loaded: {reason}") from error


def check_files(folder: Path) -> None:
    """Raises a UserError that names the file of a model's folder that is damaged, if one is."""
    for file in sorted(folder.glob("*.json")):
        with reading(file):
            json.loads(read_text(file))
    for file in sorted(folder.glob("*.jinja")):
        read_text(file)
    for file in sorted(folder.glob("*.safetensors")):
        with reading(file), safe_open(file, "pt"):
            pass


def stored_dtype(config: Model, path: str | Path) -> str:
    """Returns the dtype of a model's stored weights, which its config names.

    Raises:
        UserError: the config names none, or one that is not a value of model.dtype.
    """
    config, path = base_of(config, path)
    with explained(path):
        model_config = read_config(config, path)
    named = model_config.dtype or model_config.get_text_config(decoder=True).dtype
    dtype = str(named).removeprefix("torch.")
    if dtype not in TRAINABLE:
        what = "no data type" if named is None else dtype
        raise UserError(
            f"model.dtype = auto: config.json of {path} names {what}; give model.dtype as one of "
            f"{', '.join(TRAINABLE)}."
        )
    return dtype


def base_of(config: Model, path: str | Path) -> tuple[Model, str]:
    """Returns (settings, hub name or folder) of an adapter's base model; a model is its own base.

    Raises:
        UserError: the adapter's config names no usable base model.
    """
    adapter = Path(path)
    if not sources.is_adapter(adapter):
        return config, str(path)
    stored = read_json(adapter / adapters.CONFIG)
    base = stored.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{adapter / adapters.CONFIG}: names no base_model_name_or_path.")
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise UserError(
            f"{adapter}: its base model {base} is gone; write where it is now into the key "
            f"base_model_name_or_path of {adapters.CONFIG}."
        )
    if sources.is_adapter(Path(base)):
        raise UserError(f"{adapter}: its base model {base} is an adapter itself; merge that first.")
    return replace(config, revision=stored.get("revision")), base


def check_weights(model: PreTrainedModel, missing: Collection[str]) -> None:
    """Checks that a loaded model has all its weights.

    Args:
        missing: names of weights that were in no file, which transformers initialised randomly.

    Raises:
        ValueError: weights are missing or not finite.
    """
    if missing:
        named = ", ".join(sorted(missing)[:3])
        others = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
        raise ValueError(f"it lacks the weights {named}{others}")
    for name, p in model.named_parameters():
        values = quantization.dequantized(p) if quantization.is_quantized(p) else p.detach()
        if p.numel() and not all(map(torch.isfinite, values.aminmax())):  # aminmax propagates NaN
            raise ValueError(f"the weights of {name} are not finite")


def check_embeddings(model: PreTrainedModel, path: str, prompts: Sequence[Prompt]) -> None:
    """Checks that all tokens of the prompts have an embedding.

    Raises:
        UserError: a token has no embedding.
    """
    known: int = model.get_input_embeddings().num_embeddings
    largest = max((max(prompt.ids) for prompt in prompts), default=0)
    if largest >= known:
        raise UserError(
            f"model.path = {path}: its tokenizer has the token {largest}, but the model has "
            f"{known:,} embeddings; use the tokenizer that belongs to the model."
        )


def check_context(
    model: PreTrainedModel, path: str, prompts: Sequence[Prompt], max_tokens: int
) -> None:
    """Checks that the prompts with their completions fit into the model's context.

    Raises:
        UserError: a prompt and its completion do not fit.
    """
    config = model.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    why = ""
    if rope.get("rope_type") == "longrope":
        # A longer row changes the positions of the rows computed with it and of its own cache.
        context = min(context, rope["original_max_position_embeddings"])
        why = " (longrope changes positions beyond)"
    longest = max((len(p.ids) for p in prompts), default=0)
    if isinstance(context, int) and 0 < context < longest + max_tokens:
        raise UserError(
            f"model.path = {path}: its context is {context:,} tokens{why}, but the longest prompt "
            f"has {longest:,} and generation.max_completion_tokens is {max_tokens:,}; lower "
            "generation.max_completion_tokens or dataset.max_prompt_tokens."
        )


def prepare_for_training(model: PreTrainedModel, config: Model) -> None:
    """Sets training mode, dropout, gradient checkpointing and the head's dtype by the recipe."""
    model.train()
    if config.head_dtype == "float32":
        output_head.use_float32(model)
    if config.dropout is not None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = config.dropout
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def freeze(model: PreTrainedModel, parts: Sequence[str]) -> int:
    """Freezes the weights whose names contain one of these parts.

    Args:
        parts: names of modules or weights, such as "vision_tower" or "layers.0".

    Returns:
        The number of newly frozen weights (elements).

    Raises:
        UserError: a part occurs in no name, or no weight would be left to train.
    """
    frozen, named = 0, list(model.named_parameters(remove_duplicate=False))
    for part in parts:
        found = [p for name, p in named if f".{part}." in f".{name}."]
        if not found:
            known = {n for name, _ in model.named_modules() for n in name.split(".") if n}
            raise UserError(
                f"model.freeze: the model has no part {part!r}.{nearest(part, sorted(known))}"
            )
        for p in found:
            frozen += p.numel() if p.requires_grad else 0
            p.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"model.freeze = {[*parts]}: leaves no weight to train.")
    return frozen


def set_dropout(model_config: transformers.PretrainedConfig, rate: float) -> None:
    """Sets all dropout rates of a model config."""
    for name, value in model_config.to_dict().items():
        if name.endswith(DROPOUTS) and isinstance(value, (int, float)):
            setattr(model_config, name, rate)


def eos_ids(config: transformers.GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns all token ids that end a completion, from generation config and tokenizer."""
    eos: set[int] = set()
    for ids in (config.eos_token_id, tokenizer.eos_token_id):
        eos.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(eos)


def skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """Makes a model of the same structure without tensors (on the meta device), for inference."""
    with torch.device("meta"):
        empty: PreTrainedModel = type(model)(copy.deepcopy(model.config))
    empty.generation_config = model.generation_config
    if output_head.is_float32(model):
        output_head.use_float32(empty)
    adapters.attach(empty, copy.deepcopy(adapters.attached_config(model)), 0)
    return empty.to(model.dtype).requires_grad_(False).eval()


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copies a model with its current weights, without gradients and dropout."""
    return copy.deepcopy(model).requires_grad_(False).eval()


@torch.no_grad()
def mix(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """Sets ref ← α·policy + (1 − α)·ref in place (TR-DPO, arXiv 2404.09656; α = 1: a copy)."""
    # Over parameters, not names: a tied output head has two names and must be mixed only once.
    for ref, current in zip(reference.parameters(), policy.parameters(), strict=True):
        ref.lerp_(current.to(ref), alpha)
    for ref_buffer, buffer in zip(reference.buffers(), policy.buffers(), strict=True):
        ref_buffer.copy_(buffer)
