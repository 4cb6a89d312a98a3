"""Probes an untrained policy: samples completions and judges whether the run can learn.

Start at `run.py`, from the prompts to the verdict; `samples.py` samples and scores, `measures.py`
and `signal.py` are the estimates and their intervals, `verdict.py` judges, `tables.py` prints.
"""
