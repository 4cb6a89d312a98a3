"""What lies where in the folder of a run. Imports nothing heavy.

recipe.yaml, command.txt              what was asked for
metrics.jsonl                         one flat object a step
checkpoints/step-N/                   a model folder; training/ in it is what a resume needs
checkpoints/step-N.interrupted/       the same of a run that had to end in the middle of step N+1
checkpoints/step-N.tmp/               one that is being written; what a killed run left goes with
                                      the next one
checkpoints/step-N.replaced/          one whose name another is just taking
checkpoints/step-N.old/               one beyond that which a run went on from; nothing removes it
                                      but overwrite=true
logs/rank-N.log                       what processes but the first have printed
.lock, .job                           who writes here, and whose processes (`lock`)
completions/step-N.parquet            samples of what was written
eval/step-N/                          what `grpo eval` found
summary.json, curves.png              how it ended
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

TRAINING = "training"

# What a run leaves behind; `overwrite=true` removes these and nothing else.
RUN_FILES = ("recipe.yaml", "command.txt", "metrics.jsonl", "summary.json", "curves.png", ".job")
RUN_PARTS = (
    "checkpoints/step-*",
    "completions/step-*.parquet",
    "eval/step-*",
    "tensorboard/*",
)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` of the run in `folder` lies."""
    return folder / "checkpoints" / f"step-{step}"


def steps_saved(folder: Path) -> list[int]:
    """Steps of which the run in `folder` has a whole checkpoint, in order."""
    names = (p.name for p in (folder / "checkpoints").glob("step-*"))
    return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"step-(\d+)", name)))


INTERRUPTED = ".interrupted"
REPLACED = ".replaced"  # while another takes its name


def interrupted_path(folder: Path, step: int) -> Path:
    """Where a run that was broken off after `step` steps, in the next one, is kept."""
    return folder / "checkpoints" / f"step-{step}{INTERRUPTED}"


def is_interrupted(path: Path) -> bool:
    """Whether a checkpoint is of a step that was broken off."""
    return path.name.endswith(INTERRUPTED)


def resumable(folder: Path) -> list[Path]:
    """Checkpoints that a run could go on from if they are whole, the furthest first.

    Also one that `recover` has to put back first, by the name that it then has.
    """
    names = re.compile(rf"step-\d+({re.escape(INTERRUPTED)})?")
    there = (p.name.removesuffix(REPLACED) for p in (folder / "checkpoints").glob("step-*"))
    found = [folder / "checkpoints" / name for name in {*there} if names.fullmatch(name)]
    return sorted(found, key=lambda path: (step_of(path), is_interrupted(path)), reverse=True)


def recover(folder: Path) -> None:
    """Puts back a checkpoint whose replacement was killed between two renames.

    For the main process of the run that holds the folder's lock, and for no other: it could undo
    a replacement that is under way.
    """
    for aside in (folder / "checkpoints").glob(f"*{REPLACED}"):
        path = aside.with_name(aside.name.removesuffix(REPLACED))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(aside) if path.exists() else aside.rename(path)


def step_of(path: Path) -> int:
    """The N of a file or folder called step-N; -1 for another."""
    found = re.match(r"step-(\d+)", path.name)
    return int(found[1]) if found else -1


def is_model(path: Path) -> bool:
    """Whether transformers could load a model from this folder."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def has_training_state(path: Path) -> bool:
    """Whether a run can go on from this checkpoint."""
    return (path / TRAINING / "state.pt").is_file()


def holds_run(folder: Path) -> bool:
    """Whether a run got as far as a first step in this folder."""
    metrics = folder / "metrics.jsonl"
    has_metrics = metrics.is_file() and metrics.stat().st_size > 0
    return has_metrics or any(folder.glob("checkpoints/step-*"))


def discard_run(folder: Path) -> None:
    """Removes what a run left in its folder, and nothing else."""
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)
    for path in [p for part in RUN_PARTS for p in folder.glob(part)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def evaluation_folder(model: str) -> Path:
    """`RUN/eval/step-N` for a run's checkpoint, `outputs/eval/NAME` for another model."""
    path = Path(model)
    if path.parent.name == "checkpoints":
        return path.parent.parent / "eval" / path.name
    return Path("outputs/eval") / path.name


def looks_local(path: str) -> bool:
    """Whether a model name can only be a path: hub names are `name` or `owner/name`."""
    parts = Path(path).parts
    return path.startswith((".", "/", "~")) or len(parts) > 2 or Path(parts[0]).is_dir()


def cache_dir() -> Path:
    """Where built models and servers' logs are kept: $GRPO_CACHE, or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("GRPO_CACHE", f"{base}/grpo")).expanduser()
