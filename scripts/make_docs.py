"""Writes the tables in docs/: knobs.md, memory (memory.md) and model families (models.md).

python scripts/make_docs.py            write it anew
python scripts/make_docs.py --check    only say whether it is up to date (exit code 1: it is not)
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grpo_cli.algorithm import objective  # noqa: E402
from grpo_cli.config import knob, schema  # noqa: E402
from grpo_cli.planning.memory import memory  # noqa: E402
from grpo_cli.planning.settings import Cluster, Settings  # noqa: E402
from grpo_cli.planning.shapes import Shape  # noqa: E402
from tests.models.families import FAMILIES, Family  # noqa: E402

BEGIN, END = "<!-- made by scripts/make_docs.py -->", "<!-- end -->"
# Mappings whose names are the user's own, or a knob's.
MAPPINGS = {
    "reward": ("reward.NAME", schema.Reward),
    "schedules": ("schedules.KEY", schema.Schedule),
    "callbacks": ("callbacks.NAME", schema.Callback),
}

# The models, GPUs and strategies of the table of memory.
MODELS = {
    "Qwen2.5-7B": Shape(28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True),
    "Qwen2.5-32B": Shape(64, 5120, 40, 8, 128, 27648, 152064, qkv_bias=True),
    "Qwen2.5-72B": Shape(80, 8192, 64, 8, 128, 29568, 152064, qkv_bias=True),
    "Qwen3-235B-A22B": Shape(94, 4096, 64, 4, 128, 1536, 151936, 128, 8, qk_norm=True),
}
SIZES = (8, 64, 1024)
STRATEGIES = {
    "ddp": Settings(strategy="ddp"),
    "fsdp2": Settings(),
    "fsdp2, kept gathered": Settings(reshard_after_forward=False),
    "fsdp2, embedded engine": Settings(embedded=True),
}

# The models and the ways of training of the tables for one GPU and for one node.
QWEN = {
    "0.5B": Shape(24, 896, 14, 2, 64, 4864, 151936, qkv_bias=True, tied=True),
    "1.5B": Shape(28, 1536, 12, 2, 128, 8960, 151936, qkv_bias=True, tied=True),
    "3B": Shape(36, 2048, 16, 2, 128, 11008, 151936, qkv_bias=True, tied=True),
    "7B": MODELS["Qwen2.5-7B"],
    "14B": Shape(48, 5120, 40, 8, 128, 13824, 152064, qkv_bias=True),
    "32B": MODELS["Qwen2.5-32B"],
    "72B": MODELS["Qwen2.5-72B"],
}
CARDS = (16, 24, 48, 80)  # GB
STEP = Settings(
    strategy="ddp", reference=False, micro_tokens=4096, prompts=8, num_generations=8,
    completion_tokens=1024, max_completion_tokens=1024, embedded=True,
)  # fmt: skip
TRAINING = {
    "all weights": STEP,
    "LoRA": replace(STEP, weight_bytes=2, adapter_rank=16),
    "QLoRA": replace(STEP, weight_bytes=2, adapter_rank=16, quantization="nf4"),
}
ON_A_NODE = {
    "all weights": replace(STEP, strategy="fsdp2", embedded=False),
    "LoRA": replace(STEP, strategy="fsdp2", embedded=False, weight_bytes=2, adapter_rank=16),
}

SAMPLED = {"engine": "engine", "cache": "transformers' cache", "none": "no cache"}

Field = dataclasses.Field[Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tables in docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    check: bool = parser.parse_args().check
    for name, table in TABLES.items():
        page = ROOT / "docs" / name
        old = page.read_text(encoding="utf-8")
        new = renewed(old, table())
        if check and new != old:
            sys.exit(f"docs/{name} is not up to date; run make docs")
        if not check:
            page.write_text(new, encoding="utf-8")


def renewed(page: str, table: str) -> str:
    """Returns the page with another table between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"the page must hold {BEGIN}"
    assert end, f"the page must hold {END}"
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


def cluster_table() -> str:
    """Returns the peak memory of a GPU by model and strategy, in GB."""
    lines = [["model", "GPUs", *STRATEGIES], ["---"] * (2 + len(STRATEGIES))]
    for name, shape in MODELS.items():
        for gpus in SIZES:
            line = [name if gpus == SIZES[0] else "", f"{gpus:,}"]
            for settings in STRATEGIES.values():
                cluster = Cluster(gpus)
                found = memory(shape, cluster, settings)
                wall, peak = found.wall(cluster.memory), found.peak / 1e9
                shown = f"{peak:.1f}" if peak < 9.95 else f"{peak:,.0f}"
                line.append(shown + (f": {wall}" if wall else ""))
            lines.append(line)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def memory_tables() -> str:
    """Returns the peak memory of a GPU: on one GPU, on eight, and on a cluster."""
    tables = {
        "One GPU": card_table(TRAINING, 1),
        "Eight GPUs": card_table(ON_A_NODE, 8),
        "A cluster": cluster_table(),
    }
    return "\n".join(f"### {title}\n\n{table}" for title, table in tables.items())


