"""Stop strings, found whichever way the tokens of small real tokenizers cut them."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_cli.generation.stop_strings import StopStrings

END = "<|end|>"
SILENT = 10_000  # an id that is none of the tokenizer's: rows of a padded embedding


def fast(pieces: Sequence[str], decoder: Any) -> PreTrainedTokenizerFast:
    """A tokenizer that decodes these pieces; its merges, which encode, are not needed."""
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [])
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def as_bytes(text: str) -> str:
    """A text as pieces of a byte-level vocabulary write it: a letter for each byte."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in level.pre_tokenize_str(text))


NI, HAO, SMILE = (as_bytes(c) for c in "你好😀")
BYTE_LEVEL = [
    *dict.fromkeys(NI + HAO + SMILE),  # each byte alone
    *"stop.a#",
    *map(as_bytes, ["st", "op", " st", "stop", "unstoppable", "opera", ".\n", "\n", " ", "  "]),
    *map(as_bytes, "你好"),
    NI[:2],
    as_bytes("a") + NI[:1],  # ends inside a character
    NI[1:] + HAO[:1],  # from inside one into the next
    HAO[1:] + as_bytes("p"),
]  # fmt: skip
LLAMA = [
    *(f"<0x{b:02X}>" for b in dict.fromkeys("你好😀 st.".encode())),
    *"stop.a#▁你好",
    *["st", "op", "▁st", "▁stop", "unstoppable", "opera", "▁▁", "▁a"],
]
METASPACE = [piece for piece in LLAMA if not piece.startswith("<0x")]


def llama_decoder() -> Any:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


TOKENIZERS = {
    "byte level": fast(BYTE_LEVEL, decoders.ByteLevel()),
    "llama": fast(LLAMA, llama_decoder()),
    "metaspace": fast(METASPACE, decoders.Metaspace()),
}
BYTES, SPACES = TOKENIZERS["byte level"], TOKENIZERS["llama"]


def ids_of(tokenizer: PreTrainedTokenizerFast, pieces: Sequence[str]) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[piece] for piece in pieces]


def decoded(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def answers(tokenizer: PreTrainedTokenizerFast, stop: Sequence[str], ids: list[int]) -> list[bool]:
    """What is said after each token."""
    stops = StopStrings(tokenizer, stop)
    return [stops.ends(ids[: n + 1]) for n in range(len(ids))]


def test_passed_stop_string_does_not_count_again() -> None:
    # As before the least number of tokens: "a.a" was complete at its third, not at a later one.
    ids = ids_of(BYTES, ["a", ".", "a", "s", "a", ".", "a", ".", "a"])
    assert answers(BYTES, ["a.a"], ids) == [n in (2, 6, 8) for n in range(9)]


STOPS = [
    ["stop"], ["a."], [" st"], ["  "], ["你"], ["好p"], ["你好"], ["😀"], [" 好"], ["."],
    [END], ["a" + END + "s"], ["aa", "你好你", "p s"], ["# #", "top"],
]  # fmt: skip


@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_completion_ends_at_the_first_stop_string(name: str, stop: list[str]) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(f"{name}{stop}")
    # Texts cut at random into the vocabulary's tokens, so that its bytes make characters, between
    # tokens at random.
    ends = 0
    for _ in range(60):
        pool = [*range(len(tokenizer)), SILENT]
        ids = rng.choices(pool, k=rng.randrange(25))
        for text in rng.choices([*stop, "你", "好", "😀", " st", "a"], k=4):
            ids += cut(tokenizer, text, rng) + rng.choices(pool, k=rng.randrange(2))
        found = answers(tokenizer, stop, ids)
        held = [any(s in decoded(tokenizer, ids[: n + 1]) for s in stop) for n in range(len(ids))]
        assert found.index(True) == held.index(True) if any(held) else not any(found)
        ends += any(held)
    assert ends > 8 or name == "metaspace"


def cut(tokenizer: PreTrainedTokenizerFast, text: str, rng: random.Random) -> list[int]:
    """A text as tokens of the vocabulary, any that fit; none where there are none."""
    rest = as_bytes(text) if tokenizer is BYTES else text.replace(" ", "▁")
    vocabulary, ids = tokenizer.get_vocab(), list[int]()
    if END in text:
        before, _, after = text.partition(END)
        return [*cut(tokenizer, before, rng), vocabulary[END], *cut(tokenizer, after, rng)]
    while rest:
        fitting = [p for p in vocabulary if rest.startswith(p)]
        fallback = [f"<0x{b:02X}>" for b in rest[0].encode()]
        if all(p in vocabulary for p in fallback) and (not fitting or rng.random() < 0.5):
            ids += [vocabulary[p] for p in fallback]
            rest = rest[1:]
        elif fitting:
            piece = rng.choice(fitting)
            ids.append(vocabulary[piece])
            rest = rest[len(piece) :]
        else:
            return ids
    return ids


class Counting:
    """Notes how many ids it decodes at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.lengths: list[int] = []

    def decode(self, ids: list[int], **how: Any) -> str:
        self.lengths.append(len(ids))
        text: str = self.tokenizer.decode(ids, **how)
        return text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_only_the_tail_is_decoded(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    counting = Counting(tokenizer)
    stops = StopStrings(counting, ["stop", "a."])  # type: ignore[arg-type]
    ids: list[int] = []
    for token in ids_of(tokenizer, ["st", "a", "op", "p", "#"]) * 100:
        ids.append(token)
        assert not stops.ends(ids)
    assert max(counting.lengths) <= len("stop") + 1 + 3
    # Most tokens are only looked up: of these, "op" and "p" alone end like a stop string.
    assert len(counting.lengths) == 5 + 200
    assert stops.ends([*ids, *ids_of(tokenizer, ["st", "op"])])
