"""The processes of a run: collectives, sharding, stop signals, and supervision.

Start with `workers.py`; `supervisor.py` ends a run in which a process fails or hangs. Imports the
configuration and the records only.
"""
