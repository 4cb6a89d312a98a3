"""Captures a function of fixed shapes as a CUDA graph, and replays it without Python.

Launching a decoding step operation by operation takes longer on the host than on the GPU. A CUDA
graph stores the kernels with their arguments and launches them with one call. The arguments are
addresses and numbers. The function must therefore use the same tensors each time, must not branch
on values on the device, and must read everything that changes from tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from grpo_cli.errors import first_line

Replay = Callable[[], object]


class CudaGraphs:
    """Captures CUDA graphs, each with its own memory pool, which is freed with the graph."""

    def __init__(self) -> None:
        # One stream for all captures: cuBLAS keeps a workspace for each stream it has used.
        self.stream: torch.cuda.Stream | None = None

    def capture(self, key: Hashable, function: Callable[[], None]) -> Replay:
        """Captures a function, and returns the callable that replays it.

        The function must have run once before, so that the capture contains no one-time set-up.

        Args:
            key: identifies the shapes that the function works on.
        """
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # as torch.cuda.graph does: the graph allocates memory of its own
        graph = torch.cuda.CUDAGraph()
        if self.stream is None:
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream = self.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Other threads (rewards, collation of prompts) may use the device during the capture.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # adds nothing to the first error
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay


@dataclass
class FallbackGraphs:
    """Captures until a capture fails; then prints why, and returns functions uncaptured."""

    graphs: CudaGraphs
    say: Callable[[str], None]
    has_failed: bool = False

    def capture(self, key: Hashable, function: Callable[[], None]) -> Replay:
        if self.has_failed:
            return function
        try:
            return self.graphs.capture(key, function)
        except (RuntimeError, NotImplementedError) as error:
            reason = first_line(error)
        self.has_failed = True
        self.say(f"note: decoding step by step, without CUDA graphs ({reason})")
        return function
