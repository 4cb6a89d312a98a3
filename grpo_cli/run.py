"""A run under way: the live objects, and where it stands."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli import attention, checkpoint, data, folders, heartbeat, policy
from grpo_cli.ahead import Arrived, Batch
from grpo_cli.attention import UnsupportedModelError
from grpo_cli.balance import divided
from grpo_cli.budget import Budget, tokens_that_fit
from grpo_cli.checkpoint import Checkpointer
from grpo_cli.clock import Clock, possible_stages
from grpo_cli.config import Recipe
from grpo_cli.distributed import Workers
from grpo_cli.entropy import adapted_coef, applied_coef
from grpo_cli.errors import TrainingError, UserError, listed, nearest
from grpo_cli.evaluate import Evaluator, as_metrics
from grpo_cli.flops import forward_flops, params_in_products, peak_flops
from grpo_cli.generation import Generator, TransformersGenerator, sample
from grpo_cli.heartbeat import Leave
from grpo_cli.kl import adapted_beta
from grpo_cli.likelihood import Likelihood, bytes_per_token, cut
from grpo_cli.lock import Lock
from grpo_cli.outcomes import WholeStep
from grpo_cli.packing import length, packed_micro_batches, unique_tokens
from grpo_cli.registry import TrainerState
from grpo_cli.report import Reporter, readable
from grpo_cli.rollouts import Group, Prompt, Rollout, placeholder
from grpo_cli.sampling import Sampling
from grpo_cli.schedules import at_step
from grpo_cli.scoring import Scorer
from grpo_cli.stop import Interrupted, Stop
from grpo_cli.versions import versions
from grpo_cli.work import Work

T = TypeVar("T")

PLAIN = "plain"  # the decoder that a run had to fall back on, in its checkpoints


@dataclass
class State:
    """Where a run stands; saved with every checkpoint, besides weights and optimizer."""

    step: int = 0  # steps done
    num_tokens: float = 0  # prompt and completion tokens seen, over all processes
    seconds: float = 0  # time spent training, over all its sittings
    before: dict[str, float] | None = None  # metrics of the evaluation before the first step
    after: dict[str, float] | None = None  # metrics of the newest evaluation
    after_step: int = 0  # and the step it was made at
    best_step: int | None = None  # the step of the best evaluation
    best_value: float = -math.inf  # of the metric `eval.best`
    worse: int = 0  # evaluations in a row since then
    position: int = 0  # prompts sampled
    signal_share: float = 1.0  # of the groups sampled last (dynamic sampling)
    reference_moved: bool = False  # it is no longer the model that the run began with
    beta: float | None = None  # where loss.kl_target adapts it
    entropy_coef: float | None = None  # where loss.entropy_target adapts it
    entropy: float | None = None  # of the last optimizer step, for the same
    tracker_id: str | None = None  # by which the tracker knows the run
    # Of each process, as measured and halved: another split is another rounding.
    micro_batch_tokens: list[int | None] = field(default_factory=list)
    cache_tokens: list[int | None] = field(default_factory=list)
    ways: list[dict[str, str]] = field(default_factory=list)  # as `Run.ways`


@dataclass
class Run:
    """A run under way. The loop asks it for things by name and never for a backend."""

    recipe: Recipe
    folder: Path
    workers: Workers
    tokenizer: PreTrainedTokenizerBase
    policy: PreTrainedModel  # the model itself
    likelihood: Likelihood  # what it says of rollouts
    reference: PreTrainedModel | None
    reference_likelihood: Likelihood | None
    budget: Budget
    optimizer: torch.optim.Optimizer
    generator: Generator
    scorer: Scorer
    stream: data.PromptStream
    evaluator: Evaluator | None
    reporter: Reporter
    stop: Stop
    lock: Lock | None  # of the folder; the main process holds it
    checkpointer: Checkpointer
    carried: list[Group] = field(default_factory=list)  # this process's, for the next step
    ahead: deque[Batch] = field(default_factory=deque)  # of the next steps, under way
    lengths: dict[int, float] = field(default_factory=dict)  # of each row's completions, last time
    work: Work | None = None  # of the step under way, once it is collected
    unreported: dict[str, float] | None = None  # metrics of a step whose evaluation is to come
    stopped_by: int | None = None  # the signal that ended the run early
    left_at: Path | None = None  # where a step that was broken off is kept
    saved_step: int = -1  # of the newest checkpoint of this sitting
    state: State = field(default_factory=State)
    started: float = field(default_factory=time.monotonic)
    save_seconds: float = math.nan  # that the newest checkpoint took
    streams: dict[str, Any] | None = None  # random ones, at the last thing that was done whole
    _before: tuple[Any, ...] = ()  # what collecting changes, as it was before
    _began: float = math.inf  # when this step did
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=3))  # of the last steps

    def sampling(self, recipe: Recipe) -> Sampling:
        """How completions are drawn for training, by the recipe as it is at a step."""
        g = recipe.generation
        return Sampling(
            max_tokens=g.max_completion_tokens,
            temperature=g.temperature,
            top_p=g.top_p,
            top_k=g.top_k,
            min_p=g.min_p,
            repetition_penalty=g.repetition_penalty,
            min_tokens=g.min_completion_tokens,
            stop=tuple(g.stop),
        )

    def sampled_as_trained(self, recipe: Recipe) -> bool:
        """Whether the sampler's log-probabilities are the policy's own but for rounding."""
        sampling = self.sampling(recipe)
        return (
            recipe.update.old_logprobs == "auto"
            and self.generator.samples_from_policy
            and sampling.is_unfiltered
            and recipe.mixed_precision == "no"
            and self.policy.dtype in (torch.float32, torch.float64)
            # These ask what the two disagree about.
            and recipe.loss.sampling_correction == "none"
            and recipe.loss.off_policy_mask is None
        )

    def trainer_state(self) -> TrainerState:
        """Where the run stands, for reward functions that want to know."""
        return TrainerState(self.state.step, self.recipe.steps, self.epoch)

    @property
    def epoch(self) -> float:
        """Passes over the data; what is being sampled ahead does not count yet."""
        ahead = len(self.ahead) * self.recipe.prompts_per_step
        return (self.state.position - ahead) / len(self.stream.prompts)

    def take_prompts(self, number: int) -> list[tuple[int, Prompt]]:
        """(position, prompt) of this process's share of the next `number` prompts of the run."""
        first = self.state.position
        self.state.position += number
        prompts = list(self.stream.take(first, number))
        if self.workers.size == 1:
            return prompts
        known = self.lengths.values()
        typical = sum(known) / len(known) if known else self.recipe.longest_completion / 2
        group = self.recipe.generation.num_generations
        works = [len(p.ids) + group * self.lengths.get(p.row, typical) for _, p in prompts]
        own = divided(works, self.workers.size)[self.workers.rank]
        return [prompts[i] for i in own]

    def sample(self, recipe: Recipe, prompts: int) -> Callable[[Arrived], list[Group]]:
        """Takes this process's share of the next prompts; what is returned samples for them."""
        own = self.take_prompts(prompts)
        return lambda arrived: sample(
            self.generator,
            self.tokenizer,
            own,
            recipe.generation.num_generations,
            self.sampling(recipe),
            recipe.seed,
            arrived,
        )

    @property
    def overlap(self) -> int:
        """Steps whose completions are begun ahead."""
        generation = self.recipe.generation
        return generation.vllm.overlap if generation.engine == "vllm_server" else 0

    def sample_ahead(self, step: int) -> None:
        """Begins the completions of the steps after `step`, as many as generation.vllm.overlap."""
        while len(self.ahead) < self.overlap and step + len(self.ahead) + 1 < self.recipe.steps:
            recipe, _ = at_step(self.recipe, step + len(self.ahead) + 1)
            self.ahead.append(Batch(self.sample(recipe, recipe.prompts_per_step)))

    def beta(self, recipe: Recipe) -> float:
        """The KL's coefficient at this step."""
        adapted = self.state.beta if recipe.loss.kl_target is not None else None
        return recipe.loss.beta if adapted is None else adapted

    def adapt_beta(self, recipe: Recipe, metrics: dict[str, float]) -> dict[str, float]:
        """Moves the KL's coefficient towards `loss.kl_target`; returns the one that acted."""
        loss = recipe.loss
        if loss.kl_target is None or not math.isfinite(metrics["kl"]):  # nothing was measured
            return {}
        acted = self.beta(recipe)
        self.state.beta = adapted_beta(acted, metrics["kl"], loss.kl_target, loss.kl_gain)
        return {"beta": acted}

    def entropy_coef(self, recipe: Recipe) -> float:
        """The entropy bonus's coefficient at this optimizer step."""
        loss = recipe.loss
        adapted = self.state.entropy_coef if loss.entropy_target is not None else None
        coef = loss.entropy_coef if adapted is None else adapted
        return applied_coef(coef, self.state.entropy, loss.entropy_target)

    def adapt_entropy(self, recipe: Recipe, measured: dict[str, float]) -> None:
        """Moves the entropy bonus's coefficient by what an optimizer step has measured."""
        state, loss = self.state, recipe.loss
        if loss.entropy_target is None:
            return
        state.entropy = measured["entropy_trained"]
        state.entropy_coef = adapted_coef(
            loss.entropy_coef if state.entropy_coef is None else state.entropy_coef,
            state.entropy,
            loss.entropy_target,
            low=loss.entropy_coef_min,
            high=loss.entropy_coef_max,
            step=loss.entropy_coef_step,
        )

    def refresh_reference(self, step: int) -> None:
        """Iterative GRPO: every N steps the reference takes over the policy, or a part of it."""
        loss = self.recipe.loss
        if self.reference is not None and loss.reference_every and not step % loss.reference_every:
            policy.mix(self.reference, self.policy, loss.reference_alpha)
            self.state.reference_moved = True

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluates the policy as it is after `step` steps and remembers how it did."""
        assert self.evaluator is not None
        with heartbeat.inside("evaluate"):
            found = self.evaluator.run(state=self.trainer_state(), leavable=self.leavable)
        metrics, state = as_metrics(found), self.state
        value = metrics.get(f"eval/{self.recipe.eval.best}")
        if value is None and step == 0:
            names = [key.removeprefix("eval/") for key in metrics]
            raise UserError(
                f"eval.best = {self.recipe.eval.best}: the evaluation gives no such number; there "
                f"are {listed(names)}.{nearest(self.recipe.eval.best, names)}"
            )
        state.after, state.after_step = metrics, step
        if step == 0:
            state.before = metrics
            self.reporter.say(f"held-out accuracy before training: {metrics['eval/accuracy']:.3f}")
        if value is None:  # not worth the steps that were trained
            self.reporter.say(f"note: eval.best = {self.recipe.eval.best}: there is no such number")
        elif value > state.best_value:
            state.best_value, state.best_step, state.worse = value, step, 0
        else:
            state.worse += 1
        return metrics

    @property
    def is_over(self) -> bool:
        """Whether the last step is done, or further ones are not worth it (eval.patience)."""
        patience = self.recipe.eval.patience
        return self.state.step >= self.recipe.steps or 0 < patience <= self.state.worse

    @property
    def scored_by(self) -> str:
        """What the values of a completion's rewards depend on in the recipe."""
        rewards = self.recipe.reward.items()
        return repr({name: (r.function, r.weight, r.args, r.positions) for name, r in rewards})

    def drawn_by(self, step: int) -> str:
        """What the completions of a step depend on in the recipe, but for prompt and policy."""
        recipe, vllm = at_step(self.recipe, step)[0], self.recipe.generation.vllm
        generation = recipe.generation
        how = (generation.engine, generation.num_generations, recipe.seed, self.sampling(recipe))
        return repr((*how, vllm.regex, vllm.json_schema, vllm.seeded))

    @cached_property
    def filler(self) -> Rollout:
        """What a process computes that has nothing left while others have."""
        return placeholder(reference=self.reference is not None)

    def micro_batches(
        self, likelihood: Likelihood, rollouts: Sequence[Rollout], max_tokens: int
    ) -> Iterator[list[Rollout]]:
        """The process's rollouts in micro-batches; in step, as many of them on every process."""
        own = list(likelihood.micro_batches(rollouts, max_tokens))
        most = int(self.workers.max(len(own))) if self.workers.in_step else len(own)
        for micro in (*own, *[[self.filler]] * (most - len(own))):
            heartbeat.beat()  # here a process may leave
            if self.workers.in_step:  # or all together
                self.leave_together()
            yield micro

    @property
    def ways(self) -> dict[str, str]:
        """How this process computes and decodes, by name: a plainer way is another rounding."""
        found = {"policy": str(self.likelihood.ways[0])}
        if self.reference_likelihood is not None:
            found["reference"] = str(self.reference_likelihood.ways[0])
        if isinstance(self.generator, TransformersGenerator) and self.generator.is_plain:
            found["decoder"] = PLAIN
        return found

    def go_on_by(self, ways: Mapping[str, str]) -> None:
        """Gives up what the run had given up before; what is left is checked as ever."""
        both = {"policy": self.likelihood, "reference": self.reference_likelihood}
        for name, likelihood in both.items():
            if likelihood is not None and name in ways:
                likelihood.begin_with(ways[name])
        if isinstance(self.generator, TransformersGenerator) and ways.get("decoder") == PLAIN:
            attention.install(self.generator.policy)  # as it was when the engine was tried
            self.generator.decode_plainly("as before")

    def get_ready(self, recipe: Recipe, rollouts: Sequence[Rollout]) -> None:
        """Before the first rollouts: how they are computed, and how many tokens at a time."""
        both = [m for m in (self.likelihood, self.reference_likelihood) if m is not None]
        if self.budget.tokens is not None and all(m.checked for m in both):
            return
        some, temperature = cut(rollouts), recipe.generation.temperature
        if self.workers.in_step:  # the same on every process, the first that can tell most
            some = max(self.workers.gather(some), key=len)
        if not some:
            return

        def attempt(max_tokens: int) -> None:
            few = next(packed_micro_batches(some, max_tokens))
            few = few if len(few) > 1 else some[:2]  # of one alone nothing could be told
            for likelihood in both:
                likelihood.check(few, temperature)
            if self.budget.tokens is None and self.likelihood.checked:
                kept = bytes_per_token(self.likelihood, few, temperature)
                fitting = tokens_that_fit(
                    self.policy,
                    self.workers.device,
                    kept,
                    optimizer_is_empty=not self.optimizer.state,
                )
                if self.workers.in_step:
                    fitting = -int(self.workers.max(-fitting))
                self.budget.tokens = fitting

        # Not even these few have to fit all at once. Nothing is said: no micro-batch is smaller.
        lengths = [length(r) for r in some]
        silent = Budget(sum(lengths), lambda text: None, in_step=self.workers.in_step)
        silent.fitted(attempt, lengths, lambda: None, unique_tokens(some)[0])

    def fitted(
        self,
        likelihood: Likelihood,
        attempt: Callable[[int], T],
        rollouts: Sequence[Rollout],
        undo: Callable[[], None],
    ) -> T:
        """What `attempt(tokens of a micro-batch)` returns, with as many tokens as memory allows."""
        lengths = [length(r) for r in rollouts]
        if self.workers.in_step:  # one process alone cannot change its way in the middle
            longest = self.workers.max(max(lengths, default=0))
            if likelihood.way.packed and longest > (
                window := attention.narrowest_window(likelihood.model)
            ):
                likelihood.give_up(f"its attention sees {window:g} tokens and no more")
        while True:
            try:
                with contextlib.nullcontext() if self.workers.in_step else self.leavable():
                    return self.budget.fitted(attempt, lengths, undo, likelihood.tokens(rollouts))
            except UnsupportedModelError as error:  # longer than what was checked
                undo()
                likelihood.give_up(str(error))

    def begin_step(self) -> None:
        """Remembers what would have to be put back if the step were broken off."""
        state = self.state
        heartbeat.at("generate", state.step + 1)
        now = time.monotonic()
        if self._began < now:
            self._seconds.append(now - self._began)
        self._began = now
        self._before = (
            state.position,
            state.signal_share,
            list(self.carried),
            deque(self.ahead),
        )
        self.mark()

    def mark(self) -> None:
        """What was done so far is whole: a step that is broken off is gone on with from here."""
        self.streams = checkpoint.rng_state()

    def go_back(self) -> None:
        """Forgets what was begun since the last mark."""
        self.clear_gradients()
        if self.work is None and self._before:
            state = self.state
            state.position, state.signal_share, self.carried, self.ahead = self._before

    @contextlib.contextmanager
    def leavable(self) -> Iterator[None]:
        """Work that each process does by itself, and breaks off when the run has to end.

        Every process comes here; if one breaks off, all do.

        Raises:
            Interrupted: the run has to end, and the work is not whole.
        """
        left = False
        heartbeat.leave = self.must_leave
        try:
            yield
        except Leave:
            left = True
        finally:
            heartbeat.leave = None
        self.leave_together(left)

    def leave_together(self, left: bool = False) -> None:
        """Raises Interrupted on every process if one has to leave."""
        if self.workers.max(float(left or self.must_leave())):
            raise Interrupted

    def must_leave(self) -> bool:
        """Whether the run is to end before the step under way could be finished and saved."""
        if not self.stop.is_told:
            return False
        usual = max(self._seconds, default=math.inf)
        left = max(usual - (time.monotonic() - self._began), 0.0)
        # The next save begins once the one before is written, which goes on beside the step.
        left = max(left, self.checkpointer.seconds_left(self.save_seconds))
        return self.stop.is_too_late(left, self.save_seconds)

    def clock(self) -> Clock:
        """For the step that begins now."""
        stages = possible_stages(self.recipe, self.reference is not None, self.workers.size)
        half = self.recipe.mixed_precision == "bf16"
        dtype = torch.bfloat16 if half else self.policy.dtype
        return Clock(self.workers.device, stages, peak_flops(self.workers.device, dtype))

    def waiting(self, clock: Clock) -> contextlib.AbstractContextManager[None]:
        """Around what waits for other processes, where there are any."""
        return clock.stage("idle") if self.workers.size > 1 else contextlib.nullcontext()

    def flops(self, rollouts: Sequence[Rollout]) -> float:
        """Model FLOPs of a forward pass over rollouts, each prompt once; NaN if not known."""
        tokens, pairs = unique_tokens(rollouts)
        predicted = sum(len(r.completion.ids) for r in rollouts)
        return forward_flops(
            self.policy.config, self.num_parameters, tokens, pairs, logits=predicted
        )

    @cached_property
    def num_parameters(self) -> int | None:
        """Those that a token is multiplied with."""
        return params_in_products(self.policy)

    def zero_gradients(self) -> None:
        """Gives every weight without a gradient one of 0."""
        for p in self.policy.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)

    def clear_gradients(self) -> None:
        """Takes back what backward passes have left."""
        self.optimizer.zero_grad(set_to_none=True)

    def advance(self, whole_step: WholeStep) -> dict[str, float]:
        """Counts a step that is done; returns how far the run is."""
        self.state.step += 1
        self.work, self._before = None, ()
        self.mark()
        self.state.num_tokens += sum(
            o.prompt_tokens + o.tokens for group in whole_step.values() for o in group
        )
        return {
            "num_tokens": self.state.num_tokens,
            "epoch": self.epoch,
        }

    def evaluation_is_due(self, step: int) -> bool:
        """Whether to evaluate after `step` steps."""
        config = self.recipe.eval
        if self.evaluator is None:
            return False
        at_end = config.at_end and step == self.recipe.steps
        at_start = config.at_start and step == 0
        return at_start or at_end or (config.every > 0 and step > 0 and step % config.every == 0)

    def checkpoint_is_due(self, step: int) -> bool:
        """Whether to save after `step` steps: on schedule, at the end, and a new best."""
        every = self.recipe.checkpoint.every
        on_schedule = every > 0 and step % every == 0
        return on_schedule or self.is_over or step == self.state.best_step

    def stop_requested(self) -> bool:
        """Whether any process was told to stop; every process gets the same answer."""
        number = self.stop.signal if self.stop.is_told else None
        self.stopped_by = int(self.workers.max(float(number or 0))) or None
        return self.stopped_by is not None

    def finish(self) -> None:
        """summary.json, curves, closing table.

        Raises:
            TrainingError: the last checkpoint could not be written.
        """
        state = self.state
        error = self.checkpointer.wait()
        if self.workers.max(float(error is not None)):
            raise TrainingError(f"the run is done, but its last checkpoint is not: {error}")
        if state.step < self.recipe.steps:
            self.reporter.say(
                f"ended after step {state.step}: no better eval/{self.recipe.eval.best} than "
                f"{state.best_value:.3f} at step {state.best_step} in {state.worse} evaluations "
                "(eval.patience)"
            )
        saved = folders.steps_saved(self.folder)
        best = state.best_step if state.best_step in saved else None
        self.reporter.finish(
            {
                "recipe": self.recipe.recipe,
                "seed": self.recipe.seed,
                "steps": state.step,
                "before": readable(state.before) if state.before else None,
                "after": readable(state.after) if state.after else None,
                "after_step": state.after_step,
                "best_checkpoint": str(folders.checkpoint_path(self.folder, best))
                if best
                else None,
                "best_metric": self.recipe.eval.best if best else None,
                "best_value": state.best_value if best else None,
                "last_checkpoint": str(folders.checkpoint_path(self.folder, saved[-1]))
                if saved
                else None,
                "seconds": round(state.seconds + time.monotonic() - self.started, 1),
                "num_tokens": state.num_tokens,
                "processes": self.workers.size,
                "device": str(self.workers.device),
                "versions": versions(),
            }
        )

    def close(self) -> None:
        """Gives back what the run holds, whether it ended well or not."""
        self.stop.release()
        self.reporter.close()
        self.generator.close()
        self.scorer.crew.close()
        if self.lock is not None:
            self.lock.release()
