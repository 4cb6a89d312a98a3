"""Runs untrusted programs in separate processes, with resource limits and namespaces.

Start with `api.run`, then `isolation.find_level` (the guards that work here) and `process.Sandbox`
(one program's process). Inside, runner.py forks the children of child.py; peer.py connects the
program's with judge.py, which tests it. Imports only the standard library, for reward functions.
"""

from grpo_cli.sandbox.api import SandboxResult, grade, prepare, run
from grpo_cli.sandbox.isolation import GUARDS, describe, find_level
from grpo_cli.sandbox.process import Limits, ProgramResult, SandboxError

__all__ = [
    "GUARDS", "Limits", "ProgramResult", "SandboxError", "SandboxResult", "describe", "find_level",
    "grade", "prepare", "run",
]  # fmt: skip
