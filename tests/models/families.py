"""The table of model families: how each is computed, and the settings of a tiny model of it.

`test_architectures.py` checks every line with a random model, so that a fast mode that is lost
without a word (with a new transformers, say) shows. `scripts/make_docs.py` prints it as
docs/models.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_cli.models.policy_logprobs import ForwardMode

Settings = dict[str, Any]

STATE = "layers carry a state from token to token"
CLAMP = "log-probabilities differ"  # time steps are only bounded without it


@dataclass(frozen=True)
class Family:
    """A model type, and what is expected of it."""

    model_type: str
    settings: Settings = field(default_factory=dict)  # in its config, beside the shared ones
    without: Sequence[str] = ()  # shared settings that it does not have
    decoder: Literal["engine", "cache", "none"] = "engine"  # engine.py; its cache; refused
    packed: bool = True
    chunked: bool = True
    why: str = ""  # what the note says where it is not the engine and packed rows
    why_no_cache: str = ""
    recurrent: bool = False
    balanced: bool = False  # transformers has a load-balancing loss for its experts
    vllm: bool = True  # in the list of models of vLLM's repository (read, not run)
    name: str = ""  # if the model type alone does not say it

    @property
    def mode(self) -> ForwardMode:
        """The mode in which log-probabilities are computed."""
        return ForwardMode(self.packed, self.chunked)

    def __str__(self) -> str:
        return self.name or self.model_type


def fallback(model_type: str, why: str, settings: Settings | None = None, **more: Any) -> Family:
    """A family whose attention cannot be computed by parts."""
    return Family(model_type, settings or {}, decoder="cache", packed=False, why=why, **more)


def recurrent(model_type: str, settings: Settings, **more: Any) -> Family:
    """A family with recurrent layers."""
    expected: dict[str, Any] = {"decoder": "cache", "packed": False, "why": f"its {STATE}"}
    return Family(model_type, settings, recurrent=True, **{**expected, **more})


KV_HEADS = ("num_key_value_heads", "head_dim")
HEADS = (*KV_HEADS, "num_attention_heads")
LINEAR_FULL = {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, **LINEAR_FULL,
}  # fmt: skip
QWEN_EXPERTS = {"num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS}
MAMBA_2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid"], "mamba_d_state": 8,
    "use_mamba_kernels": False,
}  # fmt: skip
JAMBA = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8,
    "mamba_dt_rank": 4, "use_mamba_kernels": False,
}  # fmt: skip
NEMOTRON_H = {
    "layers_block_type": ["mamba", "attention", "moe", "mlp"], "num_hidden_layers": 4,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
    "moe_shared_expert_intermediate_size": 16, **GROUPS, **EXPERTS,
}  # fmt: skip
KIMI = {
    "linear_attn_config": {
        "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "kda_layers": [1],
        "full_attn_layers": [2],
    },
    "first_k_dense_replace": 1, **LATENT, **GROUPS, **EXPERTS,
}  # fmt: skip
FOUR_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
UNEQUAL = (
    "RuntimeError: scaled_dot_product_attention_flash_attention: "
    "Q/K/V should have the same head size"
)

RECURRENT = [
    recurrent("qwen3_next", DELTA_NET | QWEN_EXPERTS, balanced=True),
    recurrent("qwen3_5_text", DELTA_NET, vllm=False),
    recurrent("qwen3_5_moe_text", DELTA_NET | QWEN_EXPERTS, balanced=True, vllm=False),
    recurrent("nemotron_h", NEMOTRON_H, decoder="none", why_no_cache=CLAMP),
    recurrent("lfm2", {"layer_types": ["conv", "full_attention"]}),
    recurrent("lfm2_moe", {"layer_types": ["conv", "full_attention"], "num_experts": 4,
                           "num_dense_layers": 1, **EXPERTS}),
    recurrent("granitemoehybrid", {"layer_types": ["mamba", "attention"],
                                   "shared_intermediate_size": 16, **FOUR_EXPERTS, **MAMBA_2},
              balanced=True),
    recurrent("falcon_h1", {"mamba_d_ssm": 64, **MAMBA_2}),
    recurrent("bamba", {"attn_layer_indices": [1], **MAMBA_2}),
    recurrent("jamba", JAMBA, balanced=True),
    recurrent("kimi_linear", KIMI),
    recurrent("olmo_hybrid", DELTA_NET, vllm=False),
    recurrent("mamba", {"state_size": 8}, without=HEADS),
    recurrent("falcon_mamba", {"state_size": 8}, without=HEADS),
    recurrent("mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1,
                         "chunk_size": 8}, without=HEADS),
    recurrent("zamba", {"attention_head_dim": 16, "attention_hidden_size": 64, "mamba_dt_rank": 4,
                        "n_mamba_heads": 2, **ZAMBA}, without=("head_dim",), vllm=False),
    recurrent("zamba2", {"attention_head_dim": 16, "n_mamba_heads": 8, "mamba_headdim": 8,
                         "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1,
                         "hybrid_layer_ids": [1], "adapter_rank": 4, **ZAMBA},
              without=("head_dim",), decoder="none", why_no_cache=CLAMP),
    recurrent("minimax", {"block_size": 4, **FOUR_EXPERTS, **LINEAR_FULL}, balanced=True,
              decoder="none", why_no_cache="ValueError: MiniMax uses cache of its own"),
    recurrent("recurrent_gemma", {"lru_width": 32, "block_types": ["recurrent", "attention"],
                                  "attention_window_size": 64},
              decoder="none", why_no_cache="log-probabilities differ", vllm=False),
    recurrent("rwkv", {"attention_hidden_size": 32}, without=HEADS, decoder="none",
              why_no_cache="log-probabilities differ", vllm=False),
]  # fmt: skip
FAMILIES = [
    Family("llama"),
    Family("qwen2"),
    Family("qwen3"),
    Family("mistral", {"sliding_window": None}),
    fallback(
        "mistral",
        "its attention sees 4 tokens and no more",
        {"sliding_window": 4},
        name="mistral, completions longer than its window",
    ),
    Family("ministral3", vllm=False),
    Family("phi"),
    Family("phi3"),
    Family("gemma"),
    fallback("gemma2", "its attention has softcap"),
    Family("gemma3_text"),
    Family(
        "gemma4_text",
        {"vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 8},
        decoder="cache",
        why="its layers have keys of several sizes",
        vllm=False,
    ),
    Family("gpt2", without=(*KV_HEADS, "intermediate_size")),
    Family("gpt_neox", without=KV_HEADS),
    Family("olmo2"),
    Family("olmo3"),
    Family("smollm3", vllm=False),
    Family("glm4"),
    Family("cohere", {"logit_scale": 0.5}),
    Family("granite", {"logits_scaling": 2.0}),
    Family("exaone4"),
    Family(
        "minicpm3", LATENT | {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "dim_model_base": 32}
    ),
    # Its attention is not one that transformers lets be set.
    fallback("falcon", "its attention is sdpa", {"alibi": False}, without=KV_HEADS),
    fallback(
        "falcon", "its attention is sdpa", {"alibi": True}, without=KV_HEADS, name="falcon, ALiBi"
    ),
    fallback("bloom", "its attention is eager", without=KV_HEADS),  # ALiBi
    fallback("stablelm", "it passes no further arguments to its attention"),
    Family("mixtral", FOUR_EXPERTS, balanced=True),
    Family("qwen2_moe", QWEN_EXPERTS, balanced=True),
    Family("qwen3_moe", {"num_experts": 4, **EXPERTS}, balanced=True),
    Family("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, balanced=True),
    Family("granitemoe", FOUR_EXPERTS, balanced=True),
    Family("glm4_moe", {"first_k_dense_replace": 1, **GROUPS, **EXPERTS}),
    Family("minimax_m2", FOUR_EXPERTS, balanced=True),
    fallback("gpt_oss", "its attention is eager", FOUR_EXPERTS, balanced=True),  # attention sinks
    fallback("deepseek_v3", UNEQUAL, {"first_k_dense_replace": 1, **LATENT, **GROUPS, **EXPERTS}),
    *RECURRENT,
]
