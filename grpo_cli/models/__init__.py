"""The policy: loading, adapters, quantization, and log-probabilities of packed rollouts.

Start with `policy.py`, `policy_logprobs.py` and `packing.py`; `loading.py` makes the model. May
import algorithm, data, distributed and config.
"""
