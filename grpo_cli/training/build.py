"""Builds the live objects of a run, and the tasks of an evaluation."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
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
from grpo_cli.config.schema import Dataset, Recipe
from grpo_cli.data.conversations import Schemas
from grpo_cli.distributed.interrupts import Interrupts
from grpo_cli.distributed.stop_signal import StopSignal, end_of_job
from grpo_cli.distributed.workers import Workers
from grpo_cli.environments import factory as environments
from grpo_cli.environments.adapters import NAME_COLUMN
from grpo_cli.environments.chat import Chat
from grpo_cli.environments.loop import EpisodeLoop
from grpo_cli.environments.sessions import Sessions
from grpo_cli.environments.trl_rollouts import TrlRollouts
from grpo_cli.errors import UserError
from grpo_cli.evaluation import tasks
from grpo_cli.evaluation.evaluator import Evaluator
from grpo_cli.generation import factory
from grpo_cli.images import ImageError, StoredImage
from grpo_cli.models import adapters, loading, optimizers, quantization, tiny
from grpo_cli.models.families import num_experts
from grpo_cli.models.memory import MicroBatchBudget
from grpo_cli.models.micro_batches import MicroBatcher
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.models.reference import AdapterReference, Reference
from grpo_cli.models.routers import RouterRecorder, balancing_coefficient, has_balancing_loss
from grpo_cli.models.vision import (
    UnloadedProcessor,
    VisionProcessor,
    has_images,
    sound_images,
    takes_images,
)
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Prompt
from grpo_cli.reporting.hub import Pusher
from grpo_cli.reporting.progress import Bar
from grpo_cli.reporting.reporter import Reporter, readable
from grpo_cli.reporting.status import write_text
from grpo_cli.training import contents, resume
from grpo_cli.training.callbacks import Callbacks
from grpo_cli.training.plan import PlanRecord
from grpo_cli.training.prepare import Prepared, TrainRows, find_resume
from grpo_cli.training.rollouts.queue import RolloutQueue
from grpo_cli.training.run import Run
from grpo_cli.training.stop_rules import StopRules

COMPILE_BACKEND = "inductor"  # torch.compile's backend; the others generate no code


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
        model, tokenizer, vision = load_policy(prepared, workers, reporter)
    stream = make_stream(prepared, tokenizer, vision, reporter)
    prompts = list(stream.prompts)
    reporter.has_images = vision is not None and (
        recipe.dataset.streaming or any(prompt.images for prompt in prompts)
    )
    recipe = parsing.with_steps(recipe, len(prompts))
    prompts += longest_unknown(recipe, prompts)
    reporter.progress.total = recipe.steps
    policy_logprobs, reference, optimizer, router_coef = make_networks(
        model, recipe, workers, reporter
    )
    to_solve = make_tasks(prepared, tokenizer, vision, reporter)
    held_out = [prompt for task in to_solve for prompt in task.prompts]
    reads_images = may_have_images(recipe, [*prompts, *held_out])
    check_fits(recipe, model, prompts, held_out)
    episodes = make_episodes(prepared, model, tokenizer, vision, reporter.say)
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
    checkpointer = Checkpointer(workers, reporter.say)
    interrupts = Interrupts(
        workers,
        stop or StopSignal(reporter.say, recipe.checkpoint.grace, end_of_job()),
        checkpointer.seconds_left,
        resume.expected_seconds(model, workers.size),
    )
    budget = MicroBatchBudget(
        recipe.update.tokens_per_micro_batch,
        reporter.say if workers.is_main else partial(print, f"process {workers.rank}:"),
        runs_in_lockstep=workers.runs_in_lockstep,
    )
    run = Run(
        stop_rules=StopRules(recipe.stop),
        recipe=recipe,
        folder=folder,
        lock=lock,
        workers=workers,
        interrupts=interrupts,
        tokenizer=tokenizer,
        policy=model,
        policy_logprobs=policy_logprobs,
        reference=reference,
        micro_batches=MicroBatcher(
            workers,
            interrupts,
            budget,
            optimizer,
            policy_logprobs,
            reference,
            vision if reads_images else None,
        ),
        optimizer=optimizer,
        scaler=workers.grad_scaler(),
        generator=generator,
        queue=RolloutQueue(
            recipe,
            stream,
            workers,
            generator,
            tokenizer,
            episodes,
        ),
        scorer=prepared.scorer,
        evaluator=evaluator,
        reporter=reporter,
        checkpointer=checkpointer,
        pusher=Pusher(recipe, reporter.say, workers.is_main),
        router_coef=router_coef,
        log_history=[] if takes_state else None,
        sessions=prepared.sessions,
        vision=vision or unloaded_processor(recipe, model, tokenizer),
        callbacks=Callbacks(prepared.callbacks),
        contents=read,
    )
    if workers.is_main:
        run.plan = PlanRecord.of(folder, recipe, model.config, workers, prompts)
    describe(run)
    if prepared.note is not None:
        reporter.say(f"note: {prepared.note}")
    try:
        start(run, resume_from, command)
    except BaseException as error:
        run.close(error)
        raise
    return run


class Networks(NamedTuple):
    """The policy and its reference on their devices, and the policy's optimizer."""

    policy_logprobs: PolicyLogprobs
    reference: Reference | None
    optimizer: torch.optim.Optimizer
    router_coef: float  # weight of the load-balancing loss of experts


