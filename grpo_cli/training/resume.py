"""Stores the state of a run in checkpoints, and resumes the run from one."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from grpo_cli import random_streams
from grpo_cli.algorithm.advantages import settle
from grpo_cli.algorithm.loss import AdaptiveBeta, AdaptiveEntropyBonus
from grpo_cli.checkpoints import checkpointer, paths, provenance, retention, shards
from grpo_cli.checkpoints.shards import Parts
from grpo_cli.config import saved_recipe, sources
from grpo_cli.config.knob import flagged, value_at
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import UserError, first_line
from grpo_cli.files import LONGEST, read_text, read_yaml
from grpo_cli.records import Group
from grpo_cli.reporting.machine import processor
from grpo_cli.reporting.model_card import model_card
from grpo_cli.training.rollouts.queue import PrefetchedGroups
from grpo_cli.training.rollouts.stored_groups import (
    digest,
    from_entries,
    reward_fingerprint,
    sampling_fingerprint,
    step_fingerprint,
    to_entries,
)
from grpo_cli.training.run import Run, State, StepProgress

NOT_STORED = ("since", "log_history")  # fields of a run's state: a clock, and a text of its own
FORMAT = 2  # version of what `state_of` returns; a checkpoint with another one is not resumed
MODEL_FOLDER_UP_TO = 8 * 10**9  # bytes of weights up to which a checkpoint is a model folder


def save(run: Run, *, wait: bool = True) -> None:
    """Starts to write a checkpoint; once it is complete, outdated checkpoints are deleted.

    Args:
        wait: whether to wait for prefetched completions. If not, the run ends here, and a resumed
            run samples the incomplete ones again.
    """
    _write(run, paths.checkpoint_path(run.folder, run.state.step), wait=wait)
    run.recovery.saved_step = run.state.step


def save_interrupted(run: Run) -> None:
    """Saves a run whose step was interrupted, at its last complete point (`Recovery`).

    `run.recovery.interrupted` is the checkpoint; None if there is nothing new to save.
    """
    run.interrupts.find_signal()
    run.recovery.rollback(run)
    if run.recovery.progress is None and run.recovery.unreported is None:
        is_saved = run.recovery.saved_step == run.state.step
        error = run.checkpointer.wait() if is_saved else "not begun"
        if not run.workers.max(float(error is not None)):
            run.recovery.interrupted = paths.checkpoint_path(run.folder, run.state.step)
            run.callbacks.checkpoints(run)
            return
        if run.state.step == 0:
            return
    run.recovery.interrupted = paths.interrupted_path(run.folder, run.state.step)
    _write(run, run.recovery.interrupted, wait=False)


def to_keep(run: Run, *, wait: bool) -> list[PrefetchedGroups]:
    """Returns the prefetched groups that a checkpoint stores; the others are sampled again."""
    kept = []
    for batch in run.queue.prefetched:
        # A failed batch does not prevent the checkpoint; its own step raises the error.
        unfit = not (wait or batch.is_done) or batch.has_failed()
        if run.workers.max(float(unfit)):
            break
        kept.append(batch)
    return kept


def state_of(run: Run, kept: Sequence[PrefetchedGroups]) -> dict[str, Any]:
    """Returns the state of the run, with an incomplete step if any, as plain values.

    Args:
        kept: the first of the prefetched groups, which are stored too.
    """
    state, workers, queue = run.state, run.workers, run.queue
    progress, budget = run.recovery.progress, run.policy.micro_batches.budget
    sampled_with = sampling_fingerprint(run.recipe)
    prefetched = [workers.gather(to_entries(batch.groups(), sampled_with)) for batch in kept]
    sampled_again = (len(queue.prefetched) - len(kept)) * run.recipe.prompts_per_step
    how = step_fingerprint(run.recipe)
    own = None if progress is None else workers.gather(progress.own(how))
    state.seconds, state.since = state.total_seconds, time.monotonic()
    return {
        "format": FORMAT,
        "run": {k: v for k, v in asdict(state).items() if k not in NOT_STORED}
        | {
            "position": queue.position - sampled_again,
            "signal_share": queue.signal_share,
            "reference_moved": run.policy.reference is not None and run.policy.reference.has_moved,
            # By process: a resumed run with other micro-batches would round differently.
            **{name: workers.gather(value) for name, value in budget.state().items()},
            "cache_tokens": workers.gather(run.generator.cache_tokens),
            "modes": workers.gather(checks(run)),
        },
        "rng": workers.gather(run.recovery.random_streams or random_streams.rng_state()),
        "carried": workers.gather(to_entries(queue.leftover, reward_fingerprint(run.recipe))),
        "ahead": prefetched,
        "work": None if progress is None else progress.shared() | {"own": own, "how": digest(how)},
        "unreported": run.recovery.unreported,
        "lengths": queue.lengths,
        "stream": queue.stream.state(),
        "best": run.checkpointer.best,
        "log_history": json.dumps(state.log_history or []),  # a string loads faster
        "grad_scaler": run.policy.scaler.state_dict(),  # {} unless the arithmetic is float16
    }


def _write(run: Run, path: Path, *, wait: bool) -> None:
    run.check_folder()
    run.checkpointer.wait()  # the previous checkpoint may become the best one, which is stored
    run.callbacks.checkpoints(run)
    entries = state_of(run, to_keep(run, wait=wait)) | {"callbacks": run.callbacks.states(run)}
    best, began, last = run.state.best_step, time.monotonic(), run.is_over

    def done() -> None:
        _note_best(run, best)
        if not paths.is_interrupted(path):
            run.callbacks.written.append(path)
            run.pusher.push(path, last=last)
        retention.prune(run.folder, newest=path, **keeping(run))
        run.interrupts.save_seconds = time.monotonic() - began

    run.callbacks.saving |= not paths.is_interrupted(path)
    with_model = writes_model(run)
    resumable = run.recipe.checkpoint.every > 0 or not (run.is_over and with_model)
    run.reporter.sync()
    run.checkpointer.save(
        path,
        parts_of(run, keeps_optimizer=resumable),
        entries,
        saved_recipe.as_yaml(run.recipe),
        run.policy.processor,
        with_model=with_model,
        resumable=resumable,
        card=card_of(run) if run.workers.is_main else "",
        outdated=lambda: retention.outdated(run.folder, newest=path, **keeping(run)),
        done=done,
    )
    if not wait:  # the run ends
        run.checkpointer.wait()
        run.callbacks.checkpoints(run)


def parts_of(run: Run, *, keeps_optimizer: bool) -> Parts:
    """Returns the tensors that a checkpoint of the run stores."""
    policy, reference = run.policy, run.policy.reference
    moved = reference.weights_to_save if reference is not None else None
    return Parts(policy.model, policy.optimizer, moved, keeps_optimizer=keeps_optimizer)


def _note_best(run: Run, step: int | None) -> None:
    # If a new best could not be written, the old one stays.
    if step is not None and paths.checkpoint_path(run.folder, step).is_dir():
        run.checkpointer.best = step


def keeping(run: Run) -> dict[str, Any]:
    """Returns the arguments that decide which checkpoints to keep, those being pushed included."""
    keep_last, best = run.recipe.checkpoint.keep_last, run.checkpointer.best
    return {"keep_last": keep_last, "best": best, "in_use": run.pusher.in_use()}


def card_of(run: Run) -> str:
    """Returns the model card of a checkpoint that is written now."""
    state, command = run.state, list[str]()
    with suppress(UserError, ValueError):  # it may be missing or changed
        command = shlex.split(read_text(run.folder / "command.txt", LONGEST).partition("\n")[0])
    evaluated = (state.before, state.after, state.after_step)
    return model_card(run.recipe, command, state.step, *evaluated, run.workers.size)


def writes_model(run: Run) -> bool:
    """Returns whether checkpoints are also model folders."""
    if run.recipe.adapter.method != "none":
        return True  # small, and grpo export makes none of an adapter's shards
    when = run.recipe.checkpoint.model
    if when == "auto" and run.recipe.hub.repo is not None:
        return run.recipe.hub.strategy != "end" or run.is_over
    size = sum(t.nbytes for t in shards.tensors_of(run.policy.model).values())
    return when == "always" or (when == "auto" and size <= MODEL_FOLDER_UP_TO)


def checks(run: Run) -> dict[str, dict[str, str]]:
    """Returns the results of this process's self-checks, and the machine they were made on."""
    own = {"made": made_on(run), "generator": run.generator.checks()}
    return own | run.policy.checks()


