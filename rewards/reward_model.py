"""Reward: the score that a reward model gives, a sequence classifier in the trainer's process."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_cli.rewards import reward
from grpo_cli.rewards._arguments import one_of, whole
from grpo_cli.rewards._text import Completions, completion_texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("auto", "bfloat16", "float16", "float32")


class Scorer(NamedTuple):
    """A reward model ready for use, with its own tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@reward
def reward_model(
    prompts: list[Any],
    completions: Completions,
    *,
    model: str,
    label: int | str | None = None,
    chat: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_length: int | None = None,
    batch_tokens: int = 16384,
    dtype: str = "auto",
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **_: Any,
) -> list[float | None]:
    """Returns the logit that a sequence-classification model gives to prompt and completion.

    The model reads messages through its own chat template, and a plain row as one string: the
    prompt with the completion behind it. The score of a row does not depend on the rows beside it:
    it is the one that the model gives to the row alone, up to rounding. A row without any token
    gives None.

    Recipe args:
        model: name on the hub, or folder. It must hold the weights of a classification head; a
            LoRA adapter is merged into its base first.
        label: which logit, as number or name, where the model has several labels.
        chat: whether to use the chat template; null: where the completions are messages. A plain
            row then becomes a user's message and an assistant's; without the template, messages
            become their contents, one below the other.
        chat_template_kwargs: arguments of the chat template, such as {enable_thinking: false}.
        max_length: tokens of a row at most, and never more than the model has positions. What is
            too long loses its beginning: the completion stays, and so do the special tokens that
            the tokenizer puts in front.
        batch_tokens: tokens of one forward pass at most, padding included; a longer row is a pass
            by itself.
        dtype: precision of the weights: auto (as they are stored), bfloat16, float16 or float32.
        device: auto, cpu, cuda, mps or one such as cuda:1; null: auto. It is loaded once in each
            process and stays there.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the model may run.
    """
    one_of("reward_model: dtype", dtype, DTYPES)
    whole("reward_model: batch_tokens", batch_tokens)
    if max_length is not None:
        whole("reward_model: max_length", max_length)
    if not completions:
        return []
    scorer = _load(model, revision, dtype, _resolved(device), trust_remote_code)
    column = _label_column(label, scorer)
    rows = _encoded(scorer, prompts, completions, chat, chat_template_kwargs, max_length)
    scores: list[float | None] = [None] * len(rows)
    for positions in _batches([len(row) for row in rows], batch_tokens):
        logits = _logits(scorer, [rows[i] for i in positions])
        for i, row_logits in zip(positions, logits, strict=True):
            scores[i] = row_logits[column]
    return scores


def _resolved(device: str | None) -> str:
    """Returns the device's full name; with several GPUs each process of a node has its own."""
    import torch

    if device is None or device == "auto":
        mps = torch.backends.mps.is_available()
        device = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device


@functools.cache
def _load(
    name: str, revision: str | None, dtype: str, device: str, trust_remote_code: bool
) -> Scorer:
    import torch
    import transformers

    path = str(Path(name).expanduser()) if name.startswith("~") else name
    if not Path(path).is_dir() and (path.startswith((".", os.sep)) or path.count("/") > 1):
        raise ValueError(f"reward_model: model is {name!r}; there is no such folder.")
    shared: dict[str, Any] = {
        "revision": revision or "main",
        "trust_remote_code": trust_remote_code,
    }
    try:
        where = torch.device(device)
        # Whatever loading draws, the random numbers of the run stay those of a run without it.
        with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):
            model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
                path,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                output_loading_info=True,
                **shared,
            )
        model.to(where)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path, truncation_side="left", **shared
        )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ValueError(f"reward_model: {name} cannot be loaded: {reason}") from error
    if missing := sorted(info["missing_keys"]):
        # transformers makes them up: a causal language model gets a head of random numbers.
        raise ValueError(
            f"reward_model: {name} is no reward model: it lacks the weights {_listed(missing[:4])}"
            f"{' and others' if len(missing) > 4 else ''}, and made-up ones would score at random."
        )
    for config in _configs(model):
        config.use_cache = False  # nothing is generated
    return Scorer(name, model.eval().requires_grad_(False), tokenizer)


