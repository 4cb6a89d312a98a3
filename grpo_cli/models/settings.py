"""Declares the knobs of the policy, its adapter and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_cli.config.knob import above_0, at_least_0, at_least_1, knob, plain, read_if, text
from grpo_cli.models.adapter_methods import METHODS

# from_pretrained's arguments for file locations, of all files and of weights only.
OF_FILES = ("subfolder", "cache_dir", "local_files_only", "force_download")
OF_WEIGHTS = ("variant", "use_safetensors")
DROPOUTS = ("dropout", "pdrop", "dropout_prob")  # endings of fields with dropout rates
# Arguments of from_pretrained that model.args must not set, and the alternative for each.
NOT_IN_ARGS = {
    "dtype": "write model.dtype",
    "torch_dtype": "write model.dtype",
    "revision": "write model.revision",
    "trust_remote_code": "write model.trust_remote_code",
    "attn_implementation": "write model.attn_implementation",
    "gradient_checkpointing": "write model.gradient_checkpointing",
    "router_aux_loss_coef": "write loss.router_aux_loss_coef",
    "device_map": "write device, or distributed=fsdp2 to divide the model",
    "tp_plan": "write distributed=fsdp2 to divide the model",
    "token": "set HF_TOKEN in the environment",
    "quantization_config": "write model.quantization",
    "load_in_4bit": "write model.quantization=nf4",
    "auto_map": "write model.trust_remote_code, which runs the model's own code",
    "use_kernels": "it would run code from the hub",
    "ignore_mismatched_sizes": "it would train weights that were drawn at random",
}
BUILT_CONTEXT = 2048  # longest sequence of a built model, in tokens


@dataclass
class Build:
    """A small Qwen2 built from scratch, with a byte-level tokenizer, warmed up by supervision."""

    hidden_size: int = knob(128, "Width of the residual stream, a multiple of 8.", ge=8)
    intermediate_size: int = knob(512, "Width of the feed-forward layers.", ge=8)
    num_layers: int = at_least_1(4, "Number of decoder layers.")
    merges: int = at_least_0(
        0, "Byte-pair merges learnt from the data set, added to the 256 bytes of the vocabulary."
    )
    vision_layers: int = at_least_0(
        0, "Layers of a vision tower, with which the model reads images (Idefics 3); 0: text only."
    )
    warmup_steps: int = at_least_0(
        300, "Largest number of supervised steps on the data set's solutions."
    )
    warmup_target_loss: float = at_least_0(
        0.0, "Loss, in nats per token, at which the warm-up ends early; 0: never."
    )
    warmup_batch: int = at_least_1(64, "Rows in one step of the supervised warm-up.")
    warmup_weight_decay: float = at_least_0(1.0, "Weight decay of the supervised warm-up.")
    warmup_learning_rate: float = above_0(1e-3, "Peak learning rate of the supervised warm-up.")

    def problems(self) -> Iterator[str]:
        """Yields messages about values that contradict one another."""
        if self.hidden_size % 8:
            yield (
                f"model.build.hidden_size = {self.hidden_size}: must be a multiple of 8, since "
                "each of the 4 attention heads turns pairs."
            )


@dataclass
class Model:
    """The policy: a hub name, a folder, or a small model built on the spot."""

    path: str | None = knob(
        None,
        "Hub name or folder of a transformers causal language model, or the folder of a run: its "
        "newest checkpoint.",
        evaluated_as="checkpoint",
        trusted="model",
    )
    revision: str | None = text(
        None, "Branch, tag or commit of the model on the hub.", read_if=("model.path",)
    )
    tokenizer: str | None = knob(
        None,
        "Hub name or folder of the tokenizer or processor; null: it is beside the model.",
        read_if=("model.path",),
    )
    build: Build | None = knob(
        None,
        "Settings of a small model that is built instead of loading model.path.",
        training=True,
        kind=Build,
    )
    freeze: list[str] = text(
        [],
        "Parts of the model that are not trained, by their names in it, such as [visual] or "
        "[vision_tower, embed_tokens]. Every weight whose name has such a part stays as it is.",
        training=True,
    )
    dtype: str = knob(
        "float32",
        "Data type of the stored weights; mixed_precision sets that of the arithmetic. auto: the "
        "one that the model's config.json names, or float32 for a model that is built.",
        choices=("float32", "bfloat16", "float16", "auto"),
    )
    quantization: str = knob(
        "none",
        "Quantization of the frozen model under an adapter, by bitsandbytes when it is loaded: "
        "4 bits a weight (nf4, QLoRA). The output head, embeddings and norms are not quantized. "
        "Training needs an adapter with it.",
        choices=("none", "nf4"),
        kept=True,
    )
    head_dtype: str = knob(
        "auto",
        "Data type of the output head's product, from hidden states to logits, in training, "
        "sampling and evaluation. float32: computed in float32 from the weights as they are "
        "stored; auto: as every other layer.",
        choices=("auto", "float32"),
    )
    response_template: str = knob(
        "auto",
        "Format in which the model writes tool calls. auto: the tokenizer's own response template, "
        "or the first of the others that reads a call as the chat template writes it.",
        choices=("auto", "hermes", "qwen3_5", "llama3", "mistral"),
        episodes=True,
    )
    attn_implementation: str | None = plain(
        None,
        "Attention implementation as transformers names it (sdpa, eager, flash_attention_2, ...).",
    )
    trust_remote_code: bool = knob(
        False,
        "Run the modelling code that comes with the model.",
        read_if=("model.path",),
        trusted="never",
    )
    args: dict[str, Any] = knob(
        {},
        "Other arguments of from_pretrained: a field of the model's config, such as "
        "rope_parameters, or one of subfolder, variant, use_safetensors, cache_dir, "
        "local_files_only, force_download. Evaluation reads them from the command line only, since "
        "a checkpoint stores its config.",
        read_if=("model.path",),
    )
    chat_template: str | None = knob(
        None,
        "In place of the tokenizer's chat template: a Jinja file, a template as text, or hermes "
        "(ChatML with tool calls, for models whose own has none).",
        read_if=("dataset.chat", "auto", True),
        trusted="template",
    )
    chat_template_kwargs: dict[str, Any] = text(
        {},
        "Arguments of the chat template, such as enable_thinking: false. A column of the data "
        "named chat_template_kwargs overrides them row by row.",
        read_if=("dataset.chat", "auto", True),
    )
    gradient_checkpointing: bool = knob(
        False, "Recompute activations in the backward pass to save memory.", training=True
    )
    compile: bool = knob(
        False,
        "Compile the decoder layers of the update with torch.compile; the embedded engine decodes "
        "with uncompiled layers.",
        training=True,
    )
    dropout: float | None = at_least_0(
        0.0, "Dropout rate of every dropout layer; null keeps the model's own rates.", le=1
    )

    @property
    def refused_args(self) -> dict[str, str]:
        """The entries of `args` that must not be set, and what to do instead."""
        dropouts = [name for name in self.args if name.endswith(DROPOUTS)]
        instead = dict.fromkeys(dropouts, "write model.dropout") | NOT_IN_ARGS
        return {name: instead[name] for name in self.args if name in instead}

    def problems(self) -> Iterator[str]:
        """Yields messages about arguments that have a key of their own, or none."""
        for name, instead in self.refused_args.items():
            yield f"model.args.{name}: cannot be set: {instead}."


@read_if("adapter.method", *METHODS)
@dataclass
class Adapter:
    """A low-rank adapter that is trained in place of the model's weights (LoRA, through peft)."""

    method: str = knob(
        "none",
        "What is trained: all weights of the model (none), or an adapter on the frozen model: "
        + ", ".join(f"{title} ({name})" for name, (title, _) in METHODS.items())
        + ".",
        choices=("none", *METHODS),
        kept=True,
    )
    rank: int = at_least_1(16, "Rank r of the adapter's matrices.", kept=True)
    alpha: float = above_0(
        32.0, "Scale of the adapter: its product is multiplied by alpha/rank.", kept=True
    )
    target_modules: Any = text(
        "all-linear",
        "Modules that get an adapter: all-linear (every linear layer except the output head), a "
        "list of names such as [q_proj,v_proj], or a regular expression of full names.",
        kept=True,
    )
    path: str | None = knob(
        None,
        "Folder of a trained adapter to continue training from; its own settings replace rank, "
        "alpha, and what else decides its form. The reference policy is this adapter.",
        trusted="model",
    )
    args: dict[str, Any] = knob(
        {},
        "Further fields of the method's config in peft, such as lora_dropout, target_parameters, "
        "modules_to_save, init_lora_weights or rank_pattern of LoraConfig.",
        kept=True,
        trusted="lora",
    )
    sync: str = knob(
        "merge",
        "Weights that an update sends to vLLM: all weights with the adapter merged in (merge), or "
        "the adapter only, which vLLM applies at every token (adapter).",
        choices=("merge", "adapter"),
        read_if=("generation.engine", "vllm_colocate", "vllm_server"),
    )


