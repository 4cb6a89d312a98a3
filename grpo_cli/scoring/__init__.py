"""Calls reward functions, in this process or in workers that are killed after a deadline.

Start with `scorer.py`, then `bound_reward.py` (a recipe's reward with its function), `registry.py`
(which function a recipe means), `calls.py` and `pool.py`. May import models and below.
"""
