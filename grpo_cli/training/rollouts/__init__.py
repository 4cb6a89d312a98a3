"""Collects the rollouts of a step, assigns their advantages, and prefetches later steps.

Start at `collect.py`, from prompts to scored groups; `credit.py` gives them advantages and token
weights; `queue.py` decides which prompts are sampled next, and prefetches completions.
"""
