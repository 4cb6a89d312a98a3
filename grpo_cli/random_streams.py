"""Random numbers: seeds derived from a path of integers, and the state of the global streams."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """Returns a seed in [0, 2**63) from a path of integers and names: (seed, position, sample).

    Streams of different paths are independent. The draws of one completion therefore depend neither
    on the rest of the batch, nor on the number of processes, nor on where a run was resumed.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def rng_state() -> dict[str, Any]:
    """Returns the random states of this process, as tensors and plain values."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        # Only of this process's device: a resumed run may have another number of devices.
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores the random states that `rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0])
