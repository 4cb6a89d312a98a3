"""Evaluation: benchmarks and held-out rows, with intervals; and the probe of an untrained policy.

Start with `tasks` (the problems) and `evaluator` (sample, score); `summary` and `estimates`
compute the numbers, `tables` writes them, `paired` and `compare` compare two evaluations.
`probe` samples from an untrained policy, and judges whether it can learn.
Imports generation, scoring, data, reporting and lower layers; never training or commands.
"""
