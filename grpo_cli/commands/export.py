"""`grpo export CHECKPOINT FOLDER`: writes a plain model folder from a checkpoint, sharded or not.

Tensors are read one by one and written in files of at most 5 GB. It needs the memory of one file,
or of one layer of a mixture of experts, whose stored form differs from the published one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from grpo_cli.checkpoints import checkpointer, lookup, manifest, model_folder, paths, provenance
from grpo_cli.checkpoints.shards import Shards
from grpo_cli.config import sources
from grpo_cli.config.knob import knob
from grpo_cli.config.user_code import off_import_path
from grpo_cli.config.words import described, option, options_as_words, parse, split
from grpo_cli.errors import TrainingError, UserError, first_line, typed_line
from grpo_cli.files import read_yaml, reading
from grpo_cli.models import adapters, loading
from grpo_cli.models.settings import Model

USAGE = """\
grpo export CHECKPOINT FOLDER [--dtype=NAME] [--merge]

Writes the model of a checkpoint as a plain model folder, which transformers,
vLLM and others load. Of a checkpoint with an adapter it writes the adapter,
which peft and vLLM load beside the model.

  CHECKPOINT               Checkpoint such as outputs/NAME/checkpoints/step-100,
                           or outputs/NAME for the newest checkpoint of a run.
                           An interrupted step, step-100.interrupted, is only
                           exported when it is named.
  FOLDER                   Folder to write; it must be new or empty.
