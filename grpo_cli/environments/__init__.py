"""Tools, environments and episodes: everything between a generator and a rollout of several turns.

An episode is a completion in which the model and an environment take turns. `protocol.py` is what
the author of an environment needs; docs/environments.md begins with an example. `loop.py` takes the
turns, also with the programs that a completion writes (`programs.py`); `rollouter.py` is the one
place where training and evaluation sample. This package may import `generation` and everything
below it.
"""
