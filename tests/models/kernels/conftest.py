from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

from grpo_cli.models.kernels import arithmetic, plain
from grpo_cli.models.kernels.arithmetic import flash, flash_backward


def off_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which no device is the CPU."""
    code = function.__code__
    assert "cpu" in code.co_consts
    constants = tuple("none" if c == "cpu" else c for c in code.co_consts)
    changed = FunctionType(code.replace(co_consts=constants), function.__globals__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


@pytest.fixture(params=["cpu kernel", "plain"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        for function in (flash, flash_backward):
            for module in (arithmetic, plain):
                monkeypatch.setattr(module, function.__name__, off_cpu(function))
