"""Computes what one device holds at each moment of a training step.

    memory(shape, cluster, settings)            bytes of one GPU by part, at each moment of a step
    checkpoint_bytes(shape, settings)           bytes of a checkpoint on the disk

Assumptions:

- 80 of the 85 GB of an 80 GB GPU are counted. The GPU with the largest shard decides.
- Each tensor is sharded by rows, or experts by their second dimension (`fsdp.placement`); padding
  of the last shards is kept and gathered.
- Embedding, last norm and head stay gathered for a micro-batch; of the layers one is gathered at a
  time, with the buffers of two in the forward and one in the backward.
- Activations are what `activation_bytes.bytes_per_token` measures on the CPU for Qwen2, Qwen3 and
  Qwen3-MoE. The work space of matrix products is left out.
- An adapter is a LoRA in float32 on all linear layers of a dense model, without dropout. Its
  reference is the model with the adapter switched off. Its backward pass computes no gradients of
  the frozen weights. A quantized matrix is dequantized for each product, one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_cli.config.schema import Optimizer
from grpo_cli.errors import UserError
from grpo_cli.models.optimizers import EIGHT_BIT, state_bytes
from grpo_cli.models.token_logprobs import CHUNK_BYTES
from grpo_cli.planning.settings import Cluster, Settings
from grpo_cli.planning.shapes import Shape, count
from grpo_cli.planning.workload import completion_lengths

# The stage of a step (`stage_clock.STAGES`) that each moment belongs to.
STAGE_OF = {
    "generating": "generate",
    "old log-probabilities": "old_logprobs",
    "reference log-probabilities": "ref_logprobs",
    "forward": "forward_backward",
    "backward of the head": "forward_backward",
    "backward of a layer": "forward_backward",
    "end of the backward": "forward_backward",
    "optimizer": "optimizer",
    "sending weights": "weights",
}
PREFILL = 8192  # prompt tokens that the embedded engine computes at once (engine.PREFILL)
LARGE = 2**17  # numbers of a matrix from which it is prepacked (products.LARGE)
PACKED_SHARE = 1 / 8  # of the memory that prepacked weights may take (products.SHARE)
ROOM = 64  # tokens that a row's cache begins with; it doubles when it is full (decode_batch.ROOM)
IN_PLACE = ("adamw", *EIGHT_BIT)  # fused: a step makes no tensors of its own
# Bytes of a weight in nf4: 4 bits, 1 byte for each block of 64 and 4 for each of 64 * 256.
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


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

    The tests compare them with what `activation_bytes.bytes_per_token` measures (packed).
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
        raise UserError(
            "adapter: adapters of models with experts are not described, so that their memory "
            "cannot be planned; adapter=none plans the training of all weights."
        )
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

    @property
    def by_stage(self) -> dict[str, Mapping[str, float]]:
        """The parts at the highest moment of each stage, stages in the order of a step."""
        stages: dict[str, Mapping[str, float]] = {}
        for moment, parts in self.moments.items():
            stage = STAGE_OF[moment]
            if stage not in stages or sum(parts.values()) > sum(stages[stage].values()):
                stages[stage] = parts
        order = list(STAGE_OF.values())
        return dict(sorted(stages.items(), key=lambda item: order.index(item[0])))

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
    trained = trained_weights(shape, s, n)
    own = base_bytes(shape, n, s)
    trained_bytes = trained * s.trained_bytes
    head = shape.vocab * shape.hidden
    largest_matrix = max(math.prod(t) for t in shape.layer())

    weights = {"weights": own} | ({"adapter": trained_bytes} if adapter else {})
    config = Optimizer(s.optimizer)
    matrices = shape.layers * count(t for t in trained_layer if len(t) == 2)
    by_muon = matrices if s.optimizer == "muon" else 0
    moments_bytes = int(
        by_muon * state_bytes(config, s.trained_bytes, is_muon=True)
        + (trained - by_muon) * state_bytes(config, s.trained_bytes)
    )
    if s.offload == "all":  # to the host
        weights, moments_bytes = dict.fromkeys(weights, 0), 0
    has_copy = s.reference and not adapter
    optimizer = {"moments": moments_bytes} | ({"reference": own} if has_copy else {})
    state = weights | {"gradients": 0 if s.offload == "all" else trained_bytes} | optimizer
    activations = {"activations": s.micro_tokens * activation_bytes(shape, s)}
    # A chunk of scores; in bfloat16 also their gradient, and a block of the weight's.
    chunks = min(CHUNK_BYTES, s.micro_tokens * shape.vocab * 4) * (2 if s.compute_bytes == 2 else 1)
    scores = {"logits chunk": chunks}
    of_head = s.sum_bytes + (2 if s.compute_bytes == 2 else 0)  # and in bfloat16
    head_gradient = scores | ({} if adapter else {"head's gradient": head * of_head})

    def gathered(elements: int) -> dict[str, int]:
        return {"gathered": elements * s.compute_bytes}

    if s.sharded:
        # What is gathered is as large as its padded pieces. A layer arrives in a buffer and is
        # copied out of it; in the forward the buffer of the one before is still there.
        all_of, a_layer = n * root_share, n * layer_share
        kept_layers = 0 if s.reshard_after_forward else shape.layers
        # Tensors divided inside their rows are put together in one more copy.
        experts = [t for t in shape.layer() if inside_rows(t, n)]
        in_forward = all_of + (max(kept_layers, 1) + 2) * a_layer + count(experts)
        at_head = all_of + kept_layers * a_layer
        # Weights are given back before their gradients are summed. Then the last such tensor's
        # gradient is there twice, but that takes less than a layer that is still gathered.
        in_layer = all_of + (2 if s.reshard_after_forward else kept_layers - 1) * a_layer
        twice = 0 if s.reshard_after_forward else count(experts[-1:])
        kept_head = {} if adapter else {"head's gradient": head * s.compute_bytes}
        trained_root = 0 if adapter else 1
        in_update = {
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
        temporaries = 0 if s.optimizer in IN_PLACE else trained_bytes
        kept_copies = {} if s.gradient_checkpointing else copies
        in_update = {
            "forward": state | copies | activations | scores | dequantized,
            "backward of the head": state | kept_copies | activations | head_gradient | dequantized,
            "optimizer": state | {"optimizer's temporaries": temporaries},
        }
    resting = weights | optimizer
    before: dict[str, Mapping[str, float]] = {}
    if s.embedded:
        copy = {"whole copy": whole * s.compute_bytes} if s.sharded else _copies(shape, s)
        packed = _prepacked(shape, s) if 4 * whole <= PACKED_SHARE * cluster.memory else {}
        before["generating"] = resting | copy | packed | while_decoding(shape, s, n)
    passing = {"activations": s.micro_tokens * passing_bytes(shape, s)} | scores
    if s.old_logprobs:
        before["old log-probabilities"] = resting | _copies(shape, s) | passing
    if s.reference:
        before["reference log-probabilities"] = resting | _copies(shape, s) | passing
    moments: dict[str, Mapping[str, float]] = {**before, **in_update}
    if s.vllm_share:
        engine = {"vLLM": s.vllm_share * cluster.memory}
        moments["generating"] = resting | engine
        if not s.vllm_sleeps:
            moments = {moment: {**parts, **engine} for moment, parts in moments.items()}
    if not s.embedded:
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


def trained_weights(shape: Shape, settings: Settings, gpus: int) -> int:
    """Returns the number of weights that each process trains."""
    s = settings
    if s.adapter_rank:
        return shape.layers * share(shape.adapter(s.adapter_rank), gpus, s.strategy)
    layers = shape.layers * share(shape.layer(), gpus, s.strategy)
    return layers + share(shape.root(), gpus, s.strategy)


def passing_bytes(shape: Shape, settings: Settings) -> int:
    """Returns the bytes per token that one layer takes in a pass without gradient.

    At its widest place: the residual stream, the input of the feed-forward, and three tensors of
    its width; or a chosen expert's.
    """
    width = max(shape.width * max(shape.chosen, 1), shape.queries)
    return settings.compute_bytes * (3 * shape.hidden + 3 * width)


def while_decoding(shape: Shape, settings: Settings, gpus: int) -> dict[str, float]:
    """Returns what the embedded engine holds besides the weights, by part.

    The highest of two moments: the pass over prompts, and the growth of the rows' caches.
    """
    s = settings
    all_rows = s.prompts_of(gpus) * s.num_generations
    rows = s.num_generations if s.decoded_rows is None else min(s.decoded_rows, all_rows)
    prompts = -(-rows // s.num_generations) * s.prompt_tokens
    lengths = completion_lengths(s.completion_tokens, s.max_completion_tokens, 256)
    own = cache_tokens(lengths, rows, s.max_completion_tokens)
    cache: dict[str, float] = {"keys and values": (prompts + own) * cache_bytes(shape, s)}
    logits: dict[str, float] = {"logits": 2 * rows * shape.vocab * s.compute_bytes}
    of_prompts = min(prompts, PREFILL) * passing_bytes(shape, s)
    of_rows = rows * passing_bytes(shape, s)
    first = prompts + rows * min(ROOM, s.max_completion_tokens)
    beginning: dict[str, float] = {"keys and values": first * cache_bytes(shape, s)}
    both: tuple[dict[str, float], ...] = (
        beginning | {"logits": logits["logits"], "activations": of_prompts},
        cache | logits | {"activations": of_rows},
    )
    return max(both, key=lambda parts: sum(parts.values()))


def cache_tokens(lengths: Sequence[int], rows: int, limit: int) -> float:
    """Returns the most tokens that rows' caches have room for while they grow.

    A cache doubles when it is full: keys are copied first, then values, of the rows left.

    Args:
        lengths: of completions, in order.
    """
    room = min(ROOM, limit)
    kept = most = float(rows * room)
    while room < min(lengths[-1], limit):
        left = rows * sum(n > room for n in lengths) / len(lengths)
        room = min(2 * room, limit)
        new = left * room
        most = max(most, kept + new / 2, new + kept / 2)
        kept = new
    return most


def base_bytes(shape: Shape, gpus: int, settings: Settings) -> float:
    """Returns the bytes that each process keeps of the model's weights, without an adapter's."""
    layer, root = (
        share(tensors, gpus, settings.strategy) for tensors in (shape.layer(), shape.root())
    )
    if settings.quantization == "none":
        return (shape.layers * layer + root) * settings.weight_bytes
    matrices = shape.layers * count(t for t in shape.layer() if len(t) == 2)
    rest = shape.layers * layer + root - matrices  # biases, norms, embedding and head
    return rest * settings.weight_bytes + matrices * NF4_BYTES


def _copies(shape: Shape, settings: Settings) -> dict[str, int]:
    """Returns autocast's copies of float32 matrices, kept until it is left; experts have none."""
    if settings.sharded or not settings.bf16 or settings.weight_bytes <= 2:
        return {}
    matrices = count(t for t in shape.layer() if len(t) == 2)
    return {"bf16 copies": 2 * (shape.layers * matrices + shape.vocab * shape.hidden)}


def _prepacked(shape: Shape, settings: Settings) -> dict[str, int]:
    """Returns copies of large matrices in oneDNN's layout, while the embedded engine decodes."""
    if not settings.prepacks or settings.compute_bytes != 4:
        return {}
    if settings.adapter_rank or shape.experts:  # decoded by their modules
        return {}
    products = [shape.queries + 2 * shape.keys, shape.queries, *[shape.width] * 3]
    large = [shape.hidden * n for n in products if shape.hidden * n >= LARGE]
    head = shape.hidden * shape.vocab
    return {"prepacked weights": 4 * (shape.layers * sum(large) + head * (head >= LARGE))}


def cache_bytes(shape: Shape, settings: Settings) -> int:
    """Returns the bytes of a token's keys and values in all layers."""
    return 2 * shape.layers * shape.keys * settings.compute_bytes


def checkpoint_bytes(shape: Shape, settings: Settings) -> int:
    """Returns the bytes of what is trained and both moments; a model folder adds it again."""
    rank = settings.adapter_rank
    trained = shape.layers * count(shape.adapter(rank)) if rank else shape.parameters
    return 3 * trained * settings.trained_bytes
