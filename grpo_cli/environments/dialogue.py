"""The interface between the tokens of an episode and the messages of its environment.

`chat.Chat` uses a chat template, `programs.ProgramDialogue` uses fenced blocks. All dialogues of a
loop are of one kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from grpo_cli.environments.protocol import Message
from grpo_cli.records import Prompt


class Dialogue(Protocol):
    """Converts between tokens and messages, for episodes with one set of tools."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def is_one_text(self) -> bool:
        """Whether turns and replies form one text, which rewards read as a whole.

        An episode then has no messages, and a reply that exceeds the token budget is truncated, not
        dropped.
        """

    @property
    def piece_tokens(self) -> int | None:
        """Maximum tokens of a piece, if turns can end without a stop string; None: no maximum."""

    def with_observation(
        self, prompt: Prompt, observation: Sequence[Message], limit: int
    ) -> Prompt:
        """Adds an environment's first messages to a prompt."""

    def stops(self, num_calls: int) -> tuple[str, ...]:
        """Returns strings that end a piece, in addition to the sampling's stop strings.

        Args:
            num_calls: number of tool calls in the episode so far, here and below.
        """

    def turn_end(
        self, ids: Sequence[int], before: int, num_calls: int, *, has_stopped: bool
    ) -> int | None:
        """Returns the length of a turn that has ended, or None. Tokens after it are dropped.

        Args:
            ids: the tokens of the current turn, including the last piece.
            before: number of tokens from earlier pieces.
            has_stopped: whether the piece ended with an eos or one of `stops`.
        """

    def read(self, ids: Sequence[int], num_calls: int, *, at_stop_string: bool) -> Message:
        """Returns a complete turn as a message.

        Args:
            at_stop_string: whether it ended at one of the sampling's stop strings.

        Raises:
            MalformedCall: the turn begins a call that cannot be read.
        """

    def reply_to(self, turn: Sequence[int], messages: Sequence[Message], limit: int) -> list[int]:
        """Returns the tokens of a reply, between the given turn of the model and its next one."""
