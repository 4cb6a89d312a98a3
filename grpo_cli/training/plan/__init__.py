"""Plans memory and time: of a recipe before anything is loaded, and of a run beside its measures.

`run_plan.py` is behind `grpo plan`, `trial.py` measures this machine for a few seconds, `record.py`
writes plan.json into the folder of a run. The arithmetic is in `grpo_cli/planning/`.
"""
