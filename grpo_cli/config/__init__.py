"""The recipe: its sections, its composition by Hydra, and its checks.

Start with `recipe.py`, which puts the sections together, then `compose.py` and `parsing.py`. A
section is declared in the `settings.py` of the package that builds from it. Imports only these
modules, errors, and the rewards' traits.
"""
