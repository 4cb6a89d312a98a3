"""grpo: train language models with GRPO (DeepSeekMath, arXiv 2402.03300) from the command line."""

from pathlib import Path

__version__ = "0.1.0"

# In an install, `grpo_cli.recipes` and `grpo_cli.rewards` lie inside the package; in a checkout,
# at the repository's root. With its root on the path, a plain checkout behaves like an install.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))
