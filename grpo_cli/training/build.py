"""Builds the live objects of a run, and starts or resumes it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerBase

from grpo_cli.algorithm import arguments
from grpo_cli.checkpoints import checkpointer, paths, provenance, retention, shards
from grpo_cli.checkpoints.checkpointer import Checkpointer
from grpo_cli.checkpoints.lock import Lock, note_torchruns, torchrun
from grpo_cli.config import parsing, saved_recipe
from grpo_cli.config.notices import notices
from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed.stop_signal import Interrupts, StopSignal, end_of_job
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import UserError, counted
from grpo_cli.evaluation.evaluator import Evaluator
from grpo_cli.files import write_text
from grpo_cli.generation import factory
from grpo_cli.models import loading, quantization
from grpo_cli.models.families import num_experts
from grpo_cli.models.policy import Policy
from grpo_cli.models.routers import has_balancing_loss
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Prompt
from grpo_cli.reporting.hub import Pusher
from grpo_cli.reporting.reporter import Reporter
from grpo_cli.training import contents, resume
from grpo_cli.training.callbacks import Loaded
from grpo_cli.training.inputs import (
    check_fits,
    load_policy,
    longest_unknown,
    make_rollouter,
    make_stream,
    make_tasks,
    with_room_for_observations,
)
from grpo_cli.training.prepare import Prepared, find_resume
from grpo_cli.training.rollouts.queue import RolloutQueue
from grpo_cli.training.run import Run, State

BYTES_PER_SECOND = 0.5e9  # expected rate of the first checkpoint
# Makes callbacks from the run, its training prompts, and its evaluator if there are held-out rows.
Features = Callable[[Run, Sequence[Prompt], Evaluator | None], Iterable[object]]


def build(
    prepared: Prepared,
    command: list[str],
    workers: Workers | None = None,
    stop: StopSignal | None = None,
    features: Features = lambda *_: (),
) -> Run:
    """Loads the models and makes all other objects of `grpo train`.

    Args:
        command: the command line, kept beside the run.
        workers: the process group, if it is initialized already.
        stop: the signal handler, if there is one already.
        features: makes the callbacks that come before the recipe's.

    Raises:
        UserError: the model cannot be loaded, no prompt is short enough, the device is missing.
    """
    recipe = prepared.recipe
    if workers is None:
        workers = Workers(recipe.device, recipe.mixed_precision, recipe.distributed)
    with workers.raise_together():
        lock = Lock(prepared.folder) if workers.is_main else None
    reporter = Reporter(recipe, prepared.folder, workers.is_main)
    try:
        return assemble(prepared, command, workers, stop, lock, reporter, features)
    except BaseException as error:
        reporter.status.end_with(error)
        if lock is not None:
            lock.release()
        prepared.close()
        raise


def assemble(
    prepared: Prepared,
    command: list[str],
    workers: Workers,
    stop: StopSignal | None,
    lock: Lock | None,
    reporter: Reporter,
    features: Features,
) -> Run:
    """Makes the live objects of a run whose folder is locked, and resumes or starts the run."""
    recipe, folder = prepared.recipe, prepared.folder
    resume_from = checkpoint_to_resume(prepared, workers, reporter)
    if resume_from is not None:
        resume.check_kept(recipe, resume_from)
    read: contents.Contents = {}
    with workers.raise_together():
        if workers.is_main:
            read = contents.of_run(prepared)
            if resume_from is not None:
                contents.check(recipe, resume_from, read, reporter.say)
    reporter.status.start(device=str(workers.device), processes=workers.size)
    # For dropout; sampling has random streams of its own.
    transformers.set_seed(derive_seed(recipe.seed, workers.rank) % 2**32)

    with workers.raise_together():  # a disk, a cache or a network may fail on one process only
        loaded = load_policy(prepared, workers, reporter)
    model, tokenizer = loaded.model, loaded.tokenizer
    stream = make_stream(prepared, loaded, reporter.say)
    prompts = list(stream.prompts)
    recipe = parsing.with_steps(recipe, len(prompts))
    reporter.progress.total = recipe.steps
    to_solve = make_tasks(prepared, loaded, reporter.say)
    held_out = [prompt for task in to_solve for prompt in task.prompts]
    prompts += longest_unknown(recipe, prompts)
    check_fits(recipe, model, prompts, held_out)
    checkpointer = Checkpointer(workers, reporter.say, contents.as_json(read))
    size = 3 * sum(t.nbytes for t in shards.tensors_of(model).values())  # weights and two moments
    interrupts = Interrupts(
        workers,
        stop or StopSignal(reporter.say, recipe.checkpoint.grace, end_of_job()),
        checkpointer.seconds_left,
        2.0 + size / workers.size / BYTES_PER_SECOND,
    )
    policy = Policy.make(loaded, recipe, workers, interrupts, reporter.say, [*prompts, *held_out])
    rollouter = make_rollouter(prepared, loaded, reporter.say)
    longest_prompts = [*prompts, *with_room_for_observations(recipe, model, held_out)]
    generator = factory.make_generator(
        recipe, model, tokenizer, workers, longest_prompts, reporter.say
    )
    evaluator = None
    if to_solve:
        evaluator = Evaluator(recipe.eval, workers, tokenizer, generator, to_solve, rollouter)
    scorers = [prepared.scorer, *(task.scorer for task in to_solve)]
    takes_state = any(scorer.takes("trainer_state") for scorer in scorers)
    workers.barrier()  # by now every process has found the folder free
    if workers.is_main and resume_from is None:
        if recipe.overwrite:
            paths.discard_run(folder)
        record_command(folder, recipe, command)
    run = Run(
        recipe=recipe,
        folder=folder,
        lock=lock,
        workers=workers,
        interrupts=interrupts,
        policy=policy,
        generator=generator,
        queue=RolloutQueue(recipe, stream, workers, generator, tokenizer, rollouter),
        scorer=prepared.scorer,
        reporter=reporter,
        checkpointer=checkpointer,
        pusher=Pusher(recipe, reporter.say, workers.is_main),
        sessions=prepared.sessions,
        state=State(log_history=[] if takes_state else None),
    )
    own = map(Loaded.feature, features(run, prompts, evaluator))
    run.callbacks.loaded = [*own, *prepared.callbacks]
    describe(run, is_graded=bool(to_solve) and not recipe.benchmark)
    if prepared.note is not None:
        reporter.say(f"note: {prepared.note}")
    try:
        start(run, resume_from, command)
    except BaseException as error:
        run.close(error)
        raise
    return run


def record_command(folder: Path, recipe: Recipe, command: list[str]) -> None:
    """Writes recipe.yaml, and adds a line to command.txt."""
    write_text(folder / "recipe.yaml", saved_recipe.as_yaml(recipe))
    provenance.note_run(folder)
    with (folder / "command.txt").open("a", encoding="utf-8") as file:
        # A line for each start of the run: a line break in a word is a blank.
        file.write(" ".join(shlex.join(command).splitlines()) + "\n")


def start(run: Run, resume_from: Path | None, command: list[str]) -> None:
    """Resumes the run if there is a checkpoint, and hands the weights to the generator."""
    if resume_from is not None:
        resume.restore(run, resume_from)
        if run.workers.is_main:  # a refused resume leaves the run's recipe as it was
            record_command(run.folder, run.recipe, command)
    else:
        run.reporter.rewind(0)  # drops lines of a run that was stopped before its first checkpoint
        if run.workers.is_main:
            retention.discard_kept(run.folder, 0)
    run.generator.update_weights(run.policy.model, run.state.step)
    run.reporter.status.add(steps=run.recipe.steps, first_step=run.state.step)
    # From here on a restart by torchrun resumes this run: the files to discard or set aside are
    # gone. The gather keeps a process from starting while another may still have to exit.
    torchruns = run.workers.gather(torchrun())
    if run.workers.is_main:
        note_torchruns(run.folder, torchruns)
    run.interrupts.stop.started = True


def checkpoint_to_resume(prepared: Prepared, workers: Workers, reporter: Reporter) -> Path | None:
    """Returns the complete checkpoint with the most steps; None if there is none.

    The folder is locked by now. Another run may have written to it while the recipe was checked.

    Raises:
        UserError: all checkpoints are incomplete, or the folder now holds another run.
    """
    candidates: list[Path] = []
    with workers.raise_together():
        if workers.is_main:  # its view of a shared folder decides
            paths.recover(prepared.folder)
            candidates = find_resume(prepared.recipe, prepared.folder)
    candidates = workers.gather(candidates)[0]
    path = checkpointer.choose(candidates, workers, reporter.say)
    if candidates and path is None:
        names = ", ".join(map(paths.shown, sorted(candidates, key=paths.step_of)))
        raise UserError(
            f"resume: none of {names} is complete; start over with "
            "overwrite=true, or give another with resume=PATH."
        )
    if path is None and prepared.recipe.resume == "auto":
        reporter.say("note: resume=auto finds no checkpoint; the run starts at step 1")
    return path


FIRST_PROMPT = 300  # characters of the first prompt that the header shows


def describe(run: Run, *, is_graded: bool) -> None:
    """Prints size, devices, rewards and notices of a run that is about to start."""
    recipe, workers, policy, say = run.recipe, run.workers, run.policy, run.reporter.say
    size = sum(quantization.numel(p) for p in policy.model.parameters())
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    of_adapter = "" if trained == size else f" ({trained / 1e6:.4g} M trained)"
    prompts = len(run.queue.stream.prompts)
    most = "at most " if recipe.generation.dynamic_sampling else ""
    an_epoch = f"{most}{prompts / recipe.prompts_per_step:,.4g} steps an epoch"
    shown = f"{counted(prompts, 'prompt')} ({an_epoch})"
    if recipe.dataset.streaming:
        shown = "streamed prompts"
    say(
        f"{recipe.recipe}: {size / 1e6:.2f} M parameters{of_adapter} on {workers.device}, "
        f"{shown}, {counted(recipe.steps, 'step')}, {recipe.prompts_per_step} x "
        f"{recipe.generation.num_generations} completions a step, {workers.size} "
        f"process{'es' if workers.size > 1 else ''}; writes to {paths.shown(run.folder)}"
    )
    if (summary := quantization.summary(policy.model)) is not None:
        say(summary)
    rewards = []
    for name, reward in recipe.reward.items():
        args = [f"{key}={value}" for key, value in reward.args.items()]
        rewards.append(f"{name} ({', '.join([f'weight {reward.weight:g}', *args])})")
    accuracy = f"; accuracy: {recipe.accuracies[0]} = 1"
    say(f"rewards: {', '.join(rewards)}{accuracy if is_graded else ''}")
    say(
        f"learning rate {recipe.optimizer.learning_rate:g} ({recipe.optimizer.schedule}); chat "
        f"template {'on' if recipe.dataset.chat else 'off'}; completions of at most "
        f"{recipe.generation.max_completion_tokens} tokens"
    )
    first = str(policy.tokenizer.decode(run.queue.stream.prompts[0].ids))
    shown = first if len(first) <= FIRST_PROMPT else f"{first[:FIRST_PROMPT]} ..."
    say(f"first prompt, as the model reads it: {shown!r}")  # repr escapes control characters
    for description in run.scorer.descriptions:
        say(description)
    if policy.reference is not None:
        say(f"the reference policy takes {policy.reference.nbytes / 1e6:,.4g} MB on each process")
    if workers.size == 1 and recipe.distributed.strategy == "fsdp2":
        say(f"note: distributed = {recipe.distributed.strategy}: nothing is sharded in one process")
    if num_experts(policy.model.config.get_text_config(decoder=True)) and not policy.router_coef:
        say(
            "note: a mixture of experts without load-balancing loss: nothing keeps the load of its "
            "experts even; loss.router_aux_loss_coef is the weight of such a loss"
            if has_balancing_loss(policy.model)
            else "note: a mixture of experts for which transformers has no load-balancing loss: "
            "nothing keeps the load of its experts even"
        )
    eos_ids = loading.eos_ids(policy.model.generation_config, policy.tokenizer)
    for notice in (
        *arguments.notices(recipe),
        *notices(recipe),
        *text_notices(recipe, policy.tokenizer, eos_ids, run.queue.stream.prompts),
    ):
        say(f"note: {notice}")


def text_notices(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Sequence[int],
    prompts: Sequence[Prompt],
) -> Iterator[str]:
    """Yields a notice for each problem of the tokenizer or the chat template with this recipe.

    Args:
        eos_ids: the tokens that end a completion without `generation.stop_token_ids`.
    """
    vocabulary = tokenizer.get_vocab()
    hidden = [
        tag
        for tag in ("<think>", "</think>")
        if tag in vocabulary and not tokenizer.decode([vocabulary[tag]], skip_special_tokens=True)
    ]
    if hidden:
        yield (
            f"the tokenizer has {' and '.join(hidden)} as special tokens, and rewards read "
            "completions without special tokens: think_format and math never see the tags; write "
            '"special": false into their entries in the files of the tokenizer.'
        )
    if not (eos_ids or recipe.generation.stop_token_ids or recipe.generation.stop):
        yield (
            "neither the tokenizer nor the generation config has an end token: every completion "
            "runs to generation.max_completion_tokens = "
            f"{recipe.generation.max_completion_tokens}; set generation.stop_token_ids or "
            "generation.stop."
        )

    bos = tokenizer.bos_token_id
    twice = sum(bos is not None and prompt.ids[:2] == [bos, bos] for prompt in prompts)
    if twice:
        yield (
            f"{twice:,} of {len(prompts):,} prompts begin with two tokens of the beginning of a "
            "sequence: the data holds one, and the tokenizer adds one."
        )

    def read(ids: Sequence[int]) -> str:  # without whitespace, which templates strip
        return "".join(str(tokenizer.decode(ids)).split())

    with_system = (
        (prompt, prompt.text[0]["content"])
        for prompt in prompts
        if isinstance(prompt.text, list)
        and prompt.text[0]["role"] == "system"
        and isinstance(prompt.text[0]["content"], str)
        and len(prompt.ids) < recipe.dataset.max_prompt_tokens  # else it may have been truncated
    )
    for prompt, system in islice(with_system, 1):
        if read(tokenizer(system, add_special_tokens=False)["input_ids"]) not in read(prompt.ids):
            yield (
                f"the prompt of row {prompt.row} lacks its system message (of dataset.system or of "
                "the data): the chat template drops it; move it to dataset.prompt, or set "
                "model.chat_template."
            )
    formats = [
        name
        for name, reward in recipe.reward.items()
        if reward.function.rpartition(":")[2] == "think_format" and reward.args.get("opening", True)
    ]
    if formats and prompts and read(prompts[0].ids).endswith("<think>"):
        yield (
            "the chat template ends the prompt with <think>, so that no completion begins with it "
            f"and reward.{formats[0]} pays nothing; set reward.{formats[0]}.args.opening=false."
        )
