"""Writes model folders in the format of transformers: config, tokenizer, safetensors files.

Weights are written and hashed while they are read, with at most 5 GB of them in memory.
safetensors' own writer is not used: it needs a complete file in memory, holds the GIL while it
writes, and would require a second read for the hash.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.modeling_utils import str_to_torch_dtype

from grpo_cli.checkpoints import manifest
from grpo_cli.checkpoints.manifest import Entry, Hashing
from grpo_cli.models import adapters

FILE_BYTES = 5 * 10**9  # maximum bytes of a weights file, unless a single tensor is larger
INDEX = "model.safetensors.index.json"
DTYPES = {dtype: name for name, dtype in str_to_torch_dtype.items()}  # torch's to safetensors'


def files_of(model: PreTrainedModel, tokenizer: Any) -> dict[str, bytes]:
    """Returns a model folder's files by path, without weights: config, tokenizer, code.

    Args:
        tokenizer: the tokenizer or a processor, which has `save_pretrained`; None: neither.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-") as made:
        folder = Path(made)
        model.save_pretrained(folder, state_dict={})  # writes no weights
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        paths = {p: p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*"))}
        files = {name: p.read_bytes() for p, name in paths.items() if p.is_file()}
    dtype = getattr(model, "stored_dtype", None)
    if dtype is not None and "config.json" in files:
        files["config.json"] = with_dtype(files["config.json"], dtype)
    return files


def with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """Returns a model's config.json with another dtype of the weights."""
    fields = json.loads(config) | {"dtype": str(dtype).removeprefix("torch.")}
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def files_of_adapter(model: PreTrainedModel, tokenizer: Any) -> dict[str, bytes]:
    """Returns the files of an adapter's folder by path, without weights."""
    files = files_of(model, tokenizer)
    own = {"config.json", "generation_config.json"}
    kept = {n: data for n, data in files.items() if n not in own and not n.endswith(".py")}
    return kept | {adapters.CONFIG: adapters.config_file(model)}


def as_published(
    model: PreTrainedModel, names: Iterable[str], read: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) in the published format, for example one tensor per expert.

    Weights are converted to `model.stored_dtype`, which is that of the files that the model was
    loaded from; a model that was built has none.

    Args:
        model: may be on the meta device.
        names: tensor names in the model.
        read: tensors by these names.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept = [name for name in names if name not in ignored]
    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:
        mapping = get_model_conversion_mapping(model, add_legacy=False)
    if not mapping:
        yield from ((name, in_stored_dtype(model, name, read[name])) for name in kept)
        return
    by_layer = any(isinstance(step, WeightConverter) for step in mapping)
    kept.sort(key=_layer)
    for _, group in itertools.groupby(kept, key=_layer if by_layer else None):
        own = {name: in_stored_dtype(model, name, read[name]) for name in group}
        yield from revert_weight_conversion(model, own).items()


def in_stored_dtype(model: PreTrainedModel, name: str, tensor: Tensor) -> Tensor:
    """Returns a weight in the dtype of the files that the model was loaded from."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    exact = {*(getattr(model, "_keep_in_fp32_modules", None) or ()), *strict}
    dtype = getattr(model, "stored_dtype", None)
    if dtype is None or not tensor.is_floating_point() or exact & {*name.split(".")}:
        return tensor
    return tensor.to(dtype)


def _layer(name: str) -> str:
    """Returns `model.layers.7` of `model.layers.7.mlp.down_proj.weight`; "" outside of layers."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else ""


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], at_most: int = FILE_BYTES
) -> dict[str, Entry]:
    """Writes model.safetensors, or several files of at most `at_most` bytes and their index.

    Returns:
        The size and hash of each file, by name.
    """
    parts: list[tuple[Entry, list[str]]] = []
    waiting: dict[str, Tensor] = {}
    waiting_bytes = total = parameters = 0

    def write_part() -> None:
        name = f"model-{len(parts) + 1:05d}.safetensors"
        parts.append((write_safetensors(folder / name, waiting), list(waiting)))
        waiting.clear()

    for name, tensor in tensors:
        if waiting and waiting_bytes + tensor.nbytes > at_most:
            write_part()
            waiting_bytes = 0
        waiting[name] = tensor
        waiting_bytes += tensor.nbytes
        total += tensor.nbytes
        parameters += tensor.numel()
    write_part()

    written: dict[str, Entry] = {}
    weight_map: dict[str, str] = {}
    for number, (entry, names) in enumerate(parts, start=1):
        final = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        final = final if len(parts) > 1 else "model.safetensors"
        (folder / f"model-{number:05d}.safetensors").rename(folder / final)
        written[final] = entry
        weight_map |= dict.fromkeys(names, final)
    if len(parts) > 1:
        index = {
            "metadata": {"total_parameters": parameters, "total_size": total},
            "weight_map": weight_map,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        written[INDEX] = manifest.write_file(folder / INDEX, text.encode())
    return written


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> Entry:
    """Writes a safetensors file: length of the header, header, bytes of the tensors."""
    # Wide types first, so that each tensor is aligned to its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        stream = Hashing(file)
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            flat = tensors[name].detach().cpu().reshape(-1)
            stream.write(flat.contiguous().view(torch.uint8).numpy().data)
        manifest.sync(file)
    return stream.entry
