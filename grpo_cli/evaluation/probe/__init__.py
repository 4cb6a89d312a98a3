"""The probe of a recipe: whether the untrained policy gives a run something to learn from.

Start with `sampled` (sample and score some prompts as training does) and `measure` (the numbers of
a probe). `signal` estimates the share of groups whose rewards differ, `prompt_checks` finds prompts
that render oddly, `verdict` says what to change and `tables` prints it. May import what
`evaluation` may.
"""
