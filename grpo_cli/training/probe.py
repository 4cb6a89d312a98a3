"""The probe before the first step of a run (probe=true): a short form of `grpo probe`."""

from __future__ import annotations

from grpo_cli.checkpoints import paths
from grpo_cli.errors import CannotLearn
from grpo_cli.evaluation.probe.run import FILE, Policy, default_samples, run_probe
from grpo_cli.evaluation.probe.verdict import verdict_lines
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.reporting.status import write_text
from grpo_cli.training.run import Run

COMPLETIONS = 256
LEAST_PROMPTS = 16
LEAST_SAMPLES = 8  # completions per prompt


def is_due(run: Run) -> bool:
    """Returns whether the run is about to take its first step, and its recipe asks for a probe."""
    return run.recipe.probe != "false" and run.state.step == 0 and run.recovery.progress is None


def probe(run: Run) -> None:
    """Samples from the untrained policy, prints the verdict and writes probe.json.

    It leaves the run unchanged: it uses none of its random numbers and keeps no self-check results.

    Raises:
        CannotLearn: the run cannot learn as it stands, and the recipe says probe=stop.
        TrainingError: the engine, a sandbox or the event loop of a reward failed.
        Interrupted: the run has to end first.
    """
    recipe, say = run.recipe, run.reporter.say
    samples = default_samples(recipe, LEAST_SAMPLES)
    prompts = max(LEAST_PROMPTS, COMPLETIONS // samples)
    policy = Policy(
        recipe, run.workers, run.policy.tokenizer, own_logprobs(run), run.generator,
        run.queue.stream, run.scorer, run.queue.episodes, run.trainer_state(),
    )  # fmt: skip
    result = run_probe(policy, prompts, samples, interruptible=run.interrupts.interruptible)
    with run.workers.raise_together():
        if run.workers.is_main:
            write_text(run.folder / FILE, result.as_json())
    m = result.measured
    say(f"probe of {m.prompts} prompts x {m.samples} completions:")
    for line in verdict_lines(m, result.verdict):
        say(f"  {line}")
    if recipe.probe == "stop" and not result.verdict.can_learn:
        raise CannotLearn(
            f"the run cannot learn as it stands ({', '.join(result.verdict.reasons)}), and "
            f"probe = stop ends it; what was found: {paths.shown(run.folder / FILE)}. probe=true "
            "trains anyway."
        )


def own_logprobs(run: Run) -> PolicyLogprobs:
    """Builds a separate, uncompiled `PolicyLogprobs`; the probe does not change the run's."""
    return PolicyLogprobs(
        run.policy.model,
        autocast=run.workers.autocast,
        say=lambda text: None,
        agree_on=run.workers.agree,
    )
