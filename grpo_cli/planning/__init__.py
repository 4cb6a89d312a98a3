"""Memory and time of a run, computed from the shape of its model, before anything is loaded.

Start with plan.py, which puts together memory.py (bytes by moment of a step), workload.py (lengths,
micro-batches) and seconds.py (time by stage). It may import models, data, config and errors.
"""
