"""Rows: completions that are being decoded, each a number in the state of its request."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_cli.generation.embedded.decoding_state import DecodingState


@dataclass
class Row:
    """Describes a completion that is decoded."""

    state: DecodingState
    number: int  # of the row in its state

    @property
    def tokens(self) -> list[int]:
        """Returns the tokens of the completion so far."""
        return self.state.tokens[self.number]

    @property
    def prompt(self) -> int:
        """Returns the number of the row's prompt in its state."""
        return self.number // self.state.num_generations

    @property
    def left(self) -> int:
        """Returns the number of tokens that may still come."""
        return self.state.sampling.max_tokens - len(self.tokens)


@dataclass
class RaggedRow(Row):
    """Describes a row of a `RaggedBatch`: its place, and the tokens that the next step computes."""

    cached: int  # tokens of prompt and completion in the cache: all except the last
    shift: int  # the position of a token minus its column
    draft: list[int] = field(default_factory=list)
    drawn: int = 1  # tokens by the last step: of the draft those that agreed, and one more

    @property
    def width(self) -> int:
        """Returns the number of tokens that the next step computes."""
        return 1 + len(self.draft)


@dataclass
class StaticRow(Row):
    """Describes a row of a `StaticBatch`."""

    prompt_length: int
    first_position: int  # of the first token of the completion

    @property
    def group(self) -> tuple[int, int]:
        """Returns the state and the number of the row's prompt."""
        return id(self.state), self.prompt

    @property
    def own(self) -> int:
        """Returns the number of the completion's tokens in the cache: all except the last."""
        return len(self.tokens) - 1
