"""`grpo export CHECKPOINT FOLDER`: a plain model folder from a checkpoint, sharded or not.

It reads tensor by tensor and writes files of at most 5 GB, so that memory for one of them is enough
(and for a layer of a mixture of experts, which is kept in another form than it is published in).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from grpo_cli import checkpoint, folders, manifest, plain
from grpo_cli.errors import TrainingError, UserError, nearest
from grpo_cli.shards import SHARDS, Shards

USAGE = """\
grpo export CHECKPOINT FOLDER [--dtype=NAME]

Writes the model of a checkpoint as a plain folder, which transformers, vLLM and others load.

  CHECKPOINT     such as outputs/NAME/checkpoints/step-100, or outputs/NAME for its newest (not
                 step-100.interrupted, the model in the middle of step 101: it has to be named)
  FOLDER         must be new or empty
  --dtype=NAME   float32, bfloat16 or float16; without it the weights stay as they were saved
"""
DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str]) -> None:
    """Checks what is asked for, exports it, and says what was written."""
    if not argv or {"-h", "--help"} & {*argv}:
        print(USAGE, end="")
        return
    given, out, dtype = parse(argv)
    path = find_checkpoint(given)
    total, files = export(path, Path(out).expanduser(), dtype)
    number = f"{files} files" if files > 1 else "one file"
    print(f"{path}: exported to {out} ({manifest.in_words(total)} of weights in {number})")


def parse(argv: list[str]) -> tuple[str, str, torch.dtype | None]:
    """Checkpoint, folder and type that the command line asks for."""
    words, dtype = list(argv), None
    for word in [w for w in argv if w.startswith("-")]:
        option, equals, value = word.partition("=")
        if option != "--dtype":
            raise UserError(f"grpo export: {word}: there is no such option; there is --dtype.")
        at = words.index(word)
        if not equals:
            value = words.pop(at + 1) if at + 1 < len(words) else ""
        words.pop(at)
        if value not in DTYPES:
            raise UserError(f"--dtype = {value or 'nothing'}: must be one of {', '.join(DTYPES)}.")
        dtype = getattr(torch, value)
    if len(words) != 2:
        raise UserError(
            "grpo export: give a checkpoint and a new folder, such as "
            f"outputs/NAME/checkpoints/step-100 my-model; got {' '.join(words) or 'nothing'}."
        )
    return words[0], words[1], dtype


def find_checkpoint(given: str) -> Path:
    """The checkpoint that is meant: the folder itself, or the newest of a run's after a whole step.

    Raises:
        UserError: there is none.
    """
    path = Path(given).expanduser()
    if (path / SHARDS).is_dir() or folders.is_model(path):
        return path
    if saved := folders.steps_saved(path):
        return folders.checkpoint_path(path, saved[-1])
    if path.exists():
        raise UserError(
            f"checkpoint = {given}: is no checkpoint, and holds no checkpoints/step-N either."
        )
    beside = [str(p) for p in path.parent.glob("*")] if path.parent.is_dir() else []
    raise UserError(f"checkpoint = {given}: there is no such folder.{nearest(given, beside)}")


def export(path: Path, out: Path, dtype: torch.dtype | None = None) -> tuple[int, int]:
    """Writes the model of the checkpoint `path` to the folder `out`.

    Returns:
        (bytes of weights, files of weights).

    Raises:
        UserError: the checkpoint is damaged, or there is something in `out`.
        TrainingError: it could not be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there already, and not empty; give another folder.")
    is_sharded = (path / SHARDS).is_dir()
    if (is_sharded or (path / manifest.MANIFEST).exists()) and (wrong := manifest.verify(path)):
        beside = sorted(path.parent.glob("step-*"), key=folders.step_of)
        names = ", ".join(p.name for p in beside if p.name != path.name) or "none"
        raise UserError(f"checkpoint = {path}: {wrong}; beside it lie {names}.")
    existing = next(p for p in (out, *out.absolute().parents) if p.exists())
    was_there = out.exists()
    needed = 0
    try:
        source = Sharded(path) if is_sharded else Whole(path)
        needed = sum(source.nbytes(name, dtype) for name in source.names)
        manifest.check_space(existing, needed)
        out.mkdir(parents=True, exist_ok=True)
        each = ((name, t.to(exported(t.dtype, dtype))) for name, t in source.tensors())
        written = plain.write_weights(out, each)
        # The config last: without one, a folder that was left half-way is no model.
        copy_others(source.files, out, dtype)
    except BaseException as error:  # a Ctrl-C too
        if was_there:
            for left in out.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        else:
            shutil.rmtree(out, ignore_errors=True)
        if not isinstance(error, OSError | SafetensorError):
            raise
        why = manifest.reason(error, existing, needed)
        raise TrainingError(f"{path}: could not be exported to {out}: {why}.") from error
    weights = [entry for name, entry in written.items() if name.endswith(".safetensors")]
    return sum(entry.bytes for entry in weights), len(weights)


