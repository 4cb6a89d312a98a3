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

from grpo_cli.config.schema import Build
from grpo_cli.images import ImageError, StoredImage
from grpo_cli.models.vision import VisionProcessor

# Fields of `Build` that only a model with a vision tower reads.
SETTINGS = ("vision_layers", "vision_hidden_size", "image_size", "patch_size")
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


def processor_of(config: Build, tokenizer: PreTrainedTokenizerBase) -> VisionProcessor:
    """Makes the processor of a built model."""
    size = {"longest_edge": config.image_size}
    image_processor = Idefics3ImageProcessorPil(
        size=size, max_image_size=size, do_image_splitting=False
    )
    processor = transformers.Idefics3Processor(
        image_processor,
        tokenizer,
        image_seq_len=(config.image_size // config.patch_size // MERGED) ** 2,
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
            "hidden_size": config.vision_hidden_size,
            "intermediate_size": 2 * config.vision_hidden_size,
            "num_hidden_layers": config.vision_layers,
            "num_attention_heads": 4,
            "image_size": config.image_size,
            "patch_size": config.patch_size,
            "initializer_range": config.initializer_range,
        },
        scale_factor=MERGED,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        initializer_range=config.initializer_range,
    )
    return transformers.Idefics3ForConditionalGeneration(idefics)
