"""A policy's weights for an engine: by name, in a fixed order, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grpo_cli.distributed.fsdp import full_tensor
from grpo_cli.models import adapters, quantization

BUCKET_BYTES = 2**28  # per transfer: enough for full link speed, small relative to a model


@dataclass(frozen=True)
class WeightInfo:
    """Describes a weight by its name in the checkpoint, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Weights:
    """Iterates over all parameters of a model in a fixed order; each pass gathers them again.

    Frozen parameters are included, since an engine that fuses layers would fill missing parts with
    uninitialised memory. A tied head is yielded once, under the embedding's name. An adapter is
    merged in, quantized weights are dequantized, and the names are the base model's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def infos(self) -> list[WeightInfo]:
        """Describes the weights that iteration yields, without gathering them."""
        dtype = quantization.dtype_of(self.model)
        infos: dict[torch.nn.Parameter, WeightInfo] = {}
        for name, p, _ in adapters.plain_parameters(self.model):
            plain = quantization.plain(p, dtype)
            infos.setdefault(p, WeightInfo(name, tuple(plain.shape), plain.dtype))
        return [*infos.values()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, complete tensor). Every process of a sharded model must iterate."""
        yield from adapters.merged(self.model)


class AdapterWeights(Weights):
    """Iterates over the weights of a model's adapter, with the names of peft's files."""

    def infos(self) -> list[WeightInfo]:
        return [WeightInfo(name, tuple(p.shape), p.dtype) for name, p in self._tensors().items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self._tensors().items():
            yield name, full_tensor(p.detach())

    def _tensors(self) -> dict[str, Tensor]:
        return adapters.file_tensors(self.model, adapters.tensors_of(self.model))


def buckets(infos: Iterable[WeightInfo], limit: int) -> Iterator[list[WeightInfo]]:
    """Yields lists of consecutive weights of one dtype, up to `limit` bytes or one larger weight.

    Sender and receiver use the same function, so that only the bytes have to be sent.
    """
    bucket: list[WeightInfo] = []
    size = 0
    for info in infos:
        own = torch.Size(info.shape).numel() * info.dtype.itemsize
        if bucket and (info.dtype != bucket[0].dtype or size + own > limit):
            yield bucket
            bucket, size = [], 0
        bucket.append(info)
        size += own
    if bucket:
        yield bucket


def flattened(weights: Iterator[tuple[str, Tensor]], bucket: list[WeightInfo]) -> Tensor:
    """Returns the next weights of a pass as one flat tensor, [N].

    Raises:
        ValueError: the next weights are not the bucket's.
    """
    parts = []
    for info in bucket:
        name, tensor = next(weights)
        if (name, tuple(tensor.shape), tensor.dtype) != (info.name, info.shape, info.dtype):
            raise ValueError(f"{name} was to be {info}")
        parts.append(tensor.reshape(-1))
    return torch.cat(parts)


def unflattened(flat: Tensor, bucket: list[WeightInfo]) -> list[tuple[str, Tensor]]:
    """Splits the output of `flattened` into the bucket's (name, weight) pairs."""
    parts = torch.split(flat, [torch.Size(info.shape).numel() for info in bucket])
    return [(i.name, part.view(i.shape)) for i, part in zip(bucket, parts, strict=True)]
