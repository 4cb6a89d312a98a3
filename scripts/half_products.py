"""Computes products of 16-bit matrices in float32, where a processor has no instructions for them.

    python scripts/half_products.py -m grpo_cli.cli train mixed_precision=bf16 ...

PyTorch's own products in bfloat16 take a hundred times as long there. Such processors and GPUs sum
in float32 and round once, as this does: rounding can be tried on any machine, speed cannot.
"""

from __future__ import annotations

import runpy
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

OPERATORS = ("mm", "bmm", "addmm", "baddbmm", "mm.out", "bmm.out", "addmm.out", "baddbmm.out")
HALF = (torch.bfloat16, torch.float16)
installed: list[torch.library.Library] = []  # an override ends with its library


def are_quick() -> bool:
    """Returns whether the processor has instructions for products in bfloat16."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def install(*, always: bool = False) -> None:
    """Replaces the products of this process, where the processor has its own only if `always`."""
    if installed or (are_quick() and not always):
        return
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    installed.append(library)
    for name in OPERATORS:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

        def product(
            keys: torch.DispatchKeySet,
            *given: Any,
            out: Tensor | None = None,
            kernel: Any = kernel,
            **named: Any,
        ) -> Tensor:
            dtype = given[0].dtype
            if out is not None:
                named["out"] = out if dtype not in HALF else out.float()
            if dtype in HALF:
                given = tuple(t.float() if isinstance(t, Tensor) else t for t in given)
            found: Tensor = kernel.call_boxed(keys, *given, **named)
            return found.to(dtype) if out is None else out.copy_(found)

        how = {"dispatch_key": "CPU", "with_keyset": True, "allow_override": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it overrides
            library.impl(name, product, **how)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
