"""Evaluation: benchmarks and held-out rows, with intervals; and the probe of an untrained policy.

Start with `tasks` (the problems) and `evaluator` (sample, score); `summary` and `estimates`
compute the numbers, `tables` writes them, `paired` and `compare` compare two evaluations.
`probe` runs a probe: `probe_samples` samples and scores, `probe_measures` computes the numbers
(`signal`: the share of groups whose rewards differ), and `probe_verdict` suggests settings.
Imports generation, scoring, data, reporting and lower layers; never training or commands.
"""
