"""Pushes checkpoints and completions to the Hugging Face Hub while training continues.

A checkpoint is handed over when it is complete. One is pushed at a time; if pushes are slower than
checkpoints, the newest one waits and those between are skipped. A failure is a note, and the next
checkpoint is the next attempt. The token is the one that `huggingface_hub` finds (HF_TOKEN, or that
of `hf auth login`); it is never read here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from grpo_cli.checkpoints.paths import TRAINING
from grpo_cli.config.schema import Recipe
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import UserError
from grpo_cli.reporting import hub_upload
from grpo_cli.reporting.model_card import dataset_card

LAST_CHECKPOINT = "last-checkpoint"  # in the repository
ATTEMPTS = 3  # of the last push, when the run ends
PAUSE_SECONDS = 10.0  # between these
# What a request raises without an answer: HTTPError of httpx2, with huggingface_hub 1 of httpx, and
# OSError.
UNREACHABLE: tuple[type[Exception], ...] = HfHubHTTPError.__bases__  # type: ignore[assignment]


def check(recipe: Recipe) -> str | None:
    """Checks that the hub lets the run push, and creates repositories that are missing.

    Returns:
        A note if the hub cannot be reached now; None if all is well or nothing is pushed.

    Raises:
        UserError: the hub is switched off, there is no token, or it may not write there.
    """
    named = (
        ("hub.repo", recipe.hub.repo, "model"),
        ("hub.completions_repo", recipe.hub.completions_repo, "dataset"),
    )
    for key, repo, kind in named:
        if repo is None:
            continue
        where = f"{key} = {repo}"
        try:
            validate_repo_id(repo)
        except HFValidationError as error:
            raise UserError(f"{where}: must be owner/name or name ({_first(error)}).") from error
        if constants.is_offline_mode():
            raise UserError(
                f"{where}: HF_HUB_OFFLINE is set, so that nothing can be pushed; unset it, or "
                f"{key}=null."
            )
        if get_token() is None:
            raise UserError(
                f"{where}: there is no token; set HF_TOKEN to one that may write, or run "
                "hf auth login."
            )
        api = HfApi()
        try:
            created = api.create_repo(
                repo, repo_type=kind, private=recipe.hub.private, exist_ok=True
            )
            api.auth_check(created.repo_id, repo_type=kind, write=True)
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status >= 500 or status in (408, 409, 429):
                return _unreachable(where, error)
            raise UserError(
                f"{where}: the hub does not let this token write there "
                f"({hub_upload.reason(error)}); use one that may (HF_TOKEN, or hf auth login), or "
                "another repository."
            ) from error
        except UNREACHABLE as error:
            return _unreachable(where, error)
    return None


def _unreachable(where: str, error: Exception) -> str:
    return (
        f"{where}: the hub cannot be reached now ({hub_upload.reason(error)}); each checkpoint is "
        "another attempt"
    )


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


@dataclass(frozen=True)
class Push:
    """A complete checkpoint to be pushed, or only the completions up to it."""

    checkpoint: Path
    with_model: bool


class Pusher:
    """Pushes a run's checkpoints on the main process; does nothing on the others."""

    def __init__(
        self, recipe: Recipe, folder: Path, say: Callable[[str], None], main: bool
    ) -> None:
        self.config, self.folder, self.say = recipe.hub, folder, say
        self.is_on = main and bool(recipe.hub.repo or recipe.hub.completions_repo)
        self.card = ""
        if recipe.hub.completions_repo is not None:
            self.card = dataset_card(recipe.hub.completions_repo, recipe)
        self.failed: tuple[Push, str] | None = None  # the newest push, and why, if it failed
        self._waiting: Push | None = None
        self._current: Push | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # while something is pushed
        self._program: subprocess.Popen[str] | None = None
        self._is_closed = False

    def push(self, checkpoint: Path, *, last: bool) -> None:
        """Hands a complete checkpoint over and returns; one that waits is skipped for it.

        Args:
            last: whether the run ends here.
        """
        with_model = self.config.repo is not None and (last or self.config.strategy != "end")
        if self.is_on and (with_model or self.config.completions_repo is not None):
            self._start(Push(checkpoint, with_model))

    def in_use(self) -> set[Path]:
        """Returns the checkpoints that are being pushed or wait, which must not be removed."""
        with self._lock:
            return {p.checkpoint for p in (self._current, self._waiting) if p is not None}

    def finish(self, is_asked_to_stop: Callable[[], bool] = lambda: False) -> None:
        """Waits for the last push, `hub.wait` seconds at most; one that failed gets more attempts.

        Args:
            is_asked_to_stop: whether not to wait any longer.
        """
        if not self.is_on:
            return
        end, attempts = time.monotonic() + self.config.wait, 1
        with heartbeat.inside("hub"):
            while self._wait(end, is_asked_to_stop):
                if self.failed is None or attempts == ATTEMPTS:
                    break
                self._sleep(min(end, time.monotonic() + PAUSE_SECONDS), is_asked_to_stop)
                attempts += 1
                self._start(self.failed[0])
        if self._thread is None and self.failed is None and self.config.repo is not None:
            self.say(f"pushed to {constants.ENDPOINT}/{self.config.repo}")
        is_late = time.monotonic() >= end
        self.close(f"not done in hub.wait = {self.config.wait:g} s" if is_late else "stopped")

    def close(self, why: str = "the run ends first") -> None:
        """Ends the push that is under way, if any, and says what is not on the hub."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            unfinished = self._waiting or self._current
            self._waiting, program = None, self._program
        if program is not None:
            program.kill()
        if unfinished is not None:
            self._say_missing(unfinished, why)
        elif self.failed is not None:
            self._say_missing(*self.failed)

    def _say_missing(self, push: Push, why: str) -> None:
        text = f"hub: {push.checkpoint.name} is not pushed ({why})"
        if push.with_model:
            branch = f" --revision {self.config.revision}" if self.config.revision else ""
            text += (
                f"; by hand: hf upload {self.config.repo} {push.checkpoint} .{branch} "
                f"--exclude '{TRAINING}/*'"
            )
        self.say(text)

    def _start(self, push: Push) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._waiting = push
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hub", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._current, self._waiting = self._waiting, None
                push = self._current
                if push is None:
                    self._thread = None
                    return
            try:
                why = self._run(push)
            except OSError as error:  # the program cannot be started
                why = hub_upload.reason(error)
            with self._lock:
                self.failed = None if why is None else (push, why)
                is_closed = self._is_closed
            if why is not None and not is_closed:
                self.say(
                    f"hub: {push.checkpoint.name} could not be pushed ({why}); the run continues, "
                    "and the next checkpoint is the next attempt"
                )

    def _run(self, push: Push) -> str | None:
        """Runs the program that uploads; returns why it failed, or None."""
        command = [sys.executable, "-P", hub_upload.__file__]  # -P: its folder holds no packages
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        with self._lock:
            if self._is_closed:
                return "the run ends first"
            program = self._program = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, **quiet},
                start_new_session=True,  # a Ctrl-C is the run's
            )
        assert program.stdin is not None
        assert program.stdout is not None
        try:
            program.stdin.write(json.dumps(self._uploads(push)) + "\n")
            program.stdin.flush()
            said = program.stdout.read().strip()
            code = program.wait()
        except BrokenPipeError:
            said, code = "", program.wait()
        finally:
            self._program = None
            program.stdin.close()
            program.stdout.close()
        if code == 0:
            return None
        return "; ".join(dict.fromkeys(said.splitlines())) or f"its program ended with {code}"

    def _uploads(self, push: Push) -> list[dict[str, Any]]:
        """Returns the arguments of `hub_upload.upload`, for each upload of a push."""
        step = push.checkpoint.name.replace("-", " ")
        common = {"private": self.config.private, "message": step}
        uploads: list[dict[str, Any]] = []
        if push.with_model:
            model = {
                **common,
                "repo": self.config.repo,
                "kind": "model",
                "revision": self.config.revision,
                "folder": str(push.checkpoint),
            }
            uploads.append({**model, "ignore_patterns": [f"{TRAINING}/*"]})
            if self.config.strategy == "checkpoint":
                # Of an earlier checkpoint the repository may hold more shards.
                uploads.append({**model, "to": LAST_CHECKPOINT, "delete_patterns": ["*"]})
        completions = self.folder / "completions"
        if self.config.completions_repo is not None and completions.is_dir():
            uploads.append(
                {
                    **common,
                    "repo": self.config.completions_repo,
                    "kind": "dataset",
                    "revision": None,
                    "folder": str(completions),
                    "to": "completions",
                    "card": self.card,
                    "allow_patterns": ["step-*.parquet"],
                }
            )
        return uploads

    def _wait(self, end: float, is_asked_to_stop: Callable[[], bool]) -> bool:
        """Waits for the pushes under way; returns whether all have ended."""
        while True:
            with self._lock:
                if self._thread is None:
                    return True
            if not self._sleep(min(end, time.monotonic() + 0.1), is_asked_to_stop):
                return False
            if time.monotonic() >= end:
                return False

    @staticmethod
    def _sleep(until: float, is_asked_to_stop: Callable[[], bool]) -> bool:
        """Sleeps; returns whether the run may still wait."""
        while time.monotonic() < until:
            if is_asked_to_stop():
                return False
            heartbeat.touch()
            time.sleep(min(0.1, max(until - time.monotonic(), 0.0)))
        return True
