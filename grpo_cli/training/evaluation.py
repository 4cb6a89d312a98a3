"""Evaluates the policy during training, and follows which evaluation is the best."""

from __future__ import annotations

from grpo_cli.distributed import heartbeat
from grpo_cli.errors import UserError, listed, nearest
from grpo_cli.evaluation.evaluator import Evaluator
from grpo_cli.evaluation.summary import as_metrics
from grpo_cli.reporting.progress import measure_of
from grpo_cli.reporting.reporter import readable
from grpo_cli.training.callbacks import Event
from grpo_cli.training.run import Run


class Evaluation:
    """Evaluates before the first step, as often as `eval.every` says, and after the last step."""

    def __init__(self, run: Run, evaluator: Evaluator) -> None:
        self.run, self.evaluator = run, evaluator

    def on_start(self, event: Event) -> None:
        run = self.run
        if run.state.step == 0 and run.recipe.eval.at_start and run.state.before is None:
            self.evaluate()  # its metrics are in status.json and summary.json
        if run.state.before is not None:
            run.reporter.status.add(before=readable(run.state.before))

    def on_step(self, event: Event) -> None:
        every = self.run.recipe.eval.every
        if self.run.is_over or (every > 0 and event.step % every == 0):
            event.log_own(self.evaluate())

    def evaluate(self) -> dict[str, float]:
        """Evaluates the policy, updates the best result in the run's state, and returns metrics.

        Raises:
            UserError: the first evaluation has no metric `eval.best`.
            Interrupted: the run has to end first.
        """
        run, best = self.run, self.run.recipe.eval.best
        state, say = run.state, run.reporter.say
        with heartbeat.inside("evaluate"):
            interruptible = run.interrupts.interruptible
            found = self.evaluator.run(state=run.trainer_state(), interruptible=interruptible)
        metrics = as_metrics(found)
        value = metrics.get(f"eval/{best}")
        if value is None and state.step == 0:
            names = [key.removeprefix("eval/") for key in metrics]
            raise UserError(
                f"eval.best = {best}: the evaluation gives no such number; there are "
                f"{listed(names)}.{nearest(best, names)}"
            )
        state.after, state.after_step = metrics, state.step
        if state.step == 0:
            state.before = metrics
            name = measure_of(metrics)
            say(f"held-out {name} before training: {metrics[f'eval/{name}']:.3f}")
            if name != best == "accuracy":
                say(
                    "note: eval.best = accuracy counts only the value 1, and the reward has "
                    "others; eval.best=reward chooses by their mean"
                )
        if value is None:  # no reason to lose the trained steps
            say(f"note: eval.best = {best}: there is no such number")
        elif value > state.best_value:
            state.best_value, state.best_step, state.worse = value, state.step, 0
        else:
            state.worse += 1
        run.callbacks.call(run, "on_evaluate", metrics=metrics)
        return metrics
