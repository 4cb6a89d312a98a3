"""The rollouts of a step: collected, given advantages, sampled steps ahead.

Start at `collect.py`, from prompts to scored groups; `credit.py` gives them advantages and token
weights; `queue.py` decides which step's rollouts are sampled next, `prefetch.py` samples ahead.
"""
