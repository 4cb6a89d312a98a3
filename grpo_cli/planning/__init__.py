"""Predicts the memory and the time of a run before any weights are loaded.

Start with plan.py. It combines sizes.py (numbers of weights, activations), memory.py (bytes by
stage of a step) and seconds.py (time by stage). The package may import models, config and errors.
"""
