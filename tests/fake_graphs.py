"""Stands in for CUDA graphs: keeps the operations of a function and runs them again by themselves.

As with a CUDA graph, capturing changes nothing, a replay calls no Python of the function, and every
tensor and number is the one of the capture: a function that replaces a buffer, or reads something
in Python that changes, gives other results. What waits for the device is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# Operations by which the host learns a value, or hands one over.
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.lift_fresh, aten.masked_select, aten.equal}
BY_MASK = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


def tensors_in(values: Any) -> list[Tensor]:
    """Returns the tensors in a nest of tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the arguments that an operation writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            found += tensors_in(given)
    return found


class Recorder(TorchDispatchMode):
    """Keeps the operations that are called inside, and what tensors held before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: set[int] = set()  # storages that the function has allocated
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        given = tensors_in((args, kwargs))
        by_mask = packet in BY_MASK and any(t.dtype == torch.bool for t in tensors_in(args[1]))
        if packet in WAITING or by_mask:
            raise RuntimeError(f"{func} waits for the device, or hands it a value of the host")
        for tensor in written(func, args, kwargs):
            storage = tensor.untyped_storage().data_ptr()
            if storage not in self.made and storage not in self.before:
                whole = tensor.as_strided(
                    (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0
                )
                self.before[storage] = whole, whole.clone()
        out = func(*args, **kwargs)
        outs = tensors_in(out)
        known = {t.untyped_storage().data_ptr() for t in given}
        new = [t for t in outs if t.untyped_storage().data_ptr() not in known]
        self.made |= {t.untyped_storage().data_ptr() for t in new}
        self.calls.append((func, args, kwargs, outs))
        return out


class RecordingGraphs:
    """Captures functions on the CPU; counts captures and replays."""

    def __init__(self) -> None:
        self.captures: list[Any] = []
        self.replays = 0

    def capture(self, key: Hashable, function: Callable[[], None]) -> Callable[[], object]:
        recorder = Recorder()
        with recorder:
            function()
        for tensor, before in recorder.before.values():
            tensor.copy_(before)
        self.captures.append(key)

        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, outs in recorder.calls:
                again = tensors_in(func(*args, **kwargs))
                for out, value in zip(outs, again, strict=True):
                    if out.data_ptr() != value.data_ptr():  # neither in place nor a view
                        out.copy_(value)

        return replay
