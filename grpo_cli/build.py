"""build(prepared) -> Run: the live objects of a run, wired once; and those of an evaluation."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import transformers
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli import (
    benchmarks,
    checkpoint,
    data,
    folders,
    parsing,
    policy,
    saving,
    stored,
    tasks,
    tiny,
    tracking,
)
from grpo_cli.budget import Budget
from grpo_cli.checkpoint import Checkpointer
from grpo_cli.config import Recipe
from grpo_cli.distributed import Workers
from grpo_cli.errors import UserError
from grpo_cli.evaluate import Evaluator
from grpo_cli.generators import make_generator
from grpo_cli.likelihood import Likelihood
from grpo_cli.lock import Lock, note_torchruns, torchrun
from grpo_cli.prepare import Prepared
from grpo_cli.progress import Bar
from grpo_cli.report import Reporter, write_text
from grpo_cli.rollouts import Prompt, derive_seed
from grpo_cli.run import Run
from grpo_cli.stop import Stop, end_of_job


def build(
    prepared: Prepared,
    command: list[str],
    workers: Workers | None = None,
    stop: Stop | None = None,
) -> Run:
    """Loads the models and wires everything for `grpo train`.

    Args:
        command: the command line, kept beside the run.
        workers: the processes, if they have found one another already.
        stop: what listens to signals, if something does.

    Raises:
        UserError: the model cannot be loaded, no prompt is short enough, the device is not there.
    """
    recipe = prepared.recipe
    if workers is None:
        workers = Workers(recipe.device, recipe.mixed_precision, recipe.distributed)
    with workers.together():
        lock = Lock(prepared.folder) if workers.is_main else None
    try:
        return wired(prepared, command, workers, stop, lock)
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def wired(
    prepared: Prepared,
    command: list[str],
    workers: Workers,
    stop: Stop | None,
    lock: Lock | None,
) -> Run:
    """`build`, once the folder is this run's."""
    recipe, folder = prepared.recipe, prepared.folder
    reporter = Reporter(recipe, folder, workers.is_main)
    resume_from = chosen(prepared, workers, reporter)
    # For dropout; what is sampled has streams of its own.
    transformers.set_seed(derive_seed(recipe.seed, workers.rank) % 2**32)
    assert prepared.train_rows is not None

    with workers.together():  # a disk, a cache or a network may fail one process alone
        model, tokenizer = load_policy(prepared, workers, reporter)
    prompts = make_prompts("train", prepared.train_rows, recipe, tokenizer, reporter)
    reference = policy.frozen_copy(model) if recipe.needs_reference else None
    workers.place(model)
    if reference is not None:
        workers.place(reference)
    likelihoods = [
        Likelihood(
            m,
            packed=recipe.update.packing,
            chunked=recipe.update.chunked_logits,
            autocast=workers.autocast,
            say=reporter.say,
            agree=workers.first if workers.in_step else lambda objection: objection,
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
    to_solve = make_tasks(prepared, tokenizer, reporter)
    held_out = [prompt for task in to_solve for prompt in task.prompts]
    generator = make_generator(
        recipe, model, tokenizer, workers, [*prompts, *held_out], reporter.say
    )
    evaluator = None
    if to_solve:
        evaluator = Evaluator(recipe.eval, workers, tokenizer, generator, to_solve)
    workers.barrier()  # by now every process has found the folder free
    if workers.is_main:
        if recipe.overwrite and resume_from is None:
            folders.discard_run(folder)
        write_text(folder / "recipe.yaml", stored.as_yaml(recipe))
        with (folder / "command.txt").open("a", encoding="utf-8") as file:
            file.write(shlex.join(command) + "\n")  # a resumed run has several
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
            in_step=workers.in_step,
        ),
        optimizer=optimizer,
        generator=generator,
        scorer=prepared.scorer,
        stream=data.PromptStream(prompts, recipe.seed, recipe.dataset.shuffle),
        evaluator=evaluator,
        reporter=reporter,
        stop=stop or Stop(reporter.say, recipe.checkpoint.grace, end_of_job()),
        lock=lock,
        checkpointer=Checkpointer(workers, reporter.say, recipe.checkpoint.background),
    )
    run.save_seconds = saving.guessed_seconds(run)
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
        if resume_from is not None:
            saving.restore(run, resume_from)
        else:
            reporter.rewind(0)  # lines of a run that was stopped before its first checkpoint
        if workers.is_main:
            reporter.trackers, run.state.tracker_id = tracking.start(
                recipe, folder, asdict(recipe), run.state.tracker_id
            )
        run.generator.update_weights(model, run.state.step)
        # From here on a restart by torchrun goes on with this run: what it was to discard or to set
        # aside is gone. And no process begins while another may still have to leave.
        torchruns = workers.gather(torchrun())
        if workers.is_main:
            note_torchruns(folder, torchruns)
        run.stop.started = True
    except BaseException:
        run.close()
        raise
    return run


def chosen(prepared: Prepared, workers: Workers, reporter: Reporter) -> Path | None:
    """The checkpoint to go on from: the furthest that is whole.

    Raises:
        UserError: there are some, and none is.
    """
    with workers.together():
        if workers.is_main:
            folders.recover(prepared.folder)
    # The main process's view of a shared folder counts.
    candidates = workers.gather(prepared.resume_from)[0]
    path = checkpoint.choose(candidates, workers, reporter.say)
    if candidates and path is None:
        names = ", ".join(map(str, sorted(candidates, key=folders.step_of)))
        raise UserError(
            f"resume: none of {names} is whole; begin anew with "
            "overwrite=true, or give another with resume=PATH."
        )
    return path


def load_policy(
    prepared: Prepared, workers: Workers, reporter: Reporter
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The recipe's model and tokenizer, built and warmed up first where the recipe says so.

    Where the model is to be sharded, only the main process has weights.
    """
    recipe, whole = prepared.recipe, workers.is_main or not workers.in_step
    if recipe.model.build is None:
        assert recipe.model.path is not None, "checked when the recipe was parsed"
        return policy.load(recipe.model, recipe.model.path, weights=whole)
    assert prepared.train_rows is not None
    with workers.main_first():  # the others find what the main process has made
        path = build_model(recipe, prepared.train_rows, reporter.console)
    return policy.load(recipe.model, path, weights=whole)


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


def make_tasks(
    prepared: Prepared, tokenizer: PreTrainedTokenizerBase, reporter: Reporter
) -> list[tasks.Task]:
    """What the recipe is evaluated on: its benchmarks, or its held-out rows; none of neither."""
    recipe = prepared.recipe
    if recipe.benchmark:
        return tasks.of_benchmarks(prepared, tokenizer)
    if prepared.eval_rows is None:
        return []
    prompts = make_prompts("eval", prepared.eval_rows, recipe, tokenizer, reporter)
    name = Path(recipe.dataset.eval or "").name.split(".")[0]
    data = benchmarks.fingerprint(prepared.eval_rows)
    return [tasks.held_out(recipe, name, prompts, prepared.eval_scorer, data)]
