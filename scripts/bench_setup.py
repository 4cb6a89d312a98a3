"""Defines what both sides of the benchmark get: workloads, models, a tokenizer, prompts, a reward.

Nothing is downloaded. A token is a character, so a prompt of N tokens is a text of N characters,
except with the real chat model (`make real-model`).
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import real_model
import yaml

WARM_UP = 1  # steps at the beginning of each process that do not count
LORA_ALPHA = 32
TOOL = "grpo_cli.environments.examples:multiply"
IMAGE_SIZE = 128  # sides of a picture, in pixels
FIRST_CHARACTER = 4  # ids below: pad, eos, and the two of a chat template

# Arguments of Qwen2Config. `eos` is how many words there are for one that ends a completion: with
# random weights all words are about as likely, so lengths are geometric with about that mean.
MODELS: dict[str, dict[str, int]] = {
    "small": {
        "vocab_size": 128, "hidden_size": 384, "intermediate_size": 1024,
        "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2, "eos": 128,
    },
    "110m": {
        "vocab_size": 12_000, "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 16, "num_attention_heads": 12, "num_key_value_heads": 4, "eos": 128,
    },
    "300m": {
        "vocab_size": 12_000, "hidden_size": 1024, "intermediate_size": 2816,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "eos": 128,
    },
    "wide": {
        "vocab_size": 151_936, "hidden_size": 256, "intermediate_size": 688,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "eos": 151_936,
    },
    "0.5b": {
        "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "eos": 128,
    },
}  # fmt: skip

# Differences of a side from `grpo train` with its defaults.
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "vllm": {"generation.engine": "vllm_colocate"},
}


@dataclass(frozen=True)
class Workload:
    """One setting that both sides are timed in."""

    name: str
    prompt_tokens: tuple[int, int]  # of the shortest and of the longest prompt
    limit: int  # longest completion, in tokens
    prompts: int = 8  # a step
    generations: int = 8  # completions of each
    min_tokens: int = 0  # shortest completion
    model: str = "small"
    half_flat: bool = False  # every second prompt's rewards are all equal
    entropy: bool = False  # measured in every step; TRL measures it always
    tools: bool = False  # the model, prompts and tool of the recipe `calculator`
    images: bool = False  # the pictures of the recipe `shapes_tiny`, of 128 x 128 pixels
    questions: str = ""  # a file of samples/ whose questions the real chat model is asked
    micro_batch: int = 0  # completions of a forward of TRL's; 0: all at once
    lora_rank: int = 0  # of an adapter on all linear layers of the decoder; 0: all weights train
    sides: tuple[str, ...] = ("ours", "trl", "generate")
    steps: int = 3  # counted, in each round


WORKLOADS = {
    w.name: w
    for w in (
        Workload("tail", (30, 130), limit=512),
        Workload("prompts", (512, 512), limit=64, prompts=4, generations=16),
        Workload("short", (12, 12), limit=24, prompts=64, min_tokens=24),
        Workload(
            "vocab", (30, 130), limit=256, model="wide", entropy=True,
            sides=("ours", "trl"), steps=1,
        ),
        Workload("flat", (30, 130), limit=512, half_flat=True, sides=("ours", "all")),
        Workload(
            "lora", (30, 130), limit=512, prompts=3, model="110m", lora_rank=16,
            sides=("ours", "trl"), steps=1,
        ),
        Workload(
            "tools", (0, 0), limit=96, prompts=64, generations=4, model="calculator", tools=True,
            sides=("ours", "trl"),
        ),
        Workload(
            "images", (0, 0), limit=48, min_tokens=48, prompts=4, model="shapes", images=True,
            sides=("ours", "trl"), steps=1,
        ),
        Workload(
            "real", (0, 0), limit=64, prompts=16, model="real", micro_batch=8,
            questions="chat_sums_train.jsonl", sides=("ours", "trl"), steps=2,
        ),
        Workload(
            "real-256", (0, 0), limit=256, prompts=16, model="real", micro_batch=8,
            questions="gsm8k_train.jsonl.gz", sides=("ours", "trl"), steps=1,
        ),
        Workload("vllm", (30, 130), limit=512, sides=("vllm", "trl_vllm", "ours")),  # tail's
    )
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """Describes the work of one process of one side; handed over as a file."""

    side: str
    workload: Workload
    folder: str  # holds `model`, `prompts.jsonl` and, for ours, `recipe.yaml`
    output: str  # folder for what the side writes by itself
    steps: int  # counted and not
    bf16: bool
    metered: bool = False  # looks at memory, which costs time

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> Job:
        """The job in a file, with its workload."""
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        workload = found.pop("workload")
        for name in ("prompt_tokens", "sides"):
            workload[name] = tuple(workload[name])
        return cls(workload=Workload(**workload), **found)

    @property
    def model(self) -> str:
        return str(Path(self.folder) / "model")

    def rows(self) -> list[dict[str, Any]]:
        """The prompts with their columns, in the order of the steps."""
        lines = (Path(self.folder) / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


def reward(completions: Sequence[Any], flat: Sequence[bool], **ignored: Any) -> list[float]:
    """1.0 for three completions in ten, by a hash of their text; 0.0 where the prompt is flat.

    completions: texts, or lists of messages.
    """
    texts = [c if isinstance(c, str) else str(c[-1]["content"]) for c in completions]
    return [
        float(not is_flat and is_lucky(text)) for text, is_flat in zip(texts, flat, strict=True)
    ]


def is_lucky(text: str) -> bool:
    """True for three texts in ten, and always the same ones."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64 < 0.3


