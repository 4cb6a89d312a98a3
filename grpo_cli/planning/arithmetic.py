"""Computes what a training step holds and multiplies on N GPUs.

    memory(shape, cluster, settings)            bytes of one GPU by part, at each moment of a step
    compute_seconds(shape, cluster, settings)   seconds of a step's matrix products
    checkpoint_bytes(shape, settings)           bytes of a checkpoint on the disk

Assumptions:

- 80 of the 85 GB of an 80 GB GPU are counted. The GPU with the largest shard decides.
- Each tensor is sharded by rows, or experts by their second dimension (`fsdp.placement`); padding
  of the last shards is kept and gathered.
- Embedding, last norm and head stay gathered for a micro-batch; of the layers one is gathered at a
  time, with the buffers of two in the forward and one in the backward.
- Activations are what `policy_logprobs.bytes_per_token` measures on the CPU for Qwen2, Qwen3 and
  Qwen3-MoE. The work space of matrix products is left out.
- A GPU reaches 40 % of its listed 989 TFLOPs. Waiting of GPUs for one another is left out.
- Micro-batches are full, prompts are computed once for their group, every group has a gradient.
- An adapter is a LoRA in float32 on all linear layers of a dense model, without dropout. Its
  reference is the model with the adapter switched off. Its backward pass computes no gradients of
  the frozen weights. A quantized matrix is dequantized for each product, one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from grpo_cli.config.schema import Optimizer, Recipe
from grpo_cli.errors import UserError, listed
from grpo_cli.models.families import num_experts
from grpo_cli.models.flops import FORWARD_BACKWARD, forward_flops, listed_peak
from grpo_cli.models.master_weights import CHUNK_BYTES as CHUNK_OF_WEIGHTS
from grpo_cli.models.optimizers import state_bytes
from grpo_cli.models.token_logprobs import CHUNK_BYTES

GB = 1e9
MIB = 2**20
IN_PLACE = ("adamw", "adamw_8bit", "paged_adamw_8bit")  # fused: a step makes no tensors of its own
STRATEGIES = ("ddp", "fsdp2", "zero3")
# Bytes of a quantized weight. nf4: 4 bits, 1 byte for each block of 64 and 4 for each of 64 * 256.
QUANTIZED = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}

# Families that `Shape.of` knows: whether q, k and v have biases, and q and k norms.
FAMILIES = {
    "llama": (False, False),
    "mistral": (False, False),
    "mixtral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder with grouped-query attention and a gated feed-forward or experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int  # of the feed-forward, or of one expert
    vocab: int
    experts: int = 0  # 0: dense
    chosen: int = 0  # experts that a token is sent to
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False

    @classmethod
    def of(cls, config: PretrainedConfig) -> Shape:
        """Returns the shape of a causal language model.

        Raises:
            UserError: the model's family, or a part of the model, is not described here.
        """
        kind = config.model_type
        odd = [n for n in ("attention_bias", "mlp_bias") if getattr(config, n, False)]
        odd += ["mlp_only_layers"] if getattr(config, "mlp_only_layers", None) else []
        odd += ["decoder_sparse_step"] if getattr(config, "decoder_sparse_step", 1) != 1 else []
        if kind not in FAMILIES or odd:
            what = f"model_type = {kind}" if kind not in FAMILIES else f"{kind} with {odd[0]}"
            raise UserError(f"{what}: its parameters are not described; {listed(FAMILIES)} are.")
        experts = num_experts(config) or 0
        bias, norm = FAMILIES[kind]
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            width=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
            vocab=config.vocab_size,
            experts=experts,
            chosen=config.num_experts_per_tok if experts else 0,
            qkv_bias=bias,
            qk_norm=norm,
            tied=bool(config.tie_word_embeddings),
        )

    @property
    def queries(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The width of all key heads together; values have the same width."""
        return self.kv_heads * self.head_dim

    def layer(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the tensors of one layer, as transformers stores them."""
        h, i, e = self.hidden, self.width, self.experts
        tensors: list[tuple[int, ...]] = [(self.queries, h), (self.keys, h), (self.keys, h)]
        tensors += [(h, self.queries), (h,), (h,)]
        if self.qkv_bias:
            tensors += [(self.queries,), (self.keys,), (self.keys,)]
        if self.qk_norm:
            tensors += [(self.head_dim,), (self.head_dim,)]
        if e:
            return [*tensors, (e, h), (e, 2 * i, h), (e, h, i)]  # all experts in two tensors
        return [*tensors, (i, h), (i, h), (h, i)]

    def adapter(self, rank: int) -> list[tuple[int, ...]]:
        """Returns the shapes of one layer's matrices A [r, in] and B [out, r] (LoRA)."""
        matrices = [t for t in self.layer() if len(t) == 2]
        return [pair for out, width in matrices for pair in ((rank, width), (out, rank))]

    def root(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the tensors outside the layers: embedding, last norm, head."""
        embedding = (self.vocab, self.hidden)
        return [embedding, (self.hidden,)] + ([] if self.tied else [embedding])

    @property
    def parameters(self) -> int:
        return self.layers * count(self.layer()) + count(self.root())

    @property
    def active(self) -> int:
        """The parameters that one token is multiplied with; see `flops.params_in_products`."""
        total = self.vocab * self.hidden
        for tensor in self.layer():
            if len(tensor) == 3:
                total += self.layers * math.prod(tensor) * self.chosen // self.experts
            elif len(tensor) == 2:
                total += self.layers * math.prod(tensor)
        return total

    def forward_flops(self, tokens: int, attended: int, logits: int) -> float:
        """Returns the model FLOPs of a forward pass; see `flops.forward_flops`."""
        config = PretrainedConfig(
            hidden_size=self.hidden,
            vocab_size=self.vocab,
            num_attention_heads=self.heads,
            num_hidden_layers=self.layers,
            head_dim=self.head_dim,
        )
        return forward_flops(config, self.active, tokens, attended, logits)


@dataclass(frozen=True)
class Cluster:
    """The GPUs that train."""

    gpus: int
    memory: float = 80 * GB  # per GPU
    flops: float = listed_peak("NVIDIA H100 80GB HBM3", torch.bfloat16, tf32=False) or math.nan
    utilisation: float = 0.4  # share of the peak `flops` that the model's FLOPs reach


@dataclass(frozen=True)
class Settings:
    """The recipe's values that a step depends on, with one optimizer step per step."""

    strategy: str = "fsdp2"
    reshard_after_forward: bool = True  # of fsdp2; zero3 always does
    weight_bytes: int = 4  # model.dtype: of weights, gradients, moments and the reference
    adapter_rank: int = 0  # adapter.rank with adapter.method=lora; 0: all weights are trained
    quantization: str = "none"  # model.quantization
    optimizer: str = "adamw"  # optimizer.algorithm
    stochastic: bool = False  # optimizer.rounding=stochastic: float32 moments of bfloat16 weights
    offload: str = "none"  # distributed.offload
    bf16: bool = True  # mixed_precision=bf16; the same memory with fp16
    reference: bool = True
    old_logprobs: bool = False  # computed: with several passes over the completions of a step
    gradient_checkpointing: bool = True
    micro_tokens: int = 8192  # update.tokens_per_micro_batch
    prompts: int = 1024  # prompts_per_step
    num_generations: int = 16
    prompt_tokens: int = 512  # in the mean
    completion_tokens: int = 2048  # in the mean
    max_completion_tokens: int = 4096
    embedded: bool = False  # the embedded engine; else vLLM servers on other nodes
    bucket_bytes: int = 256 * MIB  # generation.vllm.bucket_mb

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UserError(f"strategy = {self.strategy}: one of {', '.join(STRATEGIES)}.")
        if self.quantization != "none" and (self.sharded or not self.adapter_rank):
            raise UserError("quantization: needs an adapter, and strategy = ddp.")
        if self.offload == "all" and not self.sharded:
            raise UserError("offload = all: needs strategy = fsdp2 or zero3.")

    @classmethod
    def of(cls, recipe: Recipe) -> Settings:
        """Returns the settings of a recipe whose completions are as long as they may be.

        Raises:
            UserError: the recipe leaves open what the memory depends on.
        """
        half = recipe.model.dtype in ("bfloat16", "float16")
        micro_tokens = recipe.update.tokens_per_micro_batch
        if micro_tokens is None:
            raise UserError("update.tokens_per_micro_batch: null; name the number of tokens.")
        strategy = recipe.distributed.strategy
        limit = recipe.generation.max_completion_tokens
        return cls(
            strategy="ddp" if strategy == "single" else strategy,
            reshard_after_forward=recipe.distributed.reshard_after_forward,
            weight_bytes=2 if half else 4,
            adapter_rank=0 if recipe.adapter.method == "none" else recipe.adapter.rank,
            quantization=recipe.model.quantization,
            optimizer=recipe.optimizer.algorithm,
            stochastic=recipe.optimizer.rounding == "stochastic",
            offload=recipe.distributed.offload,
            bf16=recipe.mixed_precision != "no",
            reference=recipe.loss.beta > 0,
            old_logprobs=recipe.update.num_iterations > 1,
            gradient_checkpointing=recipe.model.gradient_checkpointing,
            micro_tokens=micro_tokens,
            prompts=recipe.prompts_per_step,
            num_generations=recipe.generation.num_generations,
            prompt_tokens=recipe.dataset.max_prompt_tokens,
            completion_tokens=limit,
            max_completion_tokens=limit,
            embedded=recipe.generation.engine == "transformers",
            bucket_bytes=recipe.generation.vllm.bucket_mb * MIB,
        )

    @property
    def sharded(self) -> bool:
        return self.strategy != "ddp"

    @property
    def reshards(self) -> bool:
        """Whether a layer is freed between its forward and its backward."""
        return self.reshard_after_forward or self.strategy == "zero3"

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


def count(tensors: Iterable[tuple[int, ...]]) -> int:
    """Returns the number of elements of tensors."""
    return sum(map(math.prod, tensors))


def share(tensors: Iterable[tuple[int, ...]], gpus: int, strategy: str) -> int:
    """Returns the elements that each process keeps of tensors, including padding.

    FSDP2 divides the rows of a tensor: with fewer rows than GPUs, each keeps and sends a row.
    """
    if strategy == "ddp":
        return count(tensors)
    return sum(
        math.prod(t) // gpus if inside_rows(t, gpus) else -(-t[0] // gpus) * math.prod(t[1:])
        for t in tensors
    )


def inside_rows(tensor: tuple[int, ...], gpus: int) -> bool:
    """Returns whether a tensor is sharded by its second dimension; see `fsdp.placement`."""
    return len(tensor) == 3 and tensor[0] % gpus != 0 and tensor[1] % gpus == 0


@dataclass(frozen=True)
class Kept:
    """The bytes that a layer keeps per token for the backward, by the width they come from.

    The tests compare them with what `policy_logprobs.bytes_per_token` measures (packed).
    """

    hidden: int  # times hidden, of a dense layer
    hidden_of_experts: int  # times hidden, of a layer with experts; each expert's own come on top
    heads: int  # times the width of the query heads: q, k, v, as k and v are repeated, and outputs
    norm: int  # times the width of q and k where these are normalized
    width: int  # times the feed-forward's
    expert: tuple[int, int, int]  # of each chosen one: times hidden, times width, and besides
    stream: int  # times hidden: the input of a layer, all that checkpointing keeps of it
    tail: int  # times hidden: behind the last layer, at most
    rotary: int  # times a head's width: position embeddings, shared by all layers
    adapter: int = 0  # times the rank: outputs of A, of the seven matrices of a layer


# Under autocast norms and the residual stream are float32, and so are the experts' products.
KEPT = {
    "float32": Kept(24, 24, 16, 8, 16, (8, 16, 36), 4, 12, 8),
    "autocast": Kept(26, 24, 8, 6, 8, (8, 16, 34), 4, 12, 8),
    "bfloat16": Kept(16, 16, 8, 6, 8, (4, 8, 34), 2, 8, 4),
}
# With an adapter. Frozen norms and products keep less. An adapter in float32 on a model in bfloat16
# without autocast ("copied"): peft copies the inputs of A to float32, and keeps them.
NO_EXPERTS = (0, 0, 0)
KEPT_WITH_ADAPTER = {
    "float32": Kept(16, 0, 16, 8, 16, NO_EXPERTS, 4, 4, 8, adapter=28),
    "autocast": Kept(18, 0, 10, 6, 8, NO_EXPERTS, 4, 4, 8, adapter=14),
    "autocast, bfloat16 weights": Kept(18, 0, 10, 6, 8, NO_EXPERTS, 2, 2, 4, adapter=14),
    "copied": Kept(28, 0, 12, 6, 10, NO_EXPERTS, 2, 2, 4, adapter=28),
    "bfloat16": Kept(12, 0, 8, 6, 8, NO_EXPERTS, 2, 2, 4, adapter=14),
}


def kept_by(settings: Settings) -> Kept:
    """Returns the constants of the settings' arithmetic."""
    if settings.sharded:  # weights arrive in the type of the products
        kind = "bfloat16" if settings.compute_bytes == 2 else "float32"
    elif settings.bf16 and settings.weight_bytes > 2:
        kind = "autocast"
    elif settings.bf16 and settings.adapter_rank:
        kind = "autocast, bfloat16 weights"
    elif settings.weight_bytes == 2:
        kind = "copied" if settings.adapter_rank else "bfloat16"
    else:
        kind = "float32"
    return (KEPT_WITH_ADAPTER if settings.adapter_rank else KEPT)[kind]


def kept_in_layer(shape: Shape, kept: Kept, rank: int = 0) -> int:
    """Returns the bytes that one layer keeps per token.

    Raises:
        UserError: an adapter of a model with experts, which is not described.
    """
    if rank and shape.experts:
        raise UserError("adapter_rank: adapters of models with experts are not described.")
    total = kept.heads * shape.queries + 4 * shape.heads + 8 + kept.adapter * rank
    if shape.qk_norm:
        total += kept.norm * (shape.queries + shape.keys) + 4 * (shape.heads + shape.kv_heads)
    if not shape.experts:
        return total + kept.hidden * shape.hidden + kept.width * shape.width
    of_hidden, of_width, besides = kept.expert
    expert = of_hidden * shape.hidden + of_width * shape.width + besides
    return total + kept.hidden_of_experts * shape.hidden + shape.chosen * expert + 4 * shape.experts


def activation_bytes(shape: Shape, settings: Settings) -> int:
    """Returns the bytes per token that a forward pass keeps for its backward.

    With gradient checkpointing: the inputs of all layers, and one layer in full.
    """
    kept = kept_by(settings)
    tail = kept.tail * shape.hidden + kept.rotary * shape.head_dim
    of_layer = kept_in_layer(shape, kept, settings.adapter_rank)
    if settings.gradient_checkpointing:
        return shape.layers * kept.stream * shape.hidden + of_layer + tail
    return shape.layers * of_layer + tail


@dataclass(frozen=True)
class Memory:
    """The bytes of one GPU by moment of the step, in order, and by part."""

    moments: Mapping[str, Mapping[str, float]]

    @property
    def peak(self) -> float:
        return max(sum(parts.values()) for parts in self.moments.values())

    @property
    def at_peak(self) -> Mapping[str, float]:
        """The parts at the moment of the peak."""
        return max(self.moments.values(), key=lambda parts: sum(parts.values()))

    def wall(self, limit: float) -> str | None:
        """Returns the part that exceeds `limit`, at the first moment that exceeds it."""
        for parts in self.moments.values():
            total = 0.0
            for name, size in parts.items():
                total += size
                if total > limit:
                    return name
        return None


def memory(shape: Shape, cluster: Cluster, settings: Settings) -> Memory:
    """Returns what one GPU holds at each moment of a step."""
    n, s = cluster.gpus, settings
    whole, root = shape.parameters, count(shape.root())
    adapter = shape.adapter(s.adapter_rank) if s.adapter_rank else []
    trained_layer = adapter or shape.layer()
    layer_share = share([*shape.layer(), *adapter], n, s.strategy)
    trained_layer_share = share(trained_layer, n, s.strategy)
    root_share = share(shape.root(), n, s.strategy)
    trained = shape.layers * trained_layer_share + (0 if adapter else root_share)
    own = base_bytes(shape, n, s)
    trained_bytes = trained * s.trained_bytes
    head = shape.vocab * shape.hidden
    largest_matrix = max(math.prod(t) for t in shape.layer())

    weights = {"weights": own} | ({"adapter": trained_bytes} if adapter else {})
    config = Optimizer(s.optimizer)
    matrices = shape.layers * count(t for t in trained_layer if len(t) == 2)
    by_muon = matrices if s.optimizer == "muon" else 0
    moment_bytes = 4 if s.stochastic else s.trained_bytes
    moments_bytes = int(
        by_muon * state_bytes(config, moment_bytes, is_muon=True)
        + (trained - by_muon) * state_bytes(config, moment_bytes)
    )
    if s.offload != "none":  # to the host
        moments_bytes = 0
    if s.offload == "all":
        weights = dict.fromkeys(weights, 0)
    has_copy = s.reference and not adapter
    optimizer = {"moments": moments_bytes} | ({"reference": own} if has_copy else {})
    state = weights | {"gradients": 0 if s.offload == "all" else trained_bytes} | optimizer
    activations = {"activations": s.micro_tokens * activation_bytes(shape, s)}
    # A chunk of scores; in bfloat16 also their gradient, and a block of the weight's.
    chunks = CHUNK_BYTES * (2 if s.compute_bytes == 2 else 1)
    scores = {"logits chunk": chunks}
    of_head = s.sum_bytes + (2 if s.compute_bytes == 2 else 0)  # and in bfloat16
    head_gradient = scores | ({} if adapter else {"head's gradient": head * of_head})

    def gathered(elements: int) -> dict[str, int]:
        return {"gathered": elements * s.compute_bytes}

    if s.sharded:
        # What is gathered is as large as its padded pieces. A layer arrives in a buffer and is
        # copied out of it; in the forward the buffer of the one before is still there.
        all_of, a_layer = n * root_share, n * layer_share
        kept_layers = 0 if s.reshards else shape.layers
        # Tensors divided inside their rows are put together in one more copy.
        experts = [t for t in shape.layer() if inside_rows(t, n)]
        in_forward = all_of + (max(kept_layers, 1) + 2) * a_layer + count(experts)
        at_head = all_of + kept_layers * a_layer
        # Weights are given back before their gradients are summed. Then the last such tensor's
        # gradient is there twice, but that takes less than a layer that is still gathered.
        in_layer = all_of + (2 if s.reshards else kept_layers - 1) * a_layer
        twice = 0 if s.reshards else count(experts[-1:])
        kept_head = {} if adapter else {"head's gradient": head * s.compute_bytes}
        trained_root = 0 if adapter else 1
        moments = {
            "forward": state | gathered(in_forward) | activations | scores,
            "backward of the head": state | gathered(at_head) | activations | head_gradient,
            "backward of a layer": state
            | gathered(in_layer)
            | activations
            | kept_head
            | {
                "unsummed gradient": (count(trained_layer) + twice) * s.compute_bytes
                + n * trained_layer_share * s.sum_bytes
            },
            "end of the backward": state
            | {
                "unsummed gradient": trained_root
                * (root * s.compute_bytes + n * root_share * s.sum_bytes)
            },
        }
    else:
        copies = _copies(shape, s)
        dequantized = (
            {}
            if s.quantization == "none"
            else {"dequantized matrix": largest_matrix * s.compute_bytes}
        )
        temporaries = 0 if s.optimizer in IN_PLACE or s.offload != "none" else trained_bytes
        if s.stochastic:  # a chunk at a time: weights, gradients and temporaries in float32
            temporaries = 3 * CHUNK_OF_WEIGHTS
        kept_copies = {} if s.gradient_checkpointing else copies
        moments = {
            "forward": state | copies | activations | scores | dequantized,
            "backward of the head": state | kept_copies | activations | head_gradient | dequantized,
            "optimizer": state | {"optimizer's temporaries": temporaries},
        }
    resting = weights | optimizer
    if s.embedded:
        copy = {"whole copy": whole * s.compute_bytes} if s.sharded else _copies(shape, s)
        rows = s.prompt_tokens + s.num_generations * s.max_completion_tokens
        cache = {"keys and values": rows * cache_bytes(shape, s)}
        moments["generating"] = resting | copy | cache
    else:
        largest = max(map(math.prod, [*shape.layer(), *shape.root()])) * s.weight_bytes
        bucket = max(s.bucket_bytes, largest)
        # A matrix and the adapter's product in float32, and their sum in the model's type.
        merged = {"merged matrix": largest_matrix * (2 * 4 + s.weight_bytes)} if adapter else {}
        moments["sending weights"] = (
            resting
            | {"bucket": bucket * (2 if s.sharded else 1)}  # as gathered, and as one flat tensor
            | merged
        )
    return Memory(moments)


def base_bytes(shape: Shape, gpus: int, settings: Settings) -> float:
    """Returns the bytes that each process keeps of the model's weights, without an adapter's."""
    layer, root = (
        share(tensors, gpus, settings.strategy) for tensors in (shape.layer(), shape.root())
    )
    if settings.quantization == "none":
        return (shape.layers * layer + root) * settings.weight_bytes
    matrices = shape.layers * count(t for t in shape.layer() if len(t) == 2)
    rest = shape.layers * layer + root - matrices  # biases, norms, embedding and head
    return rest * settings.weight_bytes + matrices * QUANTIZED[settings.quantization]


def _copies(shape: Shape, settings: Settings) -> dict[str, int]:
    """Returns autocast's copies of float32 matrices, kept until it is left; experts have none."""
    if settings.sharded or not settings.bf16 or settings.weight_bytes <= 2:
        return {}
    matrices = count(t for t in shape.layer() if len(t) == 2)
    return {"bf16 copies": 2 * (shape.layers * matrices + shape.vocab * shape.hidden)}


def cache_bytes(shape: Shape, settings: Settings) -> int:
    """Returns the bytes of a token's keys and values in all layers."""
    return 2 * shape.layers * shape.keys * settings.compute_bytes


def compute_seconds(shape: Shape, cluster: Cluster, settings: Settings) -> float:
    """Returns the seconds that the busiest GPU multiplies in a step, without sampling."""
    s = settings
    p, c, rows = s.prompt_tokens, s.completion_tokens, s.num_generations
    tokens = p + rows * c
    attended = p * (p + 1) // 2 + rows * (c * p + c * (c + 1) // 2)
    forward = shape.forward_flops(tokens, attended, rows * c)
    # Frozen weights have no gradient; an adapter's own products are few.
    passes = FORWARD_BACKWARD - (1 if s.adapter_rank else 0)
    passes += s.gradient_checkpointing + s.reference + s.old_logprobs
    done = s.prompts_of(cluster.gpus) * passes * forward
    return done / (cluster.flops * cluster.utilisation)


def checkpoint_bytes(shape: Shape, settings: Settings) -> int:
    """Returns the bytes of what is trained and both moments; a model folder adds it again."""
    rank = settings.adapter_rank
    trained = shape.layers * count(shape.adapter(rank)) if rank else shape.parameters
    return 3 * trained * settings.trained_bytes
