"""Evaluation: benchmarks and held-out rows, with intervals; and the probe of an untrained policy.

Start with `tasks` (what is evaluated) and `evaluator` (sample, score); `summary` and `estimates`
compute the numbers, `tables` writes them, `paired` and `compare` hold two evaluations side by side.
`probe` runs a probe: `probe_samples` samples and scores, `probe_measures` computes the numbers
(`signal`: the share of groups that have one), and `probe_verdict` says what to change.
Imports generation, scoring, data, reporting and what lies below them; never training or commands.
"""
