"""The kernels that compute the attention of packed rows, and the choice of a kernel.

Start with `choice.py`, which lists the kernels in the order in which they are tried. `base.py`
defines the interface. `plain.py` runs everywhere; the others are checked against a masked softmax.
All kernels read a row's layout, which is in `grpo_cli/models/attention.py`. May import attention,
records, config and errors.
"""
