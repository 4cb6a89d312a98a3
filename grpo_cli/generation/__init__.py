"""Sampling: from prompts to completions.

Start with `base.py`, the base class of the engines, and `factory.py`, which lists them by name. The
policy's own engine is `transformers.py` (decoding in `engine.py`), vLLM is in `vllm/`. May import
scoring, sandbox, models and what stands below them; `engine.py` and `vllm/` do not import each
other.
"""
