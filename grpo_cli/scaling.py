"""What a step holds and sends on N GPUs, by arithmetic: memory, traffic, weight sync, checkpoints.

    memory(shape, cluster, settings)      bytes of one GPU by part, at each moment of a step
    traffic(shape, cluster, settings)     bytes that one GPU sends in a step, by what they are for
    sync(shape, cluster, settings)        seconds until vLLM servers have new weights
    checkpoint_bytes(shape, settings)     what a checkpoint takes on the disk

Bytes follow from shapes alone. Seconds are best cases, from the cluster's peak rates. The GPU with
the largest share is counted, for it runs out first. docs/scaling.md has tables and what follows.

    python -m grpo_cli.scaling            the tables
    python -m grpo_cli.scaling PAGE       writes them anew into docs/scaling.md
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from grpo_cli.distributed import CHUNK
from grpo_cli.errors import UserError, listed
from grpo_cli.flops import FORWARD_BACKWARD, NUM_EXPERTS, forward_flops, listed_peak
from grpo_cli.linear_logprobs import CHUNK_BYTES

GB = 1e9
MIB = 2**20
STRATEGIES = ("ddp", "fsdp2", "zero3")

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
    """A decoder's sizes: grouped-query attention and a gated feed-forward, dense or of experts."""

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
        """The shape of a causal language model.

        Raises:
            UserError: it is of a family, or has a part, that is not described here.
        """
        kind = config.model_type
        odd = [n for n in ("attention_bias", "mlp_bias") if getattr(config, n, False)]
        odd += ["mlp_only_layers"] if getattr(config, "mlp_only_layers", None) else []
        odd += ["decoder_sparse_step"] if getattr(config, "decoder_sparse_step", 1) != 1 else []
        if kind not in FAMILIES or odd:
            what = f"model_type = {kind}" if kind not in FAMILIES else f"{kind} with {odd[0]}"
            raise UserError(f"{what}: its parameters are not described; {listed(FAMILIES)} are.")
        experts = next((n for name in NUM_EXPERTS if (n := getattr(config, name, None))), 0)
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
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads together; values have the same."""
        return self.kv_heads * self.head_dim

    def layer(self) -> list[tuple[int, ...]]:
        """The tensors of one layer, as transformers has them."""
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

    def root(self) -> list[tuple[int, ...]]:
        """The tensors outside of the layers: embedding, last norm, head."""
        embedding = (self.vocab, self.hidden)
        return [embedding, (self.hidden,)] + ([] if self.tied else [embedding])

    @property
    def parameters(self) -> int:
        return self.layers * count(self.layer()) + count(self.root())

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied with, as `flops.params_in_products` counts them."""
        total = self.vocab * self.hidden
        for tensor in self.layer():
            if len(tensor) == 3:
                total += self.layers * math.prod(tensor) * self.chosen // self.experts
            elif len(tensor) == 2:
                total += self.layers * math.prod(tensor)
        return total

    def forward_flops(self, tokens: int, attended: int, logits: int) -> float:
        """Model FLOPs of a forward pass, see `flops.forward_flops`."""
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
    """GPUs and what lies between them. Rates are peaks, in bytes or FLOPs a second."""

    gpus: int
    gpus_per_node: int = 8
    memory: float = 80 * GB  # of one GPU
    inside: float = 450 * GB  # that one GPU sends inside its node (NVLink of an H100)
    between: float = 400 * GB  # that one node sends to others (8 links of 400 Gbit/s)
    hop: float = 3e-6  # seconds from one GPU to the next, however little is sent
    flops: float = listed_peak("NVIDIA H100 80GB HBM3", torch.bfloat16, tf32=False) or math.nan
    utilisation: float = 0.4  # of these, that the model's own FLOPs reach

    def __post_init__(self) -> None:
        if self.gpus < 1 or (self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node):
            raise UserError(
                f"gpus = {self.gpus}: a part of one node or whole nodes of "
                f"gpus_per_node = {self.gpus_per_node}."
            )

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def ring(self) -> float:
        """Bytes a second that each GPU passes on in a ring over all.

        As many rings as links leave a node: each link carries its own ring's part of the data.
        """
        return self.inside if self.nodes == 1 else min(self.inside, self.between)

    @property
    def link(self) -> float:
        """Bytes a second that one GPU alone sends to another node."""
        return self.between / self.gpus_per_node


