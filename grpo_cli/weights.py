"""A policy's weights on their way to an engine: by name, in order, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class WeightInfo:
    """What a weight is called in the checkpoint, and what it looks like."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Weights:
    """Every parameter of a model, in one fixed order; each pass gathers anew.

    All of them, frozen ones too: an engine that fuses layers fills the parts that it is not sent
    with uninitialised memory. A tied head is there once, under the embedding's name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def infos(self) -> list[WeightInfo]:
        """What iterating gives, without gathering anything."""
        named = self.model.named_parameters()
        return [WeightInfo(n, tuple(p.shape), p.dtype) for n, p in named]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) one at a time: every process of a sharded model has to iterate."""
        for name, parameter in self.model.named_parameters():
            yield name, whole(parameter.detach())


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be divided over processes: then a collective."""
    gather = getattr(tensor, "full_tensor", None)  # a DTensor
    if gather is None:
        return tensor
    found: Tensor = gather()
    return found


def buckets(infos: Iterable[WeightInfo], limit: int) -> Iterator[list[WeightInfo]]:
    """Consecutive weights of one dtype that fill `limit` bytes; a larger one is alone.

    Sender and receiver cut with the same function, so that nothing but the bytes has to travel.
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
    """The next weights of a pass as one flat tensor, [N].

    Raises:
        ValueError: they are not those of the bucket.
    """
    parts = []
    for info in bucket:
        name, tensor = next(weights)
        if (name, tuple(tensor.shape), tensor.dtype) != (info.name, info.shape, info.dtype):
            raise ValueError(f"{name} was to be {info}")
        parts.append(tensor.reshape(-1))
    return torch.cat(parts)


def unflattened(flat: Tensor, bucket: list[WeightInfo]) -> list[tuple[str, Tensor]]:
    """The weights that `flattened` was given."""
    parts = torch.split(flat, [torch.Size(info.shape).numel() for info in bucket])
    return [(i.name, part.view(i.shape)) for i, part in zip(bucket, parts, strict=True)]
