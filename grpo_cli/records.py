"""The records that travel through a step, in order; none of them changes once it is made.

A step with P = 2 prompts and G = 3 completions each:

    prompts  [Prompt("2+3="), Prompt("9+9=")]                          from data.prompts
    groups   [Group(prompt, [Rollout, Rollout, Rollout]), Group(...)]  sampled and scored
    samples  the same groups, of TrainingSample                        with advantages
    batches  WeightedSample of each completion that trains             for an optimizer step

Token ids are lists until the forward pass: `packing.py` turns them into the model's inputs, and
`collate` into the loss's. Masks are made from lengths and never from `ids != pad`, because a model
may well sample its own pad token.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_cli.images import StoredImage
    from grpo_cli.models.vision import VisionProcessor

Messages = list[dict[str, Any]]
R = TypeVar("R", bound="Rollout")
R_co = TypeVar("R_co", bound="Rollout", covariant=True, default="Rollout")


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, ready to be completed."""

    row: int  # line of the data set, counted from 0, before anything was dropped
    ids: list[int]  # prompt tokens, template and chat markup included
    text: str | Messages  # passed to reward functions as `prompts`
    columns: dict[str, Any]  # every other column of the row
    images: tuple[StoredImage, ...] = field(default=(), compare=False)  # in the order of `ids`
    vision: VisionProcessor | None = field(default=None, compare=False, repr=False)
    # ^ turns the images into model inputs; None without images
    prefill: str = ""  # text of the assistant at the end of a chat, which the completion continues
    row_ids: list[int] | None = None  # tokens before an environment's first observation was added
    added: dict[str, Any] = field(default_factory=dict)  # columns that a rollout function added
    marked: str | Messages | None = field(default=None, compare=False, repr=False)
    # ^ `conversation` with marks in its row's control tokens (data/control_tokens.py); or None

    @property
    def conversation(self) -> str | Messages:
        """The prompt as the model reads it: a string, or all messages with the prefill."""
        if not self.prefill:
            return self.text
        return [*self.text, {"role": "assistant", "content": self.prefill}]  # type: ignore[list-item]

    def expanded(self, text: str) -> str:
        """Returns a rendered text with the tokens of this prompt's images."""
        return text if self.vision is None else self.vision.expanded(text, self.images)

    @classmethod
    def from_ids(cls, ids: Sequence[int]) -> Prompt:
        """Returns a prompt of these token ids that belongs to no row of a data set."""
        return cls(row=0, ids=list(ids), text="", columns={})


@dataclass(frozen=True)
class Turn:
    """A span of a completion's tokens: a turn of the model, or a reply of its environment."""

    start: int  # tokens [start, end) of the completion
    end: int
    by: Literal["model", "environment"]
    reward: float | None = None  # the environment's reward for this turn of the model
    seconds: float = field(default=0.0, compare=False)  # sampling it, or waiting for it


# Reasons why an episode ends.
STOP_REASONS = (
    "answered",  # the model's turn asked for nothing more
    "env_done",  # the environment said so
    "max_turns", "turn_tokens",  # episode.*
    "max_tokens",  # generation.max_completion_tokens
    "parse_error",  # too many malformed calls
    "env_error", "env_timeout",  # the environment failed: the rollout has no reward
)  # fmt: skip
ENVIRONMENT_FAILED = ("env_error", "env_timeout")


