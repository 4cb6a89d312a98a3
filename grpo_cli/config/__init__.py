"""The recipe: its schema, its composition by Hydra, and its checks.

Start with `schema.py`, which declares every knob, then `compose.py` and `parsing.py`. Imports
only errors, and the rewards' traits.
"""
