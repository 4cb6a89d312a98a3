"""What a run keeps in its checkpoints, and how it goes on from one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from grpo_cli import ahead, checkpoint, folders, stored, work
from grpo_cli.carried import packed, unpacked
from grpo_cli.errors import UserError
from grpo_cli.rollouts import Group
from grpo_cli.run import Run, State
from grpo_cli.shards import Parts

PLAIN_UP_TO = 8 * 10**9  # bytes of weights: a model folder comes with each checkpoint
BYTES_PER_SECOND = 0.5e9  # that a checkpoint is taken to be written with, before one has been


def save(run: Run, *, wait: bool = True) -> None:
    """Begins a checkpoint of the present step; those no longer kept go when it is whole.

    Args:
        wait: for completions begun ahead; else the run ends here, and a resumed one samples those
            anew that are not done by now.
    """
    _write(run, folders.checkpoint_path(run.folder, run.state.step), wait=wait)
    run.saved_step = run.state.step
    if not wait:  # the run ends
        run.checkpointer.wait()


def save_interrupted(run: Run) -> Path | None:
    """Keeps a run whose step was broken off; returns where, None if nothing is new.

    The state is that of the last thing that was done whole: the step before, what was sampled and
    scored, an optimizer step.
    """
    run.go_back()
    if run.work is None and run.unreported is None:
        error = run.checkpointer.wait() if run.saved_step == run.state.step else "not begun"
        if not run.workers.max(float(error is not None)):
            return folders.checkpoint_path(run.folder, run.state.step)
        if run.state.step == 0:
            return None
    path = folders.interrupted_path(run.folder, run.state.step)
    _write(run, path, wait=False)
    run.checkpointer.wait()
    return path


def _write(run: Run, path: Path, *, wait: bool) -> None:
    state, workers, config = run.state, run.workers, run.recipe.checkpoint
    state.micro_batch_tokens = workers.gather(run.budget.tokens)
    state.cache_tokens = workers.gather(run.generator.cache_tokens)
    state.ways = workers.gather(run.ways)
    kept = []
    for batch in run.ahead:
        # One that failed is no reason to lose the checkpoint: its step will say why.
        unfit = not (wait or batch.is_done) or batch.has_failed()
        if workers.max(float(unfit)):
            break
        kept.append(batch)
    first = state.step + (run.work is not None)  # the step that the first batch ahead is of
    begun = [
        workers.gather(packed(batch.groups(), run.drawn_by(first + number)))
        for number, batch in enumerate(kept)
    ]
    again = (len(run.ahead) - len(kept)) * run.recipe.prompts_per_step
    how = under_way(run)
    own = workers.gather(run.work.own(how)) if run.work is not None else None
    now = time.monotonic()
    state.seconds, run.started = state.seconds + now - run.started, now
    entries = {
        "run": asdict(state) | {"position": state.position - again},
        "rng": workers.gather(run.streams or checkpoint.rng_state()),
        "carried": workers.gather(packed(run.carried, run.scored_by)),
        "ahead": begun,
        "work": None if run.work is None else run.work.shared() | {"own": own, "how": how},
        "unreported": run.unreported,
        "lengths": run.lengths,
        "best": run.checkpointer.best,
    }
    best, began = state.best_step, time.monotonic()

    def done() -> None:
        # A new best that could not be written is no reason to give up the old one.
        if best is not None and folders.checkpoint_path(run.folder, best).is_dir():
            run.checkpointer.best = best
        checkpoint.prune(run.folder, config.keep_last, run.checkpointer.best, path)
        run.save_seconds = time.monotonic() - began

    run.checkpointer.save(
        path,
        Parts(run.policy, run.optimizer, run.reference if state.reference_moved else None),
        entries,
        stored.as_yaml(run.recipe),
        run.tokenizer,
        plain=writes_model(run),
        done=done,
    )


def writes_model(run: Run) -> bool:
    """Whether checkpoints are model folders besides."""
    when = run.recipe.checkpoint.model
    size = sum(p.numel() * p.element_size() for p in run.policy.parameters())
    return when == "always" or (when == "auto" and size <= PLAIN_UP_TO)


def guessed_seconds(run: Run) -> float:
    """That writing a checkpoint takes, before one was written: weights and two moments."""
    size = float(3 * sum(p.numel() * p.element_size() for p in run.policy.parameters()))
    return 2.0 + size / run.workers.size / BYTES_PER_SECOND


def under_way(run: Run) -> str:
    """What the groups of a step under way, and its updates, depend on in the recipe."""
    recipe = run.recipe
    return repr((run.drawn_by(run.state.step), run.scored_by, recipe.update, recipe.loss))


def restore(run: Run, path: Path) -> None:
    """Goes on from a checkpoint: weights, optimizer, random streams, where the run stands.

    Raises:
        UserError: the checkpoint is of another model.
    """
    workers = run.workers
    with workers.together():  # each process reads by itself
        try:
            saved = checkpoint.load_state(path)
            moved = run.reference if checkpoint.has_reference(path) else None
            checkpoint.load(path, Parts(run.policy, run.optimizer, moved))
        except Exception as error:  # torn files: each format has its own errors
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            beside = [str(p) for p in folders.resumable(path.parent.parent) if p != path]
            names = ", ".join(reversed(beside)) or "none"
            raise UserError(
                f"resume: {path} cannot be gone on from ({reason}); beside it lie {names}."
            ) from error
    run.state = State(**saved["run"])
    run.lengths = saved["lengths"]
    run.checkpointer.best = saved.get("best", run.state.best_step)
    run.unreported = saved["unreported"]
    run.carried = _carried(run, saved["carried"])
    run.work = _work(run, saved["work"])
    _unpack_ahead(run, saved["ahead"])
    before = yaml.safe_load((path / folders.TRAINING / "recipe.yaml").read_text("utf-8"))
    if len(saved["rng"]) == workers.size:
        checkpoint.set_rng_state(saved["rng"][workers.rank])
    tokens, given = run.state.micro_batch_tokens, run.recipe.update.tokens_per_micro_batch
    if len(tokens) == workers.size and before["update"]["tokens_per_micro_batch"] == given:
        run.budget.tokens = tokens[workers.rank]
    if len(run.state.cache_tokens) == workers.size:
        run.generator.cache_tokens = run.state.cache_tokens[workers.rank]
    if len(run.state.ways) == workers.size:
        run.go_on_by(run.state.ways[workers.rank])
    # What an adaptive coefficient begins with was changed: it begins anew.
    if before["loss"].get("beta") != run.recipe.loss.beta:
        run.state.beta = None
    if before["loss"].get("entropy_coef") != run.recipe.loss.entropy_coef:
        run.state.entropy_coef = None
    if path == folders.checkpoint_path(run.folder, run.state.step):
        run.saved_step = run.state.step
    where = f"in step {run.state.step + 1}" if run.work else f"step {run.state.step}"
    run.reporter.say(f"going on from {path}, {where}")
    for change in stored.differences(before, run.recipe):
        run.reporter.say(f"  changed since: {change}")
    if len(saved["rng"]) != workers.size:
        run.reporter.say(
            f"  {len(saved['rng'])} processes then, {workers.size} now: the same run but for "
            "rounding"
        )
    run.reporter.rewind(run.state.step)
    if workers.is_main:
        for name in checkpoint.set_aside(run.folder, path, run.state.step):
            run.reporter.say(f"  checkpoint {name} is of another course: now {name}.old")


def of_this_process(run: Run, parts: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """This process's groups of those that each process had, as dicts with a position.

    With as many processes as then each has its own again; others take turns.
    """
    if len(parts) == run.workers.size:
        return parts[run.workers.rank]
    every: list[dict[str, Any]] = [group for part in parts for group in part]
    every.sort(key=lambda group: int(group["position"]))
    return every[run.workers.rank :: run.workers.size]


def _carried(run: Run, saved: Sequence[list[dict[str, Any]]]) -> list[Group]:
    """This process's share of a checkpoint's carried groups, as far as they are of use."""
    if not run.recipe.generation.dynamic_sampling:
        return []
    own = of_this_process(run, saved)
    fitting = unpacked(own, run.stream, run.scored_by)
    lost = int(run.workers.sum({"lost": float(len(own) - len(fitting))})["lost"])
    if lost:
        run.reporter.say(
            f"  {lost} of {sum(map(len, saved))} carried groups are of other prompts or rewards: "
            "dropped"
        )
    for r in (r for g in fitting for r in g.rollouts):
        r.masked = run.recipe.loss.mask_truncated and r.completion.finish_reason == "length"
    return fitting


def _work(run: Run, saved: dict[str, Any] | None) -> work.Work | None:
    """The step that was under way, if it is of use."""
    if saved is None:
        return None
    how = under_way(run)
    found = None
    if saved["how"] == how:
        found = work.restored(saved, of_this_process(run, saved["own"]), run.stream, how)
    if run.workers.max(float(found is None)):
        run.reporter.say("  the step that was under way is of another recipe: begun anew")
        return None
    return found


def _unpack_ahead(run: Run, saved: list[list[list[dict[str, Any]]]]) -> None:
    """Goes on with completions begun ahead; samples them anew if they are of no use now."""
    first = run.state.step + (run.work is not None)
    for number, parts in enumerate(saved):
        own = of_this_process(run, parts)
        groups = unpacked(own, run.stream, run.drawn_by(first + number))
        there = run.workers.sum({"groups": float(len(groups))})["groups"]
        if there != run.recipe.prompts_per_step:
            run.state.position = min(g["position"] for part in parts for g in part)
            run.reporter.say("  completions begun ahead are of another recipe: sampled anew")
            return
        run.ahead.append(ahead.done(groups))


def how_it_ended(run: Run) -> str:
    """What a user reads of a run that had to end before its last step."""
    step, error = run.state.step, run.checkpointer.wait()
    if run.left_at is None and step == 0:
        return "stopped before the first step; there is nothing new to save"
    path = run.left_at or folders.checkpoint_path(run.folder, step)
    when = f"after step {step}"
    if folders.is_interrupted(path):
        when = f"in step {step + 1}" if run.unreported is None else f"{when}, in its evaluation"
    if error is not None:
        return f"stopped {when}; {error}"
    return f"stopped {when}; saved in {path}; resume=auto goes on"
