"""Versions of what numbers depend on."""

from __future__ import annotations

import platform

import accelerate
import datasets
import torch
import transformers

import grpo_cli


def versions() -> dict[str, str]:
    """Versions of what numbers depend on."""
    return {
        "grpo_cli": grpo_cli.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "datasets": datasets.__version__,
    }
