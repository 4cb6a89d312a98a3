"""Advantages, losses and KL, as functions of tensors and plain values.

Start with `loss.py`, then `losses.py` and `advantages.py`. `objective.py` looks up the functions
of a recipe. Imports the configuration and the records only.
"""
