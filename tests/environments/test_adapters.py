"""What users bring as an environment, and what may not be one."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from grpo_cli.environments.adapters import Adapted, Maker, Spec, manner_of
from grpo_cli.environments.observations import Broken, observed
from grpo_cli.environments.protocol import Message, Observation, ToolCall
from grpo_cli.errors import UserError
from tests.environments.conftest import SAMPLES
from tests.environments.messages import calls, says, texts
from tests.tables import table


def made(name: str = "", **settings: Any) -> Adapted:
    return Maker(Spec(**settings)).make(name)


def names(schemas: Any) -> list[str]:
    return [s["function"]["name"] for s in schemas]


class Shop:
    tools = ({"type": "function", "function": {"name": "buy", "parameters": {}}},)

    def reset(self, row: Any) -> Observation:
        return Observation()

    def step(self, message: Message) -> Observation:
        (call,) = message["tool_calls"]
        answer = {"role": "tool", "name": call["function"]["name"], "content": "!"}
        return Observation([answer, {"role": "user", "content": "more?"}])


def test_the_calls_of_an_environments_own_tools_go_to_it_and_the_others_to_functions() -> None:
    env = made(path=f"{HERE}:Shop", tools={"times": f"{SAMPLES}:multiply"})
    assert names(env.schemas) == ["buy", "times"]
    answer = asyncio.run(env.step(calls(("buy", {}), ("times", {"a": 2, "b": 4}))))
    assert texts(answer) == ["!", "8", "more?"], "in the order of the calls"


def test_trls_manner() -> None:
    async def episode() -> None:
        env = made(path=f"{SAMPLES}:Counter", tools={"times": f"{SAMPLES}:multiply"})
        assert names(env.schemas) == ["increment", "later", "times"]
        assert await env.reset({}, 0) == Observation(tools=env.schemas)
        first = await env.reset({"start": 5, "other": 1}, 0)
        assert first.messages == [{"role": "user", "content": "You are at 5."}]
        assert env.given.columns == {"other": 1}
        answer = await env.step(
            calls(
                ("increment", {"step": "2"}),
                ("later", {"step": 3}),
                ("decrement", {}),
                ("times", {"a": 2, "b": 4}),
            )
        )
        assert texts(answer)[:2] == ["7", "10"]
        assert "there is no tool 'decrement'" in texts(answer)[2]
        assert texts(answer)[3] == "8"
        assert (await env.step(says("done"))).done
        assert (await env.finish()).rewards == {"Counter": 10.0}
        assert env.is_reusable

    asyncio.run(episode())


class Library:
    shelf = "A"

    def reset(self) -> None: ...

    @classmethod
    def find(cls) -> str:
        """Finds a book."""
        return f"Emma in {cls.shelf}"

    @staticmethod
    def spell() -> str:
        """Spells a word."""
        return "s-o"


def test_class_methods_and_static_methods_are_tools() -> None:
    env = made(path=f"{HERE}:Library")
    assert names(env.schemas) == ["find", "spell"]
    assert [schema["function"]["parameters"]["properties"] for schema in env.schemas] == [{}, {}]
    answer = asyncio.run(env.step(calls(("find", {}), ("spell", {}))))
    assert texts(answer) == ["Emma in A", "s-o"]


def test_several_environments_by_name() -> None:
    maker = Maker(
        Spec(by_name={"g": f"{SAMPLES}:Guess", "c": f"{SAMPLES}:Counter"}, args={"g": {"limit": 2}})
    )
    guess, counter = (maker.make(name) for name in ("g", "c"))
    asyncio.run(guess.reset({}, 1))
    assert (guess.given.limit, guess.given.number) == (2, random.Random(1).randrange(2))
    assert names(counter.schemas) == ["increment", "later"]
    asyncio.run(counter.reset({"environment": "c", "other": 1}, 0))
    assert counter.given.columns == {"other": 1}, "without the name"
    with pytest.raises(UserError, match=r"no environment 'cc'; environment\.by_name has c, g"):
        maker.make("cc")


def cls(**methods: Any) -> type:
    return type("Made", (), methods)


@table(
    ("made", "manner"),
    [
        (cls(reset=lambda self, row: 0, step=lambda self, turn: 0), "ours"),
        (cls(reset=lambda self: 0, step=lambda self, message: 0), "ours"),
        (cls(reset=lambda self, **kwargs: 0, step=lambda self, action: 0), "trl"),
    ],
)
def test_manners(made: type, manner: str) -> None:
    assert manner_of(made, "") == manner


class NoDocstring:
    def reset(self) -> None: ...

    def go(self, where: str) -> str:
        return where


HERE = "tests.environments.test_adapters"
GUESS = {"guess": f"{SAMPLES}:Guess"}


@table(
    ("settings", "says"),
    [
        ({"path": f"{SAMPLES}:multiply"}, "constructor raised TypeError"),
        ({"path": f"{SAMPLES}:Path"}, "Path has no method reset; an environment has reset(row"),
        ({"path": f"{SAMPLES}:Gues"}, "has no class 'Gues'. Did you mean Guess?"),
        ({"path": "nowhere.envs:Guess"}, "environment.path = nowhere.envs:Guess: cannot import"),
        ({"path": "Guess"}, "is not a class; give it as my_module:MyClass."),
        ({"path": f"{SAMPLES}:Guess", "args": {"limits": 3}}, "environment.args.limits: tests."),
        ({"path": f"{SAMPLES}:Guess", "args": {"limits": 3}}, "takes limit. Did you mean limit?"),
        ({"by_name": GUESS, "args": {"guess": 3}}, "environment.args.guess: 3 is not a mapping"),
        ({"by_name": GUESS, "args": {"gues": {}}}, "environment.args.gues: there is no env"),
        ({"path": f"{HERE}:NoDocstring"}, "method go: "),
        ({"path": f"{SAMPLES}:Counter", "tool": "later"}, "there are two tools called 'later'"),
        ({"path": f"{HERE}:Shop", "tool": "buy"}, "there are two tools called 'buy'"),
    ],
)
def test_what_cannot_be_made(settings: dict[str, Any], says: str) -> None:
    tools = {settings.pop("tool", "times"): f"{SAMPLES}:multiply"}
    with pytest.raises((UserError, Broken)) as error:
        _ = made(*settings.get("by_name", ()), **settings, tools=tools).schemas
    assert says in str(error.value)


MESSAGE = {"role": "user", "content": "hi"}


@table(
    ("value", "expected"),
    [
        (Observation([MESSAGE], 1, True), Observation([MESSAGE], 1.0, True)),
        ({"messages": [MESSAGE], "done": True}, Observation([MESSAGE], done=True)),
        ({"reward": np.float32(0.5)}, Observation([], 0.5)),
        ({"reward": True}, Observation([], 1.0)),
        ({"reward": np.array(2)}, Observation([], 2.0)),
        ({"done": np.bool_(True)}, Observation([], done=True)),
        ({"metrics": {"n": 1}}, Observation([], metrics={"n": 1.0})),
        ({"calls": [ToolCall("a", failed=True)]}, Observation([], calls=[ToolCall("a", True)])),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]},
            Observation([{"role": "user", "content": "ab"}]),
        ),
        (
            {"messages": [{"role": "tool", "content": "\ud800", "name": "n", "more": 1}]},
            Observation([{"role": "tool", "content": "\ufffd", "name": "n"}]),
        ),
        (None, "it returned None, not an Observation"),
        ("text", "it returned a str, not an Observation"),
        ({"message": MESSAGE}, "its observation.message: Extra inputs are not permitted"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "'tool' or 'system', not 'assis"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content: 3 is not a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "is not a text"),
        ({"reward": "1"}, "its observation.reward: '1' is not a finite number"),
        ({"reward": float("nan")}, "nan is not a finite number"),
        ({"reward": 10**400}, "0 is not a finite number"),  # too large for a float
        ({"rewards": {"a": None}}, "its observation.rewards.a: None is not a finite number"),
        ({"done": "no"}, "its observation.done: Input should be a valid boolean, not 'no'"),
        (
            {"tools": [{"type": "function", "function": {"name": "buy"}}]},
            "tools.0.function.parameters: Field required",
        ),
        ({"calls": ["x"]}, "calls.0: Input should be an instance of ToolCall"),
    ],
)
def test_what_an_environment_may_return(value: Any, expected: Observation | str) -> None:
    if isinstance(expected, Observation):
        assert observed(value) == Observation(
            **{**vars(expected), "tools": list(expected.tools), "calls": list(expected.calls)}
        )
        return
    with pytest.raises(Broken) as error:
        observed(value)
    assert expected in str(error.value)


def test_the_reward_of_an_episode_is_a_finite_number_or_none() -> None:
    env = made(path=f"{SAMPLES}:Faulty")
    env.given.row = {"reward": None}
    assert asyncio.run(env.finish()) == Observation()
    for reward in (float("inf"), "1", [1.0]):
        env.given.row = {"reward": reward}
        with pytest.raises(Broken, match=r"its reward 'Faulty': .* is not a finite number"):
            asyncio.run(env.finish())


class Town:
    def reset(self, city: Any) -> Any:
        return city


def returns(**observation: Any) -> dict[str, Any]:
    return {"in": "reset", "returns": Observation(**observation)}


@table(
    ("path", "row", "says"),
    [
        (f"{HERE}:Town", {"city": 3}, "its text: 3 is not a text"),
        (f"{SAMPLES}:Faulty", returns(done=True), "it returned done=True, and the model has tak"),
        (f"{SAMPLES}:Faulty", returns(reward=0.0), "it returned the reward 0, and the model has"),
    ],
)
def test_a_reset_that_does_not_fit(path: str, row: dict[str, Any], says: str) -> None:
    with pytest.raises(Broken) as error:
        asyncio.run(made(path=path).reset(row, 0))
    assert says in str(error.value)
