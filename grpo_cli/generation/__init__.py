"""Sampling: from prompts to completions.

Start with `base.py`, the base class of the engines, and `factory.py`, which lists them by name. The
policy's own engine is in `embedded/`, vLLM is in `vllm/`; they do not import each other. May import
scoring, sandbox, models and the layers below them.
"""
