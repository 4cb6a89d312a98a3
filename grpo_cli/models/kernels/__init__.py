"""The kernels that compute the attention of packed rows.

`plain.py` runs everywhere, the others on CUDA in half precision.
All kernels read a row's layout, which is in `grpo_cli/models/attention.py`; `usual_kernel` there
chooses one. May import attention, records, config and errors.
"""
