"""Checkpoints: written in the background, verified, and read again to the last bit.

Start with `checkpointer.py`; `shards.py` has the format of tensors, `manifest.py` the hashes,
`provenance.py` what may be read of another user's checkpoint. May import generation and below.
"""
