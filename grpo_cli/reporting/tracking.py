"""Sends metrics and completions to trackers in addition to the run's own files.

Most trackers are those of accelerate; those that only transformers has are its callbacks. The
package of a tracker is imported only when it is chosen. A tracker that fails never ends a run.
"""

from __future__ import annotations

import importlib
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.config.schema import Recipe
from grpo_cli.data.stored_completions import IMAGES
from grpo_cli.errors import UserError
from grpo_cli.images import ImageError, StoredImage

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

# The package of each tracker, as it is imported and as pip calls it.
PACKAGES = {
    "aim": ("aim", "aim"),
    "azure_ml": ("azureml.core", "azureml-core"),
    "clearml": ("clearml", "clearml"),
    "codecarbon": ("codecarbon", "codecarbon"),
    "comet_ml": ("comet_ml", "comet_ml"),
    "dagshub": ("dagshub", "dagshub mlflow"),
    "dvclive": ("dvclive", "dvclive"),
    "mlflow": ("mlflow", "mlflow"),
    "neptune": ("neptune", "'neptune<2'"),
    "swanlab": ("swanlab", "swanlab"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "trackio": ("trackio", "trackio"),
    "wandb": ("wandb", "wandb"),
}
OF_TRANSFORMERS = ("azure_ml", "codecarbon", "dagshub", "neptune")  # which accelerate lacks
TABLE = "completions"
PICTURES_SENT = 16  # of a step, to trackers whose tables hold no images
Cell = Sequence[dict[str, Any] | None]  # images of a prompt, as `images_cell` returns them


def require(names: Sequence[str]) -> None:
    """Checks that the packages of trackers are installed.

    Raises:
        UserError: one is not.
    """
    for name in names:
        if name == "none":
            continue
        module, package = PACKAGES[name]
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UserError(
                f"tracking.backend = {name}: the package is not installed; pip install {package}, "
                "or choose another tracker."
            ) from error


class Trackers:
    """The trackers of a run, on its main process; it has none on the others."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._live: dict[str, Any] = {}  # by name
        self._failing: set[str] = set()  # those whose failure the user has read

    def start(
        self, recipe: Recipe, folder: Path, settings: dict[str, Any], known: Mapping[str, str]
    ) -> dict[str, str]:
        """Starts the recipe's trackers.

        Args:
            settings: the recipe, stored with the run.
            known: the trackers' ids of a resumed run, whose curves then continue.

        Returns:
            The trackers' ids of the run, for those that can continue one.

        Raises:
            UserError: a tracker of a new run cannot be started.
        """
        ids = dict(known)
        for name in recipe.tracking.backend:
            if name == "none":
                continue
            try:
                self._live[name] = tracker = _make(name, recipe, folder, settings, ids)
                ids |= _id_of(name, tracker)
            except Exception as error:
                said = f"tracking.backend = {name}: cannot be started: {_first_line(error)}"
                if not known:
                    raise UserError(f"{said}.") from error
                self.say(f"note: {said}; the run continues without it")  # it may run unattended
        return ids

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Sends a step's metrics, each a finite number."""
        # MLflow takes no @ in a name, as in maj@8.
        own = {"mlflow": {key.replace("@", "_at_"): v for key, v in metrics.items()}}
        self._each("metrics", lambda name, one: one.log(own.get(name, metrics), step=step))

    def table(
        self, rows: Sequence[dict[str, Any]], step: int, images: Sequence[Cell] | None = None
    ) -> None:
        """Sends completions as a table, and their images, to the trackers that take them.

        Args:
            rows: cells by column.
            images: the stored images of each row; None: no images are sent.
        """
        if not self._live.keys() & (TABLES.keys() | PICTURES.keys()):
            return
        import pandas

        frame = pandas.DataFrame(rows)
        in_tables = self._live.keys() & CELLS.keys()
        shown = pictures_of(images or [], None if in_tables else PICTURES_SENT)

        def send(name: str, tracker: Any) -> None:
            if name in TABLES:
                own = with_pictures(frame, shown, name) if name in CELLS else frame
                TABLES[name](tracker, own, step)
            if name in PICTURES:
                distinct = {id(one): one for of_row in shown for one in of_row if one is not None}
                for number, picture in enumerate([*distinct.values()][:PICTURES_SENT]):
                    PICTURES[name](tracker, f"{TABLE}/image-{number}", picture, step)

        self._each("completions", send)

    def close(self) -> None:
        """Ends all trackers."""
        self._each("end", lambda name, one: one.finish())
        self._live = {}

    def _each(self, what: str, action: Callable[[str, Any], None]) -> None:
        for name, tracker in self._live.items():
            try:
                action(name, tracker)
            except Exception as error:  # a tracker's own code, and its server
                if name not in self._failing:
                    self.say(
                        f"note: {name} has not taken the run's {what} ({_first_line(error)}); the "
                        "run continues"
                    )
                self._failing.add(name)
            else:
                self._failing.discard(name)


def _make(
    name: str, recipe: Recipe, folder: Path, settings: dict[str, Any], ids: Mapping[str, str]
) -> Any:
    """Starts one tracker; ids are those of a resumed run."""
    project, run_name = recipe.tracking.project, recipe.tracking.name or folder.name
    if name in OF_TRANSFORMERS:
        return _Callback(name, folder, run_name, recipe.steps)
    from accelerate import tracking

    # Its logger raises before accelerate has a state of its own, which is for its process groups.
    tracking.logger = logging.getLogger(tracking.__name__)
    kind = tracking.LOGGER_TYPE_TO_CLASS[name]
    own = ids.get(name)
    arguments: dict[str, dict[str, Any]] = {
        "aim": {"run_name": run_name, "logging_dir": str(folder)},
        "clearml": {"run_name": run_name, "project_name": project, "continue_last_task": own},
        "comet_ml": {"run_name": project, "experiment_key": own},
        "dvclive": {"dir": str(folder / "dvclive"), "save_dvc_exp": False},
        "mlflow": {"experiment_name": project, "run_name": run_name, "run_id": own},
        "swanlab": {"run_name": project, "experiment_name": run_name},
        "tensorboard": {"run_name": "", "logging_dir": str(folder / "tensorboard")},
        "trackio": {"run_name": project, "name": own or run_name, "resume": "allow"},
        "wandb": {
            "run_name": project,
            "name": run_name,
            "id": own or uuid.uuid4().hex[:8],
            "resume": "allow",
        },
    }
    chosen = arguments[name]
    if name in ("trackio", "wandb"):
        chosen["config"] = settings
    tracker = kind(**{key: value for key, value in chosen.items() if value is not None})
    tracker.main_process_only = False  # this is the main process, and accelerate knows of none
    tracker.start()
    if own is None and name not in ("tensorboard", "trackio", "wandb"):  # MLflow's never change
        tracker.store_init_configuration(_flat(settings))
    return tracker


def _id_of(name: str, tracker: Any) -> dict[str, str]:
    """Returns the id by which a tracker continues the run, if it can."""
    found: dict[str, Callable[[], str]] = {
        "clearml": lambda: tracker.task.id,
        "comet_ml": lambda: tracker.writer.get_key(),
        "mlflow": lambda: tracker.active_run.info.run_id,
        "trackio": lambda: tracker.init_kwargs["name"],
        "wandb": lambda: tracker.init_kwargs["id"],
    }
    return {name: str(found[name]())} if name in found else {}


def _table_of_trackio(tracker: Any, frame: Any, step: int) -> None:
    table = importlib.import_module("trackio").Table(dataframe=frame)
    tracker.log({TABLE: table}, step=step)


def _table_of_mlflow(tracker: Any, frame: Any, step: int) -> None:
    importlib.import_module("mlflow").log_table(frame, f"{TABLE}/step-{step}.json")


def _table_of_comet(tracker: Any, frame: Any, step: int) -> None:
    tracker.writer.log_table(f"{TABLE}-step-{step}.csv", frame)


def _log_table(tracker: Any, frame: Any, step: int) -> None:
    tracker.log_table(TABLE, dataframe=frame, step=step)


# The trackers that take tables, with what sends one: (tracker, a data frame, step).
TABLES: dict[str, Callable[[Any, Any, int], None]] = {
    "clearml": _log_table,
    "comet_ml": _table_of_comet,
    "mlflow": _table_of_mlflow,
    "trackio": _table_of_trackio,
    "wandb": _log_table,
}


def _picture_for_tensorboard(tracker: Any, name: str, picture: Picture, step: int) -> None:
    import numpy

    tracker.writer.add_image(name, numpy.asarray(picture), step, dataformats="HWC")


def _picture_for_comet(tracker: Any, name: str, picture: Picture, step: int) -> None:
    tracker.writer.log_image(picture, name=name, step=step)


def _picture_for_mlflow(tracker: Any, name: str, picture: Picture, step: int) -> None:
    file = f"{TABLE}/step-{step}/{name.removeprefix(TABLE + '/')}.png"
    importlib.import_module("mlflow").log_image(picture, artifact_file=file)


def _log_picture(tracker: Any, name: str, picture: Picture, step: int) -> None:
    tracker.log_images({name: picture}, step=step)


def _log_pictures(tracker: Any, name: str, picture: Picture, step: int) -> None:
    tracker.log_images({name: [picture]}, step=step)


# The trackers whose tables hold images, with what returns the type of such a cell.
CELLS: dict[str, Callable[[], Callable[[Picture], Any]]] = {
    "trackio": lambda: importlib.import_module("trackio").Image,  # type: ignore[no-any-return]
    "wandb": lambda: importlib.import_module("wandb").Image,  # type: ignore[no-any-return]
}
# The other trackers that take images, with what sends one: (tracker, name, image, step). MLflow's
# tables refuse columns in which some cells have no image.
PICTURES: dict[str, Callable[[Any, str, Picture, int], None]] = {
    "aim": _log_picture,
    "clearml": _log_picture,
    "comet_ml": _picture_for_comet,
    "mlflow": _picture_for_mlflow,
    "swanlab": _log_pictures,
    "tensorboard": _picture_for_tensorboard,
}


def pictures_of(images: Sequence[Cell], most: int | None = None) -> list[list[Picture | None]]:
    """Decodes the images of each row, those of a shared cell once; None for one that is broken.

    Args:
        most: rows behind this many images have none; None: all have theirs.
    """
    known: dict[int, list[Picture | None]] = {}
    decoded = 0
    for cell in images:
        if id(cell) not in known:
            is_due = most is None or decoded < most
            known[id(cell)] = [_picture(one) for one in cell] if is_due else []
            decoded += sum(one is not None for one in known[id(cell)])
    return [known[id(cell)] for cell in images]


def _picture(stored: dict[str, Any] | None) -> Picture | None:
    try:
        return StoredImage(stored, "").open()
    except ImageError:
        return None


def with_pictures(frame: Any, pictures: Sequence[Sequence[Picture | None]], tracker: str) -> Any:
    """Returns a data frame with columns of images in place of their number.

    Args:
        pictures: of each row; []: the frame stays as it is.
        tracker: one of CELLS.
    """
    most = max(map(len, pictures), default=0)
    if not most:
        return frame
    kind = CELLS[tracker]()
    made = {id(one): kind(one) for of_row in pictures for one in of_row if one is not None}
    columns = {
        "image" if most == 1 else f"image {n + 1}": [
            made.get(id(of_row[n])) if n < len(of_row) else None for of_row in pictures
        ]
        for n in range(most)
    }
    return frame.drop(columns=IMAGES).assign(**columns)


class _Callback:
    """A tracker that transformers has as a callback of its Trainer."""

    def __init__(self, name: str, folder: Path, run_name: str, steps: int) -> None:
        from transformers import TrainerControl, TrainerState, TrainingArguments
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

        class Arguments(TrainingArguments):  # type: ignore[misc]
            def __post_init__(self) -> None:
                """Leaves accelerate's state alone, which TrainingArguments would reset."""

        self.arguments = Arguments(output_dir=str(folder / name), run_name=run_name)
        self.state, self.control = TrainerState(max_steps=steps), TrainerControl()
        self.callback = INTEGRATION_TO_CALLBACK[name]()
        os.makedirs(self.arguments.output_dir, exist_ok=True)
        self.callback.on_init_end(self.arguments, self.state, self.control)
        self.callback.on_train_begin(self.arguments, self.state, self.control, model=None)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Sends a step's metrics."""
        self.state.global_step = step
        self.callback.on_log(
            self.arguments, self.state, self.control, logs=dict(metrics), model=None
        )

    def finish(self) -> None:
        """Ends the tracker's run."""
        self.callback.on_train_end(self.arguments, self.state, self.control, model=None)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a recipe as one level of keys, whose values every tracker takes."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            out |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            out[prefix + key] = value
        else:
            out[prefix + key] = str(value)
    return out


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
