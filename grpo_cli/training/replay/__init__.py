"""Keeps steps while a run goes on, and recomputes them afterwards (`grpo replay`).

`kept_steps.py` writes what a step needs, `run.py` builds a run from it, `completion_terms.py` and
`gradient_parts.py` divide the loss and the gradient among the completions, `results.py` holds them.
"""