@dataclass(frozen=True)
class Completion:
    """The tokens that a generator returns, and how they were sampled; nothing is guessed."""

    ids: list[int]  # sampled tokens with the eos if it was emitted, and tokens of tools
    sampling_logprobs: list[float]  # log-probability of each under the distribution sampled from
    finish_reason: Literal["stop", "length"]  # an eos was sampled, or the limit was reached
    sampled_at: int | None = None  # oldest step whose weights it comes from; None: the newest
    is_sampled: list[bool] | None = None  # by token; None: all. Other tokens have a logprob of 0.0
    tool_calls: int = 0  # programs that were run, or tools called
    tool_errors: int = 0  # calls that raised or were stopped
    tool_timeouts: int = 0  # errors that were timeouts, such as endless programs
    turns: tuple[Turn, ...] = ()  # an episode's, in order, over all tokens; (): one turn
    stop_reason: str = ""  # one of STOP_REASONS, for an episode
    messages: tuple[dict[str, Any], ...] = ()  # an episode's, after the prompt; never re-rendered
    env_rewards: dict[str, float] = field(default_factory=dict)  # the environment's, by name
    env_metrics: dict[str, float] = field(default_factory=dict)
    env_error: str = ""  # the last error, where the environment failed (ENVIRONMENT_FAILED)
    calls_by_tool: dict[str, list[int]] = field(default_factory=dict)
    # ^ [calls, failures, timeouts among these] by tool; `tool_calls` ... are the sums over tools
    parse_errors: int = 0  # turns of the model with a malformed call
    env_retries: int = 0  # fresh environments after one that failed

    @property
    def is_episode(self) -> bool:
        """Whether the model has taken turns with an environment, or tried to."""
        return bool(self.stop_reason or self.messages)

    @property
    def environment_failed(self) -> bool:
        """Whether the environment failed, so that there is nothing to score."""
        return self.stop_reason in ENVIRONMENT_FAILED

    @property
    def model_turns(self) -> list[tuple[int, int]]:
        """The token span [start, end) of each of the model's turns."""
        if not self.turns:
            return [(0, len(self.ids))]
        return [(t.start, t.end) for t in self.turns if t.by == "model"]

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the model sampled, without those of tools and environments."""
        return len(self.ids) if self.is_sampled is None else sum(self.is_sampled)

    @property
    def sampled_mask(self) -> Tensor:
        """The mask of the tokens that the model sampled, [C] bool."""
        sampled = [True] * len(self.ids) if self.is_sampled is None else self.is_sampled
        return torch.tensor(sampled, dtype=torch.bool)


@dataclass(frozen=True)
class Rollout:
    """One completion of a prompt, with its rewards once it is scored.

    For example, Rollout(prompt, completion, "4", {"exact_match": 1.0}, reward=1.0).
    """

    prompt: Prompt
    completion: Completion
    text: str  # the completion decoded, without special tokens
    reward_parts: dict[str, float | None] = field(default_factory=dict)  # by function, unweighted
    step_rewards: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    # ^ by function that rewards steps: (token at which a step ends, weighted value)
    reward: float = math.nan  # weighted sum, steps included; NaN when no function applied
    outcome_reward: float = math.nan  # `reward` without steps: the advantage rule's input
    extras: dict[str, Any] = field(default_factory=dict)  # columns that functions logged
    excluded: bool = False  # does not train, though it has a reward (`loss.mask_truncated`)
    old_logprobs: Tensor | None = None  # [C] under the trained policy as it was at sampling

    @property
    def is_scored(self) -> bool:
        """Whether a reward function applied."""
        return not math.isnan(self.reward)

    @property
    def loss_tokens(self) -> int:
        """The number of sampled tokens that train; 0 if excluded or no reward function applied."""
        if self.excluded or not self.is_scored:
            return 0
        return self.completion.sampled_tokens

    def as_kind(self, kind: type[R], **values: Any) -> R:
        """Returns a record of a kind of rollout, with this rollout's values and the given ones."""
        names = {f.name for f in dataclasses.fields(kind)}
        own = {name: value for name, value in vars(self).items() if name in names}
        return kind(**{**own, **values})


