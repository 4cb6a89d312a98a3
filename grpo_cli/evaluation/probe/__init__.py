"""The probe: what an untrained policy's completions tell about the run to come.

Start at `run.py`, from the prompts to the verdict; `samples.py` samples and scores, `measures.py`
and `signal.py` are the estimates and their intervals, `verdict.py` judges, `tables.py` prints.
"""