"""


Tensors = Iterator[tuple[str, Tensor]]  # with the names that the model is published with
READ = ("trust_remote_code", "quantization", "dtype", "tokenizer")  # keys of model


@dataclass
class ExportOptions:
    """The options of `grpo export`."""

    dtype: str | None = knob(
        None,
        "Type of the exported weights; default: the type that they were saved in.",
        choices=("float32", "bfloat16", "float16"),
    )
    merge: bool = knob(
        False,
        "Write the model with its adapter merged in, in place of the adapter. The sum is made in "
        "float32, and is not quantized.",
    )
    trust: bool = knob(
        False,
        "Run the code that comes with the model, and load the model that an adapter names, though "
        "another user has made the checkpoint.",
    )


HELP = USAGE + described(ExportOptions, dashes=True)


def main(argv: list[str]) -> None:
    """Checks the command line, exports the model and prints the new folder."""
    own, rest = split(ExportOptions, options_as_words(ExportOptions, argv, "grpo export"))
    settings = parse(ExportOptions, own, option)
    if len(rest) != 2:
        raise UserError(
            "grpo export: give a checkpoint and a new folder, such as "
            f"outputs/NAME/checkpoints/step-100 my-model; got {' '.join(rest) or 'nothing'}."
        )
    given, out = rest
    path = find_checkpoint(given)
    dtype = None if settings.dtype is None else getattr(torch, settings.dtype)
    folder, is_own = Path(out).expanduser(), provenance.is_own(path)
    trust = settings.trust or is_own
    with off_import_path(not trust):
        total, files = export(path, folder, dtype, trust, settings.merge)
    if is_own:
        provenance.note_own(folder)
    number = f"{files} files" if files > 1 else "one file"
    print(f"{path}: exported to {out} ({manifest.in_words(total)} of weights in {number})")


def find_checkpoint(given: str) -> Path:
    """Returns the folder itself if it is a checkpoint, or the newest checkpoint of a run.

    Raises:
        UserError: there is no checkpoint.
    """
    if (found := lookup.find_checkpoint(given)) is not None:
        return found
    if Path(given).expanduser().exists():
        raise UserError(
            f"checkpoint = {given}: is no checkpoint, and holds no checkpoints/step-N either."
        )
    raise lookup.no_such_folder("checkpoint", given)


def export(
    path: Path,
    out: Path,
    dtype: torch.dtype | None = None,
    trust: bool = False,
    merge: bool = False,
) -> tuple[int, int]:
    """Writes the model of the checkpoint `path` to the folder `out`.

    Args:
        trust: whether to apply all of the checkpoint's own recipe.
        merge: write the model with its adapter merged in, in place of the adapter.

    Returns:
        (bytes of weights, files of weights).

    Raises:
        UserError: the checkpoint is damaged, `out` is not empty, or there is nothing to merge.
        TrainingError: the folder could not be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there already, and not empty; give another folder.")
    is_adapter, is_sharded = sources.is_adapter(path), paths.has_shards(path)
    if merge and not is_adapter:
        raise UserError(f"--merge: {path} holds no adapter; export it without.")
    if not trust:
        provenance.check_model_links(path)
    if is_sharded or (path / manifest.MANIFEST).exists():
        manifest.check(path)
    was_there = out.exists()
    loads = merge or (is_sharded and not is_adapter)
    if loads and not trust:
        check_recipe(path)
    try:
        with tempfile.TemporaryDirectory(prefix="grpo-") as made:
            if merge:
                tensors, files = merged(path, Path(made), dtype)
            elif loads:
                tensors, files = sharded(path, dtype)
            else:
                tensors, files = stored(path), path
            out.mkdir(parents=True, exist_ok=True)
            each = (
                (name, tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)
                for name, tensor in tensors
            )
            if is_adapter and not merge:
                name = adapters.WEIGHTS
                written = {name: model_folder.write_safetensors(out / name, dict(each))}
            else:
                written = model_folder.write_weights(out, each)
            # The config last: without one, an incomplete folder is not a model.
            copy_others(files, out, dtype)
    except BaseException as error:  # also a Ctrl-C
        if was_there:  # perhaps a link or a mount
            for left in out.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        else:
            shutil.rmtree(out, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise TrainingError(f"{path}: could not be exported to {out}: {error}.") from error
    weights = [entry for name, entry in written.items() if name.endswith(".safetensors")]
    return sum(entry.bytes for entry in weights), len(weights)


def copy_others(files: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Copies the files beside the weights, with the type of the weights in the config."""
    found = (p for p in sorted(files.rglob("*")) if p.suffix != ".safetensors")
    names = [p.relative_to(files) for p in found if p.is_file()]
    names = [n for n in names if n.parts[0] != paths.TRAINING and n.name != model_folder.INDEX]
    for name in sorted(names, key=lambda name: name.name in ("config.json", adapters.CONFIG)):
        data = (files / name).read_bytes()
        if dtype is not None and str(name) == "config.json":
            data = model_folder.with_dtype(data, dtype)
        manifest.write_file(out / name, data)


def stored(path: Path) -> Tensors:
    """Yields the tensors of a plain model folder, or of an adapter's folder."""
    for file in sorted(path.glob("*.safetensors")):
        with reading(file), safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def sharded(path: Path, dtype: torch.dtype | None) -> tuple[Tensors, Path]:
    """Returns the tensors of a sharded checkpoint, as published, and the folder of other files.

    Args:
        dtype: that of the tensors; None: as the model was loaded from.
    """
    try:
        shards = Shards(path)
    except Exception as error:  # a torn or forged index can raise anything
        raise UserError(
            f"checkpoint = {path}: the index of its shards cannot be read: {typed_line(error)}"
        ) from error
    separate = path / checkpointer.MODEL
    files = separate if separate.is_dir() else path
    # The model on the meta device defines how its weights are published.
    code = {"trust_remote_code": trained_model(path).get("trust_remote_code", False)}
    try:
        config = transformers.AutoConfig.from_pretrained(files, **code)
        with torch.device("meta"):
            skeleton = loading.auto_class(config).from_config(config, **code)
        skeleton.stored_dtype = dtype or config.dtype
    except (ValueError, ImportError, KeyError) as error:
        raise UserError(f"{files}/config.json: cannot be loaded: {first_line(error)}") from error
    names = shards.names("model")
    return model_folder.as_published(skeleton, names, checkpointer.StoredModel(shards, {})), files


def check_recipe(path: Path) -> None:
    """Raises a UserError if loading another user's model needs settings that are not trusted."""
    read = {key: value for key, value in trained_model(path).items() if key in READ}
    asked = provenance.refused({"model": read}, path)
    provenance.check(path, [*asked, *provenance.refused_base(path)], "--trust=true")


def trained_model(path: Path) -> dict[str, Any]:
    """Returns the settings below `model` in the recipe of a checkpoint; {} if it stores none."""
    if not (path / provenance.RECIPE).is_file():  # an adapter from elsewhere
        return {}
    return read_yaml(path / provenance.RECIPE).get("model") or {}


def merged(path: Path, made: Path, dtype: torch.dtype | None) -> tuple[Tensors, Path]:
    """Returns the tensors of the model with its adapter merged in, and the folder of other files.

    The model must fit in memory. If it was quantized in training, it is quantized again from the
    same dtype and dequantized, since the adapter has learnt to correct these weights.

    Args:
        made: empty folder, which the other files are written to.
        dtype: that of the tensors; None: as in the files of the base model.
    """
    trained = trained_model(path)
    kept = {key: trained[key] for key in ("trust_remote_code", "tokenizer") if key in trained}
    if (path / "tokenizer_config.json").is_file():  # with the chat template of the training
        kept["tokenizer"] = str(path)
    config = Model(dtype="auto", dropout=None, **kept)
    config.dtype = loading.stored_dtype(config, path)
    dtype = dtype or getattr(torch, config.dtype)
    config.quantization = trained.get("quantization", config.quantization)
    if config.quantization == "none" and dtype == torch.float32:
        config.dtype = "float32"  # a sum is rounded to the dtype of the loaded weight
    if config.quantization != "none" and trained.get("dtype", "auto") != "auto":
        config.dtype = trained["dtype"]
    model, tokenizer = loading.load(config, path)
    tensors = {name: weight.to(dtype) for name, weight in adapters.merged(model, dtype)}
    vision = loading.load_vision(config, path, tokenizer)
    files = model_folder.files_of(model, vision or tokenizer)
    files["config.json"] = model_folder.with_dtype(files["config.json"], dtype)
    for name, data in files.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(data)
    return model_folder.as_published(model, tensors, tensors), made
