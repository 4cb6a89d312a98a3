"""Runs untrusted programs in separate processes, with resource limits and namespaces.

Start with `api.run`, then `isolation.find_level` (the guards that work here) and `process.Sandbox`
(one program's process); runner.py is the program inside it, and child.py what it forks. judge.py
runs tests in another process than the program; peer.py connects the two. Importing this package is
cheap: it uses only the standard library, so that reward functions can use it.
"""

from grpo_cli.sandbox.api import SandboxResult, grade, prepare, run
from grpo_cli.sandbox.isolation import GUARDS, describe, find_level
from grpo_cli.sandbox.process import Limits, ProgramResult, SandboxError
from grpo_cli.sandbox.temporary_folder import sweep

__all__ = [
    "GUARDS", "Limits", "ProgramResult", "SandboxError", "SandboxResult", "describe", "find_level",
    "grade", "prepare", "run", "sweep",
]  # fmt: skip
