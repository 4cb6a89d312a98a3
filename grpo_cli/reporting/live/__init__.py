"""The live view of a run: what `grpo watch` shows.

Start at `following.py`, which reads the files that a run adds to; `figures.py` is the arithmetic
(state, time that is left, curves), `panels.py` draws it. May import reporting, checkpoints, data
and config. Torch is not loaded.
"""
