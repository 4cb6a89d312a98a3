"""Builds the live objects of a run, and the tasks of an evaluation."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

import transformers
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_cli import data
from grpo_cli.algorithm import arguments
from grpo_cli.checkpoints import checkpointer, paths, provenance
from grpo_cli.checkpoints.checkpointer import Checkpointer
from grpo_cli.checkpoints.lock import Lock, note_torchruns, torchrun
from grpo_cli.config import contradictions, parsing, saved_recipe, sources
from grpo_cli.config.interpolation import as_text
from grpo_cli.config.recipe import Recipe
from grpo_cli.data.conversations import Schemas
from grpo_cli.data.settings import Dataset
from grpo_cli.distributed.interrupts import Interrupts
from grpo_cli.distributed.stop_signal import StopSignal, end_of_job
from grpo_cli.distributed.workers import Workers
from grpo_cli.environments import factory as environments
from grpo_cli.environments.adapters import NAME_COLUMN
from grpo_cli.environments.chat import Chat
from grpo_cli.environments.loop import EpisodeLoop
from grpo_cli.environments.sessions import Sessions
from grpo_cli.environments.trl_rollouts import TrlRollouts
from grpo_cli.errors import UserError, counted
from grpo_cli.evaluation import tasks
from grpo_cli.evaluation.evaluator import Evaluator
from grpo_cli.generation import factory
from grpo_cli.images import ImageError
from grpo_cli.models import loading, quantization, tiny
from grpo_cli.models.families import num_experts
from grpo_cli.models.loading import LoadedModel, load_model
from grpo_cli.models.policy import Policy
from grpo_cli.models.routers import has_balancing_loss
from grpo_cli.models.vision import has_images, sound_images
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Prompt
from grpo_cli.reporting.hub import Pusher
from grpo_cli.reporting.progress import Bar
from grpo_cli.reporting.reporter import Reporter
from grpo_cli.reporting.status import write_text
from grpo_cli.training import contents, resume
from grpo_cli.training.callbacks import Callbacks
from grpo_cli.training.plan import PlanRecord
from grpo_cli.training.prepare import Prepared, TrainRows, find_resume
from grpo_cli.training.rollouts.queue import RolloutQueue
from grpo_cli.training.run import Run
from grpo_cli.training.stop_rules import StopRules

FIRST_PROMPT = 300  # characters of the first prompt that the header shows


def build(
    prepared: Prepared,
    command: list[str],
    workers: Workers | None = None,
    stop: StopSignal | None = None,
) -> Run:
    """Loads the models and makes all other objects of `grpo train`.

    Args:
        command: the command line, kept beside the run.
        workers: the process group, if it is initialized already.
        stop: the signal handler, if there is one already.

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
        return assemble(prepared, command, workers, stop, lock, reporter)
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
) -> Run:
    """Makes the live objects of a run whose folder is locked, and resumes or starts the run."""
    recipe, folder = prepared.recipe, prepared.folder
    resume_from = checkpoint_to_resume(prepared, workers, reporter)
    if resume_from is not None:
        resume.check_optimizer(recipe, resume_from)
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
    reads_images = recipe.dataset.streaming or has_images([*prompts, *held_out])
    reporter.has_images = loaded.vision is not None and (
        recipe.dataset.streaming or has_images(prompts)
    )
    prompts += longest_unknown(recipe, prompts)
    check_fits(recipe, model, prompts, held_out)
    checkpointer = Checkpointer(workers, reporter.say)
    interrupts = Interrupts(
        workers,
        stop or StopSignal(reporter.say, recipe.checkpoint.grace, end_of_job()),
        checkpointer.seconds_left,
        resume.expected_seconds(model, workers.size),
    )
    policy = Policy.make(
        loaded, recipe, workers, interrupts, reporter.say, reads_images=reads_images
    )
    episodes = make_episodes(prepared, loaded, reporter.say)
    longest_prompts = [*prompts, *with_room_for_observations(recipe, model, held_out)]
    generator = factory.make_generator(
        recipe, model, tokenizer, workers, longest_prompts, reporter.say
    )
    evaluator = None
    if to_solve:
        evaluator = Evaluator(recipe.eval, workers, tokenizer, generator, to_solve, episodes)
    scorers = [prepared.scorer, *(task.scorer for task in to_solve)]
    takes_state = any(scorer.takes("trainer_state") for scorer in scorers)
    workers.barrier()  # by now every process has found the folder free
    if workers.is_main and resume_from is None:
        if recipe.overwrite:
            paths.discard_run(folder)
        record_command(folder, recipe, command)
    run = Run(
        stop_rules=StopRules(recipe.stop),
        recipe=recipe,
        folder=folder,
        lock=lock,
        workers=workers,
        interrupts=interrupts,
        policy=policy,
        generator=generator,
        queue=RolloutQueue(recipe, stream, workers, generator, tokenizer, episodes),
        scorer=prepared.scorer,
        evaluator=evaluator,
        reporter=reporter,
        checkpointer=checkpointer,
        pusher=Pusher(recipe, reporter.say, workers.is_main),
        log_history=[] if takes_state else None,
        sessions=prepared.sessions,
        callbacks=Callbacks(prepared.callbacks),
        contents=read,
    )
    if workers.is_main:
        run.plan = PlanRecord(folder, recipe, model.config, workers, prompts)
    describe(run)
    if prepared.note is not None:
        reporter.say(f"note: {prepared.note}")
    try:
        start(run, resume_from, command)
    except BaseException as error:
        run.close(error)
        raise
    return run


