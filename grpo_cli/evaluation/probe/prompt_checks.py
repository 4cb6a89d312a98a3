"""Finds prompts that render oddly: duplicate, empty, without a template, of unknown tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from grpo_cli.config.schema import Recipe
from grpo_cli.data.conversations import text_of
from grpo_cli.data.rows import DATASET
from grpo_cli.records import Prompt
from grpo_cli.scoring.calls import BoundReward

MOST = 20_000  # prompts that are looked at


@dataclass(frozen=True)
class PromptChecks:
    """Counts over the prompts that the run trains on, or the first of them."""

    prompts: int  # looked at
    rows: int | None  # of the data; None: not known
    kept: int  # prompts of these rows, in all
    duplicates: int  # prompts whose tokens an earlier one has
    blank: int  # without a text
    without_bos: int  # where others begin with the tokenizer's bos; 0 if none does
    double_bos: int  # that begin with two
    unknown_tokens: float  # share of all tokens
    longest: int  # tokens
    unused_template: bool  # the tokenizer has a chat template, and dataset.chat is false
    empty_columns: dict[str, int] = field(default_factory=dict)
    # ^ rows in which a column that a reward needs is empty, by column

    @property
    def dropped(self) -> int:
        """Rows without a prompt: over-long ones, and those with images that cannot be read."""
        return 0 if self.rows is None else max(0, self.rows - self.kept)


def check_prompts(
    recipe: Recipe,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    rewards: Mapping[str, BoundReward],
    rows: int | None = None,
) -> PromptChecks:
    """Returns what is odd about prompts.

    Args:
        prompts: all that the run trains on; of a stream, the first.
        rewards: that read the columns of the prompts.
        rows: number of rows that the prompts were made of, where it is known.
    """
    some = prompts[:MOST]
    bos, unknown = _special(tokenizer)
    begins = [p.ids[0] == bos for p in some] if bos is not None else []
    seen = Counter(tuple(p.ids) for p in some if not p.images)
    tokens = sum(len(p.ids) for p in some)
    needed = {c: name for name, r in rewards.items() for c in r.signature.required}
    own = {c for r in rewards.values() for c in r.args}
    empty = {
        column: sum(
            p.columns.get(column) in (None, "", [])
            for p in some
            if _applies(rewards[needed[column]], p)
        )
        for column in needed
        if column not in own
    }
    return PromptChecks(
        prompts=len(some),
        rows=rows,
        kept=len(prompts),
        duplicates=sum(seen.values()) - len(seen),
        blank=sum(_is_blank(p) for p in some),
        without_bos=begins.count(False) if any(begins) else 0,
        double_bos=sum(bos is not None and p.ids[:2] == [bos, bos] for p in some),
        unknown_tokens=0.0
        if unknown is None
        else sum(p.ids.count(unknown) for p in some) / max(tokens, 1),
        longest=max((len(p.ids) for p in some), default=0),
        unused_template=bool(
            not recipe.dataset.chat and tokenizer.chat_template and recipe.model.path
        ),
        empty_columns={column: count for column, count in empty.items() if count},
    )


def _special(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None]:
    """Returns the ids of bos and of the unknown token; None where there is none, or it is eos."""
    bos, unknown = tokenizer.bos_token_id, tokenizer.unk_token_id
    return bos, None if unknown in (tokenizer.eos_token_id, tokenizer.pad_token_id) else unknown


def _applies(reward: BoundReward, prompt: Prompt) -> bool:
    return not reward.datasets or prompt.columns.get(DATASET) in (None, *reward.datasets)


def _is_blank(prompt: Prompt) -> bool:
    if prompt.images:
        return False
    if isinstance(prompt.text, str):
        return not prompt.text.strip()
    return not any(text_of(message["content"]).strip() for message in prompt.text)