@dataclass(frozen=True, kw_only=True)
class TrainingSample(Rollout):
    """A scored rollout with what the loss needs of it; made once a step.

    For example, rollout.as_kind(TrainingSample, advantage=0.71), the better one of two.
    """

    advantage: float = 0.0
    token_advantages: Tensor | None = None  # [C] if steps were rewarded; includes `advantage`
    ref_logprobs: Tensor | None = None  # [C] under the reference policy

    @property
    def advantages(self) -> Tensor:
        """The advantage of each token, [C]."""
        if self.token_advantages is not None:
            return self.token_advantages
        return torch.full((len(self.completion.ids),), self.advantage)


@dataclass(frozen=True, kw_only=True)
class WeightedSample(TrainingSample):
    """A training sample of an optimizer batch; each optimizer step makes its own.

    For example, sample.as_kind(WeightedSample, place=(17, 0), weight=0.25) in a batch of four
    loss tokens.
    """

    place: tuple[int, int]  # (prompt index, index in its group), unique in a run
    weight: float  # factor of each token's loss (`batch.py`)
    high_entropy: Tensor | None = None  # [C] 1 on tokens that `loss.top_entropy` keeps
    cov_selected: Tensor | None = None  # [C] 1 on tokens chosen by their covariance


@dataclass(frozen=True)
class Group(Generic[R_co]):
    """All rollouts of one prompt; `prompt_index` counts the prompts of the run."""

    prompt_index: int
    prompt: Prompt
    rollouts: Sequence[R_co]


TrainingGroup = Group[TrainingSample]


def decoded(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, special: bool = False
) -> str:
    """Decodes token ids without `clean_up_tokenization_spaces`, which would remove sampled spaces.

    Args:
        special: keep special tokens.
    """
    return str(
        tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
    )


def has_images(prompts: Iterable[Prompt]) -> bool:
    """Returns whether any prompt has images."""
    return any(prompt.images for prompt in prompts)


def regrouped(groups: Sequence[Group], rollouts: Iterable[R]) -> list[Group[R]]:
    """Returns the groups with other rollouts, which are given in the same order."""
    rest = iter(rollouts)
    return [Group(g.prompt_index, g.prompt, [next(rest) for _ in g.rollouts]) for g in groups]


class EpisodeStats(NamedTuple):
    """The figures of an episode from which metrics are computed."""

    turns: int  # number of the model's turns
    stop_reason: str
    tool_calls: int
    tool_errors: int
    calls_by_tool: dict[str, list[int]]
    parse_errors: int
    env_retries: int
    env_metrics: dict[str, float]
    env_error: str
    reward_names: Sequence[str] = ()  # names of the environment's rewards for the complete episode

    @property
    def environment_failed(self) -> bool:
        """Whether the environment failed, so that there is nothing to score."""
        return self.stop_reason in ENVIRONMENT_FAILED

    @classmethod
    def of(cls, c: Completion) -> EpisodeStats | None:
        """Returns the figures of a completion; None if it is not an episode."""
        if not c.is_episode:
            return None
        turns = 0 if c.environment_failed and not c.turns else len(c.model_turns)
        return cls(
            turns,
            c.stop_reason,
            c.tool_calls,
            c.tool_errors,
            c.calls_by_tool,
            c.parse_errors,
            c.env_retries,
            c.env_metrics,
            c.env_error,
            [*c.env_rewards],
        )


class RolloutStats(NamedTuple):  # pickles three times as fast as a dataclass
    """The few numbers of a rollout that other processes need; small enough to gather."""

    reward: float
    outcome_reward: float  # the advantage rule's input
    reward_parts: dict[str, float | None]
    steps: dict[str, list[float]]  # values of rewarded steps, by function
    prompt_tokens: int
    tokens: int  # completion tokens, those of tools included
    truncated: bool
    excluded: bool
    sampled_tokens: int  # the completion's length, as metrics and advantage rules count it
    episode: EpisodeStats | None = None
    row: int = 0  # row of the sampled prompt, which may replace one with a broken image

    @classmethod
    def of(cls, r: Rollout) -> RolloutStats:
        return cls(
            r.reward,
            r.outcome_reward,
            r.reward_parts,
            {name: [value for _, value in steps] for name, steps in r.step_rewards.items()},
            len(r.prompt.ids),
            len(r.completion.ids),
            r.completion.finish_reason == "length",
            r.excluded,
            r.completion.sampled_tokens,
            EpisodeStats.of(r.completion),
            r.prompt.row,
        )


