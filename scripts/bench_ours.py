"""Our side of the benchmark: `python bench_ours.py JOB`, started by bench.py.

What `grpo train` does with the job's recipe, in this process. Times are those of its metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_probe import Probe, Step, check_meter
from bench_setup import Job
from omegaconf import DictConfig

from grpo_cli import train
from grpo_cli.config import compose, parsing
from grpo_cli.generation.base import OnGroup, Request, Work
from grpo_cli.records import Completion, Prompt
from grpo_cli.reporting import stage_clock
from grpo_cli.training import build, prepare

UPDATE = ("update", "forward_backward", "optimizer")  # stages of time/* that make up the update
METERED = ("update", "forward_backward")  # where memory is looked at, as far as they exist


class Watched:
    """A generator that tells the probe what it was given and what it made."""

    def __init__(self, generator: Any, probe: Probe) -> None:
        self.inner, self.probe = generator, probe

    def generate(self, prompts: Sequence[Prompt], *rest: Any, **named: Any) -> Any:
        groups = self.inner.generate(prompts, *rest, **named)
        self.probe.steps.append(Step())
        self.probe.sampled(
            [p.ids for p in prompts], [[len(c.ids) for c in group] for group in groups]
        )
        return groups

    def converse(self, request: Request, hand_over: OnGroup, feed: Any) -> None:
        self.probe.steps.append(Step())
        self.probe.sampled([p.ids for p in request.prompts], [[] for _ in request.prompts])

        def first(number: int, group: list[Completion]) -> None:
            self.probe.steps[-1].lengths[number][1].extend(len(c.ids) for c in group)
            hand_over(number, group)

        self.inner.converse(request, first, Followed(feed, self.probe))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Followed:
    """A feed whose completions the probe is told."""

    def __init__(self, feed: Any, probe: Probe) -> None:
        self.feed, self.probe = feed, probe

    def take(self, **how: Any) -> list[Work]:
        return [self.noted(*work) for work in self.feed.take(**how)]

    def noted(self, request: Request, hand_over: OnGroup) -> Work:
        def take(number: int, group: list[Completion]) -> None:
            self.probe.followed([len(c.ids) for c in group])
            hand_over(number, group)

        return request, take

    def __getattr__(self, name: str) -> Any:
        return getattr(self.feed, name)


def main() -> None:
    job, probe = Job.read(sys.argv[1]), Probe()
    folder = Path(job.output) / "run"
    more: dict[str, Any] = {}

    def task(cfg: DictConfig) -> None:
        recipe = parsing.parse(cfg, compose.given_keys(cfg))
        live = build.build(prepare.for_training(recipe), sys.argv)
        watched: Any = Watched(live.generator, probe)
        live.generator = live.queue.generator = watched
        if job.metered:
            more["meter"] = check_meter(live.workers.device)
            meter_stages(probe, live.policy)
        try:
            train.train(live)
        finally:
            live.close()
        live.workers.close()

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    recipe = Path(job.output) / "recipe.yaml"
    compose.compose_and_call([f"recipe={recipe}", f"output_dir={folder}"], task)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for step, line in zip(probe.steps, lines, strict=True):
        step.seconds = stages(json.loads(line))
    probe.write(job.output, device=str(probe.device), **more)


def stages(line: dict[str, float]) -> dict[str, float]:
    """Seconds of a step's stages, from its line of metrics.jsonl."""
    update = sum(line.get(f"time/{name}", 0.0) for name in UPDATE)
    return {"step": line["step_time"], "generate": line["time/generate"], "update": update}


def meter_stages(probe: Probe, model: torch.nn.Module) -> None:
    """Has the probe look at memory in the stages that hold forward and backward."""
    timed: Callable[..., Any] = stage_clock.Clock.stage

    @contextlib.contextmanager
    def stage(this: stage_clock.Clock, name: str) -> Iterator[None]:
        looking = probe.peak(model) if name in METERED else contextlib.nullcontext()
        with timed(this, name), looking:
            yield

    stage_clock.Clock.stage = stage  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    main()
