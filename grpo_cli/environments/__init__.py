"""Tools, environments and episodes: multi-turn rollouts on top of a generator.

An episode is a completion in which the model and an environment take turns. `protocol.py` is for
authors of environments; docs/environments.md begins with an example. `loop.py` decides which
episodes are sampled next, also for programs in completions (`programs.py`); `player.py` plays one.
`rollouter.py` is the one place where training and evaluation sample. This package may import
`generation` and everything below it.
"""
