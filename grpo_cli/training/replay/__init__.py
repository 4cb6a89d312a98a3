"""A step, kept while the run goes on and recomputed afterwards (`grpo replay`).

`kept_steps.py` writes what a step needs, `run.py` builds a run from it, `completion_terms.py` and
`gradient_parts.py` divide the loss and the gradient among the completions, `results.py` holds them.
"""
