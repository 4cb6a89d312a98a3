"""Runs a probe from its prompts to its verdict, and writes the result as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_cli.config.interpolation import masked
from grpo_cli.evaluation.probe.measures import Measured, as_data, measure
from grpo_cli.evaluation.probe.samples import Policy, Size, sample_and_score
from grpo_cli.evaluation.probe.verdict import Verdict, judge
from grpo_cli.models import loading
from grpo_cli.records import Group
from grpo_cli.reporting.reporter import write_text


@dataclass(frozen=True)
class ProbeResult:
    """The numbers of a probe and its verdict; the same on every process."""

    measured: Measured
    verdict: Verdict
    groups: list[Group]

    def as_data(self) -> dict[str, Any]:
        """Returns the content of probe.json."""
        verdict = self.verdict
        return {
            "can_learn": verdict.can_learn,
            "verdict": verdict.sentence,
            "findings": [asdict(finding) for finding in verdict.findings],
            **as_data(self.measured),
        }

    def as_json(self, indent: int | None = None) -> str:
        """Returns the text of probe.json; secrets, as in a reward's arguments, are masked."""
        return masked(json.dumps(self.as_data(), indent=indent, ensure_ascii=False))

    def write(self, path: Path) -> None:
        """Writes probe.json."""
        write_text(path, self.as_json(indent=2) + "\n")


def run_probe(
    policy: Policy,
    size: Size,
    *,
    progress: Callable[[int, str], None] = lambda done, text: None,
    interruptible: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> ProbeResult:
    """Samples and scores completions, measures them and returns the verdict; collective.

    Args:
        progress, interruptible: see `sample_and_score`.

    Raises:
        TrainingError, Interrupted: see `sample_and_score`.
    """
    scored = sample_and_score(policy, size, progress, interruptible)
    eos_ids = {
        *loading.eos_ids(policy.logprobs.model.generation_config, policy.tokenizer),
        *policy.recipe.generation.stop_token_ids,
    }
    measured = measure(policy.recipe, scored, size, eos_ids)
    return ProbeResult(measured, judge(policy.recipe, measured), scored.groups)
