"""Folders of made-up runs, as `grpo train` leaves them, for what shows a run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from grpo_cli.config.recipe import Recipe
from grpo_cli.config.saved_recipe import as_yaml
from grpo_cli.data.stored_completions import write_parquet
from grpo_cli.scoring.settings import Reward

HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">'
ALARM = {
    "step": 3,
    "kind": "alarm",
    "name": "length",
    "message": "step 3: twice as long",
    "time": 0,
}
STAGES = {"generate": 0.5, "reward": 0.1, "forward_backward": 0.8, "optimizer": 0.1, "idle": 0.2}


def line(step: int, steps: int) -> dict[str, Any]:
    """Returns a step's metrics: a reward that rises, and an evaluation every fifth step."""
    done = step / steps
    times = {f"time/{name}": seconds * (1 + 0.1 * (step % 3)) for name, seconds in STAGES.items()}
    values = {
        "step": step,
        "learning_rate": 1e-5 * (1 - done / 2),
        "loss": 0.01 * math.sin(step),
        "reward": 0.2 + 0.6 * done,
        "reward_std": 0.3 - 0.1 * done,
        "frac_reward_zero_std": 0.4 * done,
        "completions/mean_length": 40 + 10 * done,
        "completions/clipped_ratio": 0.05,
        "entropy": 1.0 - 0.5 * done,
        "kl": 0.01 * done,
        "grad_norm": 1 + 0.2 * math.cos(step),
        "clip_ratio/region_mean": 0.02,
        "rewards/exact/mean": 0.2 + 0.6 * done,
        "rewards/exact/std": 0.4,
        "rewards/exact/advantage_share": 0.8 - 0.1 * done,
        "rewards/form/mean": 0.5,
        "rewards/form/std": 0.2,
        "rewards/form/advantage_share": 0.2 + 0.1 * done,
        "step_time": 1.8 * (1 + 0.1 * (step % 3)),
        "tokens_per_second": 4000.0 + step,
        "mfu/forward_backward": 0.3,
        "num_tokens": 1000.0 * step,
        **times,
    }
    if step % 5 == 0:
        middle = 0.3 + 0.5 * done
        ends = {"low": middle - 0.05, "high": middle + 0.05}
        values |= {"eval/accuracy": middle, **{f"eval/accuracy_{k}": v for k, v in ends.items()}}
    return values


def completion(step: int, row: int, sample: int, steps: int, text: str) -> dict[str, Any]:
    """Returns a stored completion; each byte of its text is a token.

    Of five rows the first goes from wrong to right and the second from right to wrong.
    """
    late = step > steps / 2
    right = {0: late, 1: not late}.get(row % 5, (step + row + sample) % 2 == 0)
    ids = list(text.encode())
    return {
        "step": step,
        "row": row,
        "sample": sample,
        "prompt": f"question {row}?",
        "completion": text,
        "reward": None if row % 5 == 4 and sample == 0 else float(right),
        "rewards/exact": float(right),
        "rewards/form": 0.5,
        "columns": json.dumps({"answer": str(row)}),
        "advantage": 1.5 if right else -0.5 - 0.01 * row,
        "token_advantages": None,
        "finish_reason": "length" if row % 5 == 3 else "stop",
        "prompt_ids": [1, 2],
        "completion_ids": ids,
        "sampling_logprobs": [-0.03 * (i % 90) for i in range(len(ids))],
    }


def write_run(
    folder: Path,
    steps: int = 10,
    stored: Sequence[int] = (1, 10),
    rows: int = 5,
    samples: int = 2,
    words: int = 6,
    **changes: Any,
) -> Path:
    """Writes a finished run.

    Args:
        stored: steps whose completions are stored. rows: prompts of each of them.
        samples: completions of a prompt. words: of a completion. changes: knobs of the recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rewards = {"exact": Reward("exact_match"), "form": Reward("exact_match", weight=0.5)}
    recipe = Recipe(recipe="made_up", steps=steps, reward=rewards, **changes)
    (folder / "recipe.yaml").write_text(as_yaml(recipe), encoding="utf-8")
    (folder / "command.txt").write_text("grpo train recipe=made_up\n", encoding="utf-8")
    lines = (json.dumps(line(step, steps)) + "\n" for step in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "alarms.jsonl").write_text(json.dumps(ALARM) + "\n", encoding="utf-8")
    write_json(folder / "summary.json", summary(steps))
    write_json(folder / "plan.json", plan())
    draw = random.Random(0)
    for step in stored:
        texts = [" ".join(draw.choices(TEXT.split(), k=words)) for _ in range(rows * samples)]
        write_parquet(
            folder / "completions" / f"step-{step}.parquet",
            [
                completion(step, i // samples, i % samples, steps, text)
                for i, text in enumerate(texts)
            ],
        )
    write_tokenizer(folder / "checkpoints" / f"step-{steps}" / "tokenizer.json")
    return folder


TEXT = "so the number of apples is then three plus four which gives seven therefore"


def summary(steps: int) -> dict[str, Any]:
    ends = {"reward": 0.3, "mean_length": 40.0, "clipped_ratio": 0.0}
    return {
        "recipe": "made_up", "seed": 0, "steps": steps,
        "before": {"accuracy": 0.3, "interval_95": [0.25, 0.36], **ends},
        "after": {"accuracy": 0.8, "interval_95": [0.74, 0.85], **ends},
        "after_step": steps, "best_checkpoint": None, "best_metric": None, "best_value": None,
        "last_checkpoint": f"checkpoints/step-{steps}", "seconds": 2.5 * steps,
        "num_tokens": 1000.0 * steps, "processes": 2, "device": "cuda",
        "machine": {"node": "here", "memory": 2**34}, "versions": {"grpo_cli": "0.1.0"},
    }  # fmt: skip


def plan() -> dict[str, Any]:
    predicted = {
        "memory": {"weights": 2**30, "logits": 2**28}, "peak": 2**31, "peak_stage": "logits",
        "tokens_per_step": 4000, "device": "a GPU",
    }  # fmt: skip
    return {"predicted": predicted, "measured": predicted | {"peak": 2**31 + 2**28}}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_tokenizer(path: Path) -> None:
    """Writes a tokenizer whose tokens are bytes, and their values the ids."""
    vocab = {token: byte for byte, token in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
