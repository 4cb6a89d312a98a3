"""Declares the knobs of environments and episodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_cli.config.knob import above_0, at_least_0, at_least_1, knob

NAME_COLUMN = "environment"  # the column that names the environment of a row


@dataclass
class EnvironmentSettings:
    """The environment that answers the model's turns; each rollout has one of its own."""

    path: str | None = knob(None, "Class of the environment, as my_module:MyClass.")
    args: dict[str, Any] = knob({}, "Arguments that the environment's class is called with.")
    by_name: dict[str, str] = knob(
        {},
        "Several environments in one run: name and class of each. The column `environment` of a "
        "row holds the name of its environment.",
    )
    mcp: str | None = knob(
        None,
        "MCP server whose tools the model may call: a command that speaks MCP on its standard "
        "input and output, or an address (http://...).",
    )
    workers: int | None = at_least_1(
        None, "Worker processes of environments and tools; null: one for each core."
    )
    seconds: float = above_0(30.0, "Wall-clock limit of one reset, one step or one call of a tool.")
    max_failed_share: float = at_least_0(
        0.2,
        "Largest share of a step's rollouts that may be left without a reward because their "
        "environments failed; the run stops above it.",
        le=1,
    )

    @property
    def given(self) -> list[str]:
        """The keys that name the environment."""
        ways = ("path", "by_name", "mcp")
        return [f"environment.{name}" for name in ways if getattr(self, name)]

    def problems(self) -> Iterator[str]:
        """Yields messages about values that contradict one another."""
        if len(self.given) > 1:
            yield f"{' and '.join(self.given)}: each names the environment; set one of them."


@dataclass
class EpisodeSettings:
    """Limits and credit of episodes, in which the model and an environment take turns."""

    max_turns: int | None = at_least_1(
        None,
        "Largest number of turns of the model in an episode; null: as many as fit into "
        "generation.max_completion_tokens.",
    )
    turn_tokens: int | None = at_least_1(
        None, "Length limit of one turn of the model, in tokens; null: none of its own."
    )
    reply_tokens: int = at_least_1(
        512,
        "Length limit of one message of an environment or a tool, in tokens; a longer text is cut "
        "in its middle.",
    )
    order: str = knob(
        "auto",
        "Whether the next turns are sampled together, once all environments have answered, so that "
        "a run repeats to the last bit (repeatable), or each as soon as its own has (eager); auto: "
        "eager with vLLM servers, which repeat nothing, else repeatable.",
        choices=("auto", "repeatable", "eager"),
    )
    credit: str = knob(
        "sum",
        "Advantage of rewards that an environment gives for turns: their sum is the rollout's "
        "reward (sum), or each turn has the rewards from it on against the group's mean (turns).",
        choices=("sum", "turns"),
    )