def _configs(model: PreTrainedModel) -> tuple[Any, Any]:
    """Returns the text model's config, which a classification head reads, and the outer one."""
    return model.config.get_text_config(), model.config


def _label_column(label: int | str | None, scorer: Scorer) -> int:
    names: dict[int, str] = scorer.model.config.id2label
    if label is None and len(names) == 1:
        return 0
    for column, name in names.items():
        if label == name or (label == column and not isinstance(label, bool)):
            return column
    raise ValueError(
        f"reward_model: label is {'not set' if label is None else repr(label)}; {scorer.name} has "
        f"{_listed(f'{column} ({name})' for column, name in names.items())}: choose one."
    )


def _encoded(
    scorer: Scorer,
    prompts: list[Any],
    completions: Completions,
    chat: bool | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    max_length: int | None,
) -> list[list[int]]:
    tokenizer = scorer.tokenizer
    limit = _limit(scorer, max_length)
    pairs = list(zip(prompts, completions, strict=True))
    if chat is None:
        chat = isinstance(completions[0], list)
    if chat:
        if not tokenizer.chat_template:
            raise ValueError(
                f"reward_model: the tokenizer of {scorer.name} has no chat template; for rows as "
                "plain text set chat: false."
            )
        texts = [
            tokenizer.apply_chat_template(
                _as_messages(prompt, "user") + _as_messages(completion, "assistant"),
                tokenize=False,
                **(chat_template_kwargs or {}),
            )
            for prompt, completion in pairs
        ]
        # The template has written the special tokens already.
        rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [_ending(row, limit, tokenizer.bos_token_id) for row in rows]
    if chat_template_kwargs:
        raise ValueError(
            "reward_model: chat_template_kwargs is only read with the chat template; set chat: "
            "true, or leave it out."
        )
    texts = [_as_text(prompt, completion) for prompt, completion in pairs]
    rows = tokenizer(texts, truncation=limit is not None, max_length=limit)["input_ids"]
    return list(rows)


def _limit(scorer: Scorer, max_length: int | None) -> int | None:
    positions = getattr(_configs(scorer.model)[0], "max_position_embeddings", None)
    bounds = [n for n in (max_length, positions, scorer.tokenizer.model_max_length) if n and n > 0]
    # A tokenizer without a limit says so by a number of thirty digits.
    return min((int(n) for n in bounds if n < 2**31), default=None)


def _as_messages(text: str | list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def _as_text(prompt: str | list[dict[str, Any]], completion: str | list[dict[str, Any]]) -> str:
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    messages = _as_messages(prompt, "user") + _as_messages(completion, "assistant")
    return "\n".join(completion_texts([[message] for message in messages]))


def _ending(ids: list[int], limit: int | None, bos: int | None) -> list[int]:
    """Returns the last `limit` tokens, beginning with `bos` if all of them did."""
    if limit is None or len(ids) <= limit:
        return ids
    head = ids[:1] if ids[0] == bos else []
    return head + ids[len(ids) - limit + len(head) :]


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yields positions of rows that have tokens, longest first, so that little is padded."""
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // lengths[order[start]])
        yield order[start : start + size]
        start += size


def _logits(scorer: Scorer, rows: list[list[int]]) -> list[list[float]]:
    """Returns the logits [B, labels] of rows of which the first is the longest."""
    import torch

    pad = _configs(scorer.model)[0].pad_token_id
    if pad is None and len(rows) > 1:  # a causal model's head would read the last pad token
        return [logits for row in rows for logits in _logits(scorer, [row])]
    width = len(rows[0])
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])  # [B, T]
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(width) < lengths[:, None]).long()  # [B, T]
    where = scorer.model.device
    with torch.inference_mode():
        logits = scorer.model(input_ids=ids.to(where), attention_mask=mask.to(where)).logits
    logits = logits.float().cpu()  # [B, labels]
    if not logits.isfinite().all():
        raise ValueError(
            f"reward_model: {scorer.name} in {scorer.model.dtype} gives a score that is not finite."
        )
    values: list[list[float]] = logits.tolist()
    return values


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))
