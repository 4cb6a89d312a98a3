"""Makes thumbnails of the images of prompts, each once, within a budget."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.data.stored_completions import IMAGES
from grpo_cli.images import ImageError, StoredImage

LONGEST_SIDE = 384  # pixels


@dataclass
class Pictures:
    """Thumbnails as data URLs, each stored once for all completions that have it."""

    most_bytes: int
    urls: list[str] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)  # image sizes before shrinking
    left_out: int = 0  # images beyond the budget
    _known: dict[bytes, int] = field(default_factory=dict)
    _held: int = 0

    def columns(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the numbers of each row's images, and the thumbnails, for the report's page."""
        numbers = [[self.add(cell) for cell in row.get(IMAGES) or ()] for row in rows]
        pictures = {"urls": self.urls, "sizes": self.sizes, "left_out": self.left_out}
        return {"images": numbers if any(numbers) else None, "pictures": pictures}

    def add(self, cell: Any) -> int:
        """Returns the index of the thumbnail of a stored image.

        -1: the budget is used up; -2: the image cannot be read.
        """
        data = (cell or {}).get("bytes")
        if not data:
            return -2
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest not in self._known:
            self._known[digest] = self._make(data)
        return self._known[digest]

    def _make(self, data: bytes) -> int:
        if self._held >= self.most_bytes:
            self.left_out += 1
            return -1
        try:
            image = StoredImage({"bytes": data}, "a stored completion").open()
        except ImageError:
            return -2
        size = image.size
        image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        file = io.BytesIO()
        # Up to 128 pixels it is likely a drawing.
        image.save(file, "WEBP", quality=80, lossless=max(size) <= 128)
        self._held += file.tell()
        encoded = base64.b64encode(file.getvalue()).decode("ascii")
        self.urls.append(f"data:image/webp;base64,{encoded}")
        self.sizes.append(size)
        return len(self.urls) - 1
