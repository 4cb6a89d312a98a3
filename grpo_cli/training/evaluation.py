"""Evaluations during training: when they are due, and which one is the best."""

from __future__ import annotations

from grpo_cli.distributed import heartbeat
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.evaluation.summary import as_metrics
from grpo_cli.reporting.metric_names import measure_of
from grpo_cli.training.run import Run


def is_due(run: Run) -> bool:
    """Returns whether an evaluation is due at the present step."""
    config, step = run.recipe.eval, run.state.step
    if run.evaluator is None:
        return False
    if step == 0:
        return config.at_start and run.state.before is None
    return run.is_over or (config.every > 0 and step % config.every == 0)


def evaluate(run: Run) -> dict[str, float]:
    """Evaluates the policy, updates the best result in the run's state, and returns the metrics.

    Raises:
        UserError: the first evaluation has no metric `eval.best`.
        Interrupted: the run has to end first.
    """
    assert run.evaluator is not None
    state, best = run.state, run.recipe.eval.best
    with heartbeat.inside("evaluate"):
        interruptible = run.interrupts.interruptible
        found = run.evaluator.run(state=run.trainer_state(), interruptible=interruptible)
    metrics = as_metrics(found)
    value = metrics.get(f"eval/{best}")
    if value is None and state.step == 0:
        names = [key.removeprefix("eval/") for key in metrics]
        raise UserError(
            f"eval.best = {best}: the evaluation gives no such number; there are {listed(names)}."
            f"{nearest(best, names)}"
        )
    state.after, state.after_step = metrics, state.step
    if state.step == 0:
        state.before = metrics
        name = measure_of(metrics)
        run.reporter.say(f"held-out {name} before training: {metrics[f'eval/{name}']:.3f}")
        if name != best == "accuracy":
            run.reporter.say(
                "note: eval.best = accuracy counts only the value 1, and the reward has others; "
                "eval.best=reward chooses by their mean"
            )
    if value is None:  # no reason to lose the trained steps
        run.reporter.say(f"note: eval.best = {best}: there is no such number")
    elif value > state.best_value:
        state.best_value, state.best_step, state.worse = value, state.step, 0
    else:
        state.worse += 1
    run.callbacks.evaluated(run, metrics)
    return metrics