StepStats = dict[int, list[RolloutStats]]  # by prompt index, over all processes


def rollout_stats(groups: Sequence[Group]) -> list[tuple[int, list[RolloutStats]]]:
    """Returns (prompt index, statistics of its rollouts) for each group."""
    return [(g.prompt_index, [RolloutStats.of(r) for r in g.rollouts]) for g in groups]


def to_state(rollout: Rollout) -> dict[str, Any]:
    """Returns the fields of a rollout and its completion that differ from their defaults.

    The prompt is left out, since the stored entry identifies it by its index. Only the changes
    that an environment or a rollout function has made to it are stored.
    """
    state: dict[str, Any] = {}
    for record, kind in ((rollout.completion, Completion), (rollout, Rollout)):
        for f in dataclasses.fields(kind):  # a resumed step recomputes the others
            value = getattr(record, f.name)
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            is_default = value is default or (not isinstance(value, Tensor) and value == default)
            if f.name not in ("prompt", "completion") and not is_default:
                state[f.name] = value
    if "turns" in state:
        # Without their seconds, so that a resumed run stores the same as an uninterrupted one.
        state["turns"] = [(t.start, t.end, t.by, t.reward) for t in rollout.completion.turns]
    if rollout.prompt.row_ids is not None:
        state["observed_prompt"] = {"ids": rollout.prompt.ids, "text": rollout.prompt.text}
    if rollout.prompt.added:  # values of any type; a checkpoint holds plain ones only
        state["observed_prompt"]["added"] = json.dumps(rollout.prompt.added, default=str)
    return state


def from_state(prompt: Prompt, state: Mapping[str, Any]) -> Rollout:
    """Returns the rollout of `prompt` from a state that `to_state` returned."""
    values = dict(state)
    if (observed := values.pop("observed_prompt", None)) is not None:
        added = json.loads(observed.get("added", "{}"))
        prompt = dataclasses.replace(
            prompt,
            ids=observed["ids"],
            text=observed["text"],
            columns={**prompt.columns, **added},
            row_ids=prompt.ids,
            added=added,
        )
    if "turns" in values:
        values["turns"] = tuple(Turn(*turn) for turn in values["turns"])
    if "messages" in values:
        values["messages"] = tuple(values["messages"])
    names = {f.name for f in dataclasses.fields(Completion)} & values.keys()
    completion = Completion(**{name: values.pop(name) for name in names})
    return Rollout(prompt, completion, **values)


def matrix(step_stats: StepStats, value: Callable[[RolloutStats], float | None]) -> Tensor:
    """Returns a value of every rollout as [P, G] float64, ordered by prompt; NaN for None.

    Groups of different sizes, which a step with leftover groups may have, are padded with NaN.
    """
    most = max(map(len, step_stats.values()))
    rows = []
    for _, group in sorted(step_stats.items()):
        values = [value(o) for o in group]
        rows.append([math.nan if v is None else float(v) for v in values])
        rows[-1] += [math.nan] * (most - len(group))
    return torch.tensor(rows, dtype=torch.float64)


def sampled_mask(rollouts: Sequence[Rollout]) -> Tensor:
    """Returns the mask of sampled completion tokens, [B, C] bool; C is the longest length."""
    lengths = [[len(r.completion.ids)] for r in rollouts]
    mask = torch.arange(max(lengths)[0]) < torch.tensor(lengths)
    for row, r in zip(mask, rollouts, strict=True):
        if r.completion.is_sampled is not None:
            row[: len(r.completion.ids)] = r.completion.sampled_mask
    return mask


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host to the device; the host does not wait for a GPU."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
