"""How a variant says what it needs: by the names of its parameters.

A policy loss or an advantage rule is one pure function. Its positional parameters name the tensors
it is computed from, its keyword-only ones the knobs of the recipe that it reads. So a new variant
is one function and one line in a table, and nothing has to be passed on by hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache

from torch import Tensor


@lru_cache
def parameters(function: Callable[..., Tensor]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(positional parameters, keyword-only parameters) of a function, by name."""
    found = inspect.signature(function).parameters.values()
    return (
        tuple(p.name for p in found if p.kind is not p.KEYWORD_ONLY),
        tuple(p.name for p in found if p.kind is p.KEYWORD_ONLY),
    )


def apply(
    function: Callable[..., Tensor], tensors: Mapping[str, Tensor], settings: object
) -> Tensor:
    """Calls `function` with the tensors and the settings' attributes that it names."""
    positional, knobs = parameters(function)
    return function(
        *(tensors[name] for name in positional), **{name: getattr(settings, name) for name in knobs}
    )
