"""`grpo doctor`: checks of this machine and of recipes, each with a deadline; see command.py first.

`findings.py` runs the checks; machine.py, software.py and recipes.py have one function for each.
"""
