"""Sends metrics and completions to trackers in addition to the run's own files.

Accelerate provides the trackers. The package of a tracker is imported only when it is chosen. A
tracker that fails never ends a run.
"""

from __future__ import annotations

import importlib
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.config.keys import flat
from grpo_cli.errors import UserError, typed_line
from grpo_cli.reporting.settings import Tracking

if TYPE_CHECKING:
    from grpo_cli.distributed.workers import Workers
    from grpo_cli.training.callbacks import Event

TABLES = ("trackio", "wandb")  # trackers that accept tables
# Returns, from accelerate's tracker, the id by which a resumed run continues its curves.
IDS: dict[str, Callable[[Any], str]] = {
    "mlflow": lambda tracker: str(tracker.active_run.info.run_id),
    "trackio": lambda tracker: str(tracker.init_kwargs["name"]),
    "wandb": lambda tracker: str(tracker.init_kwargs["id"]),
}


def require(names: Sequence[str]) -> None:
    """Checks that the packages of trackers are installed.

    Raises:
        UserError: a package is not installed.
    """
    for name in names:
        if name == "none":
            continue
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(
                f"tracking.backend = {name}: the package is not installed; pip install {name}, "
                "or choose another tracker."
            ) from error


class Trackers:
    """The trackers of a run. Only the main process starts any."""

    def __init__(self, config: Tracking, workers: Workers, say: Callable[[str], None]) -> None:
        self.config, self.workers, self.say = config, workers, say
        # By tracker, "" if it has none; a resumed run continues their curves.
        self.ids: dict[str, str] = {}
        self._live: dict[str, Any] = {}  # by name
        self._failing: set[str] = set()  # trackers whose failure was printed

    def on_start(self, event: Event) -> None:
        with self.workers.raise_together():
            if self.workers.is_main:
                self.start(event.folder, event.recipe)

    def on_log(self, event: Event) -> None:
        self.log({k: v for k, v in event.metrics.items() if math.isfinite(v)}, event.step)
        if event.completions:
            self.table(event.completions, event.step)

    def on_end(self, event: Event) -> None:
        self.close()

    def state_dict(self) -> dict[str, str]:
        return self.ids

    def load_state_dict(self, ids: dict[str, str]) -> None:
        self.ids = dict(ids)

    def start(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Starts the recipe's trackers.

        Args:
            settings: the recipe, stored with the run.

        Raises:
            UserError: a tracker of a new run cannot be started.
        """
        known = dict(self.ids)
        for name in self.config.backend:
            try:
                tracker = _started(name, self.config, folder, settings, known.get(name) or None)
                self._live[name] = tracker
                self.ids[name] = IDS[name](tracker) if name in IDS else ""
            except Exception as error:
                said = f"tracking.backend = {name}: cannot be started: {typed_line(error)}"
                if not known:
                    raise UserError(f"{said}.") from error
                self.say(f"note: {said}; the run continues without it")  # it may run unattended

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Sends a step's metrics, each a finite number."""
        # MLflow takes no @ in a name, as in maj@8.
        own = {"mlflow": {key.replace("@", "_at_"): v for key, v in metrics.items()}}
        self._each("metrics", lambda name, one: one.log(own.get(name, metrics), step=step))

    def table(self, rows: Sequence[dict[str, Any]], step: int) -> None:
        """Sends completions, each a `completion_row`, to the trackers that accept tables."""
        if not self._live.keys() & {*TABLES}:
            return
        import pandas

        read = ("step", "prompt", "completion", "advantage")  # by people, as are the rewards
        prefixes = ("reward", "extras/")
        shown = [{k: r[k] for k in r if k in read or k.startswith(prefixes)} for r in rows]
        frame = pandas.DataFrame(shown)

        def send(name: str, tracker: Any) -> None:
            if name in TABLES:
                table = importlib.import_module(name).Table(dataframe=frame)
                tracker.log({"completions": table}, step=step)

        self._each("completions", send)

    def close(self) -> None:
        """Ends all trackers."""
        self._each("end", lambda name, one: one.finish())
        self._live = {}

    def _each(self, what: str, action: Callable[[str, Any], None]) -> None:
        for name, tracker in self._live.items():
            try:
                action(name, tracker)
            except Exception as error:  # from the tracker's code or its server
                if name not in self._failing:
                    self.say(
                        f"note: {name} has not taken the run's {what} ({typed_line(error)}); the "
                        "run continues"
                    )
                self._failing.add(name)
            else:
                self._failing.discard(name)


def _started(
    name: str, config: Tracking, folder: Path, settings: Mapping[str, Any], known: str | None
) -> Any:
    """Starts a tracker of accelerate.

    Args:
        known: the tracker's id of a resumed run.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    project, run_name = config.project, config.name or folder.name
    arguments: dict[str, dict[str, Any]] = {  # in most, accelerate's `run_name` is the project
        "aim": {"run_name": run_name, "logging_dir": str(folder)},
        "clearml": {"run_name": run_name, "project_name": project},
        "comet_ml": {"run_name": project},
        "dvclive": {"dir": str(folder / "dvclive"), "save_dvc_exp": False},
        "mlflow": {"experiment_name": project, "run_name": run_name, "run_id": known},
        "swanlab": {"run_name": project, "experiment_name": run_name},
        "tensorboard": {"run_name": "", "logging_dir": str(folder / "tensorboard")},
        "trackio": {"run_name": project, "name": known or run_name, "resume": "allow"},
        "wandb": {"run_name": project, "name": run_name, "id": known or uuid.uuid4().hex[:8]},
    }
    arguments["wandb"]["resume"] = "allow"
    if name in ("trackio", "wandb"):
        arguments[name]["config"] = settings
    tracker = LOGGER_TYPE_TO_CLASS[name](**arguments[name])
    tracker.start()
    if known is None and name not in ("tensorboard", "trackio", "wandb"):
        values = flat(dict(settings))
        plain = {k: v if isinstance(v, int | float | str) else str(v) for k, v in values.items()}
        tracker.store_init_configuration(plain)
    return tracker