def make_networks(
    model: PreTrainedModel, recipe: Recipe, workers: Workers, reporter: Reporter
) -> Networks:
    """Places a loaded policy, and makes its reference and its optimizer. Every process calls it.

    Raises:
        UserError: the load of the model's experts cannot be balanced with model.compile.
    """
    second = recipe.needs_reference and recipe.adapter.method == "none"
    reference_model = loading.frozen_copy(model) if second else None
    router_coef = balancing_coefficient(model, recipe.loss.router_aux_loss_coef)
    policy_logprobs = make_logprobs(model, recipe, workers, reporter)
    if router_coef and recipe.model.compile:
        raise UserError(
            f"model.compile: the load-balancing loss of experts (weight {router_coef:g}) reads "
            "outputs inside the layers; set loss.router_aux_loss_coef=0 or model.compile=false."
        )
    if router_coef:
        policy_logprobs.routers = RouterRecorder(model)
    reference: Reference | None = None
    if reference_model is not None:
        reference = Reference(make_logprobs(reference_model, recipe, workers, reporter))
    elif recipe.needs_reference:
        config = adapters.config_on(model)
        assert config is not None
        fresh = recipe.adapter.path is None and adapters.begins_as_base(config)
        reference = AdapterReference(
            lambda entered: logprobs_of(model, entered, recipe, workers, reporter),
            workers.autocast,
            keeps_copy=recipe.loss.reference_every > 0 or not fresh,
        )
    optimizer = optimizers.make(recipe.optimizer, model, offload=recipe.distributed.offload)
    return Networks(policy_logprobs, reference, optimizer, router_coef)


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
    longest, knob = recipe.generation.max_completion_tokens, "generation.max_completion_tokens"
    loading.check_context(model, recipe.model.path, prompts, longest, knob)


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
    prepared: Prepared,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionProcessor | None,
    say: Callable[[str], None],
) -> EpisodeLoop | TrlRollouts | None:
    """Returns the recipe's `EpisodeLoop` or `TrlRollouts`; None without environments.

    Raises:
        UserError: the chat template cannot carry a conversation with these tools.
    """
    recipe = prepared.recipe
    eos_ids = loading.eos_ids(model.generation_config, tokenizer)
    most = recipe.dataset.max_prompt_tokens if prepared.train else None
    return environments.make_loop(
        recipe,
        prepared.sessions,
        tokenizer,
        {*eos_ids, *recipe.generation.stop_token_ids},
        most,
        say,
        vision,
    )


def make_logprobs(
    model: PreTrainedModel, recipe: Recipe, workers: Workers, reporter: Reporter
) -> PolicyLogprobs:
    """Places a model on the processes' devices, and returns its `PolicyLogprobs`."""
    workers.place(model)
    return logprobs_of(model, workers.autocast, recipe, workers, reporter)


def logprobs_of(
    model: PreTrainedModel,
    autocast: Callable[[], AbstractContextManager[Any]],
    recipe: Recipe,
    workers: Workers,
    reporter: Reporter,
) -> PolicyLogprobs:
    """Returns the `PolicyLogprobs` of a placed model."""
    return PolicyLogprobs(
        model,
        compile_backend=COMPILE_BACKEND if recipe.model.compile else None,
        autocast=autocast,
        say=reporter.say,
        agree_on=workers.first if workers.runs_in_lockstep else lambda mismatch: mismatch,
    )


