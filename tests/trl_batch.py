"""The first batch of TRL's GRPOTrainer on a LoRA adapter, for training/test_trl_batch.py.

As a program it trains one step with TRL 1.16.0 and stores the completions, rewards, loss and
gradient norm:

    .venv-bench/bin/python -m tests.trl_batch tiny
    .venv-bench/bin/python -m tests.trl_batch real
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from grpo_cli.models import tiny
from grpo_cli.models.settings import Build
from scripts import real_model

GOLDENS = Path(__file__).parent / "goldens"
GENERATIONS, LIMIT, TEMPERATURE = 4, 12, 0.9
ROWS = [
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}],
     "target": target}
    for question, target in (("What is 2 + 3?", 4), ("Name a colour.", 8))
]  # fmt: skip


def letters(completions: list[Any], **_: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in texts]


def near(completions: list[Any], **columns: Any) -> list[float]:
    """Returns how close the number of characters is to the column `target`."""
    pairs = zip(completions, columns["target"], strict=True)
    return [-abs(len(completion[0]["content"]) - target) / 10 for completion, target in pairs]


def make(name: str, folder: Path) -> tuple[Path, Path]:
    """Returns the folders of the model and of its adapter, with the same weights each time."""
    random = np.random.RandomState(0)  # whose numbers are the same in every version

    def fill(parameter: torch.Tensor, scale: float) -> None:
        parameter.data = torch.tensor(scale * random.standard_normal(parameter.shape)).float()

    base = real_model.folder()
    if name == "tiny":
        base = folder / "model"
        shape = Build(hidden_size=32, intermediate_size=64, num_layers=2)
        tokenizer = tiny.make_tokenizer(shape, [])
        model = tiny.make_model(shape, tokenizer)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                fill(parameter, 0.2)
        model.generation_config.eos_token_id = list(range(2, 259, 8))  # so that some end
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            fill(parameter, 0.02)
    adapted.save_pretrained(folder / "adapter")
    return base, folder / "adapter"


def train(name: str, folder: Path) -> dict[str, Any]:
    """Takes a step of two micro-batches with TRL; returns its batch, loss and gradient norm."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    batch: dict[str, Any] = {}

    class Watched(GRPOTrainer):  # type: ignore[misc]
        def _calculate_rewards(self, *given: Any, **named: Any) -> Any:
            rewards = super()._calculate_rewards(*given, **named)
            batch["rewards"] = rewards.tolist()
            return rewards

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            found = super()._generate_and_score_completions(inputs)
            for key in ("prompt", "completion"):
                pairs = zip(found[f"{key}_ids"], found[f"{key}_mask"], strict=True)
                batch[f"{key}_ids"] = [ids[mask.bool()].tolist() for ids, mask in pairs]
            batch["prompt_ids"] = batch["prompt_ids"][::GENERATIONS]  # one a group
            batch["advantages"] = found["advantages"].tolist()
            return found

    base, adapter = make(name, folder)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = GRPOConfig(
        output_dir=str(folder), max_steps=1, num_generations=GENERATIONS,
        per_device_train_batch_size=len(ROWS) * GENERATIONS // 2, gradient_accumulation_steps=2,
        max_completion_length=LIMIT,
        temperature=TEMPERATURE, reward_weights=[0.5, 1.0], bf16=False, use_cpu=True,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[],
        shuffle_dataset=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = Watched(
        model=PeftModel.from_pretrained(model, adapter, is_trainable=True),
        processing_class=AutoTokenizer.from_pretrained(base, padding_side="left"),
        reward_funcs=[letters, near], args=config, train_dataset=Dataset.from_list(ROWS),
    )  # fmt: skip
    trainer.train()
    log = trainer.state.log_history[0]
    return batch | {key: log[key] for key in ("loss", "grad_norm")}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        result = train(sys.argv[1], Path(scratch))
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
    (GOLDENS / f"trl_batch_{sys.argv[1]}.json").write_text(f"{{\n{lines}\n}}\n")
