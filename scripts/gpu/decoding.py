"""Stage decoding: measures sampled tokens per second by the number of rows in a batch.

Ours with CUDA graphs and step by step, and transformers' `generate`.
"""

from __future__ import annotations

from functools import partial

import speed
import workloads
from cases import Case, Figures, Setting

ROWS = (1, 8, 32, 128, 512)
PROMPT, NEW = 128, 64  # tokens of a prompt, and sampled


def cases(setting: Setting) -> list[Case]:
    rows = (1, 4) if setting.dry else ROWS
    name = workloads.names(setting)[0]
    return [
        Case("decoding", f"{name}, {count} rows, {way}", partial(decode, setting, name, count, way))
        for count in rows
        for way in ("ours", "steps", "plain")
    ]


def decode(setting: Setting, name: str, rows: int, way: str) -> Figures:
    """Measures sampling with groups of 8 completions, or of all rows if there are fewer."""
    model = workloads.model(name, setting)
    size = min(rows, workloads.NUM_GENERATIONS)
    prompt, new = (8, 4) if setting.dry else (PROMPT, NEW)
    prompts = speed.prompts_of(model, rows // size, prompt)
    found = speed.measured_generation(setting, model, prompts, size, new, way)
    shown = ("seconds", "tokens/s", "ms a token", "GiB", "status", "error")
    return {key: found[key] for key in shown if key in found}
