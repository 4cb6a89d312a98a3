"""Callbacks of a recipe: what is a mistake before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_cli.errors import UserError
from grpo_cli.training import callbacks
from grpo_cli.training.settings import Callback
from tests.tables import table

HERE = "tests.training.test_callback_loading"


class Counter:
    def __init__(self, start: int, by: int = 1) -> None:
        if by == 0:
            raise ValueError("by is 0")
        self.count, self.by = start, by

    def on_step(self, event: Any) -> None:
        self.count += self.by


class OfTrl:
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


class Misspelt:
    def on_chekpoint(self, event: Any) -> None: ...


class Forgetful(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Shared:
    every_process = True

    def on_end(self, event: Any) -> None: ...

    @staticmethod
    def on_step(event: Any) -> None: ...


def load(path: str, **args: Any) -> callbacks.Loaded:
    return callbacks.load({"mine": Callback(path, args)})[0]


def test_a_class_is_made_with_its_arguments() -> None:
    found = load(f"{HERE}:Counter", start=3)
    assert (found.name, found.hooks, found.has_state) == ("mine", ("on_step",), False)
    assert (found.target.count, found.target.by) == (3, 1)


def test_callbacks_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    of_main, shared = load(f"{HERE}:Counter", start=3), load(f"{HERE}:Shared")
    assert of_main.target is None
    assert of_main.hooks == ("on_step",), "every process knows when one of them is called"
    assert isinstance(shared.target, Shared)
    assert shared.hooks == ("on_step", "on_end")


@table(
    ("path", "args", "said"),
    [
        ("Counter", {"start": 0}, "callbacks.mine.path = Counter: is no class; give it as my_modu"),
        (f"{HERE}:Couner", {}, "has no function 'Couner'. Did you mean Counter?"),
        (f"{HERE}:Counter", {"start": 1, "by": 0}, "cannot be made with them: ValueError: by is 0"),
        (f"{HERE}:OfTrl", {}, "It is called on_step here."),
        (f"{HERE}:Misspelt", {}, "Did you mean on_checkpoint?"),
        (f"{HERE}:Forgetful", {"start": 1}, "of state_dict and load_state_dict it has one"),
    ],
)
def test_a_mistake_is_one_sentence(path: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load(path, **args)
    assert said in str(caught.value)
    assert str(caught.value).startswith("callbacks.mine.")
