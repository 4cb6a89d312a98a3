"""The folder that keeps built models, and the key and logs of servers, between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Returns $GRPO_CACHE, or `grpo` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("GRPO_CACHE", f"{base}/grpo")).expanduser()
