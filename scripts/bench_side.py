"""One side of the benchmark, in a process of its own: `python bench_side.py JOB`, by bench.py.

- ours: `grpo train` with the job's recipe; the times are read from its metrics.jsonl.
- trl: TRL with its defaults, one optimizer step a batch. Where it is open what belongs to a stage,
  it is left out: a step is `training_step`, clipping and `optimizer.step`, without loading rows,
  zeroing gradients, schedule and logging; generation is `_generate_single_turn`, without tokenizing
  and decoding; the update is the step without `_prepare_inputs`, which holds generation, rewards
  and all that lies between them.
- generate: `model.generate` on the same prompts, each repeated for its group.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from bench_setup import LORA_ALPHA, Job, reward
from torch import nn

POLL = 1e-3  # seconds between two looks at the resident memory
UPDATE = ("update", "forward_backward", "optimizer")  # stages of time/* that make up the update
METERED = ("update", "forward_backward")  # stages in which memory is looked at


@dataclass
class Step:
    """Holds the measurements of one step."""

    tokens: int = 0  # sampled, of all completions
    shortest: int = 0  # tokens of the shortest completion
    seconds: dict[str, float] = field(default_factory=dict)  # step, generate, update
    memory: int | None = None  # bytes, above weights, gradients and optimizer state


class Probe:
    """Collects the steps of one process, the same on each side."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.base: int | None = None  # bytes that do not count, once the warm-up is over
        self.is_looking = False
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to the newest step. Waits for the GPU at both ends."""
        synchronize(self.device)
        start = time.perf_counter()
        yield
        synchronize(self.device)
        seconds = self.steps[-1].seconds
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def peak(self, model: nn.Module, step: Step) -> Iterator[None]:
        """Notes the most memory that is in use inside, above weights, gradients and optimizer.

        What is in use when a step first comes here does not count: weights and, after the warm-up,
        the optimizer's state. Nor do the gradients, which come into being inside (both sides set
        them to None after a step): their bytes are taken off by formula.
        """
        if self.is_looking:  # a stage within a stage
            yield
            return
        self.is_looking = True
        missing = sum(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None)
        with peak_memory(self.device) as seen:
            yield
        self.is_looking = False
        before, highest = seen
        if step.memory is None:
            self.base = before + missing
        assert self.base is not None
        step.memory = max(step.memory or 0, highest - self.base)


def synchronize(device: torch.device) -> None:
    """Waits for kernels that run on after their launch has returned."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """Gives a list that holds, afterwards, the bytes in use at the start and the most inside.

    On a GPU by torch's own count; else a thread looks at the process's resident memory. It falls
    after memory is freed only with malloc's settings in `bench.py`.
    """
    seen: list[int] = []
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield seen
        torch.cuda.synchronize()
        seen += [before, torch.cuda.max_memory_allocated()]
        return
    process, done = psutil.Process(), threading.Event()
    before = highest = process.memory_info().rss

    def look() -> None:
        nonlocal highest
        while not done.wait(POLL):
            highest = max(highest, process.memory_info().rss)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
    seen += [before, max(highest, process.memory_info().rss)]


def run_ours(job: Job, probe: Probe) -> None:
    """Trains with `grpo train` in this process."""
    from grpo_cli.config import compose, parsing
    from grpo_cli.reporting import stage_clock
    from grpo_cli.training import build, loop, prepare

    folder, w = Path(job.output) / "run", job.workload
    timed: Callable[..., Any] = stage_clock.Clock.stage
    take_step: Callable[..., Any] = loop.take_step

    def counted(*given: Any, **named: Any) -> Any:
        probe.steps.append(Step())
        return take_step(*given, **named)

    def task(cfg: Any) -> None:
        live = build.build(prepare.for_training(parsing.parse(cfg, compose.given_keys(cfg))), [])

        @contextlib.contextmanager
        def metered(clock: stage_clock.Clock, name: str) -> Iterator[None]:
            is_looking = job.metered and name in METERED
            looking = probe.peak(live.policy.model, probe.steps[-1]) if is_looking else None
            with timed(clock, name), looking or contextlib.nullcontext():
                yield

        stage_clock.Clock.stage = metered  # type: ignore[assignment, method-assign]
        loop.take_step = counted
        try:
            loop.train(live)
        finally:
            live.close()
        live.workers.close()

    recipe = Path(job.output) / "recipe.yaml"
    compose.compose_and_call([f"recipe={recipe}", f"output_dir={folder}"], task)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for step, line in zip(probe.steps, map(json.loads, lines), strict=True):
        update = sum(line.get(f"time/{name}", 0.0) for name in UPDATE)
        step.seconds = {"step": line["step_time"], "generate": line["time/generate"]}
        step.seconds["update"] = update
        step.tokens = round(line["completions/mean_length"] * w.prompts * w.generations)
        step.shortest = int(line["completions/min_length"])


def run_trl(job: Job, probe: Probe) -> None:
    """Trains with TRL."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    w, rows = job.workload, job.rows()
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    at_once = w.micro_batch or w.prompts * w.generations
    parts = w.prompts * w.generations // at_once  # forwards of a step

    class Watched(GRPOTrainer):  # type: ignore[misc]
        """A trainer that tells the probe when it does what."""

        def training_step(self, *given: Any, **named: Any) -> Any:
            if self._step % parts == 0:
                probe.steps.append(Step())
            with probe.stage("step"), contextlib.ExitStack() as self.after_inputs:
                return super().training_step(*given, **named)

        def _prepare_inputs(self, batch: Any) -> Any:
            with probe.stage("inputs"):
                inputs = super()._prepare_inputs(batch)
            if job.metered:  # till the end of training_step: forward and backward
                self.after_inputs.enter_context(probe.peak(self.model, probe.steps[-1]))
            return inputs

        def _generate_single_turn(self, prompt_ids: Any, *given: Any, **named: Any) -> Any:
            start = (len(probe.steps) - 1) * w.prompts
            prompts = [row["prompt"] for row in rows[start : start + w.prompts]]
            same = [list(ids) for ids in prompt_ids[:: w.generations]]
            assert same == tokenized(tokenizer, prompts)["input_ids"], "the sides' prompts differ"
            with probe.stage("generate"):
                completions, logprobs = super()._generate_single_turn(prompt_ids, *given, **named)
            note(probe.steps[-1], [len(c) for c in completions])
            return completions, logprobs

        def _clip_grad_norm(self, model: Any) -> Any:
            with probe.stage("step"):
                return super()._clip_grad_norm(model)

    class OptimizerStep(TrainerCallback):  # type: ignore[misc]
        """Times `optimizer.step`, which the trainer calls between these two."""

        def on_pre_optimizer_step(self, *given: Any, **named: Any) -> None:
            self.open = contextlib.ExitStack()
            self.open.enter_context(probe.stage("step"))

        def on_optimizer_step(self, *given: Any, **named: Any) -> None:
            self.open.close()

    adapter = None
    if w.lora_rank:
        from peft import LoraConfig

        adapter = LoraConfig(
            task_type="CAUSAL_LM", r=w.lora_rank, lora_alpha=LORA_ALPHA, target_modules="all-linear"
        )
    config = GRPOConfig(
        output_dir=f"{job.output}/run", per_device_train_batch_size=at_once,
        gradient_accumulation_steps=parts, num_generations=w.generations,
        max_completion_length=w.limit,
        generation_kwargs={"min_new_tokens": w.min_tokens} if w.min_tokens else None,
        temperature=1.0, beta=0.0, learning_rate=1e-7, max_steps=job.steps, shuffle_dataset=False,
        model_init_kwargs={"dtype": "float32"}, bf16=job.bf16, gradient_checkpointing=False,
        use_cpu=probe.device.type == "cpu", logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Watched(
        model=job.model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows),
        callbacks=[OptimizerStep()], peft_config=adapter,
    )  # fmt: skip
    trainer.train()
    for step in probe.steps:
        step.seconds["update"] = step.seconds["step"] - step.seconds.pop("inputs")