def longest_unknown(recipe: Recipe, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns a prompt of the largest length if some of the run's prompts are not known yet.

    Such prompts come from a stream, or have an environment's first observation.
    """
    if not (recipe.dataset.streaming or recipe.has_episodes):
        return []
    return [Prompt.from_ids(prompts[0].ids[:1] * recipe.dataset.max_prompt_tokens)]


def check_fits(
    recipe: Recipe,
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt] = (),
) -> None:
    """Checks the loaded model's embeddings for all prompts, and its context for training prompts.

    Raises:
        UserError: a token has no embedding, or a prompt leaves too little of the context.
    """
    if recipe.model.path is None or recipe.model.build is not None:
        return
    loading.check_embeddings(model, recipe.model.path, [*prompts, *held_out])
    longest = recipe.generation.max_completion_tokens
    loading.check_context(model, recipe.model.path, prompts, longest)


def with_room_for_observations(
    recipe: Recipe, model: PreTrainedModel, prompts: Sequence[Prompt]
) -> Sequence[Prompt]:
    """Adds a prompt as long as the longest held-out one with a first observation may become."""
    if not prompts or not recipe.has_episodes:
        return prompts
    own = max(len(p.ids) for p in prompts)
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    room = (context or math.inf) - recipe.longest_completion - own
    longest = own + int(max(0, min(recipe.episode.reply_tokens, room)))
    return [*prompts, Prompt.from_ids(prompts[0].ids[:1] * longest)]


def make_episodes(
    prepared: Prepared, loaded: LoadedModel, say: Callable[[str], None]
) -> EpisodeLoop | TrlRollouts | None:
    """Returns the recipe's `EpisodeLoop` or `TrlRollouts`; None without environments.

    Raises:
        UserError: the chat template cannot carry a conversation with these tools.
    """
    recipe = prepared.recipe
    eos_ids = loading.eos_ids(loaded.model.generation_config, loaded.tokenizer)
    return environments.make_loop(
        recipe,
        prepared.sessions,
        loaded.tokenizer,
        {*eos_ids, *recipe.generation.stop_token_ids},
        recipe.dataset.max_prompt_tokens if prepared.train else None,
        say,
        loaded.vision,
    )


def record_command(folder: Path, recipe: Recipe, command: list[str]) -> None:
    """Writes recipe.yaml, and adds a line to command.txt."""
    write_text(folder / "recipe.yaml", saved_recipe.as_yaml(recipe))
    provenance.note_run(folder)
    with (folder / "command.txt").open("a", encoding="utf-8") as file:
        file.write(shlex.join(command) + "\n")  # a resumed run has several


def describe(run: Run) -> None:
    """Prints size, devices, rewards and notices of a run that is about to start."""
    recipe, workers, policy, say = run.recipe, run.workers, run.policy, run.reporter.say
    size = sum(quantization.numel(p) for p in policy.model.parameters())
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    of_adapter = "" if trained == size else f" ({trained / 1e6:.4g} M trained)"
    prompts = len(run.queue.stream.prompts)
    most = "at most " if recipe.generation.dynamic_sampling else ""
    shown = f"{prompts:,} prompts ({most}{prompts / recipe.prompts_per_step:,.4g} steps an epoch)"
    if recipe.dataset.streaming:
        shown = "streamed prompts"
    say(
        f"{recipe.recipe}: {size / 1e6:.2f} M parameters{of_adapter} on {workers.device}, "
        f"{shown}, "
        f"{counted(recipe.steps, 'step')}, {recipe.prompts_per_step} x "
        f"{recipe.generation.num_generations} completions a step, {workers.size} "
        f"process{'es' if workers.size > 1 else ''}; writes to {paths.shown(run.folder)}"
    )
    if (summary := quantization.summary(policy.model)) is not None:
        say(summary)
    rewards = []
    for name, reward in recipe.reward.items():
        args = [f"{key}={value}" for key, value in reward.args.items()]
        rewards.append(f"{name} ({', '.join([f'weight {reward.weight:g}', *args])})")
    is_right = f"; accuracy: {recipe.accuracies[0]} = 1"
    of_rows = run.evaluator is not None and not recipe.benchmark
    say(f"rewards: {', '.join(rewards)}{is_right if of_rows else ''}")
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
    if policy.reference is not None and policy.reference.nbytes:
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
        *contradictions.notices(recipe),
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


def start(run: Run, resume_from: Path | None, command: list[str]) -> None:
    """Resumes the run if there is a checkpoint, and hands the weights to the generator."""
    if resume_from is not None:
        resume.restore(run, resume_from)
        if run.workers.is_main:  # a refused resume leaves the run's recipe as it was
            record_command(run.folder, run.recipe, command)
    else:
        run.reporter.rewind(0)  # drops lines of a run that was stopped before its first checkpoint
        if run.workers.is_main:
            checkpointer.discard_kept(run.folder, 0)
    with run.workers.raise_together():
        if run.workers.is_main:
            run.state.tracker_ids = run.reporter.trackers.start(
                run.recipe, run.folder, as_text(asdict(run.recipe)), run.state.tracker_ids
            )
    run.generator.update_weights(run.policy.model, run.state.step)
    status, state = run.reporter.status, run.state
    status.add(steps=run.recipe.steps, first_step=state.step)
    status.before = run.evaluated_before
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
            f"resume: none of {names} is whole; start over with "
            "overwrite=true, or give another with resume=PATH."
        )
    if path is None and prepared.recipe.resume == "auto":
        reporter.say("note: resume=auto finds no checkpoint; the run starts at step 1")
    return path


def load_policy(prepared: Prepared, workers: Workers, reporter: Reporter) -> LoadedModel:
    """Loads the recipe's model; a model that the recipe builds is built first."""
    recipe, path = prepared.recipe, prepared.recipe.model.path
    if recipe.model.build is not None:
        with workers.main_first():  # the others find the main process's model
            path = str(build_model(recipe, prepared.train, prepared.sessions, reporter.console))
    assert path is not None, "checked when the recipe was parsed"
    return load_model(path, recipe, workers, reporter.say, trains=bool(prepared.train))


def build_model(
    recipe: Recipe, train: Mapping[str, TrainRows], sessions: Sessions | None, console: Console
) -> Path:
    """Builds the recipe's model unless it is in the cache, and returns its folder.

    Args:
        train: data sets whose solutions the model is warmed up with.
        sessions: the sessions of the recipe's environments, whose tools the prompts list.
    """
    build = recipe.model.build
    assert build is not None
    tools: dict[str, Schemas] = {"": ()}
    if sessions is not None:
        tools = {name: sessions.schemas(name) for name in sessions.spec.names}
    by_name = sessions is not None and sessions.spec.by_name
    pairs: list[tiny.Pair] = []
    for part in train.values() if build.warmup_steps else ():
        own = list(data.solution_pairs(part.rows, part.dataset))
        texts, reads = [prompt for prompt, _ in own], build.vision_layers > 0
        rows = data.images_of(part.rows, texts, part.dataset.max_pixels, reads_images=reads)
        names = part.rows.column(NAME_COLUMN) if by_name else [""] * len(own)
        for (_, solution), row, name in zip(own, rows, names, strict=True):
            pairs.append(tiny.Pair(row.prompt, solution, tools[str(name)], row.images))
    bar = Bar(console, "warm-up", build.warmup_steps)
    path = tiny.build(
        build,
        pairs,
        recipe.seed,
        lambda step, loss: bar.update(step, f"supervised loss {loss:.3f}"),
        lambda tokenizer, tools: Chat(tokenizer, [tokenizer.eos_token_id], tools).episode_ids,
    )
    bar.close()
    return path


def make_stream(
    prepared: Prepared, loaded: LoadedModel, say: Callable[[str], None]
) -> data.PromptStream:
    """Returns the stream of prompts that the run trains on."""
    recipe, parts = prepared.recipe, prepared.train
    seed, dataset = recipe.seed, recipe.dataset
    say_once = functools.cache(say)  # every epoch reads each image again
    is_sound = sound_images(say_once if dataset.bad_rows == "drop" else None)
    if parts.keys() == {""} and (stream := parts[""].stream) is not None:

        def of_block(rows: data.Rows, may_be_empty: bool) -> list[Prompt]:
            make = partial(prompts_of, rows, dataset, prepared, loaded, say_once)
            return make(may_be_empty=may_be_empty)[0]

        streamed = data.StreamedPrompts(stream, of_block, seed, dataset.shuffle)
        streamed.is_sound = is_sound
        return streamed

    def prompts(name: str) -> list[Prompt]:
        part = parts[name]
        found, overlong = prompts_of(part.rows, part.dataset, prepared, loaded, say)
        if overlong:
            key = f"dataset.mixture.{name}" if name else "dataset.train"
            say(
                f"{key}: {overlong:,} of {len(part.rows.rows):,} prompts longer than "
                f"dataset.max_prompt_tokens = {dataset.max_prompt_tokens}: dropped"
            )
        return found

    if "" in parts:
        return data.PromptStream(prompts(""), seed, dataset.shuffle, is_sound)
    mixed = data.mixed({name: (part.rows, prompts(name)) for name, part in parts.items()})
    weights = {name: part.weight for name, part in parts.items()}
    return data.MixtureStream(mixed, weights, seed, dataset.shuffle, is_sound)


def make_tasks(
    prepared: Prepared, loaded: LoadedModel, say: Callable[[str], None]
) -> list[tasks.Task]:
    """Returns the recipe's benchmarks, or its held-out rows, as tasks.

    Raises:
        UserError: an image cannot be decoded, and dataset.bad_rows=stop.
    """
    recipe = prepared.recipe
    if recipe.benchmark:
        return tasks.of_benchmarks(recipe, prepared.benchmarks, loaded.tokenizer, loaded.vision)
    found = []
    for name, held in prepared.held_out.items():
        prompts, _ = prompts_of(held.rows, held.dataset, prepared, loaded, say, held_out=True)
        readable = []
        for prompt in prompts:
            try:
                for image in prompt.images:
                    image.open()
                readable.append(prompt)
            except ImageError as error:
                if held.dataset.bad_rows == "stop":
                    raise UserError(f"{error} (dataset.bad_rows=drop drops the row).") from error
                say(f"note: {error}; the row is dropped")
        label = name or sources.short_name(recipe.dataset.eval or recipe.dataset.train or "")
        found.append(
            tasks.held_out(
                recipe, label, readable, held.scorer, held.accuracy, is_one_of_several=bool(name)
            )
        )
    return found


def prompts_of(
    rows: data.Rows,
    dataset: Dataset,
    prepared: Prepared,
    loaded: LoadedModel,
    say: Callable[[str], None],
    *,
    held_out: bool = False,
    may_be_empty: bool = False,
) -> tuple[list[Prompt], int]:
    """Returns the prompts of data rows, and the number of over-long ones, which are left out.

    Args:
        say: prints a line for each row that is dropped because of its images.
        held_out: whether the rows are for evaluation, which drops no long prompts.
        may_be_empty: whether no prompt at all is no error.
    """
    stops = dataset.bad_rows == "stop"
    return data.make_prompts(
        rows,
        dataset,
        loaded.tokenizer,
        held_out=held_out,
        template_kwargs=prepared.recipe.model.chat_template_kwargs,
        may_be_empty=may_be_empty,
        tools=environments.tools_of(prepared.sessions),
        vision=loaded.vision,
        on_bad_image=None if stops else lambda why: say(f"note: {why}; the row is dropped"),
    )
