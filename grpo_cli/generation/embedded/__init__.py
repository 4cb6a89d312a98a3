"""The embedded engine: sampling with the policy's own module and weights.

Start with `generator.py`, which `generation.engine=transformers` names, and `engine.py`, the loop
of continuous batching. `static_decoding.py` replays CUDA graphs, and `cached_decoding.py` decodes
the models that the engine cannot, with transformers' caches.
"""
