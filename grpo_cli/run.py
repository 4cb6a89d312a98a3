"""build(prepared) -> Run: the live objects of a run, wired once."""

from __future__ import annotations

import contextlib
import math
import platform
import shlex
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import accelerate
import datasets
import torch
import transformers
import yaml
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import grpo_cli
from grpo_cli import ahead, checkpoint, data, folders, parsing, policy, stored, tiny, tracking
from grpo_cli.ahead import Arrived, Batch
from grpo_cli.attention import UnsupportedModelError
from grpo_cli.budget import Budget, tokens_that_fit
from grpo_cli.carried import packed, unpacked
from grpo_cli.clock import Clock, possible_stages
from grpo_cli.config import Recipe
from grpo_cli.distributed import Workers
from grpo_cli.entropy import adapted_coef, applied_coef
from grpo_cli.errors import UserError, listed
from grpo_cli.evaluate import Evaluation, Evaluator
from grpo_cli.flops import forward_flops, params_in_products, peak_flops
from grpo_cli.generation import Generator, sample
from grpo_cli.generators import make_generator
from grpo_cli.kl import adapted_beta
from grpo_cli.likelihood import Likelihood, bytes_per_token, cut
from grpo_cli.outcomes import WholeStep
from grpo_cli.packing import length, packed_micro_batches, unique_tokens
from grpo_cli.prepare import Prepared
from grpo_cli.progress import Bar
from grpo_cli.registry import TrainerState
from grpo_cli.report import Reporter, readable, write_text
from grpo_cli.rollouts import Group, Prompt, Rollout, derive_seed
from grpo_cli.sampling import Sampling
from grpo_cli.schedules import at_step
from grpo_cli.scoring import Scorer
from grpo_cli.stop import Stop

