"""Names the files and folders of a run. Imports nothing heavy.

recipe.yaml, command.txt              the recipe and the command line
metrics.jsonl                         one flat object for each step
checkpoints/step-N/                   a model folder; training/ in it holds what a resume needs
checkpoints/step-N.interrupted/       the checkpoint of a run that ended in the middle of step N+1
checkpoints/step-N.tmp/               a checkpoint being written; the next one removes what a killed
                                      run has left
checkpoints/step-N.replaced/          a checkpoint that is being replaced
checkpoints/step-N.old/               a checkpoint after the one from which a run was resumed; only
                                      overwrite=true removes it
logs/rank-N.log                       output of all processes except the first
.lock, .job                           the process that writes here, and its torchruns (`lock`)
.run_id                               a random name, by which `provenance` knows one's own runs
alarms.jsonl                          one object for each alarm
plan.json, probe.json                 what was predicted, and measured, of memory, time and signal
status.json                           what the run does at the moment
completions/step-N.parquet            samples of the completions
replay/step-N/                        what `grpo replay` needs of a step
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
RUN_ID = ".run_id"

# The files that `overwrite=true` removes.
RUN_FILES = (
    "recipe.yaml",
    "command.txt",
    "metrics.jsonl",
    "alarms.jsonl",
    "plan.json",
    "status.json",
    "probe.json",
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
    """Returns a path for people: from the working directory, if it lies below it."""
    folder = Path.cwd()
    return str(Path(path).relative_to(folder)) if Path(path).is_relative_to(folder) else str(path)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Returns the path of a run's checkpoint after `step` steps."""
    return folder / "checkpoints" / f"step-{step}"


def steps_saved(folder: Path) -> list[int]:
    """Returns the steps of a run's complete checkpoints, in order."""
    names = (p.name for p in (folder / "checkpoints").glob("step-*"))
    return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"step-(\d+)", name)))


KEPT = "replay"  # the folder of the steps that `grpo replay` recomputes


def kept_path(folder: Path, step: int) -> Path:
    """Returns the path of what a run keeps of step `step`, counted from 1 (log.keep_steps)."""
    return folder / KEPT / f"step-{step}"


def steps_kept(folder: Path) -> list[int]:
    """Returns the steps that a run has kept for `grpo replay`, in order."""
    names = (p.name for p in (folder / KEPT).glob("step-*"))
    return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"step-(\d+)", name)))


INTERRUPTED = ".interrupted"
REPLACED = ".replaced"  # while another takes its name


def interrupted_path(folder: Path, step: int) -> Path:
    """Returns the path of the checkpoint of a run that was interrupted after `step` steps."""
    return folder / "checkpoints" / f"step-{step}{INTERRUPTED}"


def is_interrupted(path: Path) -> bool:
    """Whether a checkpoint was made in the middle of a step."""
    return path.name.endswith(INTERRUPTED)


def resumable(folder: Path) -> list[Path]:
    """Returns the checkpoints from which a run could resume, if complete, the furthest first.

    It includes one that `recover` has to restore first, by the name that it then has.
    """
    pattern = re.compile(rf"step-\d+({re.escape(INTERRUPTED)})?")
    names = {p.name.removesuffix(REPLACED) for p in (folder / "checkpoints").glob("step-*")}
    paths = [folder / "checkpoints" / name for name in names if pattern.fullmatch(name)]
    return sorted(paths, key=lambda path: (step_of(path), is_interrupted(path)), reverse=True)


def recover(folder: Path) -> None:
    """Restores a checkpoint whose replacement was killed between two renames.

    Only the main process of the run that holds the folder's lock may call it: it could undo a
    replacement under way.
    """
    for aside in (folder / "checkpoints").glob(f"*{REPLACED}"):
        path = aside.with_name(aside.name.removesuffix(REPLACED))
        with contextlib.suppress(FileNotFoundError):
            remove(aside) if path.exists() else aside.rename(path)


def step_of(path: Path) -> int:
    """Returns the N of a file or folder called step-N; -1 for another name."""
    match = re.match(r"step-(\d+)", path.name)
    return int(match[1]) if match else -1


def is_model(path: Path) -> bool:
    """Whether a folder holds a model, or an adapter that names its model."""
    has_config = any((path / n).is_file() for n in ("config.json", ADAPTER_CONFIG))
    return has_config and any(path.glob("*.safetensors"))


def has_shards(path: Path) -> bool:
    """Whether a checkpoint holds the tensors of a run in shards."""
    return (path / TRAINING / "shards").is_dir()


def has_training_state(path: Path) -> bool:
    """Whether a run can resume from this checkpoint."""
    return (path / TRAINING / "state.pt").is_file()


def holds_run(folder: Path) -> bool:
    """Whether a run has finished a first step in this folder."""
    metrics = folder / "metrics.jsonl"
    has_metrics = metrics.is_file() and metrics.stat().st_size > 0
    return has_metrics or any(folder.glob("checkpoints/step-*"))


def remove(path: Path) -> None:
    """Removes a file, a folder, or a link: what lies behind it stays."""
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
    """Raises a UserError if a folder of the run is a link, whose files may be another's."""
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
    """Whether a model name can only be a path: hub names are `name` or `owner/name`."""
    parts = Path(path).parts
    return path.startswith((".", "/", "~")) or len(parts) > 2 or Path(parts[0]).is_dir()
