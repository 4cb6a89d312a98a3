"""Recipes and the groups that they compose; Hydra finds them as pkg://grpo_cli.recipes."""
