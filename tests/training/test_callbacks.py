"""Callbacks in runs: what they see and log, how they stop a run, what a resume gives back."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_cli.checkpoints import paths
from grpo_cli.checkpoints.checkpointer import load_state
from grpo_cli.config import parsing
from grpo_cli.distributed.workers import exit_process
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.training import callbacks, loop, resume
from grpo_cli.training.callbacks import Event, HookOutcome
from grpo_cli.training.settings import Callback
from tests import programs
from tests.tables import table
from tests.training.test_train import built, metrics, trained, weights

HERE = "tests.training.test_callbacks"
SEEN: list[Event] = []


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


class Recorder:
    """Keeps every event, and logs how many it was given."""

    def __init__(self) -> None:
        self.events = 0

    def _keep(self, event: Event) -> None:
        SEEN.append(event)
        self.events += 1
        if event.hook != "on_end":
            event.log(f"{event.hook}/events", self.events)

    on_start = on_rollouts = on_step = on_log = on_evaluate = on_checkpoint = on_end = _keep

    def state_dict(self) -> dict[str, Any]:
        return {"events": self.events, "weights": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["weights"].tolist() == [1, 1]
        self.events = state["events"]


class Stopper:
    def __init__(self, at: int, hook: str = "on_step") -> None:
        self.at, self.hook = at, hook

    def _maybe(self, event: Event) -> None:
        if event.step == self.at and event.hook == self.hook:
            event.stop("enough")

    on_step = on_evaluate = on_checkpoint = _maybe


class Shared:
    """On every process: the second one asks for the end, by a number that only it has."""

    every_process = True

    @staticmethod
    def on_step(event: Event) -> None:
        rewards = [r.reward for g in event.groups for r in g.rollouts]
        event.log("rank", event.rank)
        if event.rank == 1 and event.step == 2:
            event.stop(f"{len(rewards)} rollouts here")


class Failing:
    def __init__(self, hook: str = "on_step") -> None:
        self.hook = hook

    def on_step(self, event: Event) -> None:
        if self.hook == "on_step":
            raise ZeroDivisionError(f"in {event.step}")

    def state_dict(self) -> dict[str, Any]:
        return {"file": Path("x")} if self.hook == "state_dict" else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("torn")


def of(kind: type, **args: Any) -> dict[str, Any]:
    return {"path": f"{HERE}:{kind.__name__}", "args": args}


@pytest.mark.runs
def test_hooks_are_called_in_order_and_change_nothing(tmp_path: Path) -> None:
    plain_run = trained(tmp_path, output_dir=str(tmp_path / "plain"), eval__every=2)
    live = trained(
        tmp_path, eval__every=2, log__completions_every=1, callbacks={"mine": of(Recorder)}
    )
    assert torch.equal(weights(live), weights(plain_run))
    called = [(e.hook, e.step) for e in SEEN if e.hook != "on_checkpoint"]
    begin, end = [("on_evaluate", 0), ("on_start", 0)], [("on_end", 4)]
    steps: list[tuple[str, int]] = []
    for n in (1, 2, 3, 4):
        evaluated = [("on_evaluate", n)] if n % 2 == 0 else []
        steps += [("on_rollouts", n - 1), *evaluated, ("on_step", n), ("on_log", n)]
    assert called == begin + steps + end
    checkpoints = [e for e in SEEN if e.hook == "on_checkpoint"]
    assert [e.step for e in checkpoints] == [2, 4]
    for e in checkpoints:
        assert e.checkpoint == paths.checkpoint_path(live.folder, e.step)
    first = next(e for e in SEEN if e.hook == "on_step")
    assert len([r for g in first.groups for r in g.rollouts]) == 6 * 4
    assert first.recipe["generation"]["num_generations"] == 4
    lines = metrics(live)
    assert first.metrics["reward"] == lines[0]["reward"]
    assert lines[0]["callbacks/mine/on_evaluate/events"] == 1
    assert lines[0]["callbacks/mine/on_step/events"] == 4
    logged = next(e for e in SEEN if e.hook == "on_log")
    assert logged.metrics["callbacks/mine/on_step/events"] == 4
    assert len(logged.completions) == 6 * 4
    assert not any(key.startswith("callbacks/mine/on_evaluate") for key in lines[2])
    assert SEEN[-1].summary == json.loads((live.folder / "summary.json").read_text())
    with pytest.raises(TypeError):
        first.metrics["reward"] = 0  # type: ignore[index]


@pytest.mark.runs
@pytest.mark.parametrize("hook", ["on_evaluate", "on_checkpoint"])
def test_callback_ends_run(hook: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"steps": 50, "eval__every": 2}
    live = trained(tmp_path, callbacks={"mine": of(Stopper, at=2, hook=hook)}, **changes)
    last = live.state.step
    # A checkpoint is written in the background, and complete before the next one begins.
    assert last in ((3, 4) if hook == "on_checkpoint" else (2,))
    assert f"ended after step {last}: enough (callbacks.mine)" in capsys.readouterr().out
    assert json.loads((live.folder / "summary.json").read_text())["steps"] == last
    assert paths.steps_saved(live.folder)[-1] == last
    same = {"callbacks": {"mine": of(Stopper, at=2, hook=hook)}, "resume": "auto"}
    assert trained(tmp_path, **changes, **same).state.step == last, "it is over"
    changed = trained(tmp_path, **changes | {"steps": 4}, resume="auto")
    assert changed.state.step == 4, "a changed recipe continues"


@pytest.mark.runs
def test_a_resumed_callback_has_its_state(tmp_path: Path) -> None:
    live = built(tmp_path, eval__every=2, callbacks={"mine": of(Recorder)})
    live.recipe.steps = 2
    loop.train(live)
    live.close()
    stored = SEEN[-1]
    assert stored.hook == "on_end"
    before = [e.hook for e in SEEN[: [e.hook for e in SEEN].index("on_checkpoint")]]
    SEEN.clear()
    resumed = trained(tmp_path, eval__every=2, resume="auto", callbacks={"mine": of(Recorder)})
    line = metrics(resumed)[2]
    assert line["callbacks/mine/on_step/events"] == len(before) + 3
    straight = trained(
        tmp_path, output_dir=str(tmp_path / "straight"), eval__every=2,
        callbacks={"mine": of(Recorder)},
    )  # fmt: skip
    assert torch.equal(weights(resumed), weights(straight))


@pytest.mark.runs
def test_on_checkpoint_of_an_interrupted_run(tmp_path: Path) -> None:
    live = built(tmp_path, dataset__eval=None, callbacks={"mine": of(Recorder)})
    for unreported in (None, {}):
        live.state.step += 1
        resume.save(live)
        live.recovery.unreported = unreported
        resume.save_interrupted(live)
        assert SEEN[-1].step == live.state.step
    live.close()
    saved = load_state(live.recovery.interrupted)
    assert saved["callbacks"][0]["states"]["mine"]["events"] == 2


@pytest.mark.runs
def test_a_callback_that_raises_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        trained(tmp_path, callbacks={"mine": of(Failing)})
    first, *others = str(caught.value).splitlines()
    assert first == "callbacks.mine: on_step raised ZeroDivisionError (in 1) at step 1."
    assert others[0].startswith("Traceback")
    assert [line.split(", line")[0] for line in others if "File" in line] == [
        f'  File "{__file__}"'
    ]


@pytest.mark.runs
def test_unsupported_callback_state(tmp_path: Path) -> None:
    said = "callbacks.mine: state_dict raised TypeError .*it has a pathlib"
    with pytest.raises(TrainingError, match=said):
        trained(tmp_path, callbacks={"mine": of(Failing, hook="state_dict")})
    trained(tmp_path, overwrite=True, callbacks={"mine": of(Failing, hook="none")})
    changes = {"steps": 6, "callbacks": {"mine": of(Failing, hook="none")}}
    with pytest.raises(UserError, match="mine: load_state_dict raised KeyError: 'torn'"):
        trained(tmp_path, resume="auto", **changes)


@pytest.mark.programs
def test_processes_agree(tmp_path: Path) -> None:
    done = programs.run(programs.torchrun(2, __file__, str(tmp_path)))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    ended = "ends at 2, callbacks.shared: 12 rollouts here; rank 0.0"
    assert lines == [f"rank 0: 9 events, {ended}", f"rank 1: 0 events, {ended}"]


@table(
    ("hook", "name", "value", "error"),
    [
        ("on_step", "a b", 1.0, ValueError),
        ("on_step", "x", "much", ValueError),
        ("on_step", "x", None, TypeError),
        ("on_end", "x", 1.0, ValueError),
    ],
)
def test_what_cannot_be_logged(hook: str, name: Any, value: Any, error: type[Exception]) -> None:
    absent: Any = None
    event = Event(
        name="mine", hook=hook, step=1, steps=2, recipe={}, folder=Path(), metrics={},
        policy=absent, tokenizer=absent, rank=0, _outcome=HookOutcome(),
    )  # fmt: skip
    with pytest.raises(error):
        event.log(name, value)


def test_the_recipe_names_callbacks() -> None:
    tree: dict[str, Any] = {"model": {"path": "x"}, "dataset": {"train": "x"}}
    tree["reward"] = {"math": {}}
    given = {"mine": of(Recorder), "off": None}
    assert [*parsing.parse({**tree, "callbacks": given}).callbacks] == ["mine"]
    for wrong, said in (
        ({"mine": {"class": "a:B"}}, "callbacks.mine.class: there is no such key; a callback has"),
        ({"my own": of(Recorder)}, "callbacks.my own: its name may have"),
    ):
        with pytest.raises(UserError, match=said):
            parsing.parse({**tree, "callbacks": wrong})


# What is a mistake before a model is loaded


class Counter:
    def __init__(self, start: int, by: int = 1) -> None:
        if by == 0:
            raise ValueError("by is 0")

    def on_step(self, event: Any) -> None: ...


class OfTrl:
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


class Misspelt:
    def on_chekpoint(self, event: Any) -> None: ...


class Forgetful(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {}


def load(path: str, **args: Any) -> callbacks.Loaded:
    return callbacks.load({"mine": Callback(path, args)})[0]


@table(
    ("path", "args", "said"),
    [
        ("Counter", {"start": 0}, "callbacks.mine.path = Counter: is not a class; give it as my"),
        (f"{HERE}:Couner", {}, "has no 'Couner'. Did you mean Counter?"),
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


if __name__ == "__main__":
    both = {"main": {"path": "__main__:Recorder"}, "shared": {"path": "__main__:Shared"}}
    live = trained(Path(sys.argv[1]), callbacks=both, dataset__eval=None)
    state, rank = live.state, metrics(live)[-1]["callbacks/shared/rank"]
    print(
        f"rank {live.workers.rank}: {len(SEEN)} events, ends at {state.step}, "
        f"{state.stop_reason}; rank {rank}\n",
        end="",
        flush=True,
    )
    live.workers.close()
    exit_process(0)
