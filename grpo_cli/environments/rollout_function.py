"""Native rollout functions: a coroutine that runs a conversation with the model.

    async def tool_loop(conversation):
        while True:
            message = await conversation.turn()
            if not message.get("tool_calls"):
                return
            conversation.append(await conversation.call_tools(message))

The function handles only messages; the loop handles tokens, masks and log-probabilities. Like an
environment it runs in a worker process, with a deadline for its work between two turns. If the
worker is lost, it is restarted. So it must depend only on its row, its seed and the model's turns.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_cli.environments.adapters import Adapted
from grpo_cli.environments.functions import Functions, calls_of
from grpo_cli.environments.observations import Broken, Messages, Number, checked
from grpo_cli.environments.protocol import Message, Observation, ToolCall

_TURN = object()  # yielded by a conversation that waits for the model


class Conversation:
    """A conversation with the model, for use in a rollout function."""

    def __init__(self, row: Mapping[str, Any], seed: int, functions: Functions) -> None:
        self.row = row  # the columns of the data set's row
        self.seed = seed  # the same for all rollouts of a group
        self._functions = functions
        self._messages: list[Message] = []
        self._calls: list[ToolCall] = []
        self._reward: float | None = None
        self._has_begun = False  # whether the model has taken a turn
        self.rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}

    async def turn(self) -> Message:
        """Samples a turn of the model; returns its message.

        Returns:
            {"role": "assistant", "content": str, "tool_calls": [...]}; `tool_calls` only if the
            model has called tools.
        """
        message: Message = await _ask()
        self._has_begun = True
        return message

    def append(self, messages: Message | Sequence[Message]) -> None:
        """Appends user, tool or system messages before the model's next turn."""
        given = [messages] if isinstance(messages, Mapping) else messages
        self._messages += checked(Messages, given, "its messages")

    async def call_tools(self, message: Message) -> list[Message]:
        """Makes the tool calls of a message; returns their answers in order."""
        if not self._has_begun:
            raise Broken(
                "conversation.call_tools was called before the model's first turn; what the model "
                "has not asked for is not a call of a tool: call the function itself"
            )
        answers = await self._functions.answer(calls_of(message))
        self._calls += answers.calls
        return [*answers.messages]

    def reward(self, value: float, name: str | None = None) -> None:
        """Rewards the model's last turn or, with a name, the episode."""
        number = checked(Number, value, "conversation.reward")
        if name is None:
            if not self._has_begun:
                raise Broken(
                    "conversation.reward was called before the model's first turn, which it would "
                    "reward; give it a name to reward the episode"
                )
            self._reward = (self._reward or 0.0) + number
        else:
            self.rewards[name] = number

    def metric(self, name: str, value: float) -> None:
        """Logs a metric of the episode."""
        self.metrics[name] = checked(Number, value, "conversation.metric")

    def _taken(self, *, done: bool) -> Observation:
        """Returns the messages, reward and calls since the model's last turn, and clears them."""
        found = Observation(
            self._messages,
            self._reward,
            done,
            rewards=dict(self.rewards),
            metrics=dict(self.metrics),
            calls=self._calls,
        )
        self._messages, self._calls, self._reward = [], [], None
        return found


class RolloutFunction(Adapted):
    """Adapts a rollout function to an environment: each call runs it until its next turn."""

    is_reusable = False

    def __init__(
        self, function: Callable[..., Any], args: Mapping[str, Any], functions: Functions
    ) -> None:
        super().__init__(None, functions)
        self.function, self.args = function, args
        self._conversation: Conversation | None = None
        self._coroutine: Coroutine[Any, Any, Any] | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Starts the function; messages before the first turn are added to the prompt."""
        self._conversation = Conversation(row, seed, self.functions)
        self._coroutine = self.function(self._conversation, **self.args)
        if await _advance(self._coroutine, None):
            raise Broken("the rollout function returned before the model took a turn")
        return self._conversation._taken(done=False)

    async def step(self, message: Message) -> Observation:
        """Resumes the function with the model's turn."""
        assert self._coroutine is not None, "reset comes first"
        assert self._conversation is not None, "reset comes first"
        done = await _advance(self._coroutine, message)
        return self._conversation._taken(done=done)

    async def close(self) -> None:
        if self._coroutine is not None:
            self._coroutine.close()


@types.coroutine
def _ask() -> Generator[Any, Any, Message]:
    message: Message = yield _TURN
    return message


@types.coroutine
def _advance(coroutine: Coroutine[Any, Any, Any], sent: Any) -> Generator[Any, Any, bool]:
    """Runs a coroutine until it requests a turn; returns whether it has ended instead.

    Its other awaits are passed to the event loop, so that they run within the session's call and
    under its deadline.
    """
    resume = partial(coroutine.send, sent)
    while True:
        try:
            awaited = resume()
        except StopIteration:
            return True
        if awaited is _TURN:
            return False
        try:
            answer = yield awaited
        except BaseException as error:
            resume = partial(coroutine.throw, error)
        else:
            resume = partial(coroutine.send, answer)
