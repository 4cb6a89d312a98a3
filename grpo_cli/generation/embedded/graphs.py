"""Records a function of fixed shapes once, and runs what it has recorded without Python.

A step of decoding that is launched operation by operation takes a GPU's host longer than the GPU. A
CUDA graph keeps the kernels with their arguments and launches them with one call. What it keeps are
addresses and numbers: the function has to read and write the same tensors each time, decide nothing
by values on the device, and find everything that changes in tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

Replay = Callable[[], object]


class CudaGraphs:
    """Captures CUDA graphs, each with memory of its own, which is free once the graph is."""

    def __init__(self) -> None:
        # One for all: cuBLAS keeps a workspace for each stream that it has met.
        self.stream: torch.cuda.Stream | None = None

    def capture(self, key: Hashable, function: Callable[[], None]) -> Replay:
        """Records what a function does, and returns what does the same again.

        The function has run once before, so that nothing is set up any more while it is recorded.

        Args:
            key: names the shapes that the function works on.
        """
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # as torch.cuda.graph does: the graph allocates memory of its own
        graph = torch.cuda.CUDAGraph()
        if self.stream is None:
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream = self.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Rewards and the collation of prompts may use the device in other threads meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                abandon(graph)
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay


def abandon(graph: torch.cuda.CUDAGraph) -> None:
    """Ends a capture that has failed; the error that it ends with says nothing more."""
    with contextlib.suppress(RuntimeError):
        graph.capture_end()


@dataclass
class FallbackGraphs:
    """Captures until it fails once; says why, and calls functions as they are from then on."""

    graphs: CudaGraphs
    say: Callable[[str], None]
    has_failed: bool = False
    captures: int = 0

    def capture(self, key: Hashable, function: Callable[[], None]) -> Replay:
        if self.has_failed:
            return function
        try:
            replay = self.graphs.capture(key, function)
        except (RuntimeError, NotImplementedError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        else:
            self.captures += 1
            return replay
        self.has_failed = True
        self.say(f"note: decoding step by step, without CUDA graphs ({reason})")
        return function
