r"""Processors of vision-language models: turn prompts with images into token ids and tensors.

A prompt's ids already contain the tokens of its images, as the model's processor expands them:

    text     <|im_start|>user\n<image>How many?<|im_end|>\n ...
    ids      [1, 92, 10, 256, 256, 256, 256, 51, ...]        an image of 4 tokens, 256 each
    inputs   {"pixel_values": [16, 48], "image_grid_thw": [1, 3]}, computed on demand

An image's tokens depend only on its size, so prompts are made without decoding images.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto import modeling_auto
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils.hub import cached_file

from grpo_cli.errors import TrainingError, UserError
from grpo_cli.images import ImageError, StoredImage
from grpo_cli.records import Prompt

KEPT_BYTES = 2**30  # size of the cache of model inputs, so that a step processes images once
PROBE = 64  # side, in pixels, of images for testing a processor
# Files of a processor's video part.
OF_VIDEOS = ("video_preprocessor_config.json", "preprocessor_config.json")
TYPE_IDS = ("mm_token_type_ids", "token_type_ids")  # 1 for image tokens, 0 for others
OF_TOKENS = ("input_ids", "attention_mask", *TYPE_IDS)  # processor outputs for the text


def takes_images(config: transformers.PretrainedConfig) -> bool:
    """Returns whether a model takes images, and is loaded with AutoModelForImageTextToText."""
    by_type = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    remote = getattr(config, "auto_map", None) or {}
    known = config.model_type in by_type and "vision_config" in config.sub_configs
    return known or "AutoModelForImageTextToText" in remote


def load_processor(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> VisionProcessor:
    """Loads the processor of a vision-language model.

    Args:
        tokenizer: the model's tokenizer; gets the processor's chat template if it has none.
        options: arguments for loading the model's files.

    Raises:
        UserError: the folder has no image processor, or a package is missing.
    """
    is_without_videos = False
    try:
        processor = transformers.AutoProcessor.from_pretrained(str(path), **options)
    except Exception as error:  # processors raise many types
        processor = _without_videos(path, tokenizer, options, error)
        is_without_videos = True
    if not hasattr(processor, "image_processor"):
        raise UserError(
            f"model.path = {path}: has no image processor; save the model's processor "
            "(preprocessor_config.json) in the folder."
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = processor.chat_template
    processor.tokenizer, processor.chat_template = tokenizer, tokenizer.chat_template
    LOADED[str(path)] = VisionProcessor(processor, str(path), is_without_videos)
    return LOADED[str(path)]


# This process's processors by folder or hub name. An unpickled prompt uses the processor of its new
# process, not a copy.
LOADED: dict[str, VisionProcessor] = {}


def of_process(path: str) -> VisionProcessor:
    """Returns the processor that this process has loaded from a folder or hub name."""
    return LOADED[path]


def _without_videos(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any],
    error: Exception,
) -> ProcessorMixin:
    """Returns a processor without its video part, the only part that needs torchvision.

    Raises:
        UserError: the processor fails to load without it, too.
    """
    try:
        stored, _ = ProcessorMixin.get_processor_dict(str(path), **options)
        known = getattr(transformers, stored.get("processor_class") or "", None)
        if known is None:
            model_type = transformers.AutoConfig.from_pretrained(str(path), **options).model_type
            known = getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])
        names = [name for name in known.get_attributes() if name != "video_processor"]
        # Its own __init__ passes on its parts in order, and these come first.
        own = type(known.__name__, (known,), {"get_attributes": classmethod(lambda cls: names)})
        image_processor = transformers.AutoImageProcessor.from_pretrained(str(path), **options)
        taken = signature(known.__init__).parameters
        settings = {k: v for k, v in stored.items() if k in taken and k not in names}
        settings |= {"image_processor": image_processor, "tokenizer": tokenizer}
        processor: ProcessorMixin = own(**settings | {"video_processor": None})
    except Exception as other:
        named = other if isinstance(other, ImportError) else error  # a package is missing for both
        reason = str(named).strip().split("\n")[0].split(". ")[0].rstrip(".")
        raise UserError(
            f"model.path = {path}: its processor cannot be loaded: {reason}. Packages that "
            "processors need are installed with pip install torchvision num2words."
        ) from error
    return processor


@dataclass
class VisionProcessor:
    """Turns prompts with images into token ids and model inputs.

    Attributes:
        processor: transformers' processor.
        path: folder or hub name that it was loaded from.
        is_without_videos: whether the processor's video part was left out.
        kept_bytes: maximum bytes of cached model inputs; the least recently used are dropped.
    """

    processor: Any
    path: str
    is_without_videos: bool = False
    kept_bytes: int = KEPT_BYTES
    _expanded: dict[tuple[int, int], str] = field(default_factory=dict)  # by image size
    _kept: OrderedDict[tuple[StoredImage, ...], dict[str, Tensor]] = field(
        default_factory=OrderedDict
    )

    def __reduce__(self) -> tuple[Any, ...]:
        return of_process, (self.path,)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.processor.tokenizer  # type: ignore[no-any-return]

    @property
    def placeholder(self) -> str:
        """The placeholder string for one image in a rendered prompt."""
        return str(self.processor.image_token)

    @cached_property
    def token_ids(self) -> list[int]:
        """The ids of placeholder tokens for images and videos, which must not be sampled."""
        tokens = (getattr(self.processor, f"{kind}_token", None) for kind in ("image", "video"))
        ids = {*self.processor.image_token_ids}
        ids |= {self.tokenizer.convert_tokens_to_ids(t) for t in tokens if t is not None}
        return sorted(i for i in ids - {None, self.tokenizer.unk_token_id} if isinstance(i, int))

    def ids(self, text: str, images: Sequence[StoredImage]) -> list[int]:
        """Returns the token ids of a rendered prompt, including those of its images.

        Raises:
            ImageError: an image cannot be read, or the processor refuses its size.
            ValueError: the numbers of placeholders and of images differ.
        """
        whole = self.expanded(text, images)
        ids: list[int] = self.tokenizer(whole, add_special_tokens=False)["input_ids"]
        return ids

    def expanded(self, text: str, images: Sequence[StoredImage]) -> str:
        """Replaces each placeholder by the string of its image's tokens; raises as `ids` does."""
        parts = text.split(self.placeholder)
        if len(parts) != len(images) + 1:
            raise ValueError(f"{len(parts) - 1} placeholders for {len(images)} images")
        expanded = [self._text_of(image) for image in images]
        return "".join(t for pair in zip(parts, [*expanded, ""], strict=True) for t in pair)

    def collapsed(self, ids: Sequence[int], images: Sequence[StoredImage]) -> list[int]:
        """Returns a prompt's token ids with each image's tokens replaced by one placeholder.

        Raises:
            TrainingError: an image's tokens are not found, since they were merged with text.
        """
        found, begin = list[int](), 0
        placeholder = self.tokenizer.convert_tokens_to_ids(self.placeholder)
        for image in images:
            own = self.tokenizer(self._text_of(image), add_special_tokens=False)["input_ids"]
            places = range(begin, len(ids) - len(own) + 1)
            at = next(
                (i for i in places if ids[i] == own[0] and [*ids[i : i + len(own)]] == own), None
            )
            if at is None:
                raise TrainingError(
                    f"{image.place}: the image's tokens are joined with the text around them, so "
                    "that vLLM cannot be given this prompt; use generation=transformers.",
                    alone=True,
                )
            found += [*ids[begin:at], placeholder]
            begin = at + len(own)
        return [*found, *ids[begin:]]

    @cached_property
    def takes_blocks_only(self) -> bool:
        """Whether the chat template renders a string differently from a block with that string."""
        blocks = [{"type": "text", "text": "a"}]
        try:
            texts = [
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}], tokenize=False
                )
                for content in ("a", blocks)
            ]
        except Exception:  # templates raise many types
            return True
        return bool(texts[0] != texts[1])

    def as_template_takes(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages in the form that the chat template accepts."""
        if not self.takes_blocks_only:
            return list(messages)
        return [
            {**m, "content": [{"type": "text", "text": m["content"]}]}
            if isinstance(m["content"], str)
            else m
            for m in messages
        ]

    def inputs(self, images: Sequence[StoredImage]) -> dict[str, Tensor]:
        """Returns the model inputs for a prompt's images, such as pixel_values; caches them.

        Raises:
            ImageError: an image cannot be read.
        """
        key = tuple(images)
        if key not in self._kept:
            found = self._process([image.open() for image in images])
            self._kept[key] = {
                name: value
                for name, value in found.items()
                if isinstance(value, Tensor) and name not in OF_TOKENS
            }
        self._kept.move_to_end(key)
        total = sum(t.nbytes for made in self._kept.values() for t in made.values())
        while total > self.kept_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            total -= sum(t.nbytes for t in dropped.values())
        return self._kept[key]

    @cached_property
    def type_name(self) -> str | None:
        """The name of the model input that marks image tokens; None if the model needs none."""
        from PIL import Image

        found = self._process([Image.new("RGB", (PROBE, PROBE))])
        return next((name for name in TYPE_IDS if name in found), None)

    def type_ids(self, ids: Sequence[int]) -> list[int]:
        """Returns the token types for a model: 1 for image tokens and 0 for others."""
        (types,) = self.processor.create_mm_token_type_ids([list(ids)])
        return [int(t) for t in types]

    @cached_property
    def by_row(self) -> frozenset[str]:
        """The names of inputs with a batch axis before the image axis, [1, images, ...]."""
        from PIL import Image

        one, two = (self._process([Image.new("RGB", (PROBE, PROBE))] * n) for n in (1, 2))
        return frozenset(
            name
            for name, value in two.items()
            if isinstance(value, Tensor)
            and value.ndim > 2
            and value.shape[0] == one[name].shape[0] == 1
            and value.shape[1] == 2 * one[name].shape[1]
        )

    def dummy_prompt(self) -> Prompt:
        """Returns a prompt of only a small white image."""
        from PIL import Image

        images = (StoredImage(Image.new("RGB", (PROBE, PROBE), "white"), "dummy"),)
        ids = self.ids(self.placeholder, images)
        return replace(Prompt.from_ids(ids), images=images, vision=self)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the processor and its tokenizer; copies the files of an omitted video part."""
        self.processor.save_pretrained(folder)
        copy_files(self.path, OF_VIDEOS if self.is_without_videos else (), folder)

    def _process(self, images: Sequence[Any]) -> Mapping[str, Any]:
        """Returns the processor's outputs for a prompt of only these images."""
        found: Mapping[str, Any] = self.processor(
            text=[self.placeholder * len(images)],
            images=[list(images)],
            return_tensors="pt",
            return_text_replacement_offsets=True,
        )
        return found

    def _text_of(self, image: StoredImage) -> str:
        """Returns the string of an image's tokens, which depends only on its size."""
        if image.size not in self._expanded:
            from PIL import Image

            try:
                found = self._process([Image.new("RGB", image.size)])
            except ValueError as error:  # such as for an image of 1 x 300 pixels
                raise ImageError(f"{image.place}: {error}") from error
            (replaced,) = found["text_replacement_offsets"]
            self._expanded[image.size] = replaced[0]["replacement"]
        return self._expanded[image.size]


@dataclass
class UnloadedProcessor:
    """The files of a processor that cannot be loaded, for checkpoints of a text-only run.

    Attributes:
        path: folder or hub name of the processor.
    """

    path: str
    tokenizer: PreTrainedTokenizerBase

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the tokenizer, and copies the processor's files unchanged."""
        self.tokenizer.save_pretrained(folder)
        copy_files(self.path, ("processor_config.json", *OF_VIDEOS), folder)


def copy_files(path: str, names: Iterable[str], folder: str | Path) -> None:
    """Copies the named files that exist in a model's folder or hub repository to a folder."""
    for name in names:
        file = cached_file(
            path,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if file is not None:
            shutil.copyfile(file, Path(folder, name))


def as_entry(prompt: Prompt) -> dict[str, Any]:
    """Returns a prompt's row and images as values and tensors, which load without pickle."""
    stored = (bytearray(image.encoded()["bytes"]) for image in prompt.images)
    return {"row": prompt.row, "images": [torch.frombuffer(b, dtype=torch.uint8) for b in stored]}


def of_entry(entry: Mapping[str, Any], ids: list[int], vision: VisionProcessor | None) -> Prompt:
    """Returns the prompt of an entry that `as_entry` made."""
    images = tuple(StoredImage(t.numpy().tobytes(), f"row {entry['row']}") for t in entry["images"])
    return Prompt(entry["row"], ids, "", {}, images, vision if images else None)


def parameters_of_images(model: PreTrainedModel) -> list[nn.Parameter]:
    """Returns the parameters outside the decoder and head, which text-only rows do not use."""
    head = model.get_output_embeddings()
    of_text = [*model.get_decoder().parameters(), *(head.parameters() if head is not None else ())]
    others = {id(p) for p in of_text}
    return [p for p in model.parameters() if id(p) not in others]
