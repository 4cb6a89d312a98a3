"""Adapters (LoRA, arXiv 2106.09685, and others) through peft: few weights on a frozen model.

peft replaces linear layers in place. The model keeps its class and its forward, so that all code
that computes log-probabilities or samples works unchanged. This file selects and replaces the
trained weights, and yields weights with the adapter merged in. `adapter_methods.py` lists the
methods.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
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
from grpo_cli.distributed.fsdp import full_tensor, reshard
from grpo_cli.errors import UserError, first_line, nearest
from grpo_cli.files import read_json, reading
from grpo_cli.models import quantization
from grpo_cli.models.adapter_methods import METHODS, REFUSED
from grpo_cli.models.settings import Adapter

if TYPE_CHECKING:
    from peft import PeftConfig

CONFIG = sources.ADAPTER_CONFIG
WEIGHTS = "adapter_model.safetensors"
NAME = "default"  # peft's name of the adapter, a part of its parameters' names
PREFIX = "base_model.model."  # prefix of the names in peft's files


def config_of(adapter: Adapter, base: str, revision: str | None) -> PeftConfig | None:
    """Returns peft's config of the recipe's adapter, new or of `adapter.path`; None without one.

    Args:
        base: hub name or folder of the base model, which the config names.

    Raises:
        UserError: peft is missing or refuses `adapter.args`, or there is no such adapter.
    """
    if adapter.method == "none":
        return None
    if adapter.path is not None:
        folder = Path(adapter.path).expanduser()
        if sources.is_adapter(folder) and (folder / WEIGHTS).is_file():
            return read_config(folder)
        raise UserError(
            f"adapter.path = {adapter.path}: is not a folder with adapter_config.json and "
            "adapter_model.safetensors."
        )
    targets, (_, variant) = adapter.target_modules, METHODS[adapter.method]
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "target_modules": targets if isinstance(targets, str) else [*targets],
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        **variant,
    }
    if own := sorted(fields.keys() & adapter.args.keys()):
        raise UserError(f"adapter.args.{own[0]}: has a key of its own below adapter.")
    return _config(fields | adapter.args, "adapter", is_new=True)


def read_config(folder: Path) -> PeftConfig:
    """Reads the config of an adapter's folder.

    Raises:
        UserError: it cannot be read, or peft is missing or does not take it.
    """
    stored = read_json(folder / CONFIG)
    if stored.get("peft_type") != "LORA":
        raise UserError(
            f"adapter {folder}: is of type {stored.get('peft_type')}; only LORA can be trained and "
            "evaluated."
        )
    stored.pop("runtime_config", None)  # as peft
    return _config(stored | {"inference_mode": False}, str(folder / CONFIG), is_new=False)


def _config(fields: dict[str, Any], where: str, *, is_new: bool) -> PeftConfig:
    """Returns peft's config of an adapter that can be saved, and merged without other outputs.

    Args:
        is_new: whether an unknown field is an error; else a newer peft has written it.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError("adapter: peft is not installed here; pip install 'peft>=0.20'.")
    import peft

    with _explained(f"{where}: peft does not take it"):
        if is_new:
            config = peft.get_peft_config(fields)
        else:
            config = peft.PeftConfig.from_peft_type(**fields)  # type: ignore[call-arg, no-untyped-call]
    for name, reason in REFUSED.items():
        if getattr(config, name, None):
            raise UserError(f"{where}: {name} {reason}; leave it out.")
    # The init changes the base randomly, and the adapter's folder does not store the random state.
    if str(init_of(config)).startswith("pissa_niter"):
        raise UserError(
            f"{where}: the init {init_of(config)} is random and changes the model under the "
            "adapter, so that the saved adapter would fit no model; use pissa."
        )
    return config


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns the exceptions that peft raises for an invalid config into a UserError."""
    try:
        yield
    except (
        TypeError, ValueError, ImportError, RuntimeError, AttributeError, KeyError,
        re.error, regex.error, TimeoutError,
    ) as error:  # fmt: skip
        raise UserError(f"{what}: {first_line(error)}.") from error


def init_of(config: PeftConfig) -> Any:
    """Returns the init of an adapter's weights: `init_lora_weights`, `init_weights` or the like."""
    return next(value for name, value in vars(config).items() if name.startswith("init_"))


def attach(model: PreTrainedModel, config: PeftConfig | None, seed: int) -> None:
    """Adds a new float32 adapter to a model, and freezes the model; None: changes nothing.

    Args:
        seed: seed of the adapter's initial weights, the same on every process.

    Raises:
        UserError: the adapter matches no module, or modules that it must not change.
    """
    if config is None:
        return
    from peft import inject_adapter_in_model

    outer = (model.get_input_embeddings(), model.get_output_embeddings())
    with torch.random.fork_rng(devices=[]), _explained("adapter: peft cannot add it"):
        torch.manual_seed(seed)
        check_modules(model, config)
        inject_adapter_in_model(config, model, NAME)
    for name, base in base_layers(model):
        if base in outer:
            raise UserError(
                f"adapter.target_modules: {name} is an embedding or the output head, which an "
                "adapter does not change here; train the layers between them."
            )
        if isinstance(base, nn.Linear) and "Router" in type(base).__name__:  # Llama 4, PhiMoE
            raise UserError(
                f"adapter.target_modules: {name} is a router; name other layers, such as [q_proj]."
            )
    is_tied = model.config.get_text_config(decoder=True).tie_word_embeddings
    for name, module in model.named_modules():
        if is_tied and getattr(module, "original_module", None) in outer:
            raise UserError(
                f"adapter.args.modules_to_save: {name} is tied to the other of embedding and "
                "output head; a copy of one would untie them."
            )
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()


