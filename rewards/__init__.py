"""The rewards that ship with grpo: one plain function a file, named like the file.

A reward is called with keyword arguments, in TRL's convention: `prompts`, `completions`,
`completion_ids`, one list per dataset column, and the recipe's own arguments for it. It returns one
float per completion, or None where it does not apply. Parameters without a default name the dataset
columns it needs; keyword-only parameters with a default are its arguments.
"""