T = TypeVar("T")


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
    best_accuracy: float = -1.0
    position: int = 0  # prompts sampled
    signal_share: float = 1.0  # of the groups sampled last (dynamic sampling)
    reference_moved: bool = False  # it is no longer the model that the run began with
    beta: float | None = None  # where loss.kl_target adapts it
    entropy_coef: float | None = None  # where loss.entropy_target adapts it
    entropy: float | None = None  # of the last optimizer step, for the same
    # Of each process, as measured and halved: another split is another rounding.
    micro_batch_tokens: list[int | None] = field(default_factory=list)
    cache_tokens: list[int | None] = field(default_factory=list)


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
    carried: list[Group] = field(default_factory=list)  # this process's, for the next step
    ahead: deque[Batch] = field(default_factory=deque)  # of the next steps, under way
    stopped_by: int | None = None  # the signal that ended the run early
    state: State = field(default_factory=State)
    started: float = field(default_factory=time.monotonic)

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
        return list(self.stream.take(first, number))[self.workers.rank :: self.workers.size]

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
        metrics = self.evaluator.run(state=self.trainer_state()).metrics
        self.state.after, self.state.after_step = metrics, step
        if step == 0:
            self.state.before = metrics
            self.reporter.say(f"held-out accuracy before training: {metrics['eval/accuracy']:.3f}")
        if metrics["eval/accuracy"] > self.state.best_accuracy:
            self.state.best_accuracy, self.state.best_step = metrics["eval/accuracy"], step
        return metrics

    def save(self, wait: bool = True) -> None:
        """Writes a checkpoint of the present step, then removes those no longer kept.

        Args:
            wait: for completions begun ahead; else a resumed run samples those anew that are not
                done by now.
        """
        state, keep = self.state, self.recipe.checkpoint.keep_last
        state.micro_batch_tokens = self.workers.gather(self.budget.tokens)
        state.cache_tokens = self.workers.gather(self.generator.cache_tokens)
        rng = self.workers.gather(checkpoint.rng_state())
        carried = self.workers.gather(packed(self.carried, self.scored_by))
        kept = []
        for batch in self.ahead:
            # One that failed is no reason to lose the checkpoint: its step will say why.
            unfit = not (wait or batch.is_done) or batch.has_failed()
            if self.workers.max(float(unfit)):
                break
            kept.append(batch)
        begun = [
            self.workers.gather(packed(batch.groups(), self.drawn_by(state.step + number)))
            for number, batch in enumerate(kept)
        ]
        again = (len(self.ahead) - len(kept)) * self.recipe.prompts_per_step
        if self.workers.is_main:
            now = time.monotonic()
            state.seconds, self.started = state.seconds + now - self.started, now
            checkpoint.save(
                folders.checkpoint_path(self.folder, state.step),
                self.policy,
                self.tokenizer,
                {
                    "run": asdict(state) | {"position": state.position - again},
                    "optimizer": self.optimizer.state_dict(),
                    "rng": rng,
                    "carried": [g for part in carried for g in part],
                    "ahead": [[g for part in parts for g in part] for parts in begun],
                },
                stored.as_yaml(self.recipe),
                self.reference if state.reference_moved else None,
            )
            checkpoint.prune(self.folder, keep, state.best_step)
        self.workers.barrier()

    def restore(self, path: Path) -> None:
        """Goes on from a checkpoint: weights, optimizer, random streams, where the run stands."""
        try:
            saved = checkpoint.load_state(path)
            weights = type(self.policy).from_pretrained(path, dtype=self.policy.dtype)
            self.policy.load_state_dict(weights.state_dict())
            # The recipe's settings (they may have changed), the old run's moments.
            saved["optimizer"]["param_groups"] = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict(saved["optimizer"])
            if self.reference is not None and checkpoint.has_reference(path):
                kept = type(self.policy).from_pretrained(checkpoint.reference_path(path))
                self.reference.load_state_dict(kept.state_dict())
        except Exception as error:  # torn files: each format has its own errors
            earlier = [str(p) for p in path.parent.glob("step-*") if p != path]
            raise UserError(
                f"resume: {path} is damaged or of another model "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__}); "
                f"beside it lie {listed(earlier)}."
            ) from error
        # A checkpoint of 0.1 says neither where the prompts stand nor what is carried.
        drawn = saved["run"]["step"] * self.recipe.prompts_per_step
        self.state = State(**{"position": drawn, **saved["run"]})
        self.carried = self.unpack_carried(saved.get("carried", []))
        before = yaml.safe_load((path / folders.TRAINING / "recipe.yaml").read_text("utf-8"))
        self.unpack_ahead(saved.get("ahead", []))
        if len(saved["rng"]) == self.workers.size:
            checkpoint.set_rng_state(saved["rng"][self.workers.rank])
        tokens, given = self.state.micro_batch_tokens, self.recipe.update.tokens_per_micro_batch
        if len(tokens) == self.workers.size and before["update"]["tokens_per_micro_batch"] == given:
            self.budget.tokens = tokens[self.workers.rank]
        if len(self.state.cache_tokens) == self.workers.size:
            self.generator.cache_tokens = self.state.cache_tokens[self.workers.rank]
        # What an adaptive coefficient begins with was changed: it begins anew.
        if before["loss"].get("beta") != self.recipe.loss.beta:
            self.state.beta = None
        if before["loss"].get("entropy_coef") != self.recipe.loss.entropy_coef:
            self.state.entropy_coef = None
        self.reporter.say(f"going on from {path}, step {self.state.step}")
        for change in stored.differences(before, self.recipe):
            self.reporter.say(f"  changed since: {change}")
        self.reporter.rewind(self.state.step)
        if self.workers.is_main:
            for step in checkpoint.set_aside(self.folder, self.state.step):
                self.reporter.say(
                    f"  checkpoint step-{step} is of another course: now step-{step}.old"
                )

    @property
    def scored_by(self) -> str:
        """What the values of a completion's rewards depend on in the recipe."""
        rewards = self.recipe.reward.items()
        return repr({name: (r.function, r.weight, r.args, r.positions) for name, r in rewards})

    def unpack_carried(self, saved: list[dict[str, Any]]) -> list[Group]:
        """This process's share of a checkpoint's carried groups, as far as they are of use."""
        if not self.recipe.generation.dynamic_sampling:
            return []
        fitting = unpacked(saved, self.stream, self.scored_by)
        if len(fitting) < len(saved):
            self.reporter.say(
                f"  {len(saved) - len(fitting)} of {len(saved)} carried groups are of other "
                "prompts or rewards: dropped"
            )
        for r in (r for g in fitting for r in g.rollouts):
            r.masked = self.recipe.loss.mask_truncated and r.completion.finish_reason == "length"
        fitting.sort(key=lambda g: g.position)
        return fitting[self.workers.rank :: self.workers.size]

    def drawn_by(self, step: int) -> str:
        """What the completions of a step depend on in the recipe, but for prompt and policy."""
        recipe, vllm = at_step(self.recipe, step)[0], self.recipe.generation.vllm
        generation = recipe.generation
        how = (generation.engine, generation.num_generations, recipe.seed, self.sampling(recipe))
        return repr((*how, vllm.regex, vllm.json_schema, vllm.seeded))

    def unpack_ahead(self, saved: list[list[dict[str, Any]]]) -> None:
        """Goes on with completions begun ahead; samples them anew if they are of no use now."""
        for number, entries in enumerate(saved):
            drawn_by = self.drawn_by(self.state.step + number)
            groups = sorted(unpacked(entries, self.stream, drawn_by), key=lambda g: g.position)
            if len(groups) != self.recipe.prompts_per_step:
                self.state.position = min(entry["position"] for entry in entries)
                self.reporter.say("  completions begun ahead are of another recipe: sampled anew")
                return
            self.ahead.append(ahead.done(groups[self.workers.rank :: self.workers.size]))

    def get_ready(self, recipe: Recipe, rollouts: Sequence[Rollout]) -> None:
        """Before the first rollouts: how they are computed, and how many tokens at a time."""
        some, temperature = cut(rollouts), recipe.generation.temperature
        if not some:
            return

        def attempt(max_tokens: int) -> None:
            few = next(packed_micro_batches(some, max_tokens))
            few = few if len(few) > 1 else some[:2]  # of one alone nothing could be told
            for likelihood in (self.likelihood, self.reference_likelihood):
                if likelihood is not None:
                    likelihood.check(few, temperature)
            if self.budget.tokens is None and self.likelihood.checked:
                kept = bytes_per_token(self.likelihood, few, temperature)
                self.budget.tokens = tokens_that_fit(
                    self.policy,
                    self.workers.device,
                    kept,
                    optimizer_is_empty=not self.optimizer.state,
                )

        # Not even these few have to fit all at once. Nothing is said: no micro-batch is smaller.
        lengths = [length(r) for r in some]
        silent = Budget(sum(lengths), lambda text: None)
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
        while True:
            try:
                return self.budget.fitted(attempt, lengths, undo, likelihood.tokens(rollouts))
            except UnsupportedModelError as error:  # longer than what was checked
                undo()
                likelihood.give_up(str(error))

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
        at_end = config.at_ends and step in (0, self.recipe.steps)
        return at_end or (config.every > 0 and step > 0 and step % config.every == 0)

    def checkpoint_is_due(self, step: int) -> bool:
        """Whether to save after `step` steps: on schedule, at the end, and a new best."""
        every = self.recipe.checkpoint.every
        on_schedule = every > 0 and step % every == 0
        return on_schedule or step == self.recipe.steps or step == self.state.best_step

    def stop_requested(self) -> bool:
        """Whether any process was told to stop; every process gets the same answer."""
        self.stopped_by = int(self.workers.max(float(self.stop.signal or 0))) or None
        return self.stopped_by is not None

    def finish(self) -> None:
        """summary.json, curves, closing table."""
        state = self.state
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
                "best_accuracy": state.best_accuracy if best else None,
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


