"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft: few trained weights on a frozen model.

peft replaces linear layers in place. The model keeps its class and its forward, so that all code
that computes log-probabilities or samples works unchanged. This file selects the trained weights,
switches the adapter off, and yields weights with the adapter merged in.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_cli.config import sources
from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.fsdp import full_tensor, offload
from grpo_cli.errors import UserError, first_line, nearest
from grpo_cli.files import read_json, reading
from grpo_cli.models import quantization
from grpo_cli.models.settings import Adapter

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG = sources.ADAPTER_CONFIG
WEIGHTS = "adapter_model.safetensors"
NAME = "default"  # peft's name of the adapter
PREFIX = "base_model.model."  # prefix of the names in peft's files
KINDS: dict[str, dict[str, bool]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
}
# Inits that do not read the base model's weights, which may be quantized.
INIT_WITHOUT_BASE = (True, False, "gaussian")
INIT_AT_BASE = (True, "gaussian", "orthogonal")  # inits with which the adapter changes nothing
# Exceptions that peft raises for an invalid config.
FAILURES = (TypeError, ValueError, ImportError, RuntimeError, AttributeError, KeyError, re.error)
REFUSED = {  # LoraConfig fields with the reason
    "trainable_token_indices": "trains rows of the embeddings, which are not merged",
    "lora_bias": "adds biases, which a merged model has no place for",
    "layer_replication": "makes a model of more layers than its base",
    "alora_invocation_tokens": "is active for a part of the tokens only, and cannot be merged",
    "megatron_config": "imports the modules that megatron_core names",
}


def require() -> None:
    """Raises a UserError if peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise UserError("adapter: peft is not installed here; pip install 'peft>=0.20'.")


def config_of(adapter: Adapter, base: str, revision: str | None) -> LoraConfig:
    """Returns peft's config of the recipe's adapter.

    Args:
        base: hub name or folder of the base model, which the config names.

    Raises:
        UserError: peft refuses `adapter.args`.
    """
    from peft import LoraConfig

    targets = adapter.target_modules
    fields: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": targets if isinstance(targets, str) else [*targets],
        **KINDS[adapter.method],
    }
    if own := sorted(fields.keys() & adapter.args.keys()):
        raise UserError(f"adapter.args.{own[0]}: has a key of its own below adapter.")
    try:
        config = LoraConfig(**fields, **adapter.args)
    except FAILURES as error:
        raise UserError(f"adapter: peft does not take it: {first_line(error)}.") from error
    check_form(config, "adapter")
    return config


def config_for(recipe: Recipe) -> LoraConfig | None:
    """Returns peft's config of the recipe's adapter, new or of `adapter.path`; None without one.

    Raises:
        UserError: peft is missing or does not take the settings, or there is no such adapter.
    """
    adapter = recipe.adapter
    if adapter.method == "none":
        return None
    require()
    if adapter.path is None:
        return config_of(adapter, recipe.model.path or "", recipe.model.revision)
    folder = Path(adapter.path).expanduser()
    if not (sources.is_adapter(folder) and (folder / WEIGHTS).is_file()):
        raise UserError(
            f"adapter.path = {adapter.path}: is no folder with adapter_config.json and "
            "adapter_model.safetensors."
        )
    return read_config(folder)


def check_form(config: LoraConfig, where: str) -> None:
    """Checks that an adapter can be saved and merged without a change of its outputs.

    Raises:
        UserError: it cannot.
    """
    for name, reason in REFUSED.items():
        if getattr(config, name, None):
            raise UserError(f"{where}: {name} {reason}; leave it out.")
    # The init changes the base randomly, and the adapter's folder does not store the random state.
    if str(config.init_lora_weights).startswith("pissa_niter"):
        raise UserError(
            f"{where}: the init {config.init_lora_weights} is random and changes the model under "
            "the adapter, so that the saved adapter would fit no model; use pissa."
        )


def attach(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Adds a new float32 adapter to a model, and freezes the model.

    Args:
        seed: seed of the adapter's initial weights, the same on every process.

    Raises:
        UserError: the adapter matches no module, or modules that it must not change.
    """
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            check_modules(model, config)
            inject_adapter_in_model(config, model, NAME)
        except (*FAILURES, regex.error, TimeoutError) as error:  # of a regular expression
            raise UserError(f"adapter: peft cannot add it: {first_line(error)}.") from error
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()


def attach_new(
    model: PreTrainedModel, adapter: Adapter, base: str, revision: str | None, seed: int
) -> None:
    """Adds the recipe's new adapter, if it has one; see `config_of` and `attach`."""
    if adapter.method != "none":
        attach(model, config_of(adapter, base, revision), seed)


