"""Writes the parts of docs/ that follow from the code: tables and a picture."""

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grimp
import networkx
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grpo_cli.algorithm import arguments  # noqa: E402
from grpo_cli.config import knob, renamed  # noqa: E402
from grpo_cli.config.keys import ENTRIES, KNOBS  # noqa: E402
from grpo_cli.config.recipe import Recipe  # noqa: E402
from grpo_cli.planning.devices import Device  # noqa: E402
from grpo_cli.planning.memory import Job, Lengths  # noqa: E402
from grpo_cli.planning.plan import predict, with_values  # noqa: E402
from grpo_cli.planning.sizes import sizes_of  # noqa: E402
from tests.models.families import FAMILIES, Family  # noqa: E402

BEGIN, END = "<!-- made by scripts/make_docs.py -->", "<!-- end -->"
MAPPINGS = ("reward", "callbacks")  # whose names are the user's own


def qwen(layers: int, hidden: int, heads: int, kv: int, width: int, **own: Any) -> Any:
    """Returns the config of a dense Qwen2.5."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": kv, "intermediate_size": width, "vocab_size": 152064}
    return transformers.Qwen2Config(**{**sizes, "tie_word_embeddings": False, **own})


SMALL = {"vocab_size": 151936, "tie_word_embeddings": True}
QWEN = {
    "0.5B": qwen(24, 896, 14, 2, 4864, **SMALL),
    "1.5B": qwen(28, 1536, 12, 2, 8960, **SMALL),
    "3B": qwen(36, 2048, 16, 2, 11008, **SMALL),
    "7B": qwen(28, 3584, 28, 4, 18944),
    "14B": qwen(48, 5120, 40, 8, 13824),
    "32B": qwen(64, 5120, 40, 8, 27648),
    "72B": qwen(80, 8192, 64, 8, 29568),
}
# The models, numbers of GPUs and strategies of the table of memory.
MODELS = {f"Qwen2.5-{name}": QWEN[name] for name in ("7B", "32B", "72B")} | {
    "Qwen3-235B-A22B": transformers.Qwen3MoeConfig(
        num_hidden_layers=94, hidden_size=4096, num_attention_heads=64, num_key_value_heads=4,
        head_dim=128, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8,
        vocab_size=151936,
    )
}  # fmt: skip
SIZES = (8, 64, 1024)
LARGE: dict[str, Any] = {
    "prompts_per_step": 1024, "generation.num_generations": 16, "loss.beta": 0.04,
    "generation.max_completion_tokens": 4096, "generation.max_num_seqs": 16,
    "update.tokens_per_micro_batch": 8192,
}  # fmt: skip
SERVED: dict[str, Any] = {"generation.engine": "vllm_server"}
FSDP: dict[str, Any] = {"distributed.strategy": "fsdp2"}
SHARDED = LARGE | SERVED | FSDP
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": LARGE | SERVED, "fsdp2": SHARDED,
    "fsdp2, kept gathered": SHARDED | {"distributed.reshard_after_forward": False},
    "fsdp2, embedded engine": LARGE | FSDP,
}  # fmt: skip
CARDS = (16, 24, 48, 80)  # GB; the ways of training below are for one GPU and for one node
STEP: dict[str, Any] = {
    "prompts_per_step": 8, "generation.num_generations": 8, "loss.beta": 0.0,
    "generation.max_completion_tokens": 1024, "generation.max_num_seqs": 8,
    "update.tokens_per_micro_batch": 4096,
}  # fmt: skip
LORA: dict[str, Any] = {"model.dtype": "bfloat16", "adapter.method": "lora"}
QLORA = LORA | {"model.quantization": "nf4"}
TRAINING = {"all weights": STEP, "LoRA": STEP | LORA, "QLoRA": STEP | QLORA}
ON_A_NODE = {"all weights": STEP | FSDP | SERVED, "LoRA": STEP | LORA | FSDP | SERVED}

SAMPLED = {"engine": "engine", "cache": "transformers' cache", "none": "refused"}
Field = dataclasses.Field[Any]


def main() -> None:
    for name, table in TABLES.items():
        page = ROOT / "docs" / name
        if (new := renewed(old := page.read_text(encoding="utf-8"), table())) != old:
            print(f"rewrote {page}")
            page.write_text(new, encoding="utf-8")


def renewed(page: str, table: str) -> str:
    """Returns the page with another table between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"the page must hold {BEGIN} and {END}"  # noqa: PT018
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    rule = ["---"] * len(head)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *lines))


def cluster_table() -> str:
    """Returns the peak memory of a GPU by model and strategy, in GB; bold beyond 80 GB."""
    lines = []
    for name, config in MODELS.items():
        for gpus in SIZES:
            line = [name if gpus == SIZES[0] else "", f"{gpus:,}"]
            for values in STRATEGIES.values():
                found = peak(config, values, gpus, Lengths(512, 2048, 4096))
                shown = f"{found:.1f}" if found < 9.95 else f"{found:,.0f}"
                line.append(f"**{shown}**" if found > 80 else shown)
            lines.append(line)
    return markdown(["model", "GPUs", *STRATEGIES], lines)


def peak(config: Any, values: Mapping[str, Any], gpus: int, lengths: Lengths) -> float:
    """Returns the peak memory of a GPU with 80 GB in GB."""
    base = {"mixed_precision": "bf16", "model.gradient_checkpointing": True}
    recipe = with_values(Recipe(), {**base, **values})
    device = Device("80 GB", 80e9)
    return predict(Job(recipe, sizes_of(config, recipe), device, gpus, lengths)).peak / 1e9


