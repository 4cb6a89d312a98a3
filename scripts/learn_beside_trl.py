"""Trains the real chat model on sums with grpo and with TRL, and compares their learning curves.

    for loss in dapo grpo; do for side in ours trl; do for seed in 0 1 2; do
    .venv-bench/bin/python scripts/learn_beside_trl.py OUT --loss $loss --side $side --seed $seed
    done; done; done
    .venv/bin/python scripts/learn_beside_trl.py OUT --picture CURVES.svg

Both sides get the model, rows, reward, loss, learning rate and batch of recipe=chat_sums. Every
fifth step, the held-out sums are answered greedily. OUT gets a file for each run. The picture has
the means of the seeds and their 95 % intervals (t distribution), over steps and over the minutes of
training, without evaluation; the figures are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
STEPS, EVERY, PROMPTS, COMPLETIONS, TOKENS, RATE, PARTS = 20, 5, 16, 8, 64, 3e-5, 16
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0},
    "grpo": {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.04, "use_bias_correction_kl": False},
}
T = {2: 12.71, 3: 4.303}  # 97.5 % quantile of the t distribution for so many seeds

Point = tuple[int, float, float]  # step, seconds of training until then, held-out accuracy


def train_ours(args: argparse.Namespace, scratch: Path) -> list[Point]:
    """Trains with `grpo train`; returns the evaluations."""
    words = (
        f"recipe=chat_sums model.path={args.model} loss={args.loss} seed={args.seed} "
        f"steps={STEPS} mixed_precision={args.precision} eval.every={EVERY} "
        f"checkpoint.every=0 log.report=false overwrite=true output_dir={scratch}"
    )
    subprocess.run([sys.executable, "-m", "grpo_cli", "train", *words.split()], check=True)
    summary = json.loads((scratch / "summary.json").read_text(encoding="utf-8"))
    points, seconds = [(0, 0.0, summary["before"]["accuracy"])], 0.0
    for line in map(json.loads, (scratch / "metrics.jsonl").read_text("utf-8").splitlines()):
        seconds += line["step_time"]
        if "eval/accuracy" in line:
            points.append((line["step"], seconds, line["eval/accuracy"]))
    return points


def train_trl(args: argparse.Namespace, scratch: Path) -> list[Point]:
    """Trains with TRL's GRPOTrainer; returns the evaluations."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    from rewards.math import math

    def rows(split: str) -> list[dict[str, Any]]:
        lines = (ROOT / f"grpo_cli/samples/chat_sums_{split}.jsonl").read_text("utf-8").splitlines()
        ask = "{question} End with 'The answer is: N'."
        return [
            {"prompt": [{"role": "user", "content": ask.format(**row)}], "answer": row["answer"]}
            for row in map(json.loads, lines)
        ]

    def reward(completions: list[Any], answer: list[str], **_: Any) -> Any:
        return math([messages[-1]["content"] for messages in completions], answer)

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    held_out = rows("test")
    points: list[Point] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Evaluates, and counts the seconds of training."""

        seconds = 0.0

        def on_train_begin(self, _: Any, state: Any, control: Any, **given: Any) -> None:
            self.evaluate(given["model"], 0)

        def on_step_end(self, _: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step % EVERY == 0:
                self.seconds += time.monotonic() - self.begin
                self.evaluate(given["model"], state.global_step)

        @torch.no_grad()
        def evaluate(self, model: Any, step: int) -> None:
            model.eval()
            texts: list[str] = []
            for start in range(0, len(held_out), 64):
                batch = tokenizer.apply_chat_template(
                    [row["prompt"] for row in held_out[start : start + 64]], padding=True,
                    add_generation_prompt=True, return_dict=True, return_tensors="pt",
                ).to(model.device)  # fmt: skip
                ids = model.generate(**batch, do_sample=False, max_new_tokens=TOKENS)
                own = ids[:, batch["input_ids"].shape[1] :]
                texts += tokenizer.batch_decode(own, skip_special_tokens=True)
            model.train()
            right = math(texts, [row["answer"] for row in held_out])
            points.append((step, self.seconds, statistics.mean(r or 0.0 for r in right)))
            print("step, seconds, held-out accuracy:", *points[-1], flush=True)
            self.begin = time.monotonic()

    config = GRPOConfig(
        output_dir=str(scratch), seed=args.seed, max_steps=STEPS, learning_rate=RATE,
        per_device_train_batch_size=PROMPTS * COMPLETIONS // PARTS,
        gradient_accumulation_steps=PARTS, num_generations=COMPLETIONS,
        max_completion_length=TOKENS, temperature=1.0, lr_scheduler_type="cosine",
        model_init_kwargs={"dtype": "float32"}, bf16=args.precision == "bf16",
        gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(), save_strategy="no",
        logging_steps=1, report_to=[], disable_tqdm=True, **LOSSES[args.loss],
    )  # fmt: skip
    GRPOTrainer(
        model=args.model, reward_funcs=reward, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows("train")), callbacks=[Watch()],
    ).train()  # fmt: skip
    return points


def means(out: Path, loss: str, side: str) -> list[tuple[int, float, list[float], float, float]]:
    """Returns step, mean seconds, accuracies, their mean and half its interval, by evaluation."""
    runs = [json.loads(f.read_text()) for f in sorted(out.glob(f"{loss}-{side}-*.json"))]
    found = []
    for points in zip(*runs, strict=True):
        each = [accuracy for _, _, accuracy in points]
        half = T[len(each)] * statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0
        seconds = statistics.mean(point[1] for point in points)
        found.append((points[0][0], seconds, each, statistics.mean(each), half))
    return found


def draw(out: Path, file: Path) -> None:
    """Draws accuracy over steps and over minutes, and prints it; a bar is the mean's interval."""
    from matplotlib import pyplot

    size: Any = {"figsize": (8, 2.6 * len(LOSSES)), "layout": "tight"}
    figure, rows = pyplot.subplots(len(LOSSES), 2, sharey=True, **size)
    for loss, axes in zip(LOSSES, rows, strict=True):
        axes[0].set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
        axes[1].set(xlabel="minutes of training")
        for side, label in (("ours", "grpo"), ("trl", "TRL")):
            steps, seconds, seeds, middle, half = zip(*means(out, loss, side), strict=True)
            for axis, x in zip(axes, (steps, [s / 60 for s in seconds]), strict=True):
                axis.errorbar(x, middle, half, marker="o", capsize=3, label=label)
            print(loss, label, *zip(steps, seconds, seeds, middle, half, strict=True), sep="\n")
        axes[0].legend(title=f"loss={loss}", loc="lower right")
    figure.savefig(file)


def main() -> None:
    import real_model

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--loss", default="dapo", choices=LOSSES)
    parser.add_argument("--side", default="ours", choices=("ours", "trl"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", default="bf16", choices=("bf16", "no"))
    parser.add_argument("--model", default=str(real_model.folder()))
    parser.add_argument("--picture", type=Path, help="draw the runs in OUT, and train nothing")
    args = parser.parse_args()
    if args.picture:
        draw(args.out, args.picture)
        return
    (args.out / "runs").mkdir(parents=True, exist_ok=True)
    name = f"{args.loss}-{args.side}-{args.seed}"
    points = (train_ours if args.side == "ours" else train_trl)(args, args.out / "runs" / name)
    (args.out / f"{name}.json").write_text(json.dumps(points))


if __name__ == "__main__":
    main()
