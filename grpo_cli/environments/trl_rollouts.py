"""TRL rollout functions: a function of prompts that returns token ids.

    def rollout(prompts, trainer):
        outputs = trainer.generate(prompts)
        keys = "prompt_ids", "completion_ids", "logprobs"
        return {key: [output[key] for output in outputs] for key in keys}

It runs in the training process, with this process's prompts, each repeated `num_generations` times.
The result at an index belongs to the prompt at that index. Results are checked row by row.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from grpo_cli.config.recipe import Recipe
from grpo_cli.config.user_code import import_function
from grpo_cli.data import conversations
from grpo_cli.environments.functions import clean_text
from grpo_cli.environments.rollouter import Rollouter, RolloutSetup, Sampled
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.generation.base import Generator, Request
from grpo_cli.generation.factory import engine_class
from grpo_cli.generation.sampling import Sampling
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Completion, Prompt, decoded
from grpo_cli.scoring.guards import blame

REQUIRED = ("completion_ids", "logprobs", "prompt_ids")
TEXT_LIMIT = 2000  # maximum characters of an exception's message
MASK = "env_mask"  # key of the mask: 1 for the model's tokens, 0 for others


class RolloutTrainer:
    """The part of TRL's trainer that rollout functions use."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: PreTrainedTokenizerBase,
        request: Request,
        template_kwargs: Mapping[str, Any],
        given: Sequence[tuple[Any, Prompt]] = (),
    ) -> None:
        """given: (prompt as the function gets it, its `Prompt`) pairs."""
        self._given = {id(text): prompt for text, prompt in given}
        self.processing_class = self.tokenizer = tokenizer
        self.num_generations = request.num_generations
        self.max_completion_length = request.sampling.max_tokens
        self._generator, self._sampling = generator, request.sampling
        self._seed, self._calls = derive_seed(*request.seeds), 0
        self._template_kwargs = template_kwargs

    def generate(self, prompts: Sequence[Any], **sampling: Any) -> list[dict[str, Any]]:
        """Samples one completion of each prompt.

        Args:
            prompts: strings, lists of messages, or lists of token ids. Prompts with images must be
                the original objects, not copies or token ids.
            sampling: fields of `Sampling` that differ from the recipe's, such as max_tokens.

        Returns:
            {"prompt_ids", "completion_ids", "logprobs", "text"} for each prompt.

        Raises:
            TrainingError: a copied prompt has images.
        """
        encoded = [self._encoded(prompt) for prompt in prompts]
        seeds = [derive_seed(self._seed, self._calls, n) for n in range(len(encoded))]
        self._calls += 1
        changed = dataclasses.replace(self._sampling, **sampling)
        groups = self._generator.generate(encoded, 1, changed, seeds)
        return [
            {
                "prompt_ids": prompt.ids,
                "completion_ids": c.ids,
                "logprobs": c.sampling_logprobs,
                "text": decoded(self.tokenizer, c.ids),
            }
            for prompt, (c,) in zip(encoded, groups, strict=True)
        ]

    def _encoded(self, prompt: Any) -> Prompt:
        known = self._given.get(id(prompt))
        if known is not None and (known.images or known.marked is not None):
            return known  # its string lacks the images and marks
        is_chat, text = conversations.is_conversation(prompt), prompt
        if is_chat:
            text = conversations.render(
                self.tokenizer, prompt, self._template_kwargs, "the rollout function"
            )
        ids = prompt
        if is_chat or isinstance(prompt, str):
            ids = self.tokenizer(text, add_special_tokens=not is_chat)["input_ids"]
        vision = next((p.vision for p in self._given.values() if p.vision is not None), None)
        if vision is not None and any(i in vision.token_ids for i in ids):
            raise TrainingError(
                "trainer.generate of a rollout function takes prompts with images as the function "
                "was given them, no copies and no token ids."
            )
        return Prompt.from_ids(list(ids))


