"""Reports of a run: metrics, completions, the report, the live view, trackers, and the hub.

Start with `reporter.py`; `report/` makes report.html, `live/` reads a run folder for `grpo
watch`. May import checkpoints and below.
"""