def made_on(run: Run) -> dict[str, str]:
    """Returns the versions and hardware that rounding depends on, besides the recipe."""
    on_gpu = run.workers.device.type == "cuda"
    device = torch.cuda.get_device_name(run.workers.device) if on_gpu else processor()
    return {
        "torch": str(torch.__version__),
        "device": device,
        "threads": str(torch.get_num_threads()),
    }


def restore_checks(run: Run, stored: Mapping[str, Any]) -> None:
    """Restores the results of the stored run's self-checks, if no process's machine has changed."""
    now = made_on(run)
    changed = [
        f"{key} {was} -> {now[key]}" for key, was in stored["made"].items() if was != now[key]
    ]
    if any_changed := run.workers.first(", ".join(changed) or None):  # the checks are collective
        run.reporter.say(
            "note: the self-checks are made again, since the checkpoint was written elsewhere "
            f"({any_changed}); from here on numbers may differ by rounding"
        )
        return
    run.policy.restore_checks(stored)
    run.generator.restore_checks(stored["generator"])


def check_kept(recipe: Recipe, path: Path) -> None:
    """Checks that a resumed run has the model, adapter and optimizer of the checkpoint `path`.

    With another method or alpha, tensors of the same shapes can mean another model; another
    optimizer cannot take the stored state.

    Raises:
        UserError: a knob that a resumed run keeps has another value.
    """
    stored, shown = read_yaml(path / provenance.RECIPE), paths.shown(path)
    for key in flagged(Recipe, "kept"):
        was, value = value_at(stored, key), value_at(recipe, key)
        if was == value:
            continue
        instead = "give another output_dir to begin a run"
        if key.startswith("optimizer."):
            weights = f"model.path={shown} model.build=null"
            weights = f"adapter.path={shown}" if sources.is_adapter(path) else weights
            instead = f"begin a run from its weights with {weights}"
        raise UserError(
            f"{key} = {value}: {shown} was trained with {was}, and a resumed run keeps its "
            f"{key.partition('.')[0]}; {instead}."
        )


