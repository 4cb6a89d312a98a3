"""Pushes checkpoints to the Hugging Face Hub while training continues.

A checkpoint is pushed when it is complete. It is skipped if an earlier one is still being pushed,
unless it is the last of the run. A failure prints a note, and the next checkpoint is the next
attempt. `huggingface_hub` finds the token (HF_TOKEN, or that of `hf auth login`); this module
never reads it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from grpo_cli.checkpoints.paths import TRAINING
from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import UserError, first_line, typed_line

LAST_CHECKPOINT = "last-checkpoint"  # folder in the repository
WAIT_SECONDS = 1800.0  # longest wait for the last push: 15 GB at 10 MB a second
# Uploads folders in a separate process, which can be killed at any moment: an interpreter's exit
# waits for the threads of an upload.
UPLOAD = """
import json, sys
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
repo, uploads = json.loads(sys.argv[1])
try:
    api = HfApi()
    repo = api.create_repo(repo, private=True, exist_ok=True).repo_id
    for upload in uploads:
        api.upload_folder(repo_id=repo, **upload)
except HfHubHTTPError as error:
    said = (error.server_message or "").splitlines()
    sys.exit(f"{error.response.status_code} {said[0] if said else ''}")
"""
# Errors of a request without an answer: HTTPError of httpx2 (of httpx with huggingface_hub 1), and
# OSError.
UNREACHABLE: tuple[type[Exception], ...] = HfHubHTTPError.__bases__  # type: ignore[assignment]


def check(recipe: Recipe) -> str | None:
    """Checks that the hub lets the run push, and creates repositories that are missing.

    Returns:
        A note if the hub cannot be reached now; None if all is well or nothing is pushed.

    Raises:
        UserError: the hub is switched off, there is no token, or the token may not write there.
    """
    repo = recipe.hub.repo
    if repo is None:
        return None
    where = f"hub.repo = {repo}"
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"{where}: must be owner/name or name ({first_line(error)}).") from error
    if constants.is_offline_mode():
        raise UserError(
            f"{where}: HF_HUB_OFFLINE is set, so that nothing can be pushed; unset it, or "
            "hub.repo=null."
        )
    if get_token() is None:
        raise UserError(
            f"{where}: there is no token; set HF_TOKEN to one that may write, or run hf auth login."
        )
    api = HfApi()
    try:
        created = api.create_repo(repo, private=True, exist_ok=True)
        api.auth_check(created.repo_id, write=True)
    except UNREACHABLE as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 500
        if status >= 500 or status in (408, 409, 429):
            said = f"the hub cannot be reached now ({reason(error)})"
            return f"{where}: {said}; each checkpoint is another attempt"
        raise UserError(
            f"{where}: the hub does not let this token write there ({reason(error)}); use one that "
            "may (HF_TOKEN, or hf auth login), or another repository."
        ) from error
    return None


def reason(error: BaseException) -> str:
    """Returns one line with the reason why a request to the hub failed."""
    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    if isinstance(error, HfHubHTTPError):
        response = error.response
        said = (error.server_message or response.reason_phrase or "").strip().splitlines()
        return f"{response.status_code} {said[0] if said else ''}".strip()
    return typed_line(error)


class Pusher:
    """Pushes a run's checkpoints on the main process; does nothing on the others."""

    def __init__(self, recipe: Recipe, say: Callable[[str], None], main: bool) -> None:
        self.config, self.say = recipe.hub, say
        self.is_on = main and recipe.hub.repo is not None
        self.failed: tuple[Path, str] | None = None  # the newest push and the reason, if it failed
        self._checkpoint: Path | None = None  # the one being pushed
        self._last: Path | None = None  # the last of the run, while an earlier one is pushed
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None  # the process's standard error
        self._lock = threading.RLock()  # checkpoints are handed over by the thread that writes them

    def push(self, checkpoint: Path, *, last: bool) -> None:
        """Hands a complete checkpoint over and returns.

        Args:
            last: whether the run ends here.
        """
        if not self.is_on or (self.config.strategy == "end" and not last):
            return
        with self._lock:
            if not self.in_use():
                self._start(checkpoint)
            elif last:
                self._last = checkpoint

    def in_use(self) -> set[Path]:
        """Returns the checkpoints that are being pushed or wait, which must not be removed.

        If a push has ended, it notes a failure and starts the push that waits.
        """
        with self._lock:
            if self._process is not None and (code := self._process.poll()) is not None:
                checkpoint, self._checkpoint, self._process = self._checkpoint, None, None
                assert checkpoint is not None
                assert self._errors is not None
                if code != 0:
                    self._errors.seek(0)
                    lines = self._errors.read().decode(errors="replace").strip().splitlines()
                    self._note_failure(checkpoint, lines[-1] if lines else f"exit code {code}")
                self._errors.close()
                if self._last is not None:
                    last, self._last = self._last, None
                    self._start(last)
            return {path for path in (self._checkpoint, self._last) if path is not None}

    def finish(self, is_asked_to_stop: Callable[[], bool] = lambda: False) -> None:
        """Waits for the last push, WAIT_SECONDS at most.

        Args:
            is_asked_to_stop: returns whether to stop waiting.
        """
        if not self.is_on:
            return
        end = time.monotonic() + WAIT_SECONDS
        with heartbeat.inside("hub"):
            while self.in_use() and time.monotonic() < end and not is_asked_to_stop():
                heartbeat.touch()
                time.sleep(0.1)
        if not self.in_use() and self.failed is None:
            self.say(f"pushed to {constants.ENDPOINT}/{self.config.repo}")
        is_late = time.monotonic() >= end
        self.close(f"not done in {WAIT_SECONDS:g} s" if is_late else "stopped")

    def close(self, why: str = "the run ends first") -> None:
        """Ends the push that is running, if any, and prints which checkpoint is not on the hub."""
        with self._lock:
            if not self.is_on:
                return
            if self.in_use():
                assert self._process is not None
                self._process.kill()
                self._process.wait()
                self._say_missing(self._last or self._checkpoint, why)
            elif self.failed is not None:
                self._say_missing(*self.failed)
            self.is_on = False

    def _say_missing(self, checkpoint: Path | None, why: str) -> None:
        assert checkpoint is not None
        self.say(
            f"hub: {checkpoint.name} is not pushed ({why}); by hand: hf upload {self.config.repo} "
            f"{checkpoint} . --exclude '{TRAINING}/*'"
        )

    def _start(self, checkpoint: Path) -> None:
        # The arguments of `HfApi.upload_folder`, for each upload.
        common = {
            "folder_path": str(checkpoint),
            "commit_message": checkpoint.name.replace("-", " "),
        }
        uploads: list[dict[str, Any]] = [{**common, "ignore_patterns": [f"{TRAINING}/*"]}]
        if self.config.strategy == "checkpoint":
            # The repository may hold more shards, of an earlier checkpoint.
            uploads.append({**common, "path_in_repo": LAST_CHECKPOINT, "delete_patterns": ["*"]})
        given = json.dumps([self.config.repo, uploads])
        self.failed = None
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", UPLOAD, given],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
                start_new_session=True,  # only the run gets a Ctrl-C
            )
        except OSError as error:
            self._note_failure(checkpoint, reason(error))
        else:
            self._checkpoint = checkpoint

    def _note_failure(self, checkpoint: Path, why: str) -> None:
        self.failed = (checkpoint, why)
        self.say(
            f"hub: {checkpoint.name} could not be pushed ({why}); the run continues, and the next "
            "checkpoint is the next attempt"
        )