def build(prepared: Prepared, command: list[str]) -> Run:
    """Loads the models and wires everything for `grpo train`.

    Args:
        command: the command line, kept beside the run.

    Raises:
        UserError: the model cannot be loaded, no prompt is short enough, the device is not there.
    """
    recipe, folder = prepared.recipe, prepared.folder
    workers = Workers(recipe.device, recipe.mixed_precision)
    reporter = Reporter(recipe, folder, workers.is_main)
    # For dropout; what is sampled has streams of its own.
    transformers.set_seed(derive_seed(recipe.seed, workers.rank) % 2**32)
    assert prepared.train_rows is not None

    with workers.together():  # a disk, a cache or a network may fail one process alone
        model, tokenizer = load_policy(prepared, workers, reporter)
    prompts = make_prompts("train", prepared.train_rows, recipe, tokenizer, reporter)
    workers.place(model)
    reference = policy.frozen_copy(model) if recipe.needs_reference else None
    likelihoods = [
        Likelihood(
            m,
            packed=recipe.update.packing,
            chunked=recipe.update.chunked_logits,
            autocast=workers.autocast,
            say=reporter.say,
        )
        for m in (model, reference)
        if m is not None
    ]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.optimizer.learning_rate,
        betas=(recipe.optimizer.betas[0], recipe.optimizer.betas[1]),
        eps=recipe.optimizer.eps,
        weight_decay=recipe.optimizer.weight_decay,
    )
    held_out = []
    if prepared.eval_rows is not None:
        held_out = make_prompts("eval", prepared.eval_rows, recipe, tokenizer, reporter)
    generator = make_generator(
        recipe, model, tokenizer, workers, [*prompts, *held_out], reporter.say
    )
    evaluator = None
    if held_out:
        evaluator = Evaluator(recipe, workers, tokenizer, generator, prepared.eval_scorer, held_out)
    workers.barrier()  # by now every process has found the folder free
    if workers.is_main:
        if recipe.overwrite:
            folders.discard_run(folder)
        write_text(folder / "recipe.yaml", stored.as_yaml(recipe))
        with (folder / "command.txt").open("a", encoding="utf-8") as file:
            file.write(shlex.join(command) + "\n")  # a resumed run has several
        reporter.trackers = tracking.start(recipe, folder, asdict(recipe))
    run = Run(
        recipe=recipe,
        folder=folder,
        workers=workers,
        tokenizer=tokenizer,
        policy=model,
        likelihood=likelihoods[0],
        reference=reference,
        reference_likelihood=likelihoods[1] if reference is not None else None,
        budget=Budget(
            recipe.update.tokens_per_micro_batch,
            reporter.say if workers.is_main else partial(print, f"process {workers.rank}:"),
        ),
        optimizer=optimizer,
        generator=generator,
        scorer=prepared.scorer,
        stream=data.PromptStream(prompts, recipe.seed, recipe.dataset.shuffle),
        evaluator=evaluator,
        reporter=reporter,
        stop=Stop(reporter.say),
    )
    size = sum(p.numel() for p in model.parameters())
    reporter.say(
        f"{recipe.recipe}: {size / 1e6:.2f} M parameters on {workers.device}, {len(prompts):,} "
        f"prompts, {recipe.prompts_per_step} x {recipe.generation.num_generations} completions a "
        f"step, {workers.size} process{'es' if workers.size > 1 else ''}; writes to {folder}"
    )
    for description in prepared.scorer.descriptions:
        reporter.say(description)
    for notice in parsing.notices(recipe):
        reporter.say(f"note: {notice}")
    try:
        if prepared.resume_from is not None:
            run.restore(prepared.resume_from)
        else:
            reporter.rewind(0)  # lines of a run that was stopped before its first checkpoint
        run.generator.update_weights(model, run.state.step)
    except BaseException:
        run.close()
        raise
    return run


