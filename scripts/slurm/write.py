"""Writes train.sbatch and train_and_serve.sbatch beside it, as `grpo slurm` does.

python scripts/slurm/write.py
"""

from __future__ import annotations

import shlex
from pathlib import Path

from grpo_cli import slurm

FOLDER = Path(__file__).resolve().parent
ENVIRONMENT = "# source .venv/bin/activate, module load cuda, ...\n:"
COMMON = ["recipe=math_qwen", "nodes=4", "gpus_per_node=8", "time=12:00:00"]
EXAMPLES = {
    "train.sbatch": COMMON,
    "train_and_serve.sbatch": [*COMMON, "vllm_nodes=1", "serve.tensor_parallel=2"],
}


def text_of(name: str) -> str:
    """What the file of this name holds."""
    settings, words = slurm.split_words(EXAMPLES[name])
    place = slurm.Place(
        work_dir='"$SLURM_SUBMIT_DIR"',
        run_dir="outputs/math_qwen/job-$SLURM_JOB_ID",
        log="%x-%j.out",
        python="python",
        setup=ENVIRONMENT,
    )
    return slurm.script(settings, words, place, shlex.join(["grpo", "slurm", *EXAMPLES[name]]))


if __name__ == "__main__":
    for name in EXAMPLES:
        (FOLDER / name).write_text(text_of(name), encoding="utf-8")
        print(f"written: {FOLDER / name}")