def tokenized(tokenizer: Any, prompts: list[Any], **options: Any) -> Any:
    """Returns the tokens of prompts, which are texts or conversations."""
    if isinstance(prompts[0], str):
        return tokenizer(prompts, **options)
    return tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, return_dict=True, **options
    )


@torch.no_grad()
def run_generate(job: Job, probe: Probe) -> None:
    """Calls `model.generate`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    w, rows = job.workload, job.rows()
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    dtype = torch.bfloat16 if job.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).to(probe.device).eval()
    ends = torch.tensor(model.generation_config.eos_token_id, device=probe.device).reshape(-1)
    for number in range(job.steps):
        prompts = [row["prompt"] for row in rows[number * w.prompts : (number + 1) * w.prompts]]
        batch = tokenized(tokenizer, prompts, return_tensors="pt", padding=True).to(probe.device)
        probe.steps.append(Step())
        with probe.stage("generate"):
            ids = model.generate(
                **batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=w.limit, min_new_tokens=w.min_tokens or None,
                num_return_sequences=w.generations,
            )  # fmt: skip
        ended = torch.isin(ids[:, batch["input_ids"].shape[1] :], ends)  # [B, C]
        lengths = ((ended.cumsum(-1) - ended.long()) == 0).sum(-1)  # the first eos is included
        note(probe.steps[-1], lengths.tolist())


def note(step: Step, lengths: list[int]) -> None:
    """Notes the lengths of a step's completions."""
    step.tokens, step.shortest = sum(lengths), min(lengths)


def main() -> None:
    job, probe = pickle.loads(Path(sys.argv[1]).read_bytes()), Probe()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    {"ours": run_ours, "trl": run_trl, "generate": run_generate}[job.side](job, probe)
    found = [asdict(step) for step in probe.steps]
    (Path(job.output) / "result.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