def restore(run: Run, path: Path) -> None:
    """Resumes from a checkpoint: weights, optimizer, random streams, state.

    Raises:
        UserError: the checkpoint is of another model.
    """
    saved = restore_state(run, path)
    workers = run.workers
    before = read_yaml(path / provenance.RECIPE)
    if path == paths.checkpoint_path(run.folder, run.state.step):
        run.recovery.saved_step = run.state.step
    where = f"in step {run.state.step + 1}" if run.recovery.progress else f"step {run.state.step}"
    run.reporter.say(f"resuming from {paths.shown(path)}, {where}")
    for change in saved_recipe.differences(before, run.recipe):
        run.reporter.say(f"  changed since: {change}")
        run.state.stop_reason = None  # it came from the recipe as it was
    run.callbacks.restore(run, saved["callbacks"])
    if len(saved["rng"]) != workers.size:
        run.reporter.say(
            f"  processes then {len(saved['rng'])}, now {workers.size}: the same run except for "
            "rounding"
        )
    if workers.is_main:
        (run.folder / "summary.json").unlink(missing_ok=True)  # this run is not finished
        for name in retention.set_aside(run.folder, path, run.state.step):
            run.reporter.say(f"  checkpoint {name} is of another course: now {name}.old")
        retention.discard_kept(run.folder, run.state.step + (run.recovery.progress is not None))
    # After the checkpoints: a run that is killed in between resumes from one that it still has.
    # A step whose evaluation was interrupted is logged after the evaluation. A run that was killed
    # before its next checkpoint may have logged it already.
    run.reporter.rewind(run.state.step - (run.recovery.unreported is not None))


def restore_state(run: Run, path: Path) -> dict[str, Any]:
    """Restores the state of a run from a checkpoint or a kept step; changes no file.

    Returns:
        The stored state.

    Raises:
        UserError: the checkpoint is of another model.
    """
    saved = _load(run, path)
    if saved.get("format") != FORMAT:
        raise UserError(
            f"{paths.shown(path)}: its state is of another version of grpo; a new run starts from "
            f"its weights with model.path={paths.shown(path)}."
        )
    workers, stored = run.workers, saved["run"]
    # The history is empty if no reward read it at the checkpoint.
    history = None if run.state.log_history is None else json.loads(saved["log_history"])
    kept = {f.name: stored[f.name] for f in fields(State) if f.name not in NOT_STORED}
    run.state = State(**kept, log_history=history)
    run.state.beta = AdaptiveBeta(**stored["beta"])
    run.state.entropy_bonus = AdaptiveEntropyBonus(**stored["entropy_bonus"])
    run.queue.position, run.queue.signal_share = stored["position"], stored["signal_share"]
    run.queue.lengths = saved["lengths"]
    run.queue.stream.restore(saved["stream"])
    if run.policy.reference is not None:
        run.policy.reference.has_moved = stored["reference_moved"]
    run.checkpointer.best = saved["best"]
    _note_best(run, run.state.best_step)  # its checkpoint may be the one that `saved` comes from
    if scaler := saved["grad_scaler"]:
        run.policy.scaler.load_state_dict(scaler)
    run.recovery.unreported = saved["unreported"]
    run.queue.leftover = _leftover(run, saved["carried"])
    run.recovery.progress = _progress(run, saved["work"])
    if saved["work"] is not None and run.recovery.progress is None:  # its prompts come again
        run.queue.position = min(position for position, _ in saved["work"]["sampled"])
        run.queue.leftover, saved["ahead"] = [], []
    _restore_prefetched(run, saved["ahead"])
    before = read_yaml(path / provenance.RECIPE)
    same_processes = len(saved["rng"]) == workers.size
    if same_processes:
        random_streams.set_rng_state(saved["rng"][workers.rank])
        run.recovery.mark()  # for an evaluation that is interrupted again
    if same_processes and workers.can_continue(before["distributed"]["strategy"]):
        if before["update"]["tokens_per_micro_batch"] == run.recipe.update.tokens_per_micro_batch:
            budget = run.policy.micro_batches.budget
            budget.restore({name: stored[name][workers.rank] for name in budget.state()})
        run.generator.cache_tokens = stored["cache_tokens"][workers.rank]
        if before["model"]["compile"] == run.recipe.model.compile:
            restore_checks(run, stored["modes"][workers.rank])
    if before["eval"]["best"] != run.recipe.eval.best:  # the best value is of another metric
        run.state.best_step, run.state.best_value, run.state.worse = None, -math.inf, 0
    # An adaptive coefficient restarts if its initial value was changed.
    if before["loss"]["beta"] != run.recipe.loss.beta:
        run.state.beta.adapted = None
    if before["loss"]["entropy_coef"] != run.recipe.loss.entropy_coef:
        run.state.entropy_bonus.adapted = None
    return saved


