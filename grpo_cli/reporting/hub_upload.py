"""Uploads folders to the Hugging Face Hub: a program that `hub.py` starts for each push.

A process of its own can be ended at any moment, and its threads do not delay the end of the run.
It imports nothing of grpo, and ends with the process that started it, whose pipe is its stdin.

    stdin     one line: JSON, a list of uploads (`upload`); the pipe stays open
    stdout    the reason for each upload that failed, a line each; the exit code is then 1
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError


def main() -> None:
    uploads = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_parent, daemon=True).start()
    failed = False
    for arguments in uploads:
        try:
            upload(**arguments)
        except Exception as error:  # the others are uploaded all the same
            failed = True
            print(reason(error), flush=True)
    os._exit(failed)


def end_with_parent() -> None:
    """Ends this program when its stdin is closed."""
    sys.stdin.read()
    os._exit(1)


def upload(
    repo: str,
    kind: str,
    private: bool,
    revision: str | None,
    message: str,
    folder: str,
    to: str = "",
    card: str | None = None,
    **patterns: list[str],
) -> None:
    """Uploads a folder, after creating the repository and the branch where they are missing.

    Args:
        kind: "model" or "dataset".
        to: folder in the repository.
        card: the text of the repository's README.md, if the folder has none.
        patterns: allow_patterns, ignore_patterns and delete_patterns of `HfApi.upload_folder`.
    """
    api = HfApi()
    repo = api.create_repo(repo, repo_type=kind, private=private, exist_ok=True).repo_id
    if revision is not None:
        api.create_branch(repo, repo_type=kind, branch=revision, exist_ok=True)
    where: dict[str, Any] = {
        "repo_id": repo,
        "repo_type": kind,
        "revision": revision,
        "commit_message": message,
    }
    if card is not None:
        api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", **where)
    lists: dict[str, Any] = patterns
    api.upload_folder(folder_path=folder, path_in_repo=to or None, **lists, **where)


def reason(error: BaseException) -> str:
    """Returns in one line why a request to the hub failed."""
    while error.__cause__ is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    if isinstance(error, HfHubHTTPError):
        response = error.response
        said = (error.server_message or response.reason_phrase or "").strip().splitlines()
        return f"{response.status_code} {said[0] if said else ''}".strip()
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    main()