def make_prompts(
    count: int, tokens: tuple[int, int], half_flat: bool, seed: int = 0
) -> list[dict[str, Any]]:
    """`count` rows: a `prompt` of as many characters as `tokens` allows, and whether it is `flat`.

    Args:
        tokens: of the shortest and of the longest prompt; lengths are uniform between them.
    """
    draws = random.Random(seed)
    rows = []
    for number in range(count):
        length = draws.randint(*tokens)
        # No spaces: transformers loads a Qwen2's tokenizer by rules of its own, which drop them.
        text = "+".join(str(draws.randint(0, 99)) for _ in range(length))
        rows.append({"prompt": text[: length - 1] + "=", "flat": half_flat and number % 2 == 1})
    return rows


def make_folder(folder: Path, workload: Workload, steps: int) -> None:
    """Writes model, tokenizer and the prompts of `steps` steps."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True)
    if workload.tools:
        make_calculator(folder, steps * workload.prompts)
        return
    if workload.images:
        make_shapes(folder, steps * workload.prompts)
        return
    if workload.questions:
        ask_real_model(folder, workload.questions, steps * workload.prompts)
        return
    rows = make_prompts(steps * workload.prompts, workload.prompt_tokens, workload.half_flat)
    lines = (json.dumps(row) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    make_tokenizer(MODELS[workload.model]["vocab_size"]).save_pretrained(folder / "model")
    make_model(workload.model).save_pretrained(folder / "model")


def make_calculator(folder: Path, count: int) -> None:
    """Writes the model of the recipe `calculator`, which calls its tool at times, and prompts."""
    from grpo_cli.commands.serve import build_model
    from grpo_cli.config import compose, parsing

    def build(cfg: Any) -> None:
        recipe = parsing.parse(cfg, compose.given_keys(cfg))
        shutil.copytree(build_model(recipe), folder / "model")

    compose.compose_and_call(["recipe=calculator"], build)
    write_chats(folder, "calculator_train.jsonl.gz", count)


def ask_real_model(folder: Path, questions: str, count: int) -> None:
    """Links the real chat model, and writes the questions of a sample as chats."""
    (folder / "model").symlink_to(real_model.folder())
    write_chats(folder, questions, count)


def write_chats(folder: Path, sample: str, count: int) -> None:
    """Writes the first questions of a file of samples/, each as a conversation."""
    path = resources.files("grpo_cli") / "samples" / sample
    content = gzip.decompress(path.read_bytes()) if sample.endswith(".gz") else path.read_bytes()
    rows = [json.loads(line) for line in content.splitlines()]
    chats = [
        {"prompt": [{"role": "user", "content": row["question"]}], "flat": False}
        for row in rows[:count]
    ]
    lines = (json.dumps(row) + "\n" for row in chats)
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def make_shapes(folder: Path, count: int) -> None:
    """Writes an Idefics 3 with random weights, whose images take 256 tokens, and prompts.

    Tower and text model have 6 layers of width 384 each, 20 M parameters in all.
    """
    import datasets
    from PIL import Image

    from grpo_cli.config.schema import Build
    from grpo_cli.models import tiny, tiny_vision

    tiny.HEADS = 6
    tiny_vision.HIDDEN_SIZE, tiny_vision.IMAGE_SIZE = 384, IMAGE_SIZE
    data = resources.files("grpo_cli") / "samples" / "shapes_train.parquet"
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(datasets.Dataset.from_parquet(str(data)).select(range(count))):
        picture = (
            row["image"].convert("RGB").resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.NEAREST)
        )
        path = folder / f"{number}.png"
        picture.save(path)
        chat = [{"role": "user", "content": row["question"]}]
        rows.append({"prompt": chat, "image": str(path), "flat": False})
    build = Build(
        hidden_size=384, intermediate_size=1024, num_layers=6, vision_layers=6, warmup_steps=0,
    )  # fmt: skip
    texts = [(str(row["prompt"][0]["content"]), "0") for row in rows]
    made = tiny.build(build, texts, 0, lambda *_: None, images=[[]])
    shutil.copytree(made, folder / "model")
    lines = (json.dumps(row) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def make_model(name: str) -> Any:
    """A random Qwen2, the same each time."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = dict(MODELS[name])
    # With a vocabulary of 151,936 words one end token would never be met: so there are many.
    eos = list(range(1, shape["vocab_size"], shape.pop("eos")))
    torch.manual_seed(0)
    config = Qwen2Config(
        **shape,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=eos if len(eos) > 1 else eos[0],
        pad_token_id=0,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def make_tokenizer(words: int) -> Any:
    """A token for each printable character; the rest of `words` are never encoded, only decoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
    assert len(special) == FIRST_CHARACTER, "the first ids are the special ones"
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    known = special + characters
    known += [f"<{number}>" for number in range(len(known), words)]
    tokenizer = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(known)}, merges=[], unk_token=None)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def make_recipe(job: Job) -> dict[str, Any]:
    """Returns the recipe of one of our sides."""
    import torch

    w = job.workload
    wanted: dict[str, Any] = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "steps": job.steps,
        "prompts_per_step": w.prompts,
        "mixed_precision": "bf16" if job.bf16 else "no",
        "model.path": job.model,
        "dataset.train": str(Path(job.folder) / "prompts.jsonl"),
        "dataset.shuffle": False,
        "reward.draw.function": "bench_setup:reward",
        "generation.num_generations": w.generations,
        "generation.max_completion_tokens": w.limit,
        "optimizer.learning_rate": 1e-7,
        "checkpoint.every": 0,
        "log.report": False,
    }
    wanted |= {"generation.min_completion_tokens": w.min_tokens} if w.min_tokens else {}
    wanted |= {"tools.multiply": TOOL, "dataset.chat": True} if w.tools else {}
    wanted |= {"dataset.chat": True} if w.images or w.questions else {}
    wanted |= {"log.entropy_every": 1} if w.entropy else {}
    wanted |= {"adapter.rank": w.lora_rank, "adapter.alpha": LORA_ALPHA} if w.lora_rank else {}
    wanted |= OURS[job.side]
    recipe: dict[str, Any] = {"defaults": [
        "schema", {"generation": "transformers"}, {"loss": "dapo"}, {"advantage": "group"},
        {"optimizer": "adamw"}, {"tracking": "none"}, "_self_",
    ]}  # fmt: skip
    if w.lora_rank:
        recipe["defaults"].insert(1, {"adapter": "lora"})
    for key, value in wanted.items():
        *path, last = key.split(".")
        node = recipe
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return recipe


def write_recipe(job: Job) -> None:
    """Writes `recipe.yaml` for one of our sides."""
    path = Path(job.output) / "recipe.yaml"
    path.write_text(yaml.safe_dump(make_recipe(job), sort_keys=False), encoding="utf-8")
