"""Samples with the policy's own transformers module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli.algorithm.batch import pad_right
from grpo_cli.distributed import fsdp
from grpo_cli.errors import TrainingError
from grpo_cli.generation.base import (
    PATIENCE,
    EngineSetup,
    Feed,
    Generator,
    OnGroup,
    Request,
    Work,
)
from grpo_cli.generation.embedded.cached_decoding import CachedDecoder
from grpo_cli.generation.embedded.decoding_state import DecodingState
from grpo_cli.generation.embedded.direct_forward import DirectForward
from grpo_cli.generation.embedded.engine import Engine
from grpo_cli.generation.embedded.graphs import CudaGraphs, FallbackGraphs
from grpo_cli.generation.embedded.kept_caches import KeptCaches
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models import attention, loading, memory, self_check
from grpo_cli.models.families import (
    BIDIRECTIONAL,
    RECURRENT,
    has_bidirectional_images,
    image_tokens,
    is_recurrent,
)
from grpo_cli.models.loading import inference
from grpo_cli.models.policy_logprobs import CHECKED_TOKENS, PolicyLogprobs
from grpo_cli.models.self_check import Outcome
from grpo_cli.models.vision import has_images
from grpo_cli.records import Completion, Prompt, Rollout

Decoder = type[Engine] | type[CachedDecoder]
# Tokens per completion in a decoder's self-check, since small errors appear only after several.
DECODED_TOKENS = 16
STORED: dict[Decoder, str] = {Engine: "engine", CachedDecoder: "plain"}


@dataclass(eq=False)
class _Unfinished:
    """A request and the indices of its prompts that have no completions yet."""

    request: Request
    hand_over: OnGroup
    missing: list[int]
    is_handing_over: bool = False

    @classmethod
    def of(cls, request: Request, hand_over: OnGroup) -> _Unfinished:
        """Returns the request with all of its prompts missing."""
        return cls(request, hand_over, list(range(len(request.prompts))))

    def state(
        self,
        eos_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None,
        never: tuple[int, ...] = (),
    ) -> DecodingState:
        """Returns the decoding state that starts the missing prompts.

        Args:
            never: tokens that must not be sampled.
        """
        request, numbers, per_prompt = (
            self.request,
            list(self.missing),
            self.request.num_generations,
        )
        own = [n * per_prompt + j for n in numbers for j in range(per_prompt)]
        rest = replace(
            request,
            prompts=[request.prompts[n] for n in numbers],
            seeds=[request.seeds[n] for n in numbers],
            sampling=replace(request.sampling, never=never),
            conversations=[request.conversations[r] for r in own] if request.conversations else (),
        )
        return DecodingState(rest, eos_ids, tokenizer, partial(self._take, numbers))

    def _take(self, numbers: list[int], k: int, completions: list[Completion]) -> None:
        self.missing.remove(numbers[k])
        self.is_handing_over = True
        self.hand_over(numbers[k], completions)
        self.is_handing_over = False


@dataclass(eq=False)
class TransformersGenerator(Generator):
    """Decodes with the policy's own weights; no copy outlives a call, so none becomes stale.

    It uses the embedded engine (`engine.py`) if the engine's log-probabilities match the model's on
    a few tokens, and transformers' own cache (`cached_decoding.py`) otherwise. For a recurrent
    model the cache is checked too; on a mismatch the run ends.
    """

    samples_from_policy = True
    computes_here = True
    accepts_images = True

    policy: PreTrainedModel
    eos_ids: Sequence[int]
    max_rows: int | None = None  # maximum batch size; None: by free memory
    tokenizer: PreTrainedTokenizerBase | None = None  # finds stop strings
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    say: Callable[[str], None] = print
    cuda_graphs: bool = True  # on a GPU, replay captured steps (`static_decoding.py`)
    # Prompts of the decoder's self-check, equal on all processes; (): the first to be sampled.
    checked_on: Sequence[Prompt] = ()
    cache_tokens: int | None = None
    direct: DirectForward | None = None  # kept for all rounds of a call
    decoder: Decoder | None = None  # chosen by the self-check with the first prompts
    checked_images: bool = False  # whether a self-check included images
    graphs: FallbackGraphs | None = None  # None until CUDA graphs have been checked

    @classmethod
    def make(cls, setup: EngineSetup) -> Generator:
        """Returns the generator; a `GatheringGenerator` if the policy is sharded."""
        model, workers = setup.model, setup.workers
        generation = setup.recipe.generation
        settings: dict[str, Any] = {
            "eos_ids": setup.eos_ids,
            "max_rows": generation.max_num_seqs,
            "tokenizer": setup.tokenizer,
            "autocast": workers.autocast,
            "say": setup.say,
            "checked_on": () if has_images(setup.prompts) else setup.prompts[:2],
        }
        if fsdp.is_sharded(model):
            return GatheringGenerator(model, workers.half_type or model.dtype, **settings)
        return TransformersGenerator(model, **settings)

    def sample(self, request: Request, hand_over: OnGroup) -> None:
        with self._inference():
            self._finish([_Unfinished.of(request, hand_over)])

    def converse(self, request: Request, hand_over: OnGroup, feed: Feed) -> None:
        """Samples in rounds, or all ready requests together; keeps KV caches between turns."""
        self.refuse_images(request.prompts)
        caches = KeptCaches(len(request.prompts) * request.num_generations)

        def take() -> list[Work]:
            caches.keep_only(feed.is_open)
            return feed.take()

        more = None if feed.is_repeatable else take
        with self._inference():
            works = [(request, hand_over)]
            while works:
                self._finish([_Unfinished.of(*work) for work in works], caches, more)
                joins = more is not None and self.decoder is Engine
                works = feed.take() if feed.wait(0.0 if joins else PATIENCE) else []
                caches.keep_only(feed.is_open)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """Sets the policy up for decoding."""
        # One autocast around all steps, since it caches its casts of the weights until it exits.
        # Layers compiled for training would be recompiled for every cache size.
        with (
            inference(self.policy),
            self.autocast(),
            torch.compiler.set_stance("force_eager"),
        ):
            try:
                yield
            finally:
                self.direct = None  # it may hold copies of the weights

    def _finish(
        self,
        works: list[_Unfinished],
        caches: KeptCaches | None = None,
        more: Callable[[], list[Work]] | None = None,
    ) -> None:
        """Decodes until all requests are done; retries with fewer rows when out of memory.

        Args:
            caches: KV caches kept between turns.
            more: returns further requests to decode together with these.
        """

        def arrived() -> list[DecodingState]:
            new = [_Unfinished.of(*work) for work in more()] if more is not None else []
            works.extend(new)
            return [work.state(self.eos_ids, self.tokenizer, never) for work in new]

        never = image_tokens(self.policy.config)

        works = [work for work in works if work.missing]  # drops requests without prompts
        prompts = [prompt for work in works for prompt in work.request.prompts]
        if works and (self.decoder is None or (not self.checked_images and has_images(prompts))):
            self._choose_decoder(self.checked_on or prompts)
        while works:
            assert self.decoder is not None
            states = [work.state(self.eos_ids, self.tokenizer, never) for work in works]
            longest = max(s.longest for s in states)
            wanted = sum(s.num_rows for s in states)
            if caches is not None:  # other conversations may join, or wait for a reply
                wanted = max(wanted, caches.num_conversations)
                caches.most = self._rows_in_memory(longest)
            rows = self._rows(wanted, longest)
            failed = None
            try:
                if self.decoder is Engine:
                    if self.direct is None:
                        self.direct = DirectForward.of(self.policy)
                    Engine(
                        self.policy,
                        rows,
                        caches=caches,
                        graphs=self.graphs,
                        direct=self.direct,
                    ).decode(states, arrived)
                else:
                    self.decoder(self.policy, rows).decode(states)
            except attention.UnsupportedModelError as error:  # longer than the checked prompts
                self.fall_back(str(error))
                self.direct = None
                if caches is not None:  # only the engine reads them
                    caches.clear()
            except (RuntimeError, MemoryError) as error:
                if any(work.is_handing_over for work in works) or not memory.is_out_of_memory(
                    error
                ):
                    raise
                failed = (str(error).strip() or type(error).__name__).splitlines()[0]
            works = [work for work in works if work.missing]
            if failed is not None:  # after the except block, whose traceback held memory
                del states
                if caches is not None:
                    caches.clear()
                memory.release()
                if works:  # else it failed after the last completion
                    self._halve(rows, works[0].request.num_generations, longest, failed)

    def update_weights(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        self.policy = policy
        return {}

    def _rows(self, wanted: int, longest: int) -> int:
        """Returns the batch size for completions whose sequences have up to `longest` tokens."""
        if self.max_rows is not None:
            return min(wanted, self.max_rows)
        return min(wanted, self._rows_in_memory(longest), memory.most_rows(self.policy))

    def _rows_in_memory(self, longest: int) -> int:
        """Returns how many caches of `longest` tokens fit into memory."""
        if self.cache_tokens is None:
            self.cache_tokens = memory.cache_tokens_that_fit(self.policy)
        return max(self.cache_tokens // longest, 1)

    def _halve(self, rows: int, num_generations: int, longest: int, reason: str) -> None:
        """Halves the number of rows after `rows` did not fit into memory."""
        if rows <= num_generations:
            raise TrainingError(
                f"out of memory while {num_generations} completions of a prompt were sampled, the "
                "smallest number that is: use a smaller generation.num_generations or "
                f"generation.max_completion_tokens, or model.dtype=bfloat16. ({reason})",
                alone=True,
            )
        fewer = max(rows // 2, num_generations)
        self.cache_tokens = fewer * longest
        if self.max_rows is not None:
            self.max_rows = fewer
        self.say(
            f"note: out of memory: {fewer} completions at a time from now on; unfinished "
            "ones are sampled again, with the same result"
        )

    def checks(self) -> dict[str, str]:
        if self.decoder is None:
            return {}
        found = {"decoder": STORED[self.decoder]}
        if self.checked_images:
            found["images"] = "checked"
        if self.graphs is not None:
            found["graphs"] = "off" if self.graphs.has_failed else "on"
        return found

    def restore_checks(self, stored: Mapping[str, str]) -> None:
        decoders = {name: decoder for decoder, name in STORED.items()}
        if "decoder" not in stored:
            return
        if not is_recurrent(self.policy):
            attention.install(self.policy)  # as it was when the engine was tried
        self.decoder = decoders[stored["decoder"]]
        self.checked_images = "images" in stored
        if "graphs" in stored:
            failed = stored["graphs"] == "off"
            self.graphs = FallbackGraphs(CudaGraphs(), self.say, has_failed=failed)

    def fall_back(self, why: str) -> None:
        """Switches to transformers' own cache, and prints the reason."""
        self.say(f"note: decoding with transformers' own cache, not with the engine ({why})")
        self.decoder = CachedDecoder

    def _choose_decoder(self, prompts: Sequence[Prompt]) -> None:
        """Chooses the fastest decoder whose log-probabilities match the model's.

        Called with the first prompts, and again with the first prompts that have images.

        Raises:
            TrainingError: the model is recurrent, and its cache changes its log-probabilities.
        """
        if self.decoder is None:
            self.decoder = Engine
            if is_recurrent(self.policy):
                self.fall_back(f"its {RECURRENT}")
            elif not attention.install(self.policy):
                self.fall_back(f"its attention is {attention.name_of(self.policy)}")
        self.checked_images = has_images(prompts)
        if self.decoder is Engine and self.checked_images and has_bidirectional_images(self.policy):
            self.fall_back(f"its {BIDIRECTIONAL}")
        elif self.decoder is Engine:
            why = self._mismatch(Engine, prompts)
            if why is not None:
                self.fall_back(why)
            elif self.cuda_graphs and self.policy.device.type == "cuda" and self.graphs is None:
                self.check_graphs(FallbackGraphs(CudaGraphs(), self.say), prompts)
        elif self.decoder is CachedDecoder and is_recurrent(self.policy):
            why = self._mismatch(CachedDecoder, prompts)
            if why is not None:
                raise TrainingError(
                    "generation.engine = transformers: with its cache in transformers, "
                    f"{why.removesuffix(self_check.ADVICE)}. Use generation=vllm_colocate or "
                    "vllm_server, or another model.dtype.",
                    alone=True,
                )

    def check_graphs(self, graphs: FallbackGraphs, prompts: Sequence[Prompt]) -> None:
        """Enables CUDA graphs if captured steps report the model's log-probabilities."""
        why = self._mismatch(partial(Engine, graphs=graphs), prompts, captured=True)
        self.graphs = graphs
        if why is not None:
            graphs.has_failed = True
            self.say(f"note: decoding step by step, without CUDA graphs ({why})")

    def _mismatch(
        self, decoder: Callable[..., Any], prompts: Sequence[Prompt], *, captured: bool = False
    ) -> str | None:
        """Returns why a decoder cannot be used; None if its log-probabilities match the model's.

        Args:
            captured: skip the float32 check of a 16-bit model, which would capture again.
        """
        some = sorted(prompts, key=lambda p: not p.images)[:2]
        begun = [p if p.images else Prompt.from_ids(p.ids[-CHECKED_TOKENS:]) for p in some]
        simplest = PolicyLogprobs(self.policy, packed=False, chunked=False)

        def model_of(rollouts: list[Rollout]) -> Outcome:
            return Outcome.of(rollouts, simplest(rollouts, 1.0)[0])

        def attempt(**own: Any) -> tuple[list[Rollout], Outcome]:
            groups: dict[int, list[Completion]] = {}
            request = Request(begun, 2, Sampling(max_tokens=DECODED_TOKENS), [0, 1])
            state = DecodingState(request, [], None, groups.__setitem__)
            decoder(self.policy, 4, **own).decode([state])
            rollouts = [Rollout(p, c, "") for n, p in enumerate(begun) for c in groups[n]]
            sampled = [torch.tensor(r.completion.sampling_logprobs) for r in rollouts]
            return rollouts, Outcome.of(rollouts, pad_right(sampled, DECODED_TOKENS))

        found: list[str | None] = []

        def check() -> None:
            rollouts, reported = attempt()
            own = model_of(rollouts)
            if not self_check.is_16_bit(self.policy):
                found.append(self_check.difference(reported, own, self.policy.dtype))
                return
            direct = DirectForward.of(self.policy) if decoder is Engine else None
            with self_check.in_float32(self.policy):
                found.append(self_check.excess(reported, own, model_of(rollouts)))
                if not captured:
                    wide = {} if direct is None else {"direct": direct.in_float32()}
                    rollouts, reported = attempt(**wide)
                    right = model_of(rollouts)
                    found.append(self_check.difference(reported, right, torch.float32))

        return attention.mismatch(check) or next(filter(None, found), None)


class GatheringGenerator(TransformersGenerator):
    """Decodes on a complete copy of a sharded policy, gathered on every process while it samples.

    Otherwise layers would be gathered for each token, and every process would have to decode as
    many tokens as the process with the longest completion.
    """

    def __init__(
        self, sharded: PreTrainedModel, dtype: torch.dtype, *settings: Any, **named: Any
    ) -> None:
        """Makes a model without weights; they are gathered whenever it samples.

        Args:
            dtype: dtype of the gathered weights.
            settings, named: arguments of `TransformersGenerator` after the policy.
        """
        super().__init__(loading.skeleton(sharded), *settings, **named)
        self.sharded, self.dtype = sharded, dtype

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """Gathers the weights, a collective operation, and frees them afterwards."""
        fsdp.fill(self.policy, self.sharded, self.dtype)
        try:
            with super()._inference():
                yield
        finally:
            fsdp.empty(self.policy)

    def update_weights(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        self.sharded = policy
        return {}
