"""Names the files and folders of a run. Imports nothing slow.

recipe.yaml, command.txt              the recipe and the command line
metrics.jsonl                         one flat object for each step
checkpoints/step-N/                   a model folder; its training/ is needed to resume
checkpoints/step-N.interrupted/       the checkpoint of a run that ended in the middle of step N+1
checkpoints/step-N.tmp/               a checkpoint being written; the next one removes those of
                                      killed runs
checkpoints/step-N.replaced/          a checkpoint that is being replaced
checkpoints/step-N.old/               a checkpoint after the one from which a run was resumed; only
                                      overwrite=true removes it
logs/rank-N.log                       output of all processes except the first
.lock, .job                           the process that writes here, and its torchruns (`lock`)
.run_id                               a random name, by which `provenance` knows one's own runs
alarms.jsonl                          one object for each alarm
plan.json                             predicted and measured memory and time
status.json                           the run's current activity
completions/step-N.parquet            samples of the completions
replay/step-N/                        a step's data for `grpo replay`
eval/step-N/                          results of `grpo eval`
summary.json, report.html             final results
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from grpo_cli.config.sources import ADAPTER_CONFIG
from grpo_cli.errors import UserError

TRAINING = "training"
STATE = f"{TRAINING}/state.pt"
PARTIAL = ".tmp"  # suffix of a checkpoint that is being written
RUN_ID = ".run_id"

# The files that `overwrite=true` removes.
RUN_FILES = (
    "recipe.yaml",
    "command.txt",
    "metrics.jsonl",
    "alarms.jsonl",
    "plan.json",
    "status.json",
    "summary.json",
    "report.html",
    ".job",
    RUN_ID,
)
RUN_PARTS = (
    "checkpoints/step-*",
    "completions/step-*.parquet",
    "eval/step-*",
    "replay/step-*",
    "tensorboard/*",
)


def shown(path: str | Path) -> str:
    """Formats a path: relative to the working directory, if it lies below it."""
    folder = Path.cwd()
    return str(Path(path).relative_to(folder)) if Path(path).is_relative_to(folder) else str(path)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Returns the path of a run's checkpoint after `step` steps."""
    return folder / "checkpoints" / f"step-{step}"


def steps_saved(folder: Path) -> list[int]:
    """Returns the steps of a run's complete checkpoints, in order."""
    return _steps_in(folder / "checkpoints")


def _steps_in(folder: Path) -> list[int]:
    names = (p.name for p in folder.glob("step-*"))
    return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"step-(\d+)", name)))


KEPT = "replay"  # folder of the steps that `grpo replay` recomputes


def kept_path(folder: Path, step: int) -> Path:
    """Returns the folder of a step kept by a run (log.keep_steps), counted from 1."""
    return folder / KEPT / f"step-{step}"


def steps_kept(folder: Path) -> list[int]:
    """Returns the steps that a run has kept for `grpo replay`, in order."""
    return _steps_in(folder / KEPT)


INTERRUPTED = ".interrupted"
REPLACED = ".replaced"  # suffix while another checkpoint takes its name


def interrupted_path(folder: Path, step: int) -> Path:
    """Returns the path of the checkpoint of a run that was interrupted after `step` steps."""
    return folder / "checkpoints" / f"step-{step}{INTERRUPTED}"


def is_interrupted(path: Path) -> bool:
    """Returns whether a checkpoint was written in the middle of a step."""
    return path.name.endswith(INTERRUPTED)


def resumable(folder: Path) -> list[Path]:
    """Returns the checkpoints from which a run could resume, if complete, latest step first.

    A checkpoint that `recover` must restore first is included under its restored name.
    """
    pattern = re.compile(rf"step-\d+({re.escape(INTERRUPTED)})?")
    names = {p.name.removesuffix(REPLACED) for p in (folder / "checkpoints").glob("step-*")}
    paths = [folder / "checkpoints" / name for name in names if pattern.fullmatch(name)]
    paths = [p for p in paths if has_training_state(p) or not is_model(p)]  # else a model alone
    return sorted(paths, key=lambda path: (step_of(path), is_interrupted(path)), reverse=True)


def recover(folder: Path) -> None:
    """Restores a checkpoint whose replacement was interrupted between two renames.

    Only the main process of the run that holds the folder's lock may call it, since it could undo a
    replacement in progress.
    """
    for aside in (folder / "checkpoints").glob(f"*{REPLACED}"):
        path = aside.with_name(aside.name.removesuffix(REPLACED))
        with contextlib.suppress(FileNotFoundError):
            remove(aside) if path.exists() else aside.rename(path)


def step_of(path: Path) -> int:
    """Returns the N of a path named step-N...; -1 for other names."""
    match = re.match(r"step-(\d+)", path.name)
    return int(match[1]) if match else -1


def is_model(path: Path) -> bool:
    """Returns whether a folder holds a model, or an adapter that names its model.

    Raises:
        UserError: a file in it is a pipe, which would block its reader.
    """
    has_config = any((path / n).is_file() for n in ("config.json", ADAPTER_CONFIG))
    if has_config and (pipes := [file for file in path.iterdir() if file.is_fifo()]):
        raise UserError(f"{pipes[0]}: cannot be read: it is not a plain file.")
    return has_config and any(path.glob("*.safetensors"))


def has_shards(path: Path) -> bool:
    """Returns whether a checkpoint holds a run's tensors in shards."""
    return (path / TRAINING / "shards").is_dir()


def has_training_state(path: Path) -> bool:
    """Returns whether a run can resume from this checkpoint."""
    return (path / STATE).is_file()


def holds_run(folder: Path) -> bool:
    """Returns whether a run has finished a first step in this folder."""
    metrics = folder / "metrics.jsonl"
    has_metrics = metrics.is_file() and metrics.stat().st_size > 0
    return has_metrics or any(folder.glob("checkpoints/step-*"))


def remove(path: Path) -> None:
    """Removes a file, a folder or a link; a link's target is kept."""
    is_folder = path.is_dir() and not path.is_symlink()
    shutil.rmtree(path) if is_folder else path.unlink()


def discard_run(folder: Path) -> None:
    """Removes a run's files from its folder, and nothing else."""
    check_no_links(folder)
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)
    for path in [p for part in RUN_PARTS for p in folder.glob(part)]:
        remove(path)


def check_no_links(folder: Path) -> None:
    """Raises a UserError if a folder of the run is a link, since its files may not be the run's."""
    for inner in sorted({folder / part.partition("/")[0] for part in RUN_PARTS}):
        if inner.is_symlink():
            raise UserError(
                f"overwrite: {inner} is a link to {os.readlink(inner)}; overwrite=true deletes "
                "nothing behind a link: remove the link, or what it leads to, yourself."
            )


def evaluation_folder(model: str) -> Path:
    """Returns `RUN/eval/step-N` for a run's checkpoint, `outputs/eval/NAME` for another model."""
    path = Path(model)
    if path.parent.name == "checkpoints":
        return path.parent.parent / "eval" / path.name
    return Path("outputs/eval") / path.name


def looks_local(path: str) -> bool:
    """Returns whether a model name can only be a path; hub names are `name` or `owner/name`."""
    parts = Path(path).parts
    return path.startswith((".", "/", "~")) or len(parts) > 2 or Path(parts[0]).is_dir()
