"""Probes an untrained policy: samples completions and judges whether the run can learn.

Start at `run.py`, which leads from the prompts to the verdict. `samples.py` samples and scores,
`measures.py` and `signal.py` estimate with intervals, `verdict.py` judges, `tables.py` prints.
"""
