"""The base class of the engines that make completions: what training and evaluation ask of one.

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
    model: PreTrainedModel  # the policy, which it samples from
    tokenizer: PreTrainedTokenizerBase
    eos_ids: Sequence[int]  # tokens that end a completion
    workers: Workers
    prompts: Sequence[Prompt]  # all that it will be given; the longest sets how much room it needs
    say: Callable[[str], None]  # prints a line for the user


@dataclass(frozen=True)
class Request:
    """A request for `num_generations` completions of each of P prompts.

    Completion j of a prompt depends on (its seed, j) and the weights, and on no other prompt.
    """

    prompts: Sequence[Prompt]  # there may be none where there are more processes than prompts
    num_generations: int
    sampling: Sampling
    seeds: Sequence[int]  # one for each prompt
    # A number for each of the completions, the same for all that continue one another; engines may
    # keep what they have computed of a conversation. Empty: nothing follows.
    conversations: Sequence[int] = ()


Work = tuple[Request, OnGroup]  # a request, and what its completions are handed to


class Feed(Protocol):
    """Requests that follow from completions, as an episode's next turn follows from the last.

    All methods are called in the thread that samples.
    """

    is_repeatable: bool  # whether no request may depend on how quick anything was
    seconds_waited: float  # while nothing was sampled; engines that wait by themselves add to it

    def take(self, *, exact: bool = False) -> list[Work]:
        """Returns all requests that are ready, without waiting.

        Args:
            exact: ask for the exact number of tokens that are left. Else lengths are rounded down,
                so that more conversations share a request; the rest is asked for again.
        """

    def take_round(self) -> Work:
        """Returns one request for as many conversations as possible; the others stay ready."""

    def wait(self, patience: float) -> bool:
        """Waits for requests; returns whether any is ready, false once nothing can follow.

        Args:
            patience: seconds that it waits for others once one is ready. If requests are to be
                repeatable it waits for all.
        """

    def is_waiting(self) -> bool:
        """Returns whether requests may follow that nothing sampled now leads to."""

    def is_open(self, conversation: int) -> bool:
        """Returns whether a conversation may go on."""

    def notify(self, call: Callable[[], None]) -> None:
        """Has `call` called, in any thread, when a request may have become ready."""


PATIENCE = 0.5  # seconds that a round waits for others, once it has something to sample


class Generator:
    """Makes completions. It takes and returns token ids; every token it returns was sampled.

    The attributes below say what an engine can do; a subclass sets those that differ.
    """

    samples_from_policy = False  # whether it computes with the policy's own module
    computes_here = False  # on this process's device, so that its FLOPs are the device's
    is_repeatable = True  # whether what shares a batch is the run's own choice
    accepts_images = False  # whether it reads `Prompt.images`
    prefetch_steps = 0  # steps whose completions are sampled while an earlier step is trained on
    cache_tokens: int | None = None  # measured size of its caches: other batches round differently

    @classmethod
    def contradictions(cls, recipe: Recipe) -> Iterable[str]:
        """Returns a sentence with the keys to change for each setting that this engine refuses.

        Called before a model is loaded, on machines too that do not have the engine's software.
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
            TrainingError: it cannot sample, or a prompt has images that it cannot take.
        """
        self.refuse_images(prompts)
        groups: dict[int, list[Completion]] = {}

        def hand_over(number: int, completions: list[Completion]) -> None:
            groups[number] = completions
            on_group(number, completions)

        self.sample(Request(prompts, num_generations, sampling, seeds), hand_over)
        return [groups[number] for number in range(len(prompts))]

    def sample(self, request: Request, hand_over: OnGroup) -> None:
        """Samples what is asked for; calls `hand_over` once for each prompt, see `generate`."""
        raise NotImplementedError(f"{type(self).__name__} has neither `sample` nor `generate`")

    def converse(self, request: Request, hand_over: OnGroup, feed: Feed) -> None:
        """Samples a request, and all requests that follow from its completions.

        Here in rounds. Engines that can sample one request while others wait do so, unless the feed
        is to be repeatable. Every process calls it, also without prompts.
        """
        self.refuse_images(request.prompts)
        self.sample(request, hand_over)
        while feed.wait(PATIENCE):
            self.sample(*feed.take_round())

    def update_weights(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        """Samples from `policy`, as it is after `step` steps, from now on.

        Every process calls it. Returns metrics.

        Raises:
            TrainingError: the weights did not arrive; completions made before are sound.
        """
        return {}

    def offload(self) -> None:
        """Frees memory for the update, since nothing is generated for a while."""

    def checks(self) -> dict[str, str]:
        """Returns what its self-checks have found, for a checkpoint; {} if it makes none."""
        return {}

    def restore_checks(self, stored: Mapping[str, str]) -> None:
        """Decodes as the run did that has stored `checks`: another decoder rounds differently."""

    def close(self) -> None:
        """Ends processes and frees memory."""

    def refuse_images(self, prompts: Sequence[Prompt]) -> None:
        """Raises a TrainingError if a prompt has images and this engine reads token ids only."""
        if self.accepts_images:
            return
        for prompt in prompts:
            if prompt.images:
                raise TrainingError(
                    f"the prompt of row {prompt.row} has images; {type(self).__name__} takes "
                    "token ids only. Choose another engine (generation=...).",
                    alone=True,
                )
