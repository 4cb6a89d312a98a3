"""CUDA memory handles as JSON, which replaces the pickles that vLLM sends over HTTP."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

# The arguments of torch's `rebuild_cuda_tensor`: the tensor's class, size, stride and offset, the
# storage's class, the dtype, and REST, the numbers and bytes that describe the storage.
REST = slice(6, None)


def handle_of(weight: Tensor) -> dict[str, Any]:
    """Returns the handle, as JSON, with which another process opens a CUDA tensor."""
    from torch.multiprocessing import reductions

    return to_json(reductions.reduce_tensor(weight.contiguous())[1])  # type: ignore[no-untyped-call]


def to_json(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Returns arguments of `rebuild_cuda_tensor` as JSON, without classes and dtype."""
    _, size, stride, offset = arguments[:4]
    rest = [base64.b64encode(a).decode() if isinstance(a, bytes) else a for a in arguments[REST]]
    return {"size": list(size), "stride": list(stride), "offset": offset, "rest": rest}


def from_json(handle: dict[str, Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """Returns the arguments that `to_json` wrote, with the classes of a plain tensor."""
    rest = [base64.b64decode(a) if isinstance(a, str) else a for a in handle["rest"]]
    size, stride = torch.Size(handle["size"]), tuple(handle["stride"])
    return (Tensor, size, stride, handle["offset"], torch.storage.TypedStorage, dtype, *rest)