@dataclass
class TrlRollouts(Rollouter):
    """Samples rollouts with a TRL rollout function."""

    path: str  # for messages
    function: Callable[..., Any]
    tokenizer: PreTrainedTokenizerBase
    eos_ids: Collection[int]
    template_kwargs: Mapping[str, Any]
    max_prompt_tokens: int | None = None  # limit of a prompt that the function returns
    takes_turns = True

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        key = f"rollout = {recipe.rollout}"
        function = import_function(str(recipe.rollout), key)
        if inspect.isclass(function):
            raise UserError(
                f"{key}: is a class; give a function of (prompts, trainer), an object that is "
                "called like one, or a subclass of grpo_cli.environments.rollouter.Rollouter."
            )
        try:
            inspect.signature(function).bind([], None)
        except TypeError:
            raise UserError(
                f"{key}: must take (prompts, trainer), or be a coroutine function (async def) "
                "that takes a conversation."
            ) from None
        if recipe.generation.vllm.prefetch_steps:
            raise UserError(
                f"{key} with generation.vllm.prefetch_steps: the weights that the function sampled "
                "with are not known; set prefetch_steps=0, or use a coroutine function."
            )
        engine, strategy = recipe.generation.engine, recipe.distributed.strategy
        if strategy == "fsdp2" and engine_class(engine).samples_from_policy:
            raise UserError(
                f"{key} with distributed = {strategy}: the engine {engine} samples on all "
                "processes together, and the function does not; use vLLM "
                "(generation=vllm_colocate), or a coroutine function."
            )

    @classmethod
    def make(cls, setup: RolloutSetup) -> TrlRollouts:
        path, kwargs = str(setup.recipe.rollout), setup.recipe.model.chat_template_kwargs
        function, tokenizer = import_function(path, "rollout"), setup.loaded.tokenizer
        return cls(path, function, tokenizer, setup.eos_ids, kwargs, setup.max_prompt_tokens)

    @contextmanager
    def sample(self, generator: Generator, request: Request) -> Iterator[Iterator[Sampled]]:
        yield self._sampled(generator, request)

    def _sampled(self, generator: Generator, request: Request) -> Iterator[Sampled]:
        """Yields the groups of all prompts, which one call of the function samples.

        Raises:
            TrainingError: the function raised, or did not return a valid rollout per prompt.
        """
        if not request.prompts:
            return
        num_generations = request.num_generations
        repeated = [prompt for prompt in request.prompts for _ in range(num_generations)]
        given = [p.conversation for p in repeated]
        pairs = list(zip(given, repeated, strict=True))
        trainer = RolloutTrainer(generator, self.tokenizer, request, self.template_kwargs, pairs)
        try:
            found = self.function(list(given), trainer)
        except (TrainingError, UserError):  # from the generator, with a complete message
            raise
        except Exception as error:
            text = clean_text(blame(error), TEXT_LIMIT)
            raise TrainingError(f"rollout = {self.path} raised {text}") from error
        columns = self._columns(found, len(repeated))
        rows = [
            self._rollout(prompt, {k: v[n] for k, v in columns.items()}, n, request.sampling)
            for n, prompt in enumerate(repeated)
        ]
        for number in range(len(request.prompts)):
            group = rows[number * num_generations : (number + 1) * num_generations]
            yield number, [p for p, _ in group], [completion for _, completion in group]

    def _columns(self, found: Any, number: int) -> dict[str, Sequence[Any]]:
        """Returns the function's result as lists with one value per rollout, by key."""
        if not isinstance(found, Mapping):
            raise self._error(f"returned {type(found).__name__}; it must return a dict")
        if missing := [key for key in REQUIRED if key not in found]:
            raise self._error(f"must return the keys {', '.join(REQUIRED)}; it lacks {missing}")
        columns = {}
        for key, given in found.items():
            values = _builtin(given)
            is_list = isinstance(values, (list, tuple))
            if not is_list and key in (*REQUIRED, MASK):
                raise self._error(f"returned {type(values).__name__} as {key}; must be a list")
            if is_list and len(values) != number:
                raise self._error(
                    f"returned {len(values)} values of {key} for {number} prompts; each prompt "
                    "comes num_generations times, and needs one result each time"
                )
            columns[str(key)] = values if is_list else [values] * number
        return columns

    def _rollout(
        self, prompt: Prompt, row: dict[str, Any], n: int, sampling: Sampling
    ) -> tuple[Prompt, Completion]:
        prompt_ids = self._ids(row.pop("prompt_ids"), "prompt_ids", n)
        if self.max_prompt_tokens is not None and len(prompt_ids) > self.max_prompt_tokens:
            raise self._error(
                f"row {n}: prompt_ids has {len(prompt_ids)} tokens, more than "
                f"dataset.max_prompt_tokens = {self.max_prompt_tokens}"
            )
        if prompt.vision is not None:
            own = prompt.vision.token_ids
            expected, found = ([i for i in ids if i in own] for ids in (prompt.ids, prompt_ids))
            if found != expected:
                raise self._error(
                    f"row {n}: prompt_ids has {len(found)} tokens of images, and the prompt's "
                    f"images take {len(expected)}; return the prompt_ids of trainer.generate"
                )
        ids = self._ids(row.pop("completion_ids"), "completion_ids", n)
        if len(ids) > sampling.max_tokens:
            raise self._error(
                f"row {n}: completion_ids has {len(ids)} tokens, more than "
                f"generation.max_completion_tokens = {sampling.max_tokens}"
            )
        logprobs = _vector(row.pop("logprobs"), len(ids))
        if logprobs is None or not (np.isfinite(logprobs) & (logprobs <= 1e-4)).all():
            raise self._error(
                f"row {n}: logprobs must hold a finite number <= 0 for each of {len(ids)} tokens"
            )
        given = row.pop(MASK, None)
        mask = np.ones(len(ids)) if given is None else _vector(given, len(ids))
        if mask is None or not np.isin(mask, (0, 1)).all():
            raise self._error(f"row {n}: {MASK} must hold 0 or 1 for each of {len(ids)} tokens")
        sampled = [bool(m) for m in mask]
        completion = Completion(
            ids,
            [float(p) if own else 0.0 for p, own in zip(logprobs, sampled, strict=True)],
            "stop" if ids[-1] in self.eos_ids else "length",
            is_sampled=None if all(sampled) else sampled,
        )
        changed = dataclasses.replace(
            prompt, ids=prompt_ids, columns={**prompt.columns, **row}, row_ids=prompt.ids, added=row
        )
        return changed, completion

    def _ids(self, ids: Any, key: str, n: int) -> list[int]:
        most, found = len(self.tokenizer) - 1, _vector(ids)
        if found is None or found.dtype.kind not in "iu" or found.min() < 0 or found.max() > most:
            raise self._error(f"row {n}: {key} must be a list of token ids from 0 to {most}")
        return [int(i) for i in found]

    def _error(self, problem: str) -> TrainingError:
        return TrainingError(f"rollout = {self.path}: {problem}.")


def _builtin(value: Any) -> Any:
    """Converts arrays, tensors and their scalars to lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _vector(given: Any, length: int | None = None) -> np.ndarray[Any, Any] | None:
    """Returns values as a vector; None if they are not numbers, or of another length."""
    try:
        values = np.asarray([_builtin(value) for value in _builtin(given)])
    except (TypeError, ValueError, OverflowError):
        return None
    is_right = values.ndim == 1 and values.dtype.kind in "biuf"
    return values if is_right and length in (None, len(values)) else None
