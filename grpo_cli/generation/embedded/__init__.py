"""The embedded engine: sampling with the policy's own module and weights.

Start with `generator.py`, which `generation.engine=transformers` names, and `engine.py`, the loop
of continuous batching. `static_decoding.py` replays CUDA graphs. `cached_decoding.py` uses
transformers' caches for models that the engine cannot decode.
"""
