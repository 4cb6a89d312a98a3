"""Builds a small Qwen2: byte-level tokenizer, random weights, a short supervised warm-up.

Nothing is downloaded, so a laptop without a network can train a real transformers model. GRPO can
only reinforce behaviour that a policy sometimes shows, hence the warm-up on the data's solutions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo_cli.algorithm.batch import pad_right
from grpo_cli.config.cache import cache_dir
from grpo_cli.data import conversations
from grpo_cli.images import StoredImage
from grpo_cli.models import tiny_vision
from grpo_cli.models.packing import image_arguments
from grpo_cli.models.settings import BUILT_CONTEXT, Build
from grpo_cli.models.vision import VisionProcessor
from grpo_cli.random_streams import derive_seed
from grpo_cli.records import Prompt

HEADS, KV_HEADS = 4, 2
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Lists tools by their names and arguments, and uses Qwen2.5's call format, to save tokens.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools"
    "{% for t in tools %} {{ t.function.name }}"
    "({{ t.function.parameters.properties | join(', ') }}){% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, "
    "'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RECIPE_VERSION = 1  # part of the cache key: raise it when a change here changes the model
IGNORED = -100  # label of a token without loss
AVERAGED = 10  # number of steps whose mean loss is compared with the target

Report = Callable[[int, float], None]  # (step, loss)
# Maps a solution given as messages to its tokens, and to flags for the model's own tokens.
EpisodeIds = Callable[[Sequence[Any]], tuple[list[int], list[bool]]]
# Makes that function for a tokenizer and the tools of a row.
Encoder = Callable[[PreTrainedTokenizerBase, conversations.Schemas], EpisodeIds]


class Pair(NamedTuple):
    """A prompt and its worked solution, each a string or messages."""

    prompt: Any
    solution: Any
    tools: conversations.Schemas = ()  # listed in the prompt
    images: Sequence[StoredImage] = ()  # of the prompt


@dataclass(frozen=True)
class Example:
    """A training example of the warm-up."""

    prompt: Prompt
    solution: list[int]  # token ids
    is_trained: list[bool]  # per solution token: whether it is the model's own


def build(
    config: Build, pairs: Sequence[Pair], seed: int, report: Report, encoder: Encoder | None = None
) -> Path:
    """Builds the warmed-up model, or finds it in the cache by a hash of its inputs.

    Args:
        config: sizes and warm-up settings.
        pairs: the pair of every training row.
        seed: seed for the weights and the order of the rows.
        report: called after each supervised step.
        encoder: encodes episodes; required if solutions are messages.

    Returns:
        The model's folder.
    """
    facts: dict[str, Any] = {
        "recipe_version": RECIPE_VERSION,
        "build": dataclasses.asdict(config),
        "pairs": _digest([(pair.prompt, pair.solution) for pair in pairs]),
        "seed": seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if config.vision_layers:
        facts["images"] = tiny_vision.digest([pair.images for pair in pairs])
    if any(pair.tools for pair in pairs):
        facts["tools"] = _digest([list(pair.tools) for pair in pairs])
    key = _digest(facts)[:16]
    folder = cache_dir() / "tiny" / key
    if (folder / "config.json").is_file():
        return folder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = tokenizer_of(config, pairs)
        vision = tiny_vision.processor_of(tokenizer) if config.vision_layers else None
        model = make_model(config, tokenizer)
        if config.warmup_steps:
            rows = examples(tokenizer, pairs, encoder, vision)
            warm_up(model, config, list(rows), seed, report)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    model.save_pretrained(partial)
    (vision or tokenizer).save_pretrained(partial)
    (partial / "made_from.json").write_text(json.dumps(facts, indent=2))
    try:
        partial.rename(folder)
    except OSError:  # another process has made the same model meanwhile
        shutil.rmtree(partial)
    return folder


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def tokenizer_of(config: Build, pairs: Sequence[Pair]) -> PreTrainedTokenizerFast:
    """Makes the tokenizer for a model that is built from these training rows."""
    return make_tokenizer(config, [t for pair in pairs for t in _texts(pair)])


def make_tokenizer(config: Build, texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer with `config.merges` merges. Digits never merge."""
    special = [PAD, START, END]
    template = CHAT_TEMPLATE
    if config.vision_layers:
        special += tiny_vision.TOKENS
        template = template.replace("{{ m['content'] }}", tiny_vision.CONTENT)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\n| ?[^\s\d]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special) + config.merges,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts if config.merges else [], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=template
    )


