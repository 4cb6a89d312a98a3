"""The values of a recipe that the memory and the time of a step depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_cli.config.schema import Recipe
from grpo_cli.errors import UserError

GB = 1e9
MIB = 2**20
STRATEGIES = ("ddp", "fsdp2")


@dataclass(frozen=True)
class Cluster:
    """The GPUs that train."""

    gpus: int
    memory: float = 80 * GB  # per GPU


@dataclass(frozen=True)
class Settings:
    """The recipe's values that a step depends on, with one optimizer step per step."""

    strategy: str = "fsdp2"
    reshard_after_forward: bool = True  # of fsdp2
    weight_bytes: int = 4  # model.dtype: of weights, gradients, moments and the reference
    adapter_rank: int = 0  # adapter.rank with adapter.method=lora; 0: all weights are trained
    quantization: str = "none"  # model.quantization
    optimizer: str = "adamw"  # optimizer.algorithm
    offload: str = "none"  # distributed.offload
    bf16: bool = True  # mixed_precision=bf16; the same memory with fp16
    reference: bool = True
    old_logprobs: bool = False  # computed: with several passes over the completions of a step
    gradient_checkpointing: bool = True
    micro_tokens: int = 8192  # update.tokens_per_micro_batch
    prompts: int = 1024  # prompts_per_step
    num_generations: int = 16
    prompt_tokens: int = 512  # in the mean
    completion_tokens: float = 2048  # in the mean
    max_completion_tokens: int = 4096
    embedded: bool = False  # the embedded engine; else vLLM
    prepacks: bool = False  # the embedded engine, large float32 matrices: on x86 CPUs
    bucket_bytes: int = 256 * MIB  # of weights that vLLM servers are sent at a time
    packed: bool = True  # update.packing
    decoded_rows: int | None = None  # completions that are decoded at a time; None: one group
    servers: int = 0  # vLLM servers; 0: each process samples for itself
    vllm_share: float = 0.0  # generation.vllm.memory of an engine in the trainer's processes
    vllm_sleeps: bool = False  # generation.vllm.sleep
    iterations: int = 1  # update.num_iterations
    minibatches: int = 1  # update.minibatches
    signal_share: float = 1.0  # of groups that have a gradient

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UserError(f"strategy = {self.strategy}: one of {', '.join(STRATEGIES)}.")
        if self.quantization != "none" and (self.sharded or not self.adapter_rank):
            raise UserError("quantization: needs an adapter, and strategy = ddp.")
        if self.offload == "all" and not self.sharded:
            raise UserError("offload = all: needs strategy = fsdp2.")

    @classmethod
    def of(cls, recipe: Recipe, **known: Any) -> Settings:
        """Returns the settings of a recipe whose completions are as long as they may be.

        Args:
            known: fields that the recipe leaves open or that are known better: micro_tokens,
                prompt_tokens, completion_tokens, decoded_rows, signal_share.

        Raises:
            UserError: the recipe leaves open what the memory depends on.
        """
        half = recipe.model.dtype in ("bfloat16", "float16")
        micro_tokens = known.pop("micro_tokens", recipe.update.tokens_per_micro_batch)
        if micro_tokens is None:
            raise UserError("update.tokens_per_micro_batch: null; name the number of tokens.")
        strategy, vllm = recipe.distributed.strategy, recipe.generation.vllm
        limit = recipe.generation.max_completion_tokens
        engine, updates = recipe.generation.engine, recipe.update
        several = updates.num_iterations * updates.minibatches > 1
        fields: dict[str, Any] = {
            "strategy": "ddp" if strategy == "single" else strategy,
            "reshard_after_forward": recipe.distributed.reshard_after_forward,
            "weight_bytes": 2 if half else 4,
            "adapter_rank": 0 if recipe.adapter.method == "none" else recipe.adapter.rank,
            "quantization": recipe.model.quantization,
            "optimizer": recipe.optimizer.algorithm,
            "offload": recipe.distributed.offload,
            "bf16": recipe.mixed_precision != "no",
            "reference": recipe.needs_reference,
            "old_logprobs": several and not samples_as_trained(recipe),
            "gradient_checkpointing": recipe.model.gradient_checkpointing,
            "micro_tokens": micro_tokens,
            "prompts": recipe.prompts_per_step,
            "num_generations": recipe.generation.num_generations,
            "prompt_tokens": recipe.dataset.max_prompt_tokens,
            "completion_tokens": limit,
            "max_completion_tokens": limit,
            "embedded": engine == "transformers",
            "packed": updates.packing,
            "servers": len(vllm.servers) or 1 if engine == "vllm_server" else 0,
            "vllm_share": vllm.memory if engine == "vllm_colocate" else 0.0,
            "vllm_sleeps": vllm.sleep > 0,
            "iterations": updates.num_iterations,
            "minibatches": updates.minibatches,
        }
        return cls(**{**fields, **known})

    @property
    def sharded(self) -> bool:
        return self.strategy != "ddp"

    @property
    def compute_bytes(self) -> int:
        """The bytes of a weight when it is gathered and multiplied."""
        return 2 if self.bf16 else self.weight_bytes

    @property
    def sum_bytes(self) -> int:
        """The bytes of a gradient element when it is summed over processes: at least float32."""
        return max(4, self.weight_bytes)

    @property
    def trained_bytes(self) -> int:
        """The bytes of a weight that is trained."""
        return 4 if self.adapter_rank else self.weight_bytes

    def prompts_of(self, gpus: int) -> int:
        """Returns the prompts of the process that has the most; a group is never split."""
        return -(-self.prompts // gpus)


def samples_as_trained(recipe: Recipe) -> bool:
    """Whether the sampler's log-probabilities take the place of computed ones.

    The same as `logprob_passes.samples_as_trained`, from the recipe alone.
    """
    generation = recipe.generation
    return (
        recipe.update.old_logprobs == "auto"
        and generation.engine == "transformers"
        and generation.temperature > 0
        and not generation.changed_by
        and recipe.mixed_precision == "no"
        and recipe.model.dtype == "float32"
        and recipe.loss.sampling_correction == "none"
        and recipe.loss.off_policy_mask is None
    )
