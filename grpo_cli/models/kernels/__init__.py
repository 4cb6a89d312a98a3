"""The kernels that compute the attention of packed rows, and the choice of one.

Start with `table.py`: it lists the kernels in the order in which they are tried. `base.py`
says what a kernel is, `plain.py` is the one that runs everywhere and that the others are compared
with. The layout of a row, which all kernels read, is in `grpo_cli/models/attention.py`. Imports
attention, records, config and errors.
"""
