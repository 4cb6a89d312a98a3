"""Advantages, losses and KL, as functions of tensors and plain values.

Start with `loss.py`, then `losses.py` and `advantages.py`. `arguments.py` checks what a
recipe gives them. Imports the configuration and the records only.
"""
