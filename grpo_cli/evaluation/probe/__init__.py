"""Probes an untrained policy: samples completions and judges whether the run can learn.

Start at `run.py`, which samples, scores and measures. `signal.py` estimates the share of groups
that have a gradient, `verdict.py` judges the numbers and prints them.
"""