def check_modules(model: PreTrainedModel, config: LoraConfig) -> None:
    """Checks the modules that an adapter names.

    Raises:
        UserError: no module has the name, or it is the output head or the embeddings.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    outer = (model.get_input_embeddings(), model.get_output_embeddings())
    embeddings = {name for name, module in modules.items() if module in outer}

    def matching(target: str) -> set[str]:
        return {name for name in modules if f".{name}".endswith(f".{target}")}

    targets, found = config.target_modules, set[str]()
    if isinstance(targets, str) and targets != "all-linear":
        found = {name for name in modules if regex.fullmatch(targets, name, timeout=5)}
        if not found:
            raise UserError(f"adapter.target_modules = {targets}: matches no module of the model.")
    elif not isinstance(targets, str):
        for target in targets or ():
            found |= (own := matching(target))
            if not own:
                near = nearest(target, sorted({name.rpartition(".")[2] for name in modules}))
                raise UserError(f"adapter.target_modules: the model has no module {target}.{near}")
    if wrong := sorted(found & embeddings):
        raise UserError(
            f"adapter.target_modules: {wrong[0]} is an embedding or the output head, which an "
            "adapter does not change here; train the layers between them."
        )
    saved = {name for module in config.modules_to_save or () for name in matching(module)}
    quantized = {n for n, p in model.named_parameters() if quantization.is_quantized(p)}
    for key, wanted in (
        ("modules_to_save", sorted(saved)),
        ("target_parameters", config.target_parameters or ()),
    ):
        for name in wanted:
            if any(f".{name}." in f".{weight}." for weight in quantized):
                raise UserError(
                    f"adapter.args.{key}: {name} is quantized, which only adapter.target_modules "
                    "can name; leave it out, or set model.quantization=none."
                )
    tied = model.config.get_text_config(decoder=True).tie_word_embeddings
    if tied and (wrong := sorted(saved & embeddings)):
        raise UserError(
            f"adapter.args.modules_to_save: {wrong[0]} is tied to the other of embedding and "
            "output head; a copy of one would untie them."
        )


def load(model: PreTrainedModel, folder: Path, *, trained: bool) -> None:
    """Loads an adapter from a folder into a model.

    Args:
        trained: whether the adapter's weights are trained further.

    Raises:
        UserError: it is not a LoRA adapter, or belongs to another model.
    """
    from peft import set_peft_model_state_dict

    config = read_config(folder)
    attach(model, config, 0)
    if any(p.is_meta for p in model.parameters()):
        return  # the main process's weights replace them
    with reading(folder / WEIGHTS):
        stored = load_file(folder / WEIGHTS)
    try:
        stored = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
        for name, own in file_tensors(model, tensors_of(model)).items():
            found = stored.get(name.removeprefix(PREFIX))
            if found is None:
                raise ValueError(f"{name} is only in the model")
            if found.shape != own.shape:
                raise ValueError(f"{name} has the shape {[*found.shape]}, not {[*own.shape]}")
        result = set_peft_model_state_dict(model, stored, NAME)
    except Exception as error:  # such as corrupt files or other shapes
        raise UserError(
            f"adapter {folder}: does not fit the model: {first_line(error)}."
        ) from error
    if unexpected := result.unexpected_keys:  # type: ignore[attr-defined]
        raise UserError(
            f"adapter {folder}: does not fit the model: {unexpected[0]} is only in the file."
        )
    if not trained:
        model.requires_grad_(False)


def read_config(folder: Path) -> LoraConfig:
    """Reads the config of an adapter's folder.

    Raises:
        UserError: it cannot be read, or its method is not LoRA.
    """
    require()
    from peft import LoraConfig

    stored = read_json(folder / CONFIG)
    if stored.get("peft_type") != "LORA":
        raise UserError(
            f"adapter {folder}: is of type {stored.get('peft_type')}; only LORA (with DoRA and "
            "rsLoRA) can be trained and evaluated."
        )
    known = {f.name for f in dataclasses.fields(LoraConfig)} - {"runtime_config"}  # as peft
    try:
        config = LoraConfig(**{k: v for k, v in stored.items() if k in known})
    except FAILURES as error:
        reason = first_line(error)
        raise UserError(f"{folder / CONFIG}: peft does not take it: {reason}.") from error
    check_form(config, str(folder / CONFIG))
    config.inference_mode = False
    return config


def config_on(model: nn.Module) -> LoraConfig | None:
    """Returns the config of a model's adapter; None without an adapter."""
    configs = getattr(model, "peft_config", None)
    return configs[NAME] if configs else None


def tensors_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns an adapter's weights by their names in the model; {} without an adapter."""
    if config_on(model) is None:
        return {}
    return {
        name: p
        for name, p in model.named_parameters()
        if ".lora_" in name or f".modules_to_save.{NAME}." in name or p.requires_grad
    }


def file_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns an adapter's tensors with the names of peft's files.

    Args:
        tensors: the tensors by their names in the model.
    """
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(
        model,
        state_dict=dict(tensors),
        adapter_name=NAME,
        save_embedding_layers=False,  # "auto" would query the hub for the base model
    )
    return {PREFIX + name: tensor for name, tensor in state.items()}


def config_file(model: nn.Module) -> bytes:
    """Returns the contents of peft's config file, with sorted keys."""
    config = config_on(model)
    assert config is not None
    fields = config.to_dict()  # type: ignore[no-untyped-call]
    stored = {k: sorted(v) if isinstance(v, set) else v for k, v in fields.items()}
    stored["inference_mode"] = True  # as peft writes it
    return (json.dumps(stored, indent=2, sort_keys=True) + "\n").encode()


