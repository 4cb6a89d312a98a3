"""A micro-batch's forward and backward never make the host wait for a value of the device.

On the CPU nothing waits; the operations that would are recorded: reading a number, and shapes that
depend on values. Not of padded rows and of experts, where transformers does so itself.
"""

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_cli.distributed.workers import Workers
from grpo_cli.training import loop
from tests.optimizer_batch import FEW, all_gradients, make_groups

READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}


class HostReads(TorchDispatchMode):
    """Records the operations for which the host waits, and where they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        masks = [t for t in args[1] if t is not None] if name in INDEXED else []
        if name in READS or any(t.dtype in (torch.bool, torch.uint8) for t in masks):
            self.note(name)
        return function(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        own = [f for f in traceback.extract_stack() if "grpo_cli" in f.filename]
        self.found.append(f"{name}: {own[-1].filename}:{own[-1].lineno}" if own else name)


def test_packed_micro_batch_reads_nothing_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = HostReads()
    forward, backward, tolist = loop.micro_batch_loss, Workers.backward, Tensor.tolist
    inside: list[bool] = []

    def recording(function: Any) -> Any:
        def run(*args: Any) -> Any:
            with reads:
                inside.append(True)
                try:
                    return function(*args)
                finally:
                    inside.pop()

        return run

    def noted(tensor: Tensor) -> Any:
        if inside:
            reads.note("tolist")
        return tolist(tensor)

    monkeypatch.setattr(Tensor, "tolist", noted)
    monkeypatch.setattr(loop, "micro_batch_loss", recording(forward))
    monkeypatch.setattr(Workers, "backward", recording(backward))
    all_gradients(Workers("cpu"), make_groups(), 40, names=set(FEW) - {"router"})
    found = sorted(set(reads.found))
    assert not found, "\n".join(found)