def memory_tables() -> str:
    """Returns the peak memory of a GPU: on one GPU, on eight, and on a cluster."""
    tables = {"One GPU": card_table(TRAINING, 1), "Eight GPUs": card_table(ON_A_NODE, 8)}
    tables["A cluster"] = cluster_table()
    return "\n".join(f"### {title}\n\n{table}" for title, table in tables.items())


def card_table(ways: Mapping[str, Mapping[str, Any]], gpus: int) -> str:
    """Returns the peak memory of each of `gpus` GPUs, with the smallest card that holds it."""
    lines = []
    for name, config in QWEN.items():
        line = [name]
        for values in ways.values():
            found = peak(config, values, gpus, Lengths(512, 1024, 1024))
            card = next((card for card in CARDS if found <= 0.94 * card), None)  # 6 % are not free
            line.append(f"{found:.1f}: {card} GB" if card else f"{found:.0f}")
        lines.append(line)
    return markdown(["model", *ways], lines)


def family_table() -> str:
    """Returns the model families that the tests compute, by how they are sampled and trained."""
    groups: dict[tuple[str, str], list[Family]] = {}
    for family in FAMILIES:
        rows = "packed" if family.packed else "padded"
        rows += ", recurrent" if family.recurrent else ""
        groups.setdefault((SAMPLED[family.decoder], rows), []).append(family)
    lines = [(*key, named(group)) for key, group in groups.items()]
    parts = [f"With a load-balancing loss: {named([f for f in FAMILIES if f.balanced])}.\n"]
    parts += [f"Not in vLLM's list of models: {named([f for f in FAMILIES if not f.vllm])}.\n"]
    parts += [f"- {named([f])}: {f.why}." for f in FAMILIES if f.why and not f.recurrent]
    return "\n".join([markdown(["sampled", "training rows", "model types"], lines), *parts, ""])


def named(families: Sequence[Family]) -> str:
    """Returns the model types of families as Markdown."""
    parts = (str(family).partition(",") for family in families)
    return ", ".join(
        f"`{kind}`" + (f" ({which.strip()})" if which else "") for kind, _, which in parts
    )


def name_tables() -> str:
    """Returns the names of other trainers beside ours, a table for each section."""
    tables = []
    own = {title: rows for title, rows in renamed.sections().items() if title != "Moved"}
    for title, rows in own.items():
        lines = [f"### {title}\n\n| `GRPOConfig` | here | what differs |\n| --- | --- | --- |\n"]
        for row in rows:
            here = dict.fromkeys(row.here.format(name=name) for name in row.names)
            theirs = ", ".join(f"`{name}`" for name in row.names)
            lines.append(f"| {theirs} | {', '.join(here) or 'none'} | {row.but} |\n")
        tables.append("".join(lines))
    return "\n".join(tables)


def knob_lists() -> str:
    """Returns a list of knobs for each section of a recipe, the recipe's own knobs first."""
    parts = []
    for name, kind in sections():
        prefix = f"{name}." if name else ""
        lines = [
            line(prefix + f.name, f)
            for f in dataclasses.fields(kind)
            if not f.metadata["kind"] or f.default is None  # a section that may be null has a value
        ]
        heading = f"## {name or 'The run'}\n\n{(kind.__doc__ or '').splitlines()[0]}\n\n"
        parts.append(heading + "".join(lines))
    return "\n".join(parts)


def sections() -> Iterator[tuple[str, Any]]:
    """(key, dataclass) of each section; of a mapping, one key that stands for every entry."""
    yield "", Recipe
    for key, field in KNOBS.items():
        if field.metadata["kind"]:
            yield key, field.metadata["kind"]
        elif key in MAPPINGS:
            yield f"{key}.NAME", ENTRIES[key]


def line(key: str, field: Field) -> str:
    """Returns a knob with its default, its range and the first sentence about it."""
    allowed = knob.allowed(field.metadata).removeprefix("one of ")
    readers = arguments.readers_of(key)
    sentence = re.match(r".+?\.(?= [A-Z]|$)", field.metadata["doc"])
    assert sentence is not None, f"{key} has no sentence"
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    default = f"`{knob.as_written(value)}`" if value != "" else "empty"
    text = f"- `{key}` ({default}{f'; {allowed}' if allowed else ''}): {sentence[0]}"
    return text + (f" Read by {', '.join(readers)}." if readers else "") + "\n"


def layers() -> str:
    """Returns a picture of the packages: an arrow per import that no other arrows imply."""
    graph = grimp.build_graph("grpo_cli", exclude_type_checking_imports=True)
    packages = {f"grpo_cli.{path.stem}": path.stem for path in (ROOT / "grpo_cli").iterdir()}
    arrows = networkx.DiGraph()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            pair = [packages.get(".".join(m.split(".")[:2])) for m in (importer, imported)]
            if all(pair) and pair[0] != pair[1] and not imported.endswith(".settings"):
                arrows.add_edge(*pair)
    lines = sorted(f"    {a} --> {b}" for a, b in networkx.transitive_reduction(arrows).edges)
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```", ""])


TABLES = {
    "architecture.md": layers,
    "knobs.md": knob_lists,
    "memory.md": memory_tables,
    "models.md": family_table,
    "coming_from_trl.md": name_tables,
}


if __name__ == "__main__":
    main()
