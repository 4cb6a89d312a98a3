"""The training loop (`loop.py`) and the objects around it.

Start with `loop.py`, `run.py` and `step.py`; `build.py` makes them from a recipe, `rollouts/`
samples and scores a step. May import every package except api, cli and commands.
"""