@dataclass(frozen=True)
class Settings:
    """The recipe, as far as memory and traffic depend on it; one optimizer step in a step."""

    strategy: str = "fsdp2"
    reshard_after_forward: bool = True  # of fsdp2; zero3 always does
    weight_bytes: int = 4  # model.dtype: of weights, gradients, both moments and the reference
    half: bool = True  # mixed_precision=bf16
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
    servers: int = 1
    bucket_bytes: int = 256 * MIB  # generation.vllm.bucket_mb

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UserError(f"strategy = {self.strategy}: one of {', '.join(STRATEGIES)}.")

    @property
    def sharded(self) -> bool:
        return self.strategy != "ddp"

    @property
    def reshards(self) -> bool:
        """Whether a layer is given back between its forward and its backward."""
        return self.reshard_after_forward or self.strategy == "zero3"

    @property
    def compute_bytes(self) -> int:
        """Of a weight as it is gathered and multiplied."""
        return 2 if self.half else self.weight_bytes

    @property
    def sum_bytes(self) -> int:
        """Of a gradient as it is summed over processes: float32 at least."""
        return max(4, self.weight_bytes)

    def prompts_of(self, gpus: int) -> int:
        """Prompts of the process that has most: a group is never split."""
        return -(-self.prompts // gpus)

    def micro_batches(self, gpus: int) -> int:
        """That every process computes, since passes over a divided model are collective."""
        group = self.prompt_tokens + self.num_generations * self.completion_tokens
        return -(-self.prompts_of(gpus) * group // self.micro_tokens)


def count(tensors: Iterable[tuple[int, ...]]) -> int:
    """Elements of tensors."""
    return sum(map(math.prod, tensors))


def share(tensors: Iterable[tuple[int, ...]], gpus: int, strategy: str) -> int:
    """Elements that a process keeps of tensors, padding included: the same for every process.

    FSDP2 divides the rows of a tensor: with fewer rows than GPUs, each keeps and sends a row.
    """
    if strategy == "ddp":
        return count(tensors)
    return sum(
        math.prod(t) // gpus if inside_rows(t, gpus) else -(-t[0] // gpus) * math.prod(t[1:])
        for t in tensors
    )


def inside_rows(tensor: tuple[int, ...], gpus: int) -> bool:
    """Whether a tensor's second dimension is divided, as `sharding.placement` chooses it."""
    return len(tensor) == 3 and tensor[0] % gpus != 0 and tensor[1] % gpus == 0


@dataclass(frozen=True)
class Kept:
    """Bytes that a token leaves in a layer for the backward, by the width that they come from.

    As `likelihood.bytes_per_token` measures them (packed; tests/test_scaling.py compares).
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


# Under autocast norms and the residual stream are float32, and so are the experts' products.
KEPT = {
    "float32": Kept(24, 24, 16, 8, 16, (8, 16, 36), 4, 12, 8),
    "autocast": Kept(26, 24, 8, 6, 8, (8, 16, 34), 4, 12, 8),
    "bfloat16": Kept(16, 16, 8, 6, 8, (4, 8, 34), 2, 8, 4),
}


def kept_by(settings: Settings) -> Kept:
    """What the settings' arithmetic keeps."""
    if not settings.sharded and settings.half and settings.weight_bytes > 2:
        return KEPT["autocast"]  # float32 weights; the sharded ones arrive in bfloat16
    return KEPT["bfloat16" if settings.compute_bytes == 2 else "float32"]


def kept_in_layer(shape: Shape, kept: Kept) -> int:
    """Bytes a token, of one layer."""
    total = kept.heads * shape.queries + 4 * shape.heads + 8
    if shape.qk_norm:
        total += kept.norm * (shape.queries + shape.keys) + 4 * (shape.heads + shape.kv_heads)
    if not shape.experts:
        return total + kept.hidden * shape.hidden + kept.width * shape.width
    of_hidden, of_width, besides = kept.expert
    expert = of_hidden * shape.hidden + of_width * shape.width + besides
    return total + kept.hidden_of_experts * shape.hidden + shape.chosen * expert + 4 * shape.experts


def activation_bytes(shape: Shape, settings: Settings) -> int:
    """What a forward pass keeps for its backward, a token; checkpointed, with one layer again."""
    kept = kept_by(settings)
    tail = kept.tail * shape.hidden + kept.rotary * shape.head_dim
    if settings.gradient_checkpointing:
        stream = kept.stream * shape.hidden
        return shape.layers * stream + kept_in_layer(shape, kept) + tail
    return shape.layers * kept_in_layer(shape, kept) + tail


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU: by moment of the step, in its order, and by part."""

    moments: Mapping[str, Mapping[str, float]]

    @property
    def peak(self) -> float:
        return max(sum(parts.values()) for parts in self.moments.values())

    @property
    def at_peak(self) -> Mapping[str, float]:
        """The parts at the moment that takes most."""
        return max(self.moments.values(), key=lambda parts: sum(parts.values()))

    def wall(self, limit: float) -> str | None:
        """The part with which `limit` is passed, in the first moment that passes it."""
        for parts in self.moments.values():
            total = 0.0
            for name, size in parts.items():
                total += size
                if total > limit:
                    return name
        return None


def memory(shape: Shape, cluster: Cluster, settings: Settings) -> Memory:
    """What one GPU holds."""
    n, s = cluster.gpus, settings
    whole, layer, root = shape.parameters, count(shape.layer()), count(shape.root())
    layer_share = share(shape.layer(), n, s.strategy)
    root_share = share(shape.root(), n, s.strategy)
    own = (shape.layers * layer_share + root_share) * s.weight_bytes
    head = shape.vocab * shape.hidden

    weights = {"weights": own}
    optimizer = {"moments": 2 * own} | ({"reference": own} if s.reference else {})
    state = weights | {"gradients": own} | optimizer
    activations = {"activations": s.micro_tokens * activation_bytes(shape, s)}
    # A chunk of scores; in bfloat16 also their gradient, and a block of the weight's.
    chunks = CHUNK_BYTES * (2 if s.compute_bytes == 2 else 1)
    scores = {"logits chunk": chunks}
    of_head = s.sum_bytes + (2 if s.compute_bytes == 2 else 0)  # and in bfloat16
    head_gradient = {"logits chunk": chunks, "head's gradient": head * of_head}

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
        kept_head = {"head's gradient": head * s.compute_bytes}
        moments = {
            "forward": state | gathered(in_forward) | activations | scores,
            "backward of the head": state | gathered(at_head) | activations | head_gradient,
            "backward of a layer": state
            | gathered(in_layer)
            | activations
            | kept_head
            | {
                "unsummed gradient": (layer + twice) * s.compute_bytes
                + n * layer_share * s.sum_bytes
            },
            "end of the backward": state
            | {"unsummed gradient": root * s.compute_bytes + n * root_share * s.sum_bytes},
        }
    else:
        copies = _copies(shape, s)
        kept_copies = {} if s.gradient_checkpointing else copies
        moments = {
            "forward": state | copies | activations | scores,
            "backward of the head": state | kept_copies | activations | head_gradient,
            "optimizer": state | {"AdamW's temporaries": own},
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
        moments["sending weights"] = resting | {
            "bucket": bucket * (2 if s.sharded else 1)  # as gathered, and as one flat tensor
        }
    return Memory(moments)


def _copies(shape: Shape, settings: Settings) -> dict[str, int]:
    """Autocast's copies of float32 matrices, kept until it is left; experts have none."""
    if settings.sharded or not settings.half or settings.weight_bytes <= 2:
        return {}
    matrices = count(t for t in shape.layer() if len(t) == 2)
    return {"bf16 copies": 2 * (shape.layers * matrices + shape.vocab * shape.hidden)}


def cache_bytes(shape: Shape, settings: Settings) -> int:
    """Of a token's keys and values, in all layers."""
    return 2 * shape.layers * shape.keys * settings.compute_bytes


@dataclass(frozen=True)
class Sent:
    """What one GPU sends over a step for one purpose."""

    size: float  # bytes
    hops: float  # GPUs that one piece passes after another, over all calls

    def seconds(self, cluster: Cluster) -> float:
        return self.size / cluster.ring + self.hops * cluster.hop

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.size + other.size, self.hops + other.hops)


def traffic(shape: Shape, cluster: Cluster, settings: Settings) -> dict[str, Sent]:
    """What one GPU sends in one step, in rings; what goes to vLLM servers is in `sync`."""
    n, s = cluster.gpus, settings
    far = n - 1  # pieces that a GPU passes on in a gathering or scattering ring
    if not s.sharded:
        size = 2 * far * shape.parameters * s.sum_bytes / n
        return {"gradients": Sent(size, 2 * far * -(-shape.parameters // CHUNK))}
    layers = shape.layers * share(shape.layer(), n, s.strategy)
    root = share(shape.root(), n, s.strategy)
    micro = s.micro_batches(n)

    def gather(elements: int, calls: int) -> Sent:
        return Sent(far * elements * s.compute_bytes, far * calls)

    every = micro * (shape.layers + 1)
    sent = {
        "forward": gather(micro * (layers + root), every),
        "backward": gather(micro * layers, micro * shape.layers),
        "gradients": Sent(far * micro * (layers + root) * s.sum_bytes, far * every),
    }
    if not s.reshards:
        del sent["backward"]
    # Without a backward the root stays gathered over the pass.
    a_pass = gather(micro * layers + root, micro * shape.layers + 1)
    if s.reference:
        sent["ref_logprobs"] = a_pass
    if s.old_logprobs:
        sent["old_logprobs"] = a_pass
    if s.embedded:
        sent["generation"] = gather(layers + root, tensors_of(shape))
    return sent


def tensors_of(shape: Shape) -> int:
    return shape.layers * len(shape.layer()) + len(shape.root())


def compute_seconds(shape: Shape, cluster: Cluster, settings: Settings) -> float:
    """Of the busiest GPU's own products in a step, sampling aside."""
    s = settings
    p, c, rows = s.prompt_tokens, s.completion_tokens, s.num_generations
    tokens = p + rows * c
    attended = p * (p + 1) // 2 + rows * (c * p + c * (c + 1) // 2)
    forward = shape.forward_flops(tokens, attended, rows * c)
    passes = FORWARD_BACKWARD + s.gradient_checkpointing + s.reference + s.old_logprobs
    done = s.prompts_of(cluster.gpus) * passes * forward
    return done / (cluster.flops * cluster.utilisation)


@dataclass(frozen=True)
class Sync:
    """Seconds of one weight sync; a bucket is gathered, then sent, then the next."""

    gather: float  # over the training GPUs
    send: float  # from one process to every server

    @property
    def seconds(self) -> float:
        return self.gather + self.send


def sync(shape: Shape, cluster: Cluster, settings: Settings) -> Sync:
    """Of vLLM servers on other nodes.

    One process sends to all of them through its own link, in the weights' own type. A server's
    workers pass them on to one another inside their node.
    """
    s, far = settings, cluster.gpus - 1
    gather = Sent(0, 0)
    if s.sharded:
        tensors = [*shape.root(), *(t for t in shape.layer() for _ in range(shape.layers))]
        own = share(tensors, cluster.gpus, s.strategy)
        gather = Sent(far * own * s.weight_bytes, far * len(tensors))
    send = s.servers * shape.parameters * s.weight_bytes / cluster.link
    return Sync(gather.seconds(cluster), send)


def checkpoint_bytes(shape: Shape, settings: Settings) -> int:
    """Weights and both moments; the model folder and a moved reference are one more each."""
    return 3 * shape.parameters * settings.weight_bytes


def host_bytes(shape: Shape, cluster: Cluster, settings: Settings) -> dict[str, float]:
    """Of a node's own memory: while the model is loaded, and while a checkpoint is written."""
    on_node = min(cluster.gpus, cluster.gpus_per_node)
    loaded = shape.parameters * settings.weight_bytes  # of a divided model by one process alone
    copied = checkpoint_bytes(shape, settings)
    if not settings.sharded:
        loaded *= on_node
    else:
        own = share(shape.layer(), cluster.gpus, settings.strategy) * shape.layers
        own += share(shape.root(), cluster.gpus, settings.strategy)
        copied = min(copied, 3 * on_node * own * settings.weight_bytes)
    return {"loading": loaded, "checkpoint": copied}


# The models of the tables.
MODELS = {
    "Qwen2.5-7B": Shape(28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True),
    "Qwen2.5-32B": Shape(64, 5120, 40, 8, 128, 27648, 152064, qkv_bias=True),
    "Qwen2.5-72B": Shape(80, 8192, 64, 8, 128, 29568, 152064, qkv_bias=True),
    "Qwen3-235B-A22B": Shape(94, 4096, 64, 4, 128, 1536, 151936, 128, 8, qk_norm=True),
}
SIZES = (8, 64, 256, 1024)
BEGIN, END = "<!-- tables: python -m grpo_cli.scaling PAGE -->", "<!-- end of tables -->"
COLUMNS = {
    "ddp": Settings(strategy="ddp"),
    "fsdp2": Settings(),
    "fsdp2, kept gathered": Settings(reshard_after_forward=False),
}


def tables(limit: float = Cluster(1).memory) -> str:
    """All tables of docs/scaling.md.

    Args:
        limit: bytes of a GPU.
    """
    embedded = {"fsdp2, embedded engine": replace(COLUMNS["fsdp2"], embedded=True)}
    parts = (
        ("Models", _models()),
        ("Memory of a GPU in GB, and what no longer fits", _memory({**COLUMNS, **embedded}, limit)),
        ("Parts at the peak, GB (fsdp2)", _parts()),
        ("GB that a GPU sends in a step, and seconds at best", _traffic(COLUMNS)),
        ("Seconds of a weight sync (fsdp2)", _sync()),
        ("Checkpoints (fsdp2, 64 GPUs)", _checkpoints()),
    )
    return "\n".join(f"### {title}\n\n{text}" for title, text in parts)


def _models() -> str:
    rows = [
        [name, f"{m.parameters / 1e9:.2f}", f"{m.active / 1e9:.2f}"]
        + [_gb(m.parameters * size) for size in (2, 16, 20)]
        for name, m in MODELS.items()
    ]
    head = ["model", "parameters, 1e9", "of these multiplied with a token", "bf16, GB"]
    return _table([*head, "16 bytes each, GB", "with a reference, GB"], rows)


def _cases() -> Iterator[tuple[list[str], Shape, Cluster]]:
    """(the first cells of a row, the model, the cluster)."""
    for name, shape in MODELS.items():
        for gpus in SIZES:
            yield [name if gpus == SIZES[0] else "", f"{gpus:,}"], shape, Cluster(gpus)


def _memory(columns: dict[str, Settings], limit: float) -> str:
    rows = []
    for cells, shape, cluster in _cases():
        for settings in columns.values():
            found = memory(shape, replace(cluster, memory=limit), settings)
            wall = found.wall(limit)
            cells.append(_gb(found.peak) + (f": {wall}" if wall else ""))
        rows.append(cells)
    return _table(["model", "GPUs", *columns], rows)


def _parts() -> str:
    columns = [(name, gpus) for name in MODELS for gpus in (64, 1024)]
    found = [memory(MODELS[name], Cluster(gpus), Settings()).at_peak for name, gpus in columns]
    names = list(dict.fromkeys(name for parts in found for name in parts))
    rows = [[name, *(_gb(parts.get(name, 0)) for parts in found)] for name in names]
    rows.append(["**sum**", *(_gb(sum(parts.values())) for parts in found)])
    return _table(["part", *(f"{name}, {gpus:,}" for name, gpus in columns)], rows)


def _traffic(columns: dict[str, Settings]) -> str:
    rows = []
    for cells, shape, cluster in _cases():
        sent = {
            name: sum(traffic(shape, cluster, settings).values(), Sent(0, 0))
            for name, settings in columns.items()
        }
        cells.append(f"{Settings().micro_batches(cluster.gpus):,}")
        cells += [_gb(s.size) for s in sent.values()]
        cells.append(_seconds(sent["fsdp2"].seconds(cluster)))
        cells.append(_seconds(compute_seconds(shape, cluster, Settings())))
        rows.append(cells)
    seconds = ["fsdp2, s", "products, s"]
    return _table(["model", "GPUs", "micro-batches", *columns, *seconds], rows)


def _sync(servers: Sequence[int] = (1, 4, 16)) -> str:
    rows = []
    for name, shape in MODELS.items():
        gathers = [sync(shape, Cluster(gpus), Settings()).gather for gpus in (64, 1024)]
        sends = [sync(shape, Cluster(64), Settings(servers=number)).send for number in servers]
        weights = _gb(shape.parameters * Settings().weight_bytes)
        rows.append([name, weights, *map(_seconds, [*gathers, *sends])])
    sends_to = [f"sending to {number}" for number in servers]
    head = ["model", "GB", "gathering, 64 GPUs", "1,024 GPUs", *sends_to]
    return _table(head, rows)


def _checkpoints(rates: Sequence[int] = (2, 20, 200)) -> str:
    rows = []
    for name, shape in MODELS.items():
        size = checkpoint_bytes(shape, Settings())
        host = host_bytes(shape, Cluster(64), Settings())
        times = [_seconds(size / (rate * GB)) for rate in rates]
        rows.append([name, _gb(size), *times, *(_gb(part) for part in host.values())])
    head = ["model", "GB", *(f"s at {rate} GB/s" for rate in rates)]
    return _table([*head, "first node's memory to load, GB", "a node's to write, GB"], rows)


def _gb(size: float) -> str:
    """Bytes in GB: a digit behind the point below 10."""
    value = size / GB
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 0.995 else f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def renewed(page: str) -> str:
    """The page with what stands between its two marks written anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"the page must hold {BEGIN}"
    assert end, f"the page must hold {END}"
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def main(argv: Sequence[str]) -> None:
    """Prints the tables, or writes them into the page that is named."""
    if not argv:
        print(tables())
    for name in argv:
        page = Path(name)
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
