"""KV caches of conversations between their turns, so that a turn computes only the new tokens.

row ends        its tokens and their keys and values are kept under its conversation's number
reply arrives   the next prompt is the same tokens and some more; only those are computed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import Tensor


@dataclass(frozen=True)
class KeptCache:
    """The cache of one conversation of T tokens."""

    ids: Sequence[int]  # [T]
    keys: Tensor  # [L, Hkv, T, D]
    values: Tensor

    def beginning(self, prompt: Sequence[int]) -> KeptCache | None:
        """Returns the cache of the prefix shared with a prompt; None if there is none.

        At least one token of the prompt is left to compute, to get its logits.
        """
        pairs = zip(self.ids, prompt[:-1], strict=False)
        length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not length:
            return None
        return KeptCache(self.ids[:length], self.keys[:, :, :length], self.values[:, :, :length])


@dataclass
class KeptCaches:
    """The caches of conversations by number, oldest first."""

    num_conversations: int  # maximum number of caches, kept or in decoding
    most: int = 0  # number of caches of maximum length, kept or in decoding, that fit into memory
    caches: dict[int, KeptCache] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.caches)

    def keep(self, conversation: int, cache: Callable[[], KeptCache], under_way: int) -> None:
        """Keeps a cache; drops the oldest ones if there is no memory for all.

        Args:
            cache: makes the cache; not called if there is no memory for it.
            under_way: number of rows being decoded, which have caches of their own.
        """
        self.caches.pop(conversation, None)
        self.make_room(under_way + 1)
        if self.most > under_way:
            self.caches[conversation] = cache()

    def make_room(self, under_way: int) -> None:
        """Drops the oldest caches that do not fit beside `under_way` rows."""
        while self.caches and len(self.caches) + under_way > self.most:
            del self.caches[next(iter(self.caches))]

    def take(self, conversation: int, prompt: Sequence[int]) -> KeptCache | None:
        """Pops a conversation's cache; returns its prefix shared with the prompt, or None."""
        cache = self.caches.pop(conversation, None)
        return None if cache is None else cache.beginning(prompt)

    def drop(self, conversation: int) -> None:
        """Drops the cache of a conversation that is over."""
        self.caches.pop(conversation, None)

    def clear(self) -> None:
        """Drops all caches."""
        self.caches.clear()