def load_policy(
    prepared: Prepared, workers: Workers, reporter: Reporter
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The recipe's model and tokenizer, built and warmed up first where the recipe says so."""
    recipe = prepared.recipe
    if recipe.model.build is None:
        assert recipe.model.path is not None, "checked when the recipe was parsed"
        return policy.load(recipe.model, recipe.model.path)
    assert prepared.train_rows is not None
    with workers.main_first():  # the others find what the main process has made
        path = build_model(recipe, prepared.train_rows, reporter.console)
    return policy.load(recipe.model, path)


def build_model(recipe: Recipe, rows: data.Rows, console: Console) -> Path:
    """The model that the recipe builds, made now unless it is in the cache.

    Args:
        rows: for training; their solutions are what it is warmed up with.
    """
    build = recipe.model.build
    assert build is not None
    pairs = list(data.solution_pairs(rows, recipe.dataset)) if build.warmup_steps else []
    bar = Bar(console, "warm-up", build.warmup_steps)
    path = tiny.build(
        build,
        pairs,
        recipe.seed,
        lambda step, loss: bar.update(step, f"supervised loss {loss:.3f}"),
    )
    bar.close()
    return path


def make_prompts(
    split: str,
    rows: data.Rows,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    reporter: Reporter,
) -> list[Prompt]:
    """The prompts of a split; says how many rows were over-long."""
    held_out = split == "eval"
    prompts, overlong = data.make_prompts(rows, recipe.dataset, tokenizer, held_out=held_out)
    if overlong:
        done = "dropped" if recipe.dataset.overlong_prompts == "drop" else "cut"
        reporter.say(
            f"dataset.{split}: {overlong:,} of {len(rows.rows):,} prompts longer than "
            f"dataset.max_prompt_tokens = {recipe.dataset.max_prompt_tokens}: {done}"
        )
    return prompts


def evaluate_checkpoint(prepared: Prepared) -> tuple[Evaluation, Reporter]:
    """Loads the model of a prepared recipe and evaluates it, for `grpo eval`."""
    recipe = prepared.recipe
    workers = Workers(recipe.device, recipe.mixed_precision)
    reporter = Reporter(recipe, prepared.folder, workers.is_main)
    model, tokenizer = load_policy(prepared, workers, reporter)
    assert prepared.eval_rows is not None
    prompts = make_prompts("eval", prepared.eval_rows, recipe, tokenizer, reporter)
    model = workers.place(model)
    generator = make_generator(recipe, model, tokenizer, workers, prompts, reporter.say)
    evaluator = Evaluator(recipe, workers, tokenizer, generator, prepared.eval_scorer, prompts)
    bar = Bar(reporter.console, "eval", len(prompts))
    try:
        generator.update_weights(model, 0)
        evaluation = evaluator.run(lambda done, text: bar.update(done, text))
    finally:
        bar.close()
        generator.close()
    return evaluation, reporter


def versions() -> dict[str, str]:
    """Versions of what numbers depend on."""
    return {
        "grpo_cli": grpo_cli.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "datasets": datasets.__version__,
    }
