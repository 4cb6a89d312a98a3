"""grpo: train language models with GRPO (DeepSeekMath, arXiv 2402.03300) from the command line."""

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

# In an install, `grpo_cli.recipes` and `grpo_cli.rewards` lie inside the package; in a checkout,
# at the repository's root. With its root on the path, a plain checkout behaves like an install.
IMPORT_ROOT = Path(__file__).resolve().parent.parent  # the folder that `import grpo_cli` searches
if (IMPORT_ROOT / "pyproject.toml").is_file():
    __path__.append(str(IMPORT_ROOT))


def __getattr__(name: str) -> Any:
    """Returns `train` or `evaluate` of `grpo_cli.api`, on which no module of the package rests."""
    if name in ("train", "evaluate"):
        return getattr(importlib.import_module("grpo_cli.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
