"""Writes the model card of a checkpoint: README.md with the metadata that the hub reads.

A card holds no time and no folder of the run, so that a resumed run writes the same card.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from grpo_cli.checkpoints import paths
from grpo_cli.config import saved_recipe
from grpo_cli.config.interpolation import publishable, publishable_command
from grpo_cli.config.recipe import Recipe
from grpo_cli.config.sources import is_local
from grpo_cli.reporting.reporter import versions

TAGS = ["grpo", "grpo-cli", "reinforcement-learning"]

MODEL_CARD = """\
---
{{ card_data }}
---

# {{ title }}

{{ subject }} trained with [GRPO](https://huggingface.co/papers/2402.03300) (Group Relative Policy
Optimization) by `grpo-cli`: {{ steps }} of {{ all_steps }} steps of {{ prompts }} prompts with
{{ generations }} completions each{{ processes }}.

| | |
| --- | --- |
| data | {{ data }} |
| rewards | {{ rewards }} |
| loss | {{ loss }} |
{% if results %}
## Evaluation

With 95 % intervals, clustered by problem.

| metric | before training | after step {{ evaluated }} |
| --- | --- | --- |
{% for row in results %}| {{ row | join(" | ") }} |
{% endfor %}{% endif %}
## Training
{% if command %}
```
{{ command }}
```
{% endif %}
<details>
<summary>The complete recipe; <code>grpo train recipe=FILE</code> reads it</summary>

```yaml
{{ recipe }}
```

</details>

Versions: {{ versions }}.

## Citation

```bibtex
@article{shao2024deepseekmath,
    title  = {{ "{{" }}DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models{{ "}}" }},
    author = {Zhihong Shao and Peiyi Wang and Qihao Zhu and Runxin Xu and Junxiao Song and Xiao Bi and Haowei Zhang and Mingchuan Zhang and Y. K. Li and Y. Wu and Daya Guo},
    year   = 2024,
    eprint = {arXiv:2402.03300},
}
```
"""  # noqa: E501


def model_card(
    recipe: Recipe,
    command: Sequence[str],
    step: int,
    before: Mapping[str, float] | None,
    after: Mapping[str, float] | None,
    after_step: int,
    processes: int,
) -> str:
    """Returns the card of a checkpoint.

    Args:
        command: the command line that started the run.
        step: the number of steps of the checkpoint.
        before, after: metrics `eval/...` before training, and at the newest evaluation.
        after_step: the step of the newest evaluation.
        processes: the number of processes of the run.
    """
    path, dataset = recipe.model.path, recipe.dataset
    base = path if path and not Path(path).is_dir() and not paths.looks_local(path) else None
    sources = [part.data for part in dataset.mixture.values()] or [dataset.train or ""]
    names = {source: Path(source).name if is_local(source) else source for source in sources}
    data = [source for source in names if not is_local(source)]
    is_adapted = recipe.adapter.method != "none"
    relation: dict[str, Any] = {"base_model_relation": "adapter"} if is_adapted and base else {}
    results, name = after or {}, recipe.hub.repo or recipe.recipe or "model"
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base,
            datasets=data or None,
            library_name="peft" if is_adapted else "transformers",
            tags=[*TAGS, "lora"] if is_adapted else TAGS,
            model_name=name,
            **relation,
        ),
        template_str=MODEL_CARD,
        title=name,
        subject=subject(recipe, base),
        steps=step,
        all_steps=recipe.steps,
        prompts=recipe.prompts_per_step,
        generations=recipe.generation.num_generations,
        processes=f", on {processes} processes" if processes > 1 else "",
        data=", ".join(names.values()),
        rewards=", ".join(f"{n} (weight {r.weight:g})" for n, r in recipe.reward.items()),
        loss=f"{recipe.loss.policy}, beta {recipe.loss.beta:g}",
        evaluated=after_step,
        results=[
            (key.removeprefix("eval/"), shown(before or {}, key), shown(results, key))
            for key in results
            if f"{key}_low" in results or key == "eval/reward"
        ],
        command=shlex.join(publishable_command(command)),
        recipe=yaml.safe_dump(
            publishable(yaml.safe_load(saved_recipe.as_yaml(recipe))),
            sort_keys=False,
            allow_unicode=True,
        ).rstrip(),
        versions=", ".join(f"{package} {number}" for package, number in versions().items()),
    )
    return str(card)


def subject(recipe: Recipe, base: str | None) -> str:
    """Returns the beginning of the first sentence: the model, or the adapter and its model."""
    model = f"[{base}](https://huggingface.co/{base})"
    if base is None:
        model = "a model from a folder" if recipe.model.path else "a model built from scratch"
    if recipe.adapter.method == "none":
        return model[0].upper() + model[1:]
    quantized = recipe.model.quantization
    model += "" if quantized == "none" else f" quantized to {quantized}"
    return f"An adapter ({recipe.adapter.method}) for {model},"


def shown(metrics: Mapping[str, float], key: str) -> str:
    """Formats a metric with its interval; "" if there is no such metric."""
    value = metrics.get(key, math.nan)
    if not math.isfinite(value):
        return ""
    ends = [metrics.get(f"{key}_{end}", math.nan) for end in ("low", "high")]
    interval = f" [{ends[0]:.3f}, {ends[1]:.3f}]" if all(map(math.isfinite, ends)) else ""
    return f"{value:.3f}{interval}"
