"""Speculative decoding without a draft model: completions of a prompt are drafts for one another.

drafts.py            what may come next, by n-grams of other completions
kept_completions.py  completions of earlier epochs
drafter.py           when drafts pay, and how many tokens a row is given
ragged_batch.py      rows whose next steps compute several tokens each
"""