def record_command(folder: Path, recipe: Recipe, command: list[str]) -> None:
    """Writes recipe.yaml, and adds a line to command.txt."""
    write_text(folder / "recipe.yaml", saved_recipe.as_yaml(recipe))
    provenance.note_run(folder)
    with (folder / "command.txt").open("a", encoding="utf-8") as file:
        file.write(shlex.join(command) + "\n")  # a resumed run has several


def describe(run: Run) -> None:
    """Prints size, devices, rewards and notices of a run that is about to start."""
    recipe, workers, say = run.recipe, run.workers, run.reporter.say
    size = sum(quantization.numel(p) for p in run.policy.parameters())
    trained = sum(p.numel() for p in run.policy.parameters() if p.requires_grad)
    of_adapter = "" if trained == size else f" ({trained / 1e6:.4g} M trained)"
    prompts = len(run.queue.stream.prompts)
    most = "at most " if recipe.generation.dynamic_sampling else ""
    shown = f"{prompts:,} prompts ({most}{prompts / recipe.prompts_per_step:,.4g} steps an epoch)"
    if recipe.dataset.streaming:
        shown = "streamed prompts"
    say(
        f"{recipe.recipe}: {size / 1e6:.2f} M parameters{of_adapter} on {workers.device}, "
        f"{shown}, "
        f"{recipe.steps:,} steps, {recipe.prompts_per_step} x "
        f"{recipe.generation.num_generations} completions a step, {workers.size} "
        f"process{'es' if workers.size > 1 else ''}; writes to {paths.shown(run.folder)}"
    )
    if (summary := quantization.summary(run.policy)) is not None:
        say(summary)
    rewards = []
    for name, reward in recipe.reward.items():
        args = [f"{key}={value}" for key, value in reward.args.items()]
        rewards.append(f"{name} ({', '.join([f'weight {reward.weight:g}', *args])})")
    say(f"rewards: {', '.join(rewards)}")
    for description in run.scorer.descriptions:
        say(description)
    if run.reference is not None:
        say(f"the reference policy takes {run.reference.nbytes / 1e6:,.4g} MB on each process")
    if workers.size == 1 and recipe.distributed.strategy == "fsdp2":
        say(f"note: distributed = {recipe.distributed.strategy}: nothing is sharded in one process")
    if num_experts(run.policy.config.get_text_config(decoder=True)) and not run.router_coef:
        say(
            "note: a mixture of experts without load-balancing loss: nothing keeps the load of its "
            "experts even; loss.router_aux_loss_coef is the weight of such a loss"
            if has_balancing_loss(run.policy)
            else "note: a mixture of experts for which transformers has no load-balancing loss: "
            "nothing keeps the load of its experts even"
        )
    eos_ids = loading.eos_ids(run.policy.generation_config, run.tokenizer)
    for notice in (
        *arguments.notices(recipe),
        *contradictions.notices(recipe),
        *text_notices(recipe, run.tokenizer, eos_ids, run.queue.stream.prompts),
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
    if recipe.model.path and tokenizer.chat_template and not recipe.dataset.chat:
        yield "the tokenizer has a chat template that dataset.chat = false does not use."

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
    run.generator.update_weights(run.policy, run.state.step)
    status, state = run.reporter.status, run.state
    status.add(steps=run.recipe.steps, first_step=state.step)
    status.before = lambda: readable(state.before) if state.before else None
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
    return path


def load_policy(
    prepared: Prepared, workers: Workers, reporter: Reporter
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, VisionProcessor | None]:
    """Returns the recipe's model, tokenizer and image processor.

    A model that the recipe builds is built first. A text-only model has no image processor.

    If the model is to be sharded, only the main process has weights.
    """
    recipe, whole = prepared.recipe, workers.is_main or not workers.runs_in_lockstep
    path = recipe.model.path
    if recipe.model.build is None:
        assert path is not None, "checked when the recipe was parsed"
    else:
        with workers.main_first():  # the others find the main process's model
            path = str(build_model(recipe, prepared.train, prepared.sessions, reporter.console))
    if prepared.train:
        loading.check_trainable(recipe.model, path)
    return load_from(path, recipe, workers, reporter, trains=bool(prepared.train), whole=whole)


def load_from(
    path: str, recipe: Recipe, workers: Workers, reporter: Reporter, *, trains: bool, whole: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, VisionProcessor | None]:
    """Loads model, tokenizer and image processor from a folder or the hub.

    Args:
        trains: whether the model is trained, so that parts of it are frozen.
        whole: False: only the model's structure is loaded.
    """
    model, tokenizer = loading.load(recipe.model, path, weights=whole, half_type=workers.half_type)
    vision = None
    try:
        vision = loading.load_vision(recipe.model, path, tokenizer)
    except UserError as error:  # a text-only run does not need it
        reporter.say(f"note: {error} The model reads text only.")
    if recipe.model.freeze and trains:
        frozen = loading.freeze(model, recipe.model.freeze)
        reporter.say(f"{frozen / 1e6:.4g} M parameters are frozen (model.freeze)")
    if recipe.adapter.method != "none":
        add_adapter(model, path, recipe, reporter.say)
    return model, tokenizer, vision


def unloaded_processor(
    recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> UnloadedProcessor | None:
    """Returns the files of an image processor that did not load; None for a text-only model."""
    if recipe.model.path is None or not takes_images(model.config):
        return None
    _, path = loading.base_of(recipe.model, recipe.model.path)
    return UnloadedProcessor(path, tokenizer)


def may_have_images(recipe: Recipe, prompts: Sequence[Prompt]) -> bool:
    """Returns whether a prompt has images, or a prompt that is not known yet may have some."""
    return recipe.dataset.streaming or has_images(prompts)


def add_adapter(
    model: PreTrainedModel, path: str, recipe: Recipe, say: Callable[[str], None]
) -> None:
    """Adds the recipe's adapter, fresh or with the weights of `adapter.path`.

    Args:
        path: hub name or folder of the model.
        say: prints a note if the adapter was trained on a model of another name.
    """
    if recipe.adapter.path is not None:
        folder = Path(recipe.adapter.path).expanduser()
        adapters.load(model, folder, trained=True)
        base = adapters.read_json(folder).get("base_model_name_or_path")
        if base and sources.absolute(base) != sources.absolute(path):
            say(
                f"note: adapter.path = {folder}: was trained on {base}, and is now trained on "
                f"model.path = {path}; the shapes agree, the weights may differ"
            )
        return
    config = adapters.config_of(recipe.adapter, path, recipe.model.revision)
    adapters.attach(model, config, derive_seed(recipe.seed, "adapter") % 2**32)


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
    pairs: list[tuple[Any, Any]] = []
    images: list[Sequence[StoredImage]] = []
    for part in train.values() if build.warmup_steps else ():
        own = list(data.solution_pairs(part.rows, part.dataset))
        texts, reads = [prompt for prompt, _ in own], build.vision_layers > 0
        rows = data.images_of(part.rows, texts, part.dataset.max_pixels, reads_images=reads)
        images += [() if row is None else row.images for row in rows]
        pairs += [
            (prompt if row is None else row.messages, solution)
            for (prompt, solution), row in zip(own, rows, strict=True)
        ]
    bar = Bar(console, "warm-up", build.warmup_steps)
    path = tiny.build(
        build,
        pairs,
        recipe.seed,
        lambda step, loss: bar.update(step, f"supervised loss {loss:.3f}"),
        _episodes(train, sessions) if pairs else None,
        images,
    )
    bar.close()
    return path


def _episodes(train: Mapping[str, TrainRows], sessions: Sessions | None) -> tiny.Episodes:
    """Returns the encoder of solutions that are episodes, with the tools of each row."""

    def encoder(tokenizer: PreTrainedTokenizerBase, tools: Schemas) -> tiny.EpisodeIds:
        return Chat(tokenizer, [tokenizer.eos_token_id], tools).episode_ids

    if sessions is None:
        return tiny.Episodes({"": ()}, encoder)
    tools = {name: sessions.schemas(name) for name in sessions.spec.names}
    names = []
    for part in train.values() if sessions.spec.by_name else ():
        names += [str(name) for name in part.rows.column(NAME_COLUMN)]
    return tiny.Episodes(tools, encoder, names)


def make_stream(
    prepared: Prepared,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionProcessor | None,
    reporter: Reporter,
) -> data.PromptStream:
    """Returns the stream of prompts that the run trains on."""
    recipe, parts = prepared.recipe, prepared.train
    seed, shuffle = recipe.seed, recipe.dataset.shuffle
    say = once(reporter.say)  # every epoch reads each image again
    is_sound = sound_images(say if recipe.dataset.bad_rows == "drop" else None)

    if parts.keys() == {""} and (stream := parts[""].stream) is not None:
        template_kwargs = recipe.model.chat_template_kwargs
        tools = environments.tools_of(prepared.sessions)

        def of_block(rows: data.Rows, may_be_empty: bool) -> list[Prompt]:
            prompts, _ = data.make_prompts(
                rows,
                recipe.dataset,
                tokenizer,
                template_kwargs=template_kwargs,
                may_be_empty=may_be_empty,
                tools=tools,
                vision=vision,
                on_bad_image=on_bad_image(recipe.dataset, say),
            )
            return prompts

        streamed = data.StreamedPrompts(stream, of_block, seed, shuffle)
        streamed.is_sound = is_sound
        return streamed

    def prompts(name: str) -> list[Prompt]:
        key = f"dataset.mixture.{name}" if name else "dataset.train"
        part = parts[name]
        return make_prompts(key, part.rows, part.dataset, prepared, tokenizer, vision, reporter)

    if "" in parts:
        return data.PromptStream(prompts(""), seed, shuffle, is_sound)
    mixed = data.mixed({name: (part.rows, prompts(name)) for name, part in parts.items()})
    weights = {name: part.weight for name, part in parts.items()}
    return data.MixtureStream(mixed, weights, seed, shuffle, is_sound)


def make_prompts(
    key: str,
    rows: data.Rows,
    dataset: Dataset,
    prepared: Prepared,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionProcessor | None,
    reporter: Reporter,
    *,
    held_out: bool = False,
) -> list[Prompt]:
    """Makes the prompts of data rows, and prints how many are too long.

    Args:
        key: the name of the rows in messages.
        held_out: whether the rows are for evaluation, which drops no long prompts.
    """
    recipe = prepared.recipe
    prompts, overlong = data.make_prompts(
        rows,
        dataset,
        tokenizer,
        held_out=held_out,
        template_kwargs=recipe.model.chat_template_kwargs,
        tools=environments.tools_of(prepared.sessions),
        vision=vision,
        on_bad_image=on_bad_image(dataset, reporter.say),
    )
    if held_out:
        prompts = [p for p in prompts if can_be_read(p, dataset, reporter.say)]
    if overlong:
        reporter.say(
            f"{key}: {overlong:,} of {len(rows.rows):,} prompts longer than "
            f"dataset.max_prompt_tokens = {recipe.dataset.max_prompt_tokens}: dropped"
        )
    return prompts


def can_be_read(prompt: Prompt, dataset: Dataset, say: Callable[[str], None]) -> bool:
    """Returns whether all images of a held-out prompt can be decoded; called before the run starts.

    Raises:
        UserError: an image cannot be decoded, and dataset.bad_rows=stop.
    """
    try:
        for image in prompt.images:
            image.open()
    except ImageError as error:
        drop = on_bad_image(dataset, say)
        if drop is None:
            raise UserError(f"{error} (dataset.bad_rows=drop drops the row).") from error
        drop(str(error))
        return False
    return True


def once(say: Callable[[str], None]) -> Callable[[str], None]:
    """Returns a function that prints each line only once."""
    said: set[str] = set()

    def say_once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return say_once


def on_bad_image(dataset: Dataset, say: Callable[[str], None]) -> data.OnBadImage | None:
    """Returns the callback that reports a dropped row, or None if a bad image is an error."""
    if dataset.bad_rows == "stop":
        return None
    return lambda message: say(f"note: {message}; the row is dropped")


def make_tasks(
    prepared: Prepared,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionProcessor | None,
    reporter: Reporter,
) -> list[tasks.Task]:
    """Returns the recipe's benchmarks, or its held-out rows, as tasks."""
    recipe = prepared.recipe
    if recipe.benchmark:
        return tasks.of_benchmarks(recipe, prepared.benchmarks, tokenizer, vision)
    found = []
    for name, held in prepared.held_out.items():
        found.append(
            tasks.held_out(
                recipe,
                name or sources.short_name(recipe.dataset.eval or recipe.dataset.train or ""),
                make_prompts(
                    "dataset.eval",
                    held.rows,
                    held.dataset,
                    prepared,
                    tokenizer,
                    vision,
                    reporter,
                    held_out=True,
                ),
                held.scorer,
                held.accuracy,
                is_one_of_several=bool(name),
            )
        )
    return found
