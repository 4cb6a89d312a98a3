"""The objects around the loop of `train.py`.

Start with `run.py` and `step.py`; `build.py` makes them from a recipe, `rollouts/` samples and
scores a step. May import every package except cli, commands and train.
"""
