"""Calls reward functions, in this process or in workers that are killed after a deadline.

Start with `scorer.py`, then `registry.py` (which function a recipe means) and `pool.py`. May
import planning, models and below.
"""
