"""Samples with the policy's own transformers module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli.algorithm.batch import pad_right
from grpo_cli.distributed import fsdp
from grpo_cli.errors import TrainingError, first_line
from grpo_cli.generation.base import EngineSetup, Finished, Generator, Request, Session
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
    is_recurrent,
    placeholder_tokens,
)
from grpo_cli.models.policy_logprobs import CHECKED_TOKENS, PolicyLogprobs, inference
from grpo_cli.models.self_check import Outcome
from grpo_cli.records import Prompt, Rollout, has_images

Decoder = type[Engine] | type[CachedDecoder]
# Tokens per completion in a decoder's self-check, since small errors appear only after several.
DECODED_TOKENS = 16
STORED: dict[Decoder, str] = {Engine: "engine", CachedDecoder: "plain"}


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
    # Texts for the decoder's self-check, equal on all processes; (): the first to be sampled.
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

    @contextmanager
    def session(self) -> Iterator[Session]:
        # One autocast around all steps, since it caches its casts of the weights until it exits.
        # Layers compiled for training would be recompiled for every cache size.
        with (
            inference(self.policy),
            self.autocast(),
            torch.compiler.set_stance("force_eager"),
            closing(EmbeddedSession(self)) as session,
        ):
            try:
                yield session
            finally:
                self.direct = None  # it may hold copies of the weights

    @cached_property
    def never(self) -> tuple[int, ...]:
        """The tokens that are not sampled: placeholders of images."""
        return placeholder_tokens(self.policy.config)

    def state(self, request: Request, numbers: Sequence[int] | None = None) -> DecodingState:
        """Returns the state that starts a request, or only its prompts `numbers`."""
        return DecodingState(
            request, self.eos_ids, self.tokenizer, numbers=numbers, never=self.never
        )

    def decode(
        self,
        states: Sequence[DecodingState],
        rows: int,
        caches: KeptCaches | None,
        arrived: Callable[[], Sequence[DecodingState]],
    ) -> Iterator[list[Finished]]:
        """Decodes with the chosen decoder, up to `rows` rows at a time; see `Engine.decode`."""
        if self.decoder is CachedDecoder:
            return CachedDecoder(self.policy, rows).decode(states)
        if self.direct is None:
            self.direct = DirectForward.of(self.policy)
        engine = Engine(self.policy, rows, caches=caches, graphs=self.graphs, direct=self.direct)
        return engine.decode(states, arrived)

    def update_weights(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        self.policy = policy
        return {}

    def rows(self, wanted: int, longest: int) -> int:
        """Returns the batch size for completions whose sequences have up to `longest` tokens."""
        if self.max_rows is not None:
            return min(wanted, self.max_rows)
        most = memory.MOST_ROWS.get(self.policy.device.type, memory.MOST_ROWS["cpu"])
        return min(wanted, self.rows_in_memory(longest), most)

    def rows_in_memory(self, longest: int) -> int:
        """Returns how many caches of `longest` tokens fit into memory."""
        if self.cache_tokens is None:
            self.cache_tokens = memory.cache_tokens_that_fit(self.policy)
        return max(self.cache_tokens // longest, 1)

    def halve_rows(self, rows: int, num_generations: int, longest: int, reason: str) -> None:
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
        self.say(
            f"note: the embedded engine is off ({why}); transformers' own cache gives the same "
            "completions, slower"
        )
        self.decoder, self.direct = CachedDecoder, None

    def choose_decoder(self, prompts: Sequence[Prompt]) -> None:
        """Chooses the fastest decoder whose log-probabilities match the model's.

        It does so with the first prompts, and again with the first prompts that have images.

        Raises:
            TrainingError: the model is recurrent, and its cache changes its log-probabilities.
        """
        if self.decoder is not None and (self.checked_images or not has_images(prompts)):
            return
        prompts = prompts if has_images(prompts) else self.checked_on or prompts
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
            elif self.policy.device.type == "cuda" and self.graphs is None:
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
            request = Request(begun, 2, Sampling(max_tokens=DECODED_TOKENS), [0, 1])
            found = decoder(self.policy, 4, **own).decode([DecodingState(request, [], None)])
            groups = {done.number: done.completions for finished in found for done in finished}
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


class EmbeddedSession(Session):
    """Decodes all submitted requests together; keeps KV caches between turns of conversations."""

    generator: TransformersGenerator
    caches: KeptCaches | None = None

    @property
    def joins_requests(self) -> bool:
        return self.generator.decoder is Engine

    def submit(self, request: Request) -> None:
        super().submit(request)
        if self.caches is None and request.conversations:
            self.caches = KeptCaches(len(request.conversations))

    def end(self, conversation: int) -> None:
        if self.caches is not None:
            self.caches.drop(conversation)

    def _sample(self) -> Iterator[list[Finished]]:
        """Decodes the submitted requests; decodes again with fewer rows when out of memory."""
        engine = self.generator
        states: list[DecodingState] = []

        def arrived() -> list[DecodingState]:
            new = [engine.state(request) for request in self._submitted]
            self._submitted.clear()
            states.extend(new)
            return new

        while True:
            arrived()
            engine.choose_decoder([prompt for state in states for prompt in state.sources])
            longest = max(s.longest for s in states)
            wanted = sum(len(s.tokens) for s in states)
            if (caches := self.caches) is not None:
                # Other conversations may join, or wait for a reply.
                wanted = max(wanted, caches.num_conversations)
                caches.most = engine.rows_in_memory(longest)
            rows = engine.rows(wanted, longest)
            reason, is_out_of_memory = None, False
            try:
                yield from engine.decode(states, rows, caches, arrived)
            except attention.UnsupportedModelError as error:  # longer than the checked prompts
                reason = str(error)
            except (RuntimeError, MemoryError) as error:
                if not memory.is_out_of_memory(error):
                    raise
                is_out_of_memory = True
                reason = first_line(error)
            # After the except block, whose traceback held memory.
            if finished := [done for state in states for done in state.take_finished()]:
                yield finished  # in the step that has failed
            states[:] = [engine.state(s.request, s.missing) for s in states if s.missing]
            if reason is None:
                continue
            if caches is not None:
                caches.clear()
            if not is_out_of_memory:
                engine.fall_back(reason)
                continue
            memory.release()
            if states:  # else it failed after the last completion
                engine.halve_rows(rows, states[0].num_generations, longest, reason)


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
    def session(self) -> Iterator[Session]:
        """Gathers the weights, a collective operation, and frees them afterwards."""
        fsdp.fill(self.policy, self.sharded, self.dtype)
        try:
            with super().session() as session:
                yield session
        finally:
            fsdp.empty(self.policy)

    def update_weights(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        self.sharded = policy
        return {}
