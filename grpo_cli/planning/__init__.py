"""Predicts the memory of a run before any weights are loaded.

Start with plan.py, then sizes.py and memory.py. May import generation and below.
"""