def begins_as_base(config: LoraConfig) -> bool:
    """Returns whether switching a fresh adapter off gives the initial model.

    PiSSA, OLoRA and others change the base weights, and a trained bias remains in the model when
    the adapter is off.
    """
    return config.init_lora_weights in INIT_AT_BASE and config.bias == "none"


@contextlib.contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Switches the adapter off within the context; outputs are bitwise the base model's."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    layers: list[Any] = [part for part in model.modules() if isinstance(part, kinds)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextlib.contextmanager
def replaced(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replaces the adapter's weights within the context.

    Args:
        tensors: weights from `copied`, by their names in the model.
    """
    current = copied(model)
    fill(model, tensors)
    try:
        yield
    finally:
        fill(model, current)


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of an adapter's weights, or of this process's shards of them."""
    offload(model)  # frees gathered weights, so that the shards are read
    return {name: p.detach().clone() for name, p in tensors_of(model).items()}


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Sets an adapter's weights, or this process's shards of them, in place."""
    offload(model)  # a change of gathered weights would be lost
    for name, p in tensors_of(model).items():
        p.copy_(tensors[name])


def base_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, base layer) for each adapted layer of a model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module.get_base_layer()


def plain_parameters(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Parameter, nn.Module | None]]:
    """Yields (name, parameter, layer) for a model's parameters except the adapter's.

    The name is that in the model without an adapter; a tied weight has several. `layer` is the
    adapted layer of the parameter, or None. A module in `modules_to_save` replaces its original.
    `quantization.plain` gives the shape and dtype of a quantized parameter.
    """
    if config_on(model) is not None:
        yield from _parameters_of_base(model, "", None)
        return
    for name, p in model.named_parameters(remove_duplicate=False):
        yield name, p, None


def _parameters_of_base(
    module: nn.Module, prefix: str, layer: nn.Module | None
) -> Iterator[tuple[str, nn.Parameter, nn.Module | None]]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(module, BaseTunerLayer):
        yield from _parameters_of_base(module.get_base_layer(), prefix, layer or module)
        return
    if isinstance(module, ModulesToSaveWrapper):
        yield from _parameters_of_base(module.modules_to_save[NAME], prefix, layer)
        return
    for name, p in module._parameters.items():
        if p is not None:
            yield prefix + name, p, layer
    for name, child in module.named_children():
        yield from _parameters_of_base(child, f"{prefix}{name}.", layer)


def merged(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for a model's weights with its adapter merged in, layer by layer.

    The model itself is not changed, since adding and subtracting in place would change bfloat16
    weights slightly each time. The sum is computed in float32 on a copy of the layer, and returned
    in the weight's dtype. Quantized weights are dequantized. Collective if the model is sharded. A
    tied weight is yielded once.

    Args:
        dtype: dtype for quantized weights; None: the dtype of the model.
    """
    dtype = dtype or quantization.dtype_of(model)
    seen: set[nn.Parameter] = set()
    of_layer: dict[str, Tensor] = {}
    current: nn.Module | None = None
    for name, p, layer in plain_parameters(model):
        if p in seen:
            continue
        seen.add(p)
        if layer is None:
            if quantization.is_quantized(p):
                yield name, quantization.dequantized(p).to(dtype)
            else:
                yield name, full_tensor(p.detach())
            continue
        if layer is not current:
            current, of_layer = layer, _merged_layer(layer)
        yield name, of_layer[name.rpartition(".")[2]].to(quantization.plain(p, dtype).dtype)


@torch.no_grad()
def _merged_layer(layer: nn.Module) -> dict[str, Tensor]:
    """Returns an adapted layer's parameters with the adapter merged in, at least in float32."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    def wide(p: Tensor) -> nn.Parameter:
        is_quantized = quantization.is_quantized(p)
        whole = quantization.dequantized(p) if is_quantized else full_tensor(p.detach())
        dtype = torch.promote_types(whole.dtype, torch.float32)
        return nn.Parameter(whole.to(dtype, copy=not is_quantized), requires_grad=False)

    # The memo keeps deepcopy from copying parameters, which fails for sharded ones.
    complete = copy.deepcopy(layer, {id(p): wide(p) for p in layer.parameters()})
    quantized = any(map(quantization.is_quantized, layer.parameters()))
    for part in complete.modules():
        if isinstance(part, BaseTunerLayer):
            if quantized:
                _merge_dequantized(part)
            else:
                part.merge()
    return {name: p.detach() for name, p, _ in _parameters_of_base(complete, "", None)}


def _merge_dequantized(layer: Any) -> None:
    """Merges the adapter into a dequantized layer; peft's own merge would quantize the sum."""
    base = layer.get_base_layer()
    variant = layer.lora_variant.get(NAME)  # DoRA; None: plain LoRA
    if variant is None:
        base.weight.data += layer.get_delta_weight(NAME)
    else:
        base.weight.data = variant.merge_safe(layer, NAME, base.weight.data)
