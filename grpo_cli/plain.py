"""A plain model folder: config, tokenizer, and weights in safetensors files, as transformers'.

The weights are written as they are read, from wherever, with at most 5 GB of them in memory.
safetensors' own writer wants all of a file in memory and keeps Python from doing anything else.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from grpo_cli import manifest
from grpo_cli.manifest import Entry, Hashing

FILE_BYTES = 5 * 10**9  # of a file of weights, at most, but for a tensor that is larger
INDEX = "model.safetensors.index.json"

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def files_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, bytes]:
    """What lies beside the weights in a model folder, by path: config, tokenizer, own code."""
    with tempfile.TemporaryDirectory(prefix="grpo-") as made:
        folder = Path(made)
        model.save_pretrained(folder, state_dict={})  # without weights
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        files = {p: p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*"))}
        return {name: p.read_bytes() for p, name in files.items() if p.is_file()}


def as_published(
    model: PreTrainedModel, names: Iterable[str], read: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as in the folder that a model comes from: its experts, say, one by one.

    Args:
        model: may be on the meta device. read: gives a tensor by its name in the model.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept = [name for name in names if name not in ignored]
    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:
        mapping = get_model_conversion_mapping(model, add_legacy=False)
    if not mapping:
        yield from ((name, read[name]) for name in kept)
        return
    whole_layers = any(isinstance(step, WeightConverter) for step in mapping)
    kept.sort(key=_layer)
    for _, group in itertools.groupby(kept, key=_layer if whole_layers else None):
        yield from revert_weight_conversion(model, {name: read[name] for name in group}).items()


def _layer(name: str) -> str:
    """model.layers.7 of model.layers.7.mlp.experts.3.down_proj.weight; "" outside of layers."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else ""


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], at_most: int = FILE_BYTES
) -> dict[str, Entry]:
    """Writes model.safetensors, or several files of `at_most` bytes and their index.

    Returns:
        What was written, by name.
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
    """Writes one file in the safetensors format: length of the header, header, bytes of tensors."""
    # Wide types first, so that each tensor lies where its type may be read.
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
