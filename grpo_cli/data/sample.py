"""The completion as reward functions read it, sampled or stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_cli.data import images
from grpo_cli.data.prompts import other_columns
from grpo_cli.data.rows import Rows
from grpo_cli.images import StoredImage, unreadable

if TYPE_CHECKING:
    from grpo_cli.records import Completion, Rollout


@dataclass(frozen=True)
class Sample:
    """A completion as passed to reward functions."""

    row: int  # row of the data set; for stored completions the line of their file, from 0
    prompt: Any  # a string, or messages of a chat; "" if the file has no prompts
    text: str
    ids: Sequence[int] | None  # sampled tokens; None if the file has none
    columns: Mapping[str, Any]  # all other columns
    prefill: str = ""  # assistant text before the completion, in a chat
    episode: Mapping[str, Any] | None = None  # result of `episode_of`
    environment_failed: bool = False  # if set, no reward applies
    images: tuple[StoredImage, ...] = ()  # the prompt's images, in order

    @property
    def unreadable(self) -> str | None:
        """Why an image cannot be read; None if all can."""
        return unreadable(self.images)

    @classmethod
    def of(cls, rollout: Rollout) -> Sample:
        """Returns the sample of a rollout."""
        prompt, completion = rollout.prompt, rollout.completion
        return cls(
            prompt.row,
            prompt.text,
            rollout.text,
            completion.ids,
            prompt.columns,
            prompt.prefill,
            episode_of(completion),
            completion.environment_failed,
            prompt.images,
        )

    @classmethod
    def of_row(
        cls, rows: Rows, number: int, prompt: Any, text: str, ids: Sequence[int] | None,
        max_pixels: int | None,
    ) -> Sample:  # fmt: skip
        """Returns the sample of a completion that was not sampled; see `images.of_row`."""
        row = rows.rows[number]
        found = images.of_row(rows, number, row, prompt, max_pixels)
        columns = other_columns(row) | other_columns(found.columns)
        return cls(rows.line(number), found.prompt, text, ids, columns, images=found.images)


def episode_of(completion: Completion) -> dict[str, Any] | None:
    """Returns an episode as passed to reward functions; None for other completions."""
    if not completion.is_episode:
        return None
    return {
        "messages": list(completion.messages),
        "turns": [dataclasses.asdict(turn) for turn in completion.turns],
        "stop_reason": completion.stop_reason,
        "rewards": dict(completion.env_rewards),
        "metrics": dict(completion.env_metrics),
    }