def check_modules(model: PreTrainedModel, config: Any) -> None:
    """Checks that a model has the modules that an adapter names, where peft would ignore them.

    Raises:
        UserError: no module has the name, or it is quantized and cannot be trained.
    """
    names = [name for name, _ in model.named_modules() if name]
    targets = config.target_modules
    if isinstance(targets, str) and targets != "all-linear":
        if not [name for name in names if regex.fullmatch(targets, name, timeout=5)]:
            raise UserError(f"adapter.target_modules = {targets}: matches no module of the model.")
    elif not isinstance(targets, str):
        for target in sorted(targets or ()):
            if not any(f".{name}".endswith(f".{target}") for name in names):
                near = nearest(target, sorted({name.rpartition(".")[2] for name in names}))
                raise UserError(f"adapter.target_modules: the model has no module {target}.{near}")
    quantized = [n for n, p in model.named_parameters() if quantization.is_quantized(p)]
    for key in ("modules_to_save", "target_parameters"):
        for name in getattr(config, key, None) or ():
            if any(f".{name}." in f".{weight}." for weight in quantized):
                raise UserError(
                    f"adapter.args.{key}: {name} is quantized, which only adapter.target_modules "
                    "can name; leave it out, or set model.quantization=none."
                )


def load(model: PreTrainedModel, folder: Path, *, trained: bool) -> None:
    """Loads an adapter from a folder into a model.

    Args:
        trained: whether the adapter's weights are trained further.

    Raises:
        UserError: it is of another type, or belongs to another model.
    """
    attach(model, read_config(folder), 0)
    if any(p.is_meta for p in model.parameters()):
        return  # the main process's weights replace them
    own = file_tensors(model, tensors_of(model))
    with reading(folder / WEIGHTS):
        stored = load_file(folder / WEIGHTS)
    stored = {PREFIX + name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
    problems = [
        f"{name} is only in the {'model' if name in own else 'file'}"
        for name in sorted(own.keys() ^ stored.keys())
    ] or [
        f"{name} has the shape {[*stored[name].shape]}, not {[*p.shape]}"
        for name, p in own.items()
        if stored[name].shape != p.shape
    ]
    if problems:
        raise UserError(f"adapter {folder}: does not fit the model: {problems[0]}.")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(stored[name])
    if not trained:
        model.requires_grad_(False)


def attached_config(model: nn.Module) -> PeftConfig | None:
    """Returns the config of a model's adapter; None without an adapter."""
    configs = getattr(model, "peft_config", None)
    return configs[NAME] if configs else None


def tensors_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns an adapter's weights by their names in the model; {} without an adapter."""
    if attached_config(model) is None:
        return {}
    named = model.named_parameters()
    return {name: p for name, p in named if NAME in name.split(".") or p.requires_grad}


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
    """Returns the contents of peft's config file, with sorted keys and sets."""
    config = attached_config(model)
    assert config is not None
    fields = config.to_dict() | {"inference_mode": True}  # type: ignore[no-untyped-call]
    return (json.dumps(fields, indent=2, sort_keys=True, default=sorted) + "\n").encode()


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
    reshard(model)  # frees gathered weights, so that the shards are read
    return {name: p.detach().clone() for name, p in tensors_of(model).items()}


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Sets an adapter's weights, or this process's shards of them, in place."""
    reshard(model)  # a change of gathered weights would be lost
    for name, p in tensors_of(model).items():
        p.copy_(tensors[name])


def base_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, base layer) for each adapted layer of a model."""
    for name, module in model.named_modules():
        if hasattr(module, "get_base_layer"):
            yield name, module.get_base_layer()  # type: ignore[operator]


def plain_parameters(
    module: Any, prefix: str = "", layer: nn.Module | None = None
) -> Iterator[tuple[str, nn.Parameter, nn.Module | None]]:
    """Yields (name, parameter, layer) for a model's parameters except the adapter's.

    The name is that in the model without an adapter; a tied weight has several. `layer` is the
    adapted layer of the parameter, or None. A module in `modules_to_save` replaces its original.
    `quantization.plain` gives the shape and dtype of a quantized parameter.
    """
    if hasattr(module, "get_base_layer"):  # a layer of peft
        yield from plain_parameters(module.get_base_layer(), prefix, layer or module)
        return
    if hasattr(module, "modules_to_save"):  # a wrapper of peft
        yield from plain_parameters(module.modules_to_save[NAME], prefix, layer)
        return
    for name, p in module._parameters.items():
        if p is not None:
            yield prefix + name, p, layer
    for name, child in module.named_children():
        yield from plain_parameters(child, f"{prefix}{name}.", layer)


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

    def wide(p: Tensor) -> nn.Parameter:
        is_quantized = quantization.is_quantized(p)
        whole = quantization.dequantized(p) if is_quantized else full_tensor(p.detach())
        dtype = torch.promote_types(whole.dtype, torch.float32)
        return nn.Parameter(whole.to(dtype, copy=not is_quantized), requires_grad=False)

    # The memo keeps deepcopy from copying parameters, which fails for sharded ones.
    complete = copy.deepcopy(layer, {id(p): wide(p) for p in layer.parameters()})
    quantized = any(map(quantization.is_quantized, layer.parameters()))
    for part in complete.modules():
        if hasattr(part, "get_base_layer"):
            kind: Any = type(part)
            if quantized:  # whose own merge would quantize the sum: peft's layer for plain weights
                kind = importlib.import_module(kind.__module__.rpartition(".")[0]).Linear
            kind.merge(part)
    return {name: p.detach() for name, p, _ in plain_parameters(complete)}
