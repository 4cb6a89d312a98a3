"""Builds a small vision-language model: an Idefics 3 with the text model of `tiny.py`.

An image of 32 x 32 pixels in patches of 4 x 4 gives 64 patches, and each 4 patches become one of
its 16 tokens. The processor needs only Pillow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from grpo_cli.images import ImageError, StoredImage
from grpo_cli.models.settings import Build
from grpo_cli.models.vision import VisionProcessor

IMAGE_SIZE, PATCH_SIZE, HIDDEN_SIZE = 32, 4, 64  # pixels, pixels, width of the tower
INITIALIZER_RANGE = 0.06  # 0.02 suits widths of thousands
IMAGE = "<image>"
TOKENS = [IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
# A message's content in the chat template: a string, or blocks, some of which are images.
CONTENT = (
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for b in m['content'] %}"
    "{% if b['type'] == 'image' %}<image>{% else %}{{ b['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
)
MERGED = 2  # patches along each side that are merged into one token


def digest(images: Sequence[Sequence[StoredImage]]) -> str:
    """Returns a hash of a data set's images."""
    found = hashlib.sha256()
    for of_row in images:
        for image in of_row:
            try:
                found.update(image.open().tobytes())
            except ImageError:  # making the prompts drops or refuses the row
                found.update(b"?")
    return found.hexdigest()


def processor_of(tokenizer: PreTrainedTokenizerBase) -> VisionProcessor:
    """Makes the processor of a built model."""
    size = {"longest_edge": IMAGE_SIZE}
    image_processor = Idefics3ImageProcessorPil(
        size=size, max_image_size=size, do_image_splitting=False
    )
    processor = transformers.Idefics3Processor(
        image_processor,
        tokenizer,
        image_seq_len=(IMAGE_SIZE // PATCH_SIZE // MERGED) ** 2,
        chat_template=tokenizer.chat_template,
    )
    return VisionProcessor(processor, "")


def make_model(
    config: Build, text: transformers.Qwen2Config, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Makes a randomly initialised model of the config's sizes.

    Args:
        text: the text model's config.
    """
    idefics = transformers.Idefics3Config(
        # vLLM uses its Llama for the text model, where this field enables Qwen2's biases.
        text_config={**text.to_dict(), "qkv_bias": True},
        vision_config={
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 2 * HIDDEN_SIZE,
            "num_hidden_layers": config.vision_layers,
            "num_attention_heads": 4,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH_SIZE,
            "initializer_range": INITIALIZER_RANGE,
        },
        scale_factor=MERGED,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
    )
    return transformers.Idefics3ForConditionalGeneration(idefics)
