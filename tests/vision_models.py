"""Tiny vision-language models with random weights, saved as transformers saves them.

Their processors are made of PIL image processors, so that torchvision is not needed.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

SIZE = 32  # sides of a picture, in pixels
HIDDEN, HEADS = 64, 2
TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 1, "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for b in m['content'] %}"
    "{% if b['type'] == 'image' %}IMAGE{% else %}{{ b['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def picture(seed: int, size: tuple[int, int] = (SIZE, SIZE)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def byte_tokenizer(
    placeholder: str, special: Sequence[str], **named: str
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes, with special tokens and a template that prints placeholders."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|pad|>", "<|start|>", "<|end|>", *special]
    vocabulary = {t: i for i, t in enumerate([*tokens, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=TEMPLATE.replace("IMAGE", placeholder),
        extra_special_tokens=named,
    )


def text_config(tokenizer: PreTrainedTokenizerFast, **more: Any) -> dict[str, Any]:
    """Returns the configuration of a language model with this vocabulary."""
    eos = tokenizer.eos_token_id
    return TEXT | {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": eos} | more


def _mrope(interleaved: bool) -> dict[str, Any]:
    half = HIDDEN // HEADS // 2
    a = half * 3 // 8
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [half - 2 * a, a, a]}
    return sections | ({"mrope_interleaved": True} if interleaved else {})


def _qwen(folder: Path, kind: str) -> PreTrainedModel:
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    names = ["vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"]
    tokenizer = byte_tokenizer("<|vision_start|><|image_pad|><|vision_end|>", special)
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(special), strict=True))
    vision: dict[str, Any] = {
        "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "hidden_size": 32,
    }  # fmt: skip
    text = text_config(tokenizer, rope_parameters=_mrope(kind != "Qwen2_5_VL"))
    if kind == "Qwen2VL":
        vision |= {"embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2}
        text["rope_parameters"] = _mrope(interleaved=False)
    else:
        vision |= {"intermediate_size": 64, "out_hidden_size": HIDDEN}
    if kind == "Qwen2_5_VL":
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    elif kind == "Qwen3VL":
        vision |= {"num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
        text["head_dim"] = HIDDEN // HEADS
    elif kind == "Qwen3_5":
        vision["num_position_embeddings"] = 256
        partial = {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
        text |= {
            "head_dim": HIDDEN // HEADS, "rope_parameters": _mrope(interleaved=True) | partial,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **ids
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    size = {"shortest_edge": 256, "longest_edge": 4096}
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size=size
    )
    processor.save_pretrained(folder)
    _save_without_videos(folder, tokenizer, "Qwen3VL" if kind == "Qwen3_5" else kind)
    return model


def _gemma4(folder: Path, *, large: bool = False) -> PreTrainedModel:
    """Large: like the larger checkpoints, which read images in both directions."""
    named = {
        "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
        "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
    }  # fmt: skip
    tokenizer = byte_tokenizer("<|image|>", [*named.values(), "<|video|>"], **named)
    text = text_config(
        tokenizer,
        vocab_size_per_layer_input=len(tokenizer),
        hidden_size_per_layer_input=0 if large else 8,
        head_dim=HIDDEN // HEADS,
        global_head_dim=2 * HIDDEN // HEADS,
        num_hidden_layers=2 if large else 4,
        num_kv_shared_layers=0 if large else 2,
        attention_k_eq_v=large,
        layer_types=["sliding_attention", "full_attention"] * (1 if large else 2),
        sliding_window=512,
        bos_token_id=None,
        use_bidirectional_attention="vision" if large else None,
    )
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4,
        "pooling_kernel_size": 2, "position_embedding_size": 256,
    }  # fmt: skip
    tokens = named | {"video_token": "<|video|>"}
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    config = transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, **ids
    )
    model = transformers.Gemma4ForConditionalGeneration(config)
    processor = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    processor.save_pretrained(folder)
    _save_without_videos(folder, tokenizer, "Gemma4", image_seq_length=70)
    return model


def _gemma3(folder: Path) -> PreTrainedModel:
    named = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    tokenizer = byte_tokenizer("<start_of_image>", [*named.values()], **named)
    text = text_config(tokenizer, head_dim=HIDDEN // HEADS, sliding_window=512)
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=_siglip(8),
        mm_tokens_per_image=4,
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():  # it starts at zero: pictures would not matter
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(0, 0.2)
    transformers.Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE}), tokenizer, image_seq_length=4
    ).save_pretrained(folder)
    return model


def _siglip(patch: int) -> dict[str, Any]:
    return {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": SIZE, "patch_size": patch,
    }  # fmt: skip


def _idefics3(folder: Path, kind: str = "Idefics3", *, tiles: bool = False) -> PreTrainedModel:
    special = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    if tiles:
        special += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer = byte_tokenizer("<image>", special)
    config = getattr(transformers, f"{kind}Config")(
        text_config=text_config(tokenizer, model_type="llama"),
        vision_config=_siglip(8),
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    image_processor = Idefics3ImageProcessorPil if kind == "Idefics3" else SmolVLMImageProcessorPil
    processor = image_processor(
        size={"longest_edge": 2 * SIZE if tiles else SIZE},
        max_image_size={"longest_edge": SIZE},
        do_image_splitting=tiles,
    )
    if kind == "Idefics3":
        whole = transformers.Idefics3Processor(processor, tokenizer, image_seq_len=4)
        whole.save_pretrained(folder)
    else:
        processor.save_pretrained(folder)
        _save_without_videos(folder, tokenizer, kind, image_seq_len=4)
    return model


def _internvl(folder: Path) -> PreTrainedModel:
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = byte_tokenizer("<IMG_CONTEXT>\n", [*named.values()], **named)
    config = transformers.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer)},
        vision_config=_siglip(8)
        | {"image_size": (SIZE, SIZE), "patch_size": (8, 8), "layer_scale_init_value": 1.0},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=True,
    )
    model = transformers.InternVLForConditionalGeneration(config)
    processor = GotOcr2ImageProcessorPil(
        size={"height": SIZE, "width": SIZE}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    processor.save_pretrained(folder)
    _save_without_videos(folder, tokenizer, "InternVL", image_seq_length=4)
    return model


def _mistral3(folder: Path) -> PreTrainedModel:
    special = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer = byte_tokenizer("[IMG]", special)
    config = transformers.Mistral3Config(
        text_config=TEXT
        | {"model_type": "mistral", "vocab_size": len(tokenizer), "head_dim": HIDDEN // HEADS}
        | {"sliding_window": None},
        vision_config={**_siglip(8), "model_type": "pixtral", "image_size": 2 * SIZE},
        spatial_merge_size=2,
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        tie_word_embeddings=True,
    )
    model = transformers.Mistral3ForConditionalGeneration(config)
    transformers.PixtralProcessor(
        PixtralImageProcessorPil(size={"longest_edge": 2 * SIZE}, patch_size=8),
        tokenizer,
        patch_size=8,
        spatial_merge_size=2,
    ).save_pretrained(folder)
    return model


def _save_without_videos(
    folder: Path, tokenizer: PreTrainedTokenizerFast, kind: str, **settings: Any
) -> None:
    """Saves a processor of which the image processor is in the folder, and no part for videos."""
    tokenizer.save_pretrained(folder)
    named = {"processor_class": f"{kind}Processor", **settings}
    (folder / "processor_config.json").write_text(json.dumps(named))


def _llava(folder: Path, kind: str = "Llava") -> PreTrainedModel:
    tokenizer = byte_tokenizer("<image>", ["<image>"], image_token="<image>")
    tiles: dict[str, Any] = {}
    if kind == "LlavaNext":
        tiles["image_grid_pinpoints"] = [[SIZE, 2 * SIZE], [2 * SIZE, SIZE], [2 * SIZE, 2 * SIZE]]
    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config={**_siglip(8), "model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
        **tiles,
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    image_processor = LlavaNextImageProcessorPil if tiles else CLIPImageProcessorPil
    size, crop = {"shortest_edge": SIZE}, {"height": SIZE, "width": SIZE}
    getattr(transformers, f"{kind}Processor")(
        image_processor(size=size, crop_size=crop, **tiles),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return model


MAKERS: dict[str, Callable[[Path], PreTrainedModel]] = {
    "qwen2_vl": lambda folder: _qwen(folder, "Qwen2VL"),
    "qwen2_5_vl": lambda folder: _qwen(folder, "Qwen2_5_VL"),
    "qwen3_vl": lambda folder: _qwen(folder, "Qwen3VL"),
    "qwen3_5": lambda folder: _qwen(folder, "Qwen3_5"),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_large": lambda folder: _gemma4(folder, large=True),
    "idefics3": _idefics3,
    "idefics3_tiles": lambda folder: _idefics3(folder, tiles=True),
    "smolvlm": lambda folder: _idefics3(folder, "SmolVLM"),
    "smolvlm_tiles": lambda folder: _idefics3(folder, "SmolVLM", tiles=True),
    "internvl": _internvl,
    "mistral3": _mistral3,
    "llava": _llava,
    "llava_next": lambda folder: _llava(folder, "LlavaNext"),
}
FAMILIES = tuple(MAKERS)
NEED_TORCHVISION = ("mistral3", "gemma4", "gemma4_large")  # their processors


def make(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Writes a tiny model of a family, with its processor, into a folder."""
    if family in NEED_TORCHVISION:
        pytest.importorskip("torchvision")
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MAKERS[family](folder)
        with torch.no_grad():  # at their initial scale pictures hardly show in the logits
            for p in model.parameters():
                if p.ndim > 1:
                    p.mul_(3)
        model.generation_config.eos_token_id = 2
        model.generation_config.pad_token_id = 0
        model.save_pretrained(folder)
    return folder
