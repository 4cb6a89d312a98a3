"""The base class of the engines that sample completions for training and evaluation.

Two prompts with two completions each:

    generator.generate([prompt_a, prompt_b], 2, Sampling(max_tokens=16), seeds=[11, 12])
    # -> [[completion 0 of a, completion 1 of a], [completion 0 of b, completion 1 of b]]

`factory.py` lists the engines. A new engine is a subclass with `make` and `sample`, in a file of
its own. `converse` is for episodes: an engine overrides it to sample some turns while others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli.errors import TrainingError
from grpo_cli.generation.sampling import Sampling
from grpo_cli.records import Completion, Prompt

if TYPE_CHECKING:
    from grpo_cli.config.schema import Recipe
    from grpo_cli.distributed.workers import Workers

OnGroup = Callable[[int, list[Completion]], None]


def ignore(number: int, completions: list[Completion]) -> None:
    """Does nothing; for callers that wait until `generate` returns."""


@dataclass(frozen=True)
class EngineSetup:
    """The arguments that every engine is made with."""

    recipe: Recipe
    model: PreTrainedModel  # the policy, which the engine samples from
    tokenizer: PreTrainedTokenizerBase
    eos_ids: Sequence[int]  # tokens that end a completion
    workers: Workers
    prompts: Sequence[Prompt]  # all prompts of the run; the longest sizes the caches
    say: Callable[[str], None]  # prints a line for the user


@dataclass(frozen=True)
class Request:
    """A request for `num_generations` completions of each of P prompts.

    Completion j of a prompt depends on (its seed, j) and the weights, and on no other prompt.
    """

    prompts: Sequence[Prompt]  # empty on some processes if there are more processes than prompts
    num_generations: int
    sampling: Sampling
    seeds: Sequence[int]  # one for each prompt
    # The number of each completion's conversation; turns of one conversation share it. Engines may
    # keep a conversation's KV cache. Empty: there are no later turns.
    conversations: Sequence[int] = ()


Work = tuple[Request, OnGroup]  # a request, and the callback that receives its completions


class Feed(Protocol):
    """Requests that follow from completions, as an episode's next turn follows from the last.

    All methods are called in the thread that samples.
    """

    is_repeatable: bool  # whether requests must not depend on timing
    seconds_waited: float  # idle time; engines with a wait of their own add to it

    def take(self, *, exact: bool = False) -> list[Work]:
        """Returns all requests that are ready, without waiting.

        Args:
            exact: request exactly the tokens that are left. Otherwise lengths are rounded down so
                that more conversations share a request, and the rest is requested later.
        """

    def take_round(self) -> Work:
        """Returns one request for as many conversations as possible; the others stay ready."""

    def wait(self, patience: float) -> bool:
        """Waits for requests; returns whether one is ready. False means that none can follow.

        Args:
            patience: seconds to wait for further requests once one is ready. A repeatable feed
                waits for all of them.
        """

    def is_waiting(self) -> bool:
        """Returns whether requests may follow that do not depend on the current sampling."""

    def is_open(self, conversation: int) -> bool:
        """Returns whether a conversation may have another turn."""

    def notify(self, call: Callable[[], None]) -> None:
        """Registers a callback for when a request may be ready; any thread may run it."""


PATIENCE = 0.5  # seconds that a round waits for further requests once one is ready


class Generator:
    """Samples completions. It takes and returns token ids; every token it returns was sampled.

    The attributes below are an engine's capabilities; a subclass sets those that differ.
    """

    samples_from_policy = False  # whether it computes with the policy's own module
    computes_here = False  # whether it uses this process's device, whose FLOPs then include it
    is_repeatable = True  # whether the run alone decides which prompts share a batch
    accepts_images = False  # whether it reads `Prompt.images`
    prefetch_steps = 0  # steps that are sampled ahead, while an earlier step trains
    cache_tokens: int | None = None  # measured cache size; it sets batches and so their rounding

    @classmethod
    def contradictions(cls, recipe: Recipe) -> Iterable[str]:
        """Returns a message for each setting that this engine refuses, with the keys to change.

        Called before a model is loaded, also on machines without the engine's software.
        """
        return ()

    @classmethod
    def require(cls) -> None:
        """Raises a UserError if software that the engine needs is not installed here."""

    @classmethod
    def make(cls, setup: EngineSetup) -> Generator:
        """Returns the engine, ready to sample once it has weights.

        Raises:
            UserError: the engine cannot be started with this model and these settings.
        """
        raise NotImplementedError(f"{cls.__name__} cannot be chosen by generation.engine")

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: Sampling,
        seeds: Sequence[int],
        on_group: OnGroup = ignore,
    ) -> list[list[Completion]]:
        """Returns `num_generations` completions of each prompt, in the order of the prompts.

        Args:
            prompts, num_generations, sampling, seeds: see `Request`.
            on_group: called with (index of the prompt, its completions) as soon as all
                completions of the prompt are there, while others are still sampled. Must be quick.

        Raises:
            TrainingError: the engine cannot sample, or a prompt has images that it cannot take.
        """
        self.refuse_images(prompts)
        groups: dict[int, list[Completion]] = {}

        def hand_over(number: int, completions: list[Completion]) -> None:
            groups[number] = completions
            on_group(number, completions)

        self.sample(Request(prompts, num_generations, sampling, seeds), hand_over)
        return [groups[number] for number in range(len(prompts))]

    def sample(self, request: Request, hand_over: OnGroup) -> None:
        """Samples a request; calls `hand_over` once for each prompt, as `generate` describes."""
        raise NotImplementedError(f"{type(self).__name__} has neither `sample` nor `generate`")

    def converse(self, request: Request, hand_over: OnGroup, feed: Feed) -> None:
        """Samples a request, and all requests that follow from its completions.

        This version works in rounds. Engines override it to sample some requests while others
        wait, unless the feed is repeatable. Every process calls it, even without prompts.
        """
        self.refuse_images(request.prompts)
        self.sample(request, hand_over)
        while feed.wait(PATIENCE):
            self.sample(*feed.take_round())

    def update_weights(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        """Gives the engine the weights of `policy` after `step` steps.

        Every process calls it. Returns metrics.

        Raises:
            TrainingError: the weights did not arrive; earlier completions remain valid.
        """
        return {}

    def offload(self) -> None:
        """Frees memory for the update, during which nothing is generated."""

    def checks(self) -> dict[str, str]:
        """Returns the results of its self-checks for a checkpoint; {} if it has none."""
        return {}

    def restore_checks(self, stored: Mapping[str, str]) -> None:
        """Restores the decoder that stored `checks` name, since another one rounds differently."""

    def close(self) -> None:
        """Ends processes and frees memory."""

    def refuse_images(self, prompts: Sequence[Prompt]) -> None:
        """Raises a TrainingError if a prompt has images and this engine takes only token ids."""
        if self.accepts_images:
            return
        for prompt in prompts:
            if prompt.images:
                raise TrainingError(
                    f"the prompt of row {prompt.row} has images; {type(self).__name__} takes "
                    "token ids only. Choose another engine (generation=...).",
                    alone=True,
                )
