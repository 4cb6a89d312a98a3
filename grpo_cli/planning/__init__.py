"""Predicts the memory of a run before any weights are loaded.

Start with plan.py, then sizes.py (weights, activations) and memory.py (bytes by stage of a step).
The package may import models, config and errors.
"""