def make_model(config: Build, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Makes a randomly initialised Qwen2, or with `vision_layers` a vision-language model."""
    qwen = config_of(config, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    model: PreTrainedModel
    if config.vision_layers:
        model = tiny_vision.make_model(config, qwen, tokenizer)
    else:
        model = transformers.Qwen2ForCausalLM(qwen)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def config_of(
    config: Build, vocab_size: int, eos: int | None = None, pad: int | None = None
) -> transformers.Qwen2Config:
    """Returns the config of the language model.

    Args:
        eos, pad: token ids of eos and padding.
    """
    return transformers.Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=BUILT_CONTEXT,
        tie_word_embeddings=True,
        initializer_range=tiny_vision.INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )


def warm_up(
    model: PreTrainedModel, config: Build, every: Sequence[Example], seed: int, report: Report
) -> None:
    """Trains next-token prediction on `prompt + solution + eos`, with loss on the solution only.

    If a solution is an episode, the loss is on the model's own turns, each with its eos.

    Ends early once the loss, averaged over the last `AVERAGED` steps, reaches the target. The steps
    that a small model needs vary by half between seeds, but its ability at a given loss does not.
    """
    rows = [r for r in every if len(r.prompt.ids) + len(r.solution) <= BUILT_CONTEXT]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.warmup_learning_rate, weight_decay=config.warmup_weight_decay
    )
    chooser = random.Random(derive_seed(seed, RECIPE_VERSION))
    losses: list[float] = []
    model.train()
    for step in range(config.warmup_steps):
        for group in optimizer.param_groups:
            group["lr"] = config.warmup_learning_rate * _triangle(step, config.warmup_steps)
        batch = chooser.choices(rows, k=config.warmup_batch)
        ids, labels = _padded(batch)
        images = image_arguments([r.prompt for r in batch], ids, model, packed=False)
        logits = model(input_ids=ids, use_cache=False, **images).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        report(step + 1, losses[-1])
        if sum(losses[-AVERAGED:]) / AVERAGED <= config.warmup_target_loss and step >= AVERAGED:
            return


def _padded(batch: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Returns the right-padded tokens of examples and their labels, [B, T] each."""
    rows = [r.prompt.ids + r.solution for r in batch]
    ids = pad_right([torch.tensor(row) for row in rows], max(map(len, rows)))
    labels = torch.full_like(ids, IGNORED)
    for row, r in zip(labels, batch, strict=True):
        pairs = zip(r.solution, r.is_trained, strict=True)
        kept = [token if is_trained else IGNORED for token, is_trained in pairs]
        first = len(r.prompt.ids)
        row[first : first + len(kept)] = torch.tensor(kept)
    return ids, labels


def _triangle(step: int, steps: int) -> float:
    """Returns the learning-rate factor: linear warm-up over a tenth of the steps, then cosine."""
    rise = max(1, steps // 10)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _texts(pair: Pair) -> list[str]:
    prompt, solution, *_ = pair
    parts = [str(prompt)]
    if isinstance(prompt, list):
        parts = [conversations.text_of(m["content"]) for m in prompt]
    if not isinstance(solution, list):
        return [*parts, str(solution)]
    # Includes the markup of calls, which takes more tokens than their contents.
    for m in solution:
        parts += [m["role"], m["content"], *map(_call, m.get("tool_calls") or [])]
    return parts


def _call(call: Mapping[str, Any]) -> str:
    """Returns a call as `CHAT_TEMPLATE` writes it."""
    function = {key: call["function"][key] for key in ("name", "arguments")}
    return f"<tool_call>{json.dumps(function, ensure_ascii=False)}</tool_call>"


def examples(
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    encoder: Encoder | None,
    vision: VisionProcessor | None = None,
) -> Iterator[Example]:
    """Yields the training example of each pair."""
    encoders: dict[int, EpisodeIds] = {}  # by the id of the tools, which many pairs share
    for prompt, solution, tools, images in pairs:
        text = prompt
        if isinstance(prompt, list):
            text = conversations.render(tokenizer, prompt, {}, "the warm-up", tools)
        if images:
            assert vision is not None, "checked when the prompts were made"
            ids = vision.ids(str(text), images)
        else:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = replace(
            Prompt.from_ids(ids), images=tuple(images), vision=vision if images else None
        )
        if isinstance(solution, list):
            assert encoder is not None, "messages are episodes"
            if id(tools) not in encoders:
                encoders[id(tools)] = encoder(tokenizer, tools)
            yield Example(whole, *encoders[id(tools)](solution))
        else:
            own = tokenizer(solution, add_special_tokens=False)["input_ids"]
            yield Example(whole, [*own, tokenizer.eos_token_id], [True] * (len(own) + 1))