def card_table(ways: Mapping[str, Settings], gpus: int) -> str:
    """Returns the peak memory of each of `gpus` GPUs, with the smallest card that holds it."""
    lines = [["model", *ways], ["---"] * (1 + len(ways))]
    for name, shape in QWEN.items():
        peaks = [memory(shape, Cluster(gpus), settings).peak / 1e9 for settings in ways.values()]
        lines.append([name, *map(on_card, peaks)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def on_card(peak: float) -> str:
    """Returns a peak in GB and the smallest card for it, of whose memory 94 % are counted."""
    card = next((card for card in CARDS if peak <= 0.94 * card), None)
    return f"{peak:.1f}: {card} GB" if card else f"{peak:.0f}"


def family_table() -> str:
    """Returns the model families that the tests compute, by how they are sampled and trained."""
    groups: dict[tuple[str, str], list[Family]] = {}
    for family in FAMILIES:
        rows = "packed" if family.packed else "padded"
        rows += ", recurrent" if family.recurrent else ""
        groups.setdefault((SAMPLED[family.decoder], rows), []).append(family)
    lines = ["| sampled | training rows | model types |", "| --- | --- | --- |"]
    lines += [f"| {a} | {b} | {named(group)} |" for (a, b), group in groups.items()]
    lines += ["", f"With a load-balancing loss: {named([f for f in FAMILIES if f.balanced])}.", ""]
    lines += [f"Not in vLLM's list of models: {named([f for f in FAMILIES if not f.vllm])}.", ""]
    lines += [f"- {named([f])}: {f.why}." for f in FAMILIES if f.why and not f.recurrent]
    return "\n".join(lines) + "\n"


def named(families: Sequence[Family]) -> str:
    """Returns the model types of families as Markdown."""
    parts = (str(family).partition(",") for family in families)
    return ", ".join(
        f"`{kind}`" + (f" ({which.strip()})" if which else "") for kind, _, which in parts
    )


def knob_lists() -> str:
    """Returns a list of knobs for each section of a recipe, the recipe's own knobs first."""
    parts = []
    for name, kind in sections():
        prefix = f"{name}." if name else ""
        lines = [line(prefix + f.name, f) for f in dataclasses.fields(kind) if is_knob(f)]
        heading = f"## {name or 'The run'}\n\n{(kind.__doc__ or '').splitlines()[0]}\n\n"
        parts.append(heading + "".join(lines))
    return "\n".join(parts)


def sections() -> Iterator[tuple[str, Any]]:
    """(key, dataclass) of each section; of a mapping, one key that stands for every entry."""
    yield "", schema.Recipe
    for key, field in schema.knobs():
        if section_of(field) is not None:
            yield key, section_of(field)
        elif key in MAPPINGS:
            yield MAPPINGS[key]


def section_of(field: Field) -> Any:
    """The dataclass that a field holds, or None."""
    kind = getattr(schema, str(field.type).removesuffix(" | None"), None)
    return kind if dataclasses.is_dataclass(kind) else None


def is_knob(field: Field) -> bool:
    """Whether it has a value of its own: a section that may be null has."""
    return section_of(field) is None or field.default is None


def line(key: str, field: Field) -> str:
    """Returns a knob with its default, its range and the first sentence about it."""
    allowed = knob.allowed(field.metadata).removeprefix("one of ")
    readers = objective.readers_of(key)
    text: str = f"- `{key}` ({default(field)}{f'; {allowed}' if allowed else ''}): "
    sentence = re.match(r".+?\.(?= [A-Z]|$)", field.metadata["doc"])
    assert sentence is not None, f"{key} has no sentence"
    return text + sentence[0] + (f" Read by {', '.join(readers)}." if readers else "") + "\n"


def default(field: Field) -> str:
    """A knob's default as YAML writes it."""
    value = field.default
    if value is dataclasses.MISSING:
        assert field.default_factory is not dataclasses.MISSING
        value = field.default_factory()
    if value == "":
        return "empty"
    text = "null" if value is None else str(value)
    return f"`{text.lower() if isinstance(value, bool) else text}`"


TABLES = {
    "knobs.md": knob_lists,
    "memory.md": memory_tables,
    "models.md": family_table,
}


if __name__ == "__main__":
    main()
