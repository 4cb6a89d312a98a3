"""Images of data rows: references to stored images, which are decoded when they are opened.

    image = StoredImage(Cell(table, 3, ("images", 0)), "train.parquet, row 3, column 'images'")
    image.size     # (640, 480), from the file's header
    image.open()   # PIL image in RGB, resized to at most `max_pixels`

Pillow is imported only when an image is read, so that runs without images do not need it.
"""

from __future__ import annotations

import io
import math
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_cli.errors import TrainingError, UserError, listed

if TYPE_CHECKING:
    from PIL import Image

MOST_PIXELS = 178_956_970  # Pillow refuses more: a small file may hold gigabytes of one colour

ORIENTATION = 0x0112  # EXIF tag
LONGEST_PATH = 1024  # characters; a longer text is perhaps base64
URLS = ("http://", "https://", "data:", "s3://", "gs://", "hf://", "file://")
FORMS = 'an image is a path, encoded bytes, or {"bytes": ..., "path": ...}'


class ImageError(TrainingError):
    """Raised when an image cannot be read; the message names its row and column, and why."""


def require() -> None:
    """Raises a UserError if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise UserError(
            "the data has images, which need the package pillow: pip install pillow."
        ) from error


@dataclass(frozen=True)
class Cell:
    """A place in a table: `rows[row][keys[0]][keys[1]] ...`, looked up at each read."""

    rows: Sequence[Mapping[str, Any]]
    row: int
    keys: tuple[str | int, ...]

    def read(self) -> Any:
        """Returns the cell's value."""
        value: Any = self.rows[self.row]
        for key in self.keys:
            value = value[key]
        return value


