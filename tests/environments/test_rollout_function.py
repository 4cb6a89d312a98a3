"""Tests rollout functions that are coroutines."""

import asyncio
from typing import Any

import pytest

from grpo_cli.environments.protocol import Message, Observation
from grpo_cli.environments.rollout_function import Conversation
from grpo_cli.environments.sessions import EnvironmentSession
from grpo_cli.errors import UserError
from tests.environments.conftest import PATIENCE, Open, begin, failed
from tests.environments.messages import texts

pytestmark = pytest.mark.programs

HERE = "tests.environments.test_rollout_function"


async def tool_loop(conversation: Conversation) -> None:
    """The loop of tools, as docs/environments.md has it."""
    while True:
        message = await conversation.turn()
        if not message.get("tool_calls"):
            return
        conversation.append(await conversation.call_tools(message))


async def haggle(conversation: Conversation, steps: int = 2) -> None:
    conversation.append({"role": "user", "content": f"{conversation.row['item']}?"})
    for price in range(steps):
        message = await conversation.turn()
        await asyncio.sleep(0.001)
        conversation.reward(len(message["content"]))
        conversation.append({"role": "user", "content": f"{price + conversation.seed}"})
    await conversation.turn()
    conversation.reward(0.5, "deal")
    conversation.metric("rounds", steps)


async def silent(conversation: Conversation) -> None: ...


async def says_as_assistant(conversation: Conversation) -> None:
    conversation.append({"role": "assistant", "content": "I am the model"})
    await conversation.turn()


async def raises_later(conversation: Conversation) -> None:
    await conversation.turn()
    raise RuntimeError("no more")


async def rewards_at_once(conversation: Conversation) -> None:
    conversation.reward(1.0)
    await conversation.turn()


async def calls_at_once(conversation: Conversation) -> None:
    await conversation.call_tools(said("", 3))
    await conversation.turn()


def opened(start: Open, name: str, **args: Any) -> EnvironmentSession:
    return start(f"{HERE}:{name}", args=args).open("", {"item": "a rug"}, 7)


def said(text: str, *calls: int) -> Message:
    functions = [{"function": {"name": "times", "arguments": {"a": x, "b": 2}}} for x in calls]
    return {"role": "assistant", "content": text} | ({"tool_calls": functions} if calls else {})


def test_a_function_leads_the_conversation(start: Open) -> None:
    session = opened(start, "haggle", steps=2)
    assert texts(session.reset().result(PATIENCE)) == ["a rug?"]
    second = session.step(said("abc")).result(PATIENCE)
    assert (texts(second), second.reward) == (["7"], 3.0)
    third = session.step(said("de")).result(PATIENCE)
    assert (texts(third), third.reward) == (["8"], 2.0)
    last = session.step(said("f")).result(PATIENCE)
    assert last.done
    assert (last.reward, dict(last.rewards)) == (None, {"deal": 0.5})
    assert dict(last.metrics) == {"rounds": 2.0}


def test_the_built_in_loop_of_tools_can_be_written_with_it(start: Open) -> None:
    turns = [said("first", 3, 4), said("", 10), said("done")]
    found: list[list[Observation]] = []
    for name in (None, f"{HERE}:tool_loop"):
        session = begin(start(name, tools={"times": "multiply"}))
        found.append([session.step(turn).result(PATIENCE) for turn in turns])
    ours, theirs = found
    assert [texts(o) for o in ours] == [["6", "8"], ["20"], []]
    for a, b in zip(ours, theirs, strict=True):
        assert (list(a.messages), a.done) == (list(b.messages), b.done)
        assert [(c.name, c.failed) for c in a.calls] == [(c.name, c.failed) for c in b.calls]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("silent", "returned before the model took a turn"),
        ("says_as_assistant", "assistant"),
        ("raises_later", "RuntimeError: no more"),
        ("rewards_at_once", "conversation.reward was called before the model's first turn"),
        ("calls_at_once", "conversation.call_tools was called before the model's first turn"),
    ],
)
def test_a_function_that_fails_is_a_failed_environment(
    start: Open, name: str, problem: str
) -> None:
    session = opened(start, name)
    error = session.reset().exception(PATIENCE) or failed(session.step(said("hi")))
    assert problem in str(error)


async def takes_nothing() -> None: ...


async def takes_two(conversation: Conversation, other: int) -> None: ...


@pytest.mark.parametrize("name", ["takes_nothing", "takes_two"])
def test_a_function_that_takes_no_conversation_is_a_mistake(start: Open, name: str) -> None:
    with pytest.raises(UserError, match=f"{name}: a rollout function must take a conversation"):
        start(f"{HERE}:{name}").try_out("", {})