def _load(run: Run, path: Path) -> dict[str, Any]:
    """Loads weights and optimizer into the run, and returns its stored state."""
    with run.workers.raise_together():  # each process reads by itself
        try:
            saved = checkpointer.load_state(path)
            policy, reference = run.policy, None
            if policy.reference is not None and checkpointer.has_reference(path):
                reference = policy.reference.weights
            checkpointer.load(path, Parts(policy.model, policy.optimizer, reference))
        except Exception as error:  # torn files: each format has its own errors
            reason = first_line(error)
            others = [paths.shown(p) for p in paths.resumable(path.parent.parent) if p != path]
            names = ", ".join(reversed(others)) or "none"
            name = run.recipe.recipe
            with suppress(UserError, KeyError):
                stored = read_yaml(path / provenance.RECIPE)
                if stored["recipe"] != name:
                    reason = f"it was trained with recipe={stored['recipe']}, not {name}; {reason}"
            raise UserError(
                f"resume: {paths.shown(path)} cannot be resumed ({reason}); other checkpoints: "
                f"{names}."
            ) from error
    return saved


def of_this_process(run: Run, parts: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns this process's share of the stored groups of all processes.

    With the same number of processes each gets its own groups; otherwise groups are dealt in turn.
    """
    if len(parts) == run.workers.size:
        return parts[run.workers.rank]
    every: list[dict[str, Any]] = [group for part in parts for group in part]
    every.sort(key=lambda group: int(group["position"]))
    return every[run.workers.rank :: run.workers.size]


def _leftover(run: Run, saved: Sequence[list[dict[str, Any]]]) -> list[Group]:
    """Returns this process's share of the leftover groups that are still usable."""
    if not run.recipe.generation.dynamic_sampling:
        return []
    own = of_this_process(run, saved)
    usable = from_entries(own, run.queue.stream, reward_fingerprint(run.recipe))
    dropped = int(run.workers.sum({"dropped": float(len(own) - len(usable))})["dropped"])
    if dropped:
        run.reporter.say(
            f"  {dropped} of {sum(map(len, saved))} leftover groups have other prompts or rewards "
            "now: dropped"
        )
    return settle(usable, run.recipe.reward_weights, run.recipe.loss.mask_truncated)


def _progress(run: Run, saved: dict[str, Any] | None) -> StepProgress | None:
    """Returns the interrupted step, if it is still usable."""
    if saved is None:
        return None
    fingerprint = step_fingerprint(run.recipe)
    found = None
    if saved["how"] == digest(fingerprint):
        own = of_this_process(run, saved["own"])
        found = StepProgress.restored(saved, own, run.queue.stream, fingerprint)
    if run.workers.max(float(found is None)):
        run.reporter.say("  the interrupted step is of another recipe: it starts again")
        return None
    return found


def _restore_prefetched(run: Run, saved: list[list[list[dict[str, Any]]]]) -> None:
    """Restores prefetched groups; their prompts are sampled again if they are not usable now."""
    fingerprint = sampling_fingerprint(run.recipe)
    for parts in saved:
        groups = from_entries(of_this_process(run, parts), run.queue.stream, fingerprint)
        usable = run.workers.sum({"groups": float(len(groups))})["groups"]
        if usable != run.recipe.prompts_per_step:
            run.queue.position = min(g["position"] for part in parts for g in part)
            run.reporter.say("  prefetched completions are of another recipe: sampled again")
            return
        run.queue.prefetched.append(PrefetchedGroups(nullcontext(iter(groups))))