@dataclass(frozen=True, eq=False)
class StoredImage:
    """An image of a row. `open` decodes it each time; the decoded image is not cached.

    A pickled one holds the encoded bytes or the path, not the table.
    """

    source: Any = field(repr=False)  # a Cell; or path, bytes, {"bytes", "path"}, PIL image
    place: str  # "train.parquet, row 3, column 'image'", for messages
    max_pixels: int | None = None  # larger images are resized to it; None: no limit
    folder: str | tuple[str, ...] = ""  # of relative paths; of several, the first with the file

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels as `open` returns them; only the header is read.

        Raises:
            ImageError: it cannot be read, or it has more than 178,956,970 pixels.
        """
        with self._opened() as image:
            return self._target(*_turned_size(image))

    def open(self) -> Image.Image:
        """Returns the image in RGB, with at most `max_pixels` pixels.

        Transparent parts become white. A photo is turned as its camera was held (EXIF).

        Raises:
            ImageError: it cannot be read.
        """
        import numpy as np
        from PIL import Image, ImageOps

        with self._opened() as image:
            size = self._target(*_turned_size(image))
            if "exif" in image.info:
                image = ImageOps.exif_transpose(image)
            if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
                image = image.convert("RGBA")
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image)
            if image.mode.startswith("I"):  # 16 bits, which `convert` would clip at 255
                grey = np.asarray(image).astype(np.int64) // 256
                image = Image.fromarray(grey.clip(0, 255).astype(np.uint8))
            rgb = image.convert("RGB")
            return rgb if rgb.size == size else rgb.resize(size, Image.Resampling.BICUBIC)

    def encoded(self) -> dict[str, Any]:
        """Returns the image in the form of `datasets`' images, {"bytes", "path"}.

        The stored bytes are returned unchanged; a resized image is encoded as PNG.

        Raises:
            ImageError: it cannot be read; only `open` notices a truncated file.
        """
        from PIL import Image

        with self._opened() as image:
            stored = self._picture()
            size = _turned_size(image)
            if size == self._target(*size) and not isinstance(stored, Image.Image):
                is_path = isinstance(stored, str | Path)
                file = self._path(stored).read_bytes() if is_path else stored
                return {"bytes": file, "path": None}
        png = io.BytesIO()
        self.open().save(png, "PNG")
        return {"bytes": png.getvalue(), "path": None}

    def __str__(self) -> str:
        return f"image of {self.place}"

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredImage, (self._stored(), self.place, self.max_pixels, self.folder)

    def _stored(self) -> Any:
        return self.source.read() if isinstance(self.source, Cell) else self.source

    def _picture(self) -> Any:
        """Returns encoded bytes, a path or a PIL image."""
        from PIL import Image

        stored = self._stored()
        if isinstance(stored, Mapping):
            if stored and not stored.keys() & {"bytes", "path"}:
                raise ValueError(f"it has the keys {listed(map(str, stored))}; {FORMS}")
            stored = stored.get("bytes") or stored.get("path")
        if stored is None or (isinstance(stored, str | bytes | Mapping) and not stored):
            raise ValueError("it is empty")
        if isinstance(stored, str) and (stored.startswith(URLS) or len(stored) > LONGEST_PATH):
            kind = "a URL" if stored.startswith(URLS) else "no path"
            raise ValueError(f"it is {kind} ({stored:.40}); store the image in the data: {FORMS}")
        if not isinstance(stored, str | bytes | Path | Image.Image):
            raise ValueError(f"it is of the type {type(stored).__name__}; {FORMS}")
        return stored

    def _path(self, path: str | Path) -> Path:
        """Returns an image file's path; `folder` may list the folders of a data set's files.

        Raises:
            ValueError: it is not a regular file (reading a pipe would block), or is ambiguous.
        """
        folders = (self.folder,) if isinstance(self.folder, str) else self.folder
        places = [Path(folder, path).expanduser() for folder in folders]
        there = [place for place in places[1:] if place.exists()]
        found = places[0] if places[0].exists() or not there else there[0]
        if found is not places[0] and len({place.resolve() for place in there}) > 1:
            names = listed(str(place) for place in there[:3])
            raise ValueError(f"{path} may be any of {names}; give paths from {folders[0]} on")
        if found.exists() and not found.is_file():
            raise ValueError(f"{found} is not a file")
        return found

    @contextmanager
    def _opened(self) -> Iterator[Image.Image]:
        """Opens the image; turns errors within the context into an ImageError."""
        from PIL import Image

        try:
            stored = self._picture()
            if isinstance(stored, Image.Image):
                yield stored
                return
            file = io.BytesIO(stored) if isinstance(stored, bytes) else self._path(stored)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                with Image.open(file) as image:
                    yield image
        except Image.DecompressionBombError as error:
            raise ImageError(
                f"{self.place}: the image has more than {MOST_PIXELS:,} pixels; store it smaller"
            ) from error
        except (
            OSError,
            ValueError,
            SyntaxError,
            EOFError,
            TypeError,
            MemoryError,
            struct.error,
        ) as error:
            reason = str(error).split("\n")[0] or type(error).__name__
            reason = reason.split(" <")[0]  # "cannot identify image file <_io.BytesIO ...>"
            raise ImageError(f"{self.place}: the image cannot be read: {reason}") from error

    def _target(self, width: int, height: int) -> tuple[int, int]:
        """Returns the size within `max_pixels`, with the same aspect ratio."""
        if self.max_pixels is None or width * height <= self.max_pixels:
            return width, height
        scale = math.sqrt(self.max_pixels / (width * height))
        return max(1, int(width * scale)), max(1, int(height * scale))


def _turned_size(image: Image.Image) -> tuple[int, int]:
    """Returns the width and height of the upright image; only the header is read."""
    width, height = image.size
    # Without this entry a PNG would be decoded to look for it.
    lies = "exif" in image.info and image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
    return (height, width) if lies else (width, height)


def unreadable(images: Iterable[StoredImage]) -> str | None:
    """Returns why an image cannot be read; None if all can."""
    try:
        for image in images:
            image.open()
    except ImageError as error:
        return str(error)
    return None
