"""The live view of a run, which `grpo watch` shows.

Start at `following.py`, which reads the files that a run writes. `figures.py` computes the state,
the time left and the curves, and `panels.py` draws them. May import reporting, checkpoints, data
and config. Torch is not loaded.
"""
