"""The base class of the engines that sample completions for training and evaluation.

Two prompts with two completions each:

    with generator.session() as session:
        session.submit(Request([prompt_a, prompt_b], 2, Sampling(max_tokens=16), seeds=[11, 12]))
        while session.unfinished:
            for request, number, completions in session.poll():
                ...  # number 1, [completion 0 of b, completion 1 of b]

More can be submitted at any time, such as an episode's next turn. `factory.py` lists the engines. A
new engine is a subclass with `make` and `sample`, in a file of its own; one that samples several
requests together overrides `session` instead of `sample`. An engine around another one passes on
`update_weights`, `checks`, `restore_checks`, `offload` and `close`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli.errors import TrainingError
from grpo_cli.generation.sampling import Sampling
from grpo_cli.records import Completion, Prompt

if TYPE_CHECKING:
    from grpo_cli.config.recipe import Recipe
    from grpo_cli.distributed.workers import Workers


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


class Finished(NamedTuple):
    """All completions of one prompt."""

    request: Request
    number: int  # index of the prompt in the request
    completions: list[Completion]


class Session:
    """The requests of one caller to an engine: `submit` some, and `poll` while any is unfinished.

    This class samples one request after the other, by the engine's `sample`.
    """

    rounds_lengths = True  # whether later turns get rounded lengths, so that more share a request

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.unfinished = 0  # submitted prompts without completions
        self._submitted: deque[Request] = deque()
        self._sampled: Iterator[list[Finished]] | None = None  # begun by the first `poll`

    @property
    def joins_requests(self) -> bool:
        """Whether a request is sampled beside the unfinished ones, and need not wait for them."""
        return False

    def submit(self, request: Request) -> None:
        """Adds a request. Every process of a run submits its share, also one without prompts."""
        self.generator.check_prompts(request.prompts)
        self.unfinished += len(request.prompts)
        if request.prompts:
            self._submitted.append(request)

    def poll(self, timeout: float = 1.0) -> list[Finished]:
        """Samples until some prompts have all completions, or there is room for more requests.

        Args:
            timeout: seconds to wait for an engine that computes elsewhere.

        Returns:
            The prompts that are finished; each is returned once.
        """
        self._sampled = self._sampled or self._sample()
        found = next(self._sampled)
        self.unfinished -= len(found)
        return found

    def drain(self) -> Iterator[Finished]:
        """Yields each prompt as it is finished, until none is unfinished."""
        while self.unfinished:
            yield from self.poll()

    def end(self, conversation: int) -> None:
        """Frees what the engine keeps for a conversation, which has no further turn."""

    def close(self) -> None:
        """Drops unfinished requests, and what the engine holds for them."""
        self._sampled = None

    def _sample(self) -> Iterator[list[Finished]]:
        """Yields what `poll` returns; advanced only while there are unfinished prompts."""
        while True:
            assert self._submitted, "`sample` yields each prompt of a request once"
            request = self._submitted.popleft()
            for number, completions in self.generator.sample(request):
                yield [Finished(request, number, completions)]


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

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Prepares the engine to sample, and yields the session to use within the context.

        Every process enters it, even without prompts: a sharded policy is gathered here.
        """
        with closing(Session(self)) as session:
            yield session

    def sample(self, request: Request) -> Iterator[tuple[int, list[Completion]]]:
        """Yields (index of the prompt, its completions) once for each prompt, in any order."""
        raise NotImplementedError(f"{type(self).__name__} has neither `sample` nor `session`")

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """Returns `num_generations` completions of each prompt, in the order of the prompts.

        Raises:
            TrainingError: the engine cannot sample, or a prompt has images that it cannot take.
        """
        with self.session() as session:
            session.submit(Request(prompts, num_generations, sampling, seeds))
            groups = {done.number: done.completions for done in session.drain()}
        return [groups[number] for number in range(len(prompts))]

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

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raises a TrainingError if this engine cannot take a prompt, for its images."""
        first = next((p for p in prompts if p.images and not self.accepts_images), None)
        if first is not None:
            raise TrainingError(
                f"the prompt of row {first.row} has images; {type(self).__name__} takes token ids "
                "only. Choose another engine (generation=...).",
                alone=True,
            )