def exported(kept: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The type that tensors of the type `kept` are exported in."""
    return dtype if dtype is not None and kept.is_floating_point else kept


def copy_others(files: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Copies what lies beside the weights; the config says of which type these are."""
    names = [p.relative_to(files) for p in sorted(files.rglob("*")) if p.is_file()]
    names = [n for n in names if n.parts[0] != folders.TRAINING and not is_weights(n)]
    for name in sorted(names, key=lambda name: name.name == "config.json"):
        data = (files / name).read_bytes()
        if dtype is not None and str(name) == "config.json":
            config = json.loads(data) | {"dtype": str(dtype).removeprefix("torch.")}
            data = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
        manifest.write_file(out / name, data)


def is_weights(name: Path) -> bool:
    return name.suffix == ".safetensors" or name.name == plain.INDEX


class Sharded:
    """A checkpoint's model, read from its shards."""

    def __init__(self, path: Path) -> None:
        self.path, self.stored = path, Shards(path)
        self.names = self.stored.names("model")
        separate = path / checkpoint.MODEL
        self.files = separate if separate.is_dir() else path

    def nbytes(self, name: str, dtype: torch.dtype | None) -> int:
        """Of a tensor, in the type that it is exported in."""
        stored = self.stored.tensors[f"model.{name}"]
        return stored.size.numel() * exported(stored.properties.dtype, dtype).itemsize

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """One after another, with the names that the model is published with."""
        return plain.as_published(self.skeleton(), self.names, checkpoint.Model(self.stored, {}))

    def skeleton(self) -> PreTrainedModel:
        """The model without tensors: it knows how its weights are published."""
        recipe = self.path / folders.TRAINING / "recipe.yaml"
        model = (yaml.safe_load(recipe.read_text("utf-8")) or {}).get("model") or {}
        trusted = bool(model.get("trust_remote_code", False))
        trust = {"trust_remote_code": trusted}
        try:
            config = transformers.AutoConfig.from_pretrained(self.files, **trust)
            with torch.device("meta"):
                skeleton: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
                    config, **trust
                )
        except (ValueError, ImportError, KeyError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(f"{self.files}/config.json: cannot be loaded: {first}") from error
        return skeleton


class Whole:
    """A plain model folder: that of a checkpoint of an earlier version, or any other."""

    def __init__(self, path: Path) -> None:
        self.files = path
        self.where: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                self.where |= dict.fromkeys(opened.keys(), file)
        self.names = list(self.where)

    def nbytes(self, name: str, dtype: torch.dtype | None) -> int:
        """Of a tensor, in the type that it is exported in."""
        with safe_open(self.where[name], "pt") as opened:
            part = opened.get_slice(name)
            kept = next(t for t, known in plain.DTYPES.items() if known == part.get_dtype())
            return int(math.prod(part.get_shape())) * exported(kept, dtype).itemsize

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """One after another."""
        for name, file in self.where.items():
            with safe_open(file, "pt") as opened:
                yield name, opened.get_tensor(name)