ADAM = ("adamw", "muon")  # optimizers that read betas


@dataclass
class Optimizer:
    """The optimizer and the schedule of its learning rate."""

    algorithm: str = knob(
        "adamw",
        "Optimizer: adamw, muon (AdamW for all but hidden matrices), or a class of PyTorch, of "
        "bitsandbytes or of your own, such as torch.optim:SGD.",
        kept=True,
        trusted="class",
    )
    args: dict[str, Any] = plain(
        {}, "Further arguments of the optimizer's constructor, such as momentum of muon.", kept=True
    )
    learning_rate: float = at_least_0(1e-6, "Peak learning rate.")
    betas: list[float] = at_least_0(
        [0.9, 0.999], "Decay rates of AdamW's two moments, also of muon's AdamW.", lt=1
    )
    weight_decay: float = at_least_0(
        0.0, "Weight decay: decoupled in adamw and muon, else as the optimizer's class has it."
    )
    no_decay: list[str] = knob(
        ["norms", "biases", "embeddings"],
        "Parameters without weight decay; []: all parameters decay.",
        choices=("norms", "biases", "embeddings"),
    )
    max_grad_norm: float | None = above_0(
        1.0, "Gradient norm above which gradients are scaled down to it; null: never."
    )
    schedule: str = knob(
        "constant",
        "Learning rate after the warm-up, over the remaining steps; wsd: constant, and a linear "
        "decay in the last tenth of the run.",
        choices=("constant", "linear", "cosine", "wsd"),
    )
    warmup_steps: int = at_least_0(
        0, "Steps over which the learning rate rises from 0 to its peak."
    )
    min_learning_rate: float = at_least_0(
        0.0,
        "Learning rate that the linear, cosine and wsd schedules fall towards; the step after the "
        "last would have it.",
        read_if=("optimizer.schedule", "linear", "cosine", "wsd"),
    )

    def problems(self) -> Iterator[str]:
        """Yields messages about values that contradict one another."""
        if len(self.betas) != 2:
            yield f"optimizer.betas = {self.betas}: must be two numbers."
