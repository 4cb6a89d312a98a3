"""Every knob of a recipe: its type, its default, what it does in one sentence, its range.

A composed YAML is turned into a `Recipe` once, by `parsing.parse`. After that, code passes these
dataclasses (or plain values) and never a raw config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


def knob(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[str, ...] | None = None,
    read_if: tuple[Any, ...] = (),
) -> Any:
    """A dataclass field with its sentence and its range: >= ge, > gt, <= le, < lt, choices.

    Args:
        read_if: (key, value, ...): the knob is read only if that other knob has one of the values,
            or, without values, if it is set to something; if that other holds several, one will
            do. Set without being read, it is an error.
    """
    metadata = {
        "doc": doc, "ge": ge, "gt": gt, "le": le, "lt": lt, "choices": choices, "read_if": read_if,
    }  # fmt: skip
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, doc: str) -> Any:
    """A nested group of knobs."""
    return field(default_factory=kind, metadata={"doc": doc})


_VLLM = ("generation.engine", "vllm_colocate", "vllm_server")
_COLOCATE = ("generation.engine", "vllm_colocate")
_SERVER = ("generation.engine", "vllm_server")
_TIR = ("eval.mode", "tir")


@dataclass
class Build:
    """A small Qwen2 built from scratch, with a byte-level tokenizer, warmed up by supervision."""

    hidden_size: int = knob(128, "Width of the residual stream.", ge=8)
    intermediate_size: int = knob(512, "Width of the feed-forward layers.", ge=8)
    num_layers: int = knob(4, "Number of decoder layers.", ge=1)
    num_heads: int = knob(4, "Number of attention heads; divides hidden_size.", ge=1)
    num_kv_heads: int = knob(2, "Number of key/value heads; divides num_heads.", ge=1)
    max_position_embeddings: int = knob(2048, "Longest sequence, in tokens.", ge=16)
    initializer_range: float = knob(
        0.06, "Standard deviation of the first weights; 0.02 is for widths of thousands.", gt=0
    )
    merges: int = knob(
        0, "Byte-pair merges learnt from the dataset, on top of the 256 bytes.", ge=0
    )
    warmup_steps: int = knob(300, "Most supervised steps on the dataset's own solutions.", ge=0)
    warmup_target_loss: float = knob(
        0.0, "The warm-up ends early at this loss, in nats a token; 0: it does not.", ge=0
    )
    warmup_batch: int = knob(64, "Rows in one supervised step.", ge=1)
    warmup_weight_decay: float = knob(1.0, "Weight decay of the supervised steps.", ge=0)
    warmup_learning_rate: float = knob(1e-3, "Peak learning rate of the supervised steps.", gt=0)


@dataclass
class Model:
    """The policy: a hub name, a folder, or a small model built on the spot."""

    path: str | None = knob(None, "Hub name or folder of a transformers causal language model.")
    revision: str | None = knob(None, "Branch, tag or commit on the hub.", read_if=("model.path",))
    build: Build | None = knob(None, "Build this small model instead of loading `path`.")
    dtype: str = knob(
        "float32",
        "Type that the weights are kept in; with mixed_precision the arithmetic is another matter.",
        choices=("float32", "bfloat16", "float16"),
    )
    attn_implementation: str | None = knob(
        None, "Attention kernel as transformers names it (sdpa, eager, flash_attention_2, ...)."
    )
    trust_remote_code: bool = knob(
        False, "Run modelling code that comes with the model.", read_if=("model.path",)
    )
    chat_template: str | None = knob(
        None,
        "Jinja file, or template text, in place of the tokenizer's chat template.",
        read_if=("dataset.chat",),
    )
    gradient_checkpointing: bool = knob(False, "Recompute activations in the backward pass.")
    dropout: float | None = knob(
        0.0, "Every dropout rate of the model; null keeps the model's own.", ge=0, le=1
    )


@dataclass
class Dataset:
    """Rows, and how a row becomes a prompt."""

    train: str | None = knob(
        None, "Hub name, or a .json/.jsonl/.jsonl.gz/.csv/.parquet file, or pkg://package/file."
    )
    eval: str | None = knob(None, "The same for held-out rows; null: no evaluation.")
    subset: str | None = knob(None, "The hub data set's configuration (GSM8K has `main`).")
    train_split: str = knob("train", "Split to train on, where the data has splits.")
    eval_split: str = knob("test", "Split to evaluate on, where the data has splits.")
    columns: dict[str, str] = knob(
        {}, "Columns to rename, as new_name: old_name, before anything reads them."
    )
    prompt: str = knob(
        "{prompt}", "Prompt template over the row's columns; write a literal brace twice."
    )
    system: str | None = knob(None, "System prompt (chat only).", read_if=("dataset.chat",))
    chat: bool = knob(
        False, "Wrap the prompt in the tokenizer's chat template; completions become messages."
    )
    solution: str | None = knob(
        None, "Template of a worked solution; only the warm-up of a built model reads it."
    )
    max_prompt_tokens: int = knob(512, "Longest training prompt, in tokens.", ge=1)
    overlong_prompts: str = knob(
        "drop",
        "What becomes of a longer one: drop the row, or cut tokens off its left end.",
        choices=("drop", "cut"),
    )
    shuffle: bool = knob(True, "New order each epoch, a function of (seed, epoch) alone.")
    train_limit: int | None = knob(None, "Use only the first N training rows.", ge=1)
    eval_limit: int | None = knob(None, "Use only the first N held-out rows.", ge=1)


@dataclass
class Reward:
    """One reward function of a recipe."""

    function: str = knob("", "Short name (`grpo rewards` lists them) or my_package.my_module:name.")
    weight: float = knob(1.0, "Factor in the sum that is the reward.")
    args: dict[str, Any] = knob({}, "Keyword arguments for the function.")
    positions: str = knob(
        "characters",
        "What a function that rewards steps counts their ends in.",
        choices=("characters", "tokens"),
    )
    timeout: float | None = knob(
        None,
        "Seconds for one completion, in a worker process that is killed when they are over; null: "
        "what the function asks for; 0: no limit, in the run's own process.",
        ge=0,
    )
    timeout_value: float | None = knob(
        None, "Value of a completion that took longer; null: the reward does not apply to it."
    )
    on_error: str = knob(
        "stop",
        "When the function raises or returns no number: stop the run, or count it and go on as if "
        "the reward did not apply.",
        choices=("stop", "count"),
    )
    cache: bool | None = knob(
        None,
        "Remember values by completion and row, of functions with a timeout; null: what the "
        "function asks for.",
    )
    concurrency: int | None = knob(
        None, "Completions at once, of an async function; null: 16.", ge=1
    )


@dataclass
class Benchmark:
    """A published set of problems: its rows, how they are put, and how an answer is judged."""

    data: str = knob(
        "", "Hub name, or a .json/.jsonl/.jsonl.gz/.csv/.parquet file, or pkg://package/file."
    )
    subset: str | None = knob(None, "The hub data set's configuration; `all`: every one it has.")
    split: str = knob("test", "Split, where the data has splits.")
    columns: dict[str, str] = knob(
        {}, "Columns to rename, as new_name: old_name, before anything reads them."
    )
    limit: int | None = knob(None, "Use only the first N rows.", ge=1)
    cot: str | None = knob(
        "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
        "Prompt of mode cot, a template over the row's columns; null: there is no such mode.",
    )
    tir: str | None = knob(
        None, "The same of mode tir, in which the model writes programs that are run."
    )
    system: str | None = knob(None, "System prompt, where the prompt is a chat.")
    chat: bool | None = knob(
        None, "Wrap the prompt in the tokenizer's chat template; null: where it has one."
    )
    examples: list[Any] = knob(
        [], "Worked examples: mappings of the columns that the templates name, with `cot` or `tir`."
    )
    shots: int = knob(0, "How many of them come before the problem.", ge=0)
    reward: str = knob("math", "Reward that gives 1 to a right answer (`grpo rewards`).")
    args: dict[str, Any] = knob({}, "Keyword arguments for it.")
    breakdown: list[str] = knob([], "Columns by which the accuracy is told besides.")
    max_completion_tokens: int | None = knob(
        None,
        "Longest completion, unless eval.max_completion_tokens says; null: of generation.",
        ge=1,
    )
    stop: list[str] = knob([], "Texts that end a completion, such as the next example's beginning.")


@dataclass
class Scoring:
    """How rewards are computed."""

    workers: int | None = knob(
        None,
        "Worker processes for rewards with a timeout; null: this process's share of the cores.",
        ge=1,
    )
    worker_memory_gb: float | None = knob(
        4.0, "Address space of one of them, in GiB; null: no limit.", gt=0
    )
    try_out: bool = knob(
        True, "Call every reward on one row with a made-up completion before a model is loaded."
    )
    modules: list[str] = knob(
        [], "Modules to import first: their @reward functions are then known by short names."
    )


@dataclass
class Vllm:
    """What vLLM is told: in the trainer's processes (colocate), or servers of `grpo serve`."""

    servers: list[str] = knob(
        [],
        "Addresses of `grpo serve`, such as http://node1:8000.",
        read_if=_SERVER,
    )
    regex: str | None = knob(
        None, "Every completion matches this regular expression.", read_if=_VLLM
    )
    json_schema: str | None = knob(
        None, "Every completion is JSON of this schema: JSON text, or a .json file.", read_if=_VLLM
    )
    seeded: bool = knob(
        True,
        "Draw each completion from a stream of its own, as a function of (seed, prompt, number); "
        "false: from the engine's one stream, quicker on a GPU with thousands of rows.",
        read_if=_VLLM,
    )
    max_model_len: int | None = knob(
        None,
        "Longest prompt with its completion, in tokens; null: what the data and the limits need.",
        ge=2,
        read_if=_COLOCATE,
    )
    tensor_parallel: int = knob(
        1, "Training processes that share one engine; divides their number.", ge=1,
        read_if=_COLOCATE,
    )  # fmt: skip
    memory: float = knob(
        0.3, "Share of the GPU's memory that the engine may use.", gt=0, le=1, read_if=_COLOCATE
    )
    kv_cache_gb: float | None = knob(
        None,
        "GiB for keys and values; null: what `memory` leaves on a GPU, 0.5 on the CPU.",
        gt=0,
        read_if=_COLOCATE,
    )
    sleep: int = knob(
        0,
        "While the policy is updated the engine keeps its memory (0), frees its cache and moves "
        "its weights to the host (1), or frees both (2); GPUs only.",
        ge=0,
        le=2,
        read_if=_COLOCATE,
    )
    dtype: str = knob(
        "auto",
        "Type of the engine's arithmetic; auto: bfloat16 with mixed_precision=bf16, else "
        "model.dtype.",
        choices=("auto", "float32", "bfloat16", "float16"),
        read_if=_COLOCATE,
    )
    model_impl: str = knob(
        "auto",
        "Modelling code: vLLM's own, or transformers' inside vLLM.",
        choices=("auto", "vllm", "transformers"),
        read_if=_COLOCATE,
    )
    eager: bool | None = knob(
        None, "No compilation and no CUDA graphs; null: true on the CPU.", read_if=_COLOCATE
    )
    engine_args: dict[str, Any] = knob(
        {}, "Any other engine argument of vLLM's, such as block_size.", read_if=_COLOCATE
    )
    transfer: str = knob(
        "auto",
        "How weights go to servers: nccl (GPUs), ipc (the trainer's own GPU), gloo (CPU), disk (a "
        "folder that all can see); auto: as the server was started.",
        choices=("auto", "nccl", "ipc", "gloo", "disk"),
        read_if=_SERVER,
    )
    transfer_host: str | None = knob(
        None,
        "Address at which servers reach the trainer; null: that of the interface towards them.",
        read_if=_SERVER,
    )
    transfer_port: int = knob(
        0, "Port of the first server's transfer, the next has the next; 0: any.", ge=0, lt=65536,
        read_if=_SERVER,
    )  # fmt: skip
    transfer_folder: str | None = knob(
        None, "That folder.", read_if=("generation.vllm.transfer", "disk")
    )
    bucket_mb: int = knob(256, "MiB of weights that go over at a time.", ge=1, read_if=_SERVER)
    start_timeout: float = knob(
        240.0, "Seconds that a run waits for its servers at its start.", gt=0, read_if=_SERVER
    )
    request_timeout: float = knob(
        1800.0, "Seconds for the completions of one prompt.", gt=0, read_if=_SERVER
    )
    update_timeout: float = knob(
        300.0,
        "Seconds for each bucket and each other call of a weight update.",
        gt=0,
        read_if=_SERVER,
    )
    canary: bool = knob(
        True,
        "After each update compare what engine and trainer say of a few fixed tokens; on a "
        "difference do the update once more, then stop.",
        read_if=_VLLM,
    )
    canary_tolerance: float | None = knob(
        None,
        "Largest mean difference of their log-probabilities; null: four times that of the start, "
        "and at least 5e-5 in float32, 0.005 in 16 bit.",
        gt=0,
        read_if=_VLLM,
    )
    overlap: int = knob(
        0,
        "Steps whose completions are begun ahead, while the policy is updated: at most so many "
        "steps lie between sampling and use.",
        ge=0,
        read_if=_SERVER,
    )
    in_flight: bool = knob(
        False,
        "Give servers new weights in the middle of completions, whose later tokens then come from "
        "the newer policy; false: wait until those begun are done.",
        read_if=("generation.vllm.overlap",),
    )


@dataclass
class Tools:
    """Programs that a completion writes and has run while it is sampled (eval.mode tir)."""

    max_calls: int = knob(4, "Programs run for one completion.", ge=1, read_if=_TIR)
    seconds: float = knob(
        5.0,
        "Wall time of one, the earlier ones that it goes on from included.",
        gt=0,
        read_if=_TIR,
    )
    output_characters: int = knob(
        1000, "Longest output that the model is shown.", ge=1, read_if=_TIR
    )
    memory_mb: int = knob(1024, "Memory of one, in MiB.", ge=1, read_if=_TIR)
    guards: str = knob(
        "auto",
        "What the sandbox must keep them from: see docs/sandbox.md.",
        choices=("auto", "namespaces", "limits"),
        read_if=_TIR,
    )
    site_packages: bool = knob(
        True,
        "Whether they may import what is installed beside grpo, such as sympy.",
        read_if=_TIR,
    )


@dataclass
class Generation:
    """How completions are sampled."""

    engine: str = knob(
        "transformers",
        "Which generator makes them.",
        choices=("transformers", "vllm_colocate", "vllm_server"),
    )
    num_generations: int = knob(8, "Completions for each prompt: the group.", ge=2)
    max_completion_tokens: int = knob(256, "Longest completion, in tokens.", ge=1)
    min_completion_tokens: int = knob(
        0, "No eos and no stop string ends a completion of fewer tokens than this.", ge=0
    )
    stop: list[str] = knob(
        [], "Texts that end a completion; the token that completes one is the completion's last."
    )
    temperature: float = knob(1.0, "Sampling temperature; also that of the log-probs.", gt=0)
    top_p: float = knob(1.0, "Keep the likeliest tokens up to this share.", gt=0, le=1)
    top_k: int = knob(0, "Keep the K likeliest tokens; 0 keeps all.", ge=0)
    min_p: float = knob(0.0, "Drop tokens below this share of the likeliest one's.", ge=0, le=1)
    repetition_penalty: float = knob(
        1.0,
        "Logits of tokens in the prompt or completion are divided by this where positive, "
        "multiplied where negative; 1: left alone.",
        gt=0,
    )
    max_rows: int | None = knob(
        None,
        "Completions decoded at the same time; null: by free memory. Halved when it runs out; a "
        "group is never split. vLLM: of an engine, or asked of a server by one process.",
        ge=1,
    )
    max_logp_difference: float | None = knob(
        1.0,
        "Stop when trainer and sampler differ by more than this in a step: mean over tokens of "
        "|difference of log-probabilities|; null: never.",
        gt=0,
    )
    vllm: Vllm = section(Vllm, Vllm.__doc__ or "")
    tools: Tools = section(Tools, Tools.__doc__ or "")
    dynamic_sampling: bool = knob(
        False, "Drop groups whose rewards are all equal, and sample more until the step is full."
    )
    max_attempts: int = knob(
        10,
        "Rounds of sampling in one step; after the last, the step trains on what there is.",
        ge=1,
        read_if=("generation.dynamic_sampling",),
    )


@dataclass
class Loss:
    """The objective: policy, KL and entropy terms. docs/algorithm.md has the formulas."""

    policy: str = knob(
        "clipped",
        "Policy term: a function of losses.py.",
        choices=("clipped", "cispo", "sapo", "vespo", "gmpo", "clip_cov", "kl_cov"),
    )
    ratio_level: str = knob(
        "token",
        "Importance ratio: each token's, the completion's (GSPO), or that one with each token's "
        "own gradient (GSPO-token).",
        choices=("token", "sequence", "sequence_token"),
        read_if=("loss.policy", "clipped", "cispo", "sapo"),
    )
    normalize: str = knob(
        "tokens",
        "What is averaged: all tokens of the batch, each completion's mean, each prompt's mean; or "
        "each completion's sum, over max_completion_tokens (constant) or as it is (sums).",
        choices=("tokens", "completions", "prompts", "constant", "sums"),
    )
    epsilon: float = knob(
        0.2,
        "The ratio is clipped below at 1 - epsilon (gmpo: its logarithm at -epsilon).",
        ge=0,
        le=1,
        read_if=("loss.policy", "clipped", "gmpo", "clip_cov"),
    )
    epsilon_high: float | None = knob(
        None,
        "The ratio is clipped above at 1 + epsilon_high; null: epsilon.",
        ge=0,
        read_if=("loss.policy", "clipped", "gmpo", "clip_cov"),
    )
    delta: float | None = knob(
        None,
        "Upper bound of the ratio for negative advantages (two-sided clipping); null: none.",
        gt=1,
        read_if=("loss.policy", "clipped"),
    )
    ratio_cap: float = knob(
        5.0, "Largest weight of a token.", gt=0, read_if=("loss.policy", "cispo")
    )
    sapo_temperature_pos: float = knob(
        1.0, "Steepness of the gate for A > 0.", gt=0, read_if=("loss.policy", "sapo")
    )
    sapo_temperature_neg: float = knob(
        1.05, "Steepness of the gate for A <= 0.", gt=0, read_if=("loss.policy", "sapo")
    )
    vespo_k_pos: float = knob(
        2.0, "Power of the ratio for A >= 0.", ge=0, read_if=("loss.policy", "vespo")
    )
    vespo_lambda_pos: float = knob(
        3.0, "Decay with the ratio for A >= 0.", gt=0, read_if=("loss.policy", "vespo")
    )
    vespo_k_neg: float = knob(
        3.0, "Power of the ratio for A < 0.", ge=0, read_if=("loss.policy", "vespo")
    )
    vespo_lambda_neg: float = knob(
        2.0, "Decay with the ratio for A < 0.", gt=0, read_if=("loss.policy", "vespo")
    )
    cov_share: float = knob(
        2e-4,
        "Share of the batch's tokens that are treated apart for their covariance.",
        gt=0,
        le=1,
        read_if=("loss.policy", "clip_cov", "kl_cov"),
    )
    cov_low: float = knob(
        1.0, "Lowest covariance of a chosen token.", read_if=("loss.policy", "clip_cov")
    )
    cov_high: float = knob(
        5.0, "Highest covariance of a chosen token.", read_if=("loss.policy", "clip_cov")
    )
    cov_kl: float = knob(
        1.0, "Weight of the chosen tokens' KL.", ge=0, read_if=("loss.policy", "kl_cov")
    )
    mask_truncated: bool = knob(
        False, "Completions cut off by the length limit do not train; their rewards still count."
    )
    beta: float = knob(0.0, "Weight of the KL to the reference; 0 loads no reference.", ge=0)
    kl_estimator: str = knob(
        "k3",
        "How the KL is estimated on sampled tokens.",
        choices=("k1", "k2", "k3"),
        read_if=("loss.beta",),
    )
    kl_in: str = knob(
        "loss",
        "The KL is a term of the loss, or is subtracted from the reward, summed over tokens.",
        choices=("loss", "reward"),
        read_if=("loss.beta",),
    )
    kl_bias_correction: bool = knob(
        False, "Multiply the KL by the importance ratio (DeepSeek-V3.2).", read_if=("loss.beta",)
    )
    kl_target: float | None = knob(
        None,
        "Adapt beta so that the KL a token stays near this; null: beta is fixed.",
        gt=0,
        read_if=("loss.beta",),
    )
    kl_gain: float = knob(
        0.1, "How fast beta adapts: at most a fifth of this a step.", gt=0, lt=5,
        read_if=("loss.kl_target",),
    )  # fmt: skip
    reference_every: int = knob(
        0,
        "Refresh the reference with the policy every N steps (iterative GRPO); 0: never.",
        ge=0,
        read_if=("loss.beta",),
    )
    reference_alpha: float = knob(
        1.0,
        "Share of the policy in a refreshed reference; 1 replaces it.",
        gt=0,
        le=1,
        read_if=("loss.reference_every",),
    )
    entropy_coef: float = knob(
        0.0, "Weight of the entropy bonus; with entropy_target its first value.", ge=0
    )
    entropy_target: float | None = knob(
        None,
        "Adapt entropy_coef so that the entropy, in nats a token, does not fall below this.",
        gt=0,
    )
    entropy_coef_min: float = knob(
        0.0, "Smallest adapted entropy_coef.", ge=0, read_if=("loss.entropy_target",)
    )
    entropy_coef_max: float = knob(
        1.0, "Largest adapted entropy_coef.", ge=0, read_if=("loss.entropy_target",)
    )
    entropy_coef_step: float = knob(
        0.005, "Change of entropy_coef in one optimizer step.", gt=0,
        read_if=("loss.entropy_target",),
    )  # fmt: skip
    top_entropy: float = knob(
        1.0,
        "The policy term trains only this share of the batch's tokens, those of highest entropy.",
        gt=0,
        le=1,
    )
    sampling_correction: str = knob(
        "none",
        "Weigh the policy term by the trainer's probability over the sampler's: a token's, a "
        "completion's or its mean by length; held to its bounds (truncate) or 0 outside (mask).",
        choices=(
            "none",
            "token_truncate",
            "token_mask",
            "sequence_truncate",
            "sequence_mask",
            "sequence_mean_truncate",
            "sequence_mean_mask",
        ),
    )
    sampling_cap: float = knob(
        3.0, "Upper bound of that ratio.", gt=0, read_if=("loss.sampling_correction",)
    )
    sampling_floor: float | None = knob(
        None, "Lower bound of that ratio; null: none.", ge=0, read_if=("loss.sampling_correction",)
    )
    off_policy_mask: float | None = knob(
        None,
        "Leave out the negative tokens of completions whose log-probability has fallen by more "
        "than this a token since they were sampled (DeepSeek-V3.2); null: keep them.",
        ge=0,
    )


@dataclass
class Advantage:
    """Rewards to advantages."""

    rule: str = knob(
        "group",
        "A function of advantages.py.",
        choices=("group", "rloo", "reinforce_pp", "opo", "pass_at_k", "max_rl", "gdpo"),
    )
    scale: str = knob(
        "group",
        "Divide by the group's standard deviation, by that of the whole step, or not at all.",
        choices=("group", "batch", "none"),
        read_if=("advantage.rule", "group"),
    )
    baseline: str = knob(
        "group",
        "Subtract the group's mean before normalising over the step, or not.",
        choices=("group", "none"),
        read_if=("advantage.rule", "reinforce_pp"),
    )
    k: int = knob(
        2,
        "Completions of which one has to be right.",
        ge=1,
        read_if=("advantage.rule", "pass_at_k"),
    )


@dataclass
class Schedule:
    """How a scalar knob changes with the step."""

    to: float = knob(0.0, "Value that it ends at.")
    shape: str = knob(
        "linear", "Way there; jump: at `begin`, all at once.", choices=("linear", "cosine", "jump")
    )
    begin: int = knob(0, "Step, counted from 0, up to which the knob keeps its own value.", ge=0)
    end: int | None = knob(None, "Step from which it is `to`; null: the run's last.", ge=1)


@dataclass
class Optimizer:
    """AdamW and its schedule."""

    learning_rate: float = knob(1e-6, "Peak learning rate.", ge=0)
    betas: list[float] = knob([0.9, 0.999], "Decay rates of the two moments.", ge=0, lt=1)
    eps: float = knob(1e-8, "Added to the root of the second moment.", gt=0)
    weight_decay: float = knob(0.0, "Decoupled weight decay.", ge=0)
    max_grad_norm: float = knob(1.0, "Gradients are scaled down to this norm.", gt=0)
    schedule: str = knob(
        "constant",
        "Learning rate after the warm-up, over the steps left.",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: int = knob(0, "Steps over which the learning rate rises from 0.", ge=0)
    min_learning_rate: float = knob(
        0.0,
        "Where linear and cosine end.",
        ge=0,
        read_if=("optimizer.schedule", "linear", "cosine"),
    )


@dataclass
class Update:
    """What happens to one step's batch of completions."""

    num_iterations: int = knob(1, "Passes over the step's completions.", ge=1)
    minibatches: int = knob(1, "Optimizer steps in one pass, each on whole groups.", ge=1)
    tokens_per_micro_batch: int | None = knob(
        None,
        "Tokens in one backward; null: by free memory. Halved when memory runs out; moves memory, "
        "never the gradient.",
        ge=1,
    )
    packing: bool = knob(
        True, "Compute each prompt once for its completions, with no padding; false: padded rows."
    )
    chunked_logits: bool = knob(
        True, "Make logits a chunk of tokens at a time, and again in the backward; false: whole."
    )
    old_logprobs: str = knob(
        "auto",
        "Log-probabilities before a step's first update: auto takes the sampler's where it samples "
        "in float32 from the trainer's own distribution, and computes them elsewhere.",
        choices=("auto", "computed"),
    )
    skip_silent: bool = knob(
        True, "Compute nothing of completions that have no gradient: no advantage, KL or entropy."
    )


@dataclass
class Eval:
    """Held-out evaluation, during training and by `grpo eval`."""

    every: int = knob(0, "Evaluate every N steps; 0: not while training.", ge=0)
    at_start: bool = knob(True, "Evaluate before the first step.")
    at_end: bool = knob(True, "Evaluate after the last step.")
    accuracy: str | None = knob(
        None, "The reward of which a value of 1 counts as correct; null: the recipe's first."
    )
    num_samples: int = knob(1, "Completions for each row.", ge=1)
    temperature: float | None = knob(
        None,
        "Sampling temperature; 0 is greedy; null: 0 for one completion a row, 0.7 for several.",
        ge=0,
    )
    top_p: float = knob(1.0, "Keep the likeliest tokens up to this share.", gt=0, le=1)
    max_completion_tokens: int | None = knob(
        None, "Longest completion; null: that of generation.", ge=1
    )
    mode: list[str] = knob(
        ["cot"],
        "How benchmarks are solved: in words (cot), with programs that are run (tir), or each way.",
        choices=("cot", "tir"),
    )
    metric: list[str] = knob(
        [],
        "Of several completions a row: mean accuracy, pass@k, maj@k; empty: all of them.",
        choices=("mean", "pass", "maj"),
    )
    k: list[int] = knob(
        [],
        "The k of pass@k and maj@k; empty: the powers of 2 up to eval.num_samples, and that.",
        ge=1,
    )
    limit: int | None = knob(None, "Use only the first N rows of every benchmark.", ge=1)
    best: str = knob(
        "accuracy",
        "Metric of which the checkpoint with the highest value is kept, as `eval/` names it, such "
        "as gsm8k/maj@8.",
    )
    patience: int = knob(
        0, "End the run when so many evaluations in a row brought no better one; 0: never.", ge=0
    )

    @property
    def drawn_at(self) -> float:
        """The temperature, settled."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.num_samples == 1 else 0.7


@dataclass
class Distributed:
    """How the work is divided over the processes that torchrun starts."""

    strategy: str = knob(
        "ddp",
        "One process (single); the whole model in each (ddp); weights, gradients and optimizer "
        "state divided over all of them, by PyTorch's FSDP2 (fsdp2; zero3: always as ZeRO-3).",
        choices=("single", "ddp", "fsdp2", "zero3"),
    )
    reshard_after_forward: bool = knob(
        True,
        "Give a layer's weights back after its forward and gather them again in the backward; "
        "false: keep them in between, quicker where there is room.",
        read_if=("distributed.strategy", "fsdp2"),
    )
    stall_minutes: float = knob(
        30.0,
        "A run in which no process gets on for so long says which one is to blame, and ends; 0: "
        "it waits for ever.",
        ge=0,
    )


@dataclass
class Checkpoint:
    """When weights are saved, for how long they are kept, and how."""

    every: int = knob(100, "Save every N steps; 0: only when the run ends.", ge=0)
    keep_last: int = knob(2, "Newest checkpoints kept; the best one is kept besides.", ge=1)
    background: bool = knob(True, "Training goes on while one is written; false: it waits.")
    model: str = knob(
        "auto",
        "Whether each is a model folder besides, as `grpo export` makes one; auto: up to 8 GB.",
        choices=("auto", "always", "never"),
    )
    grace: float = knob(
        30.0,
        "Seconds between a SIGTERM or SIGUSR1 and the end: a step that would take longer is left "
        "between two micro-batches and gone on with by resume=auto.",
        ge=0,
    )


@dataclass
class Log:
    """What is written while training, besides metrics.jsonl."""

    completions_every: int = knob(20, "Write a step's completions every N steps; 0: never.", ge=0)
    completions_shown: int = knob(1, "Of these, how many are also printed.", ge=0)
    entropy_every: int = knob(
        10, "Measure the entropy every N steps, where nothing else asks for it; 0: never.", ge=0
    )
    plots: bool = knob(True, "Draw curves.png when the run ends.")


@dataclass
class Tracking:
    """Where metrics go besides metrics.jsonl."""

    backend: str = knob("none", "Tracker.", choices=("none", "tensorboard", "wandb", "trackio"))
    project: str = knob("grpo", "Project name.", read_if=("tracking.backend", "wandb", "trackio"))
    name: str | None = knob(
        None,
        "Run name; null: the output folder's.",
        read_if=("tracking.backend", "wandb", "trackio"),
    )


@dataclass
class Recipe:
    """One run."""

    recipe: str = knob("", "Name of the recipe; the command line sets it.")
    description: str = knob("", "One line for `grpo recipes`.")
    output_dir: str = knob("outputs/${recipe}", "Folder of the run.")
    overwrite: bool = knob(False, "Discard the run that output_dir holds.")
    resume: str | None = knob(
        None, "`auto`: go on from output_dir's newest checkpoint, if any; or a checkpoint's path."
    )
    seed: int = knob(0, "Seed of everything that is drawn.", ge=0)
    steps: int = knob(100, "Batches of completions to sample and train on.", ge=1)
    prompts_per_step: int = knob(32, "Prompts in one step, over all processes.", ge=1)
    device: str = knob(
        "auto", "auto: CUDA, else MPS, else CPU.", choices=("auto", "cpu", "cuda", "mps")
    )
    mixed_precision: str = knob(
        "no", "Arithmetic of forward and backward: no is the weights' own.", choices=("no", "bf16")
    )
    model: Model = section(Model, Model.__doc__ or "")
    dataset: Dataset = section(Dataset, Dataset.__doc__ or "")
    reward: dict[str, Any] = knob({}, "Rewards by name; each has function, weight and args.")
    benchmark: dict[str, Any] = knob(
        {}, "Benchmarks by name, such as benchmark=gsm8k,math; the data of eval, if there are any."
    )
    scoring: Scoring = section(Scoring, Scoring.__doc__ or "")
    generation: Generation = section(Generation, Generation.__doc__ or "")
    loss: Loss = section(Loss, Loss.__doc__ or "")
    advantage: Advantage = section(Advantage, Advantage.__doc__ or "")
    optimizer: Optimizer = section(Optimizer, Optimizer.__doc__ or "")
    update: Update = section(Update, Update.__doc__ or "")
    schedules: dict[str, Any] = knob(
        {}, "Scalars of loss and generation as functions of the step, such as loss.beta.to=0."
    )
    distributed: Distributed = section(Distributed, Distributed.__doc__ or "")
    eval: Eval = section(Eval, Eval.__doc__ or "")
    checkpoint: Checkpoint = section(Checkpoint, Checkpoint.__doc__ or "")
    log: Log = section(Log, Log.__doc__ or "")
    tracking: Tracking = section(Tracking, Tracking.__doc__ or "")

    @property
    def longest_completion(self) -> int:
        """In tokens, in training and evaluation."""
        own = self.eval.max_completion_tokens
        of_benchmarks = [own or b.max_completion_tokens or 0 for b in self.benchmark.values()]
        return max(self.generation.max_completion_tokens, own or 0, *of_benchmarks)

    @property
    def needs_reference(self) -> bool:
        """Whether there is, or will be, a KL to a reference."""
        schedule = self.schedules.get("loss.beta")
        return self.loss.beta > 0 or (schedule is not None and schedule.to > 0)


def knobs(node: Any = Recipe, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """(full key, field) of every knob below a dataclass, sections before what they hold."""
    for f in dataclasses.fields(node):
        yield prefix + f.name, f
        kind = _SECTIONS.get(str(f.type).removesuffix(" | None"))
        if kind is not None:
            yield from knobs(kind, f"{prefix}{f.name}.")


_SECTIONS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Build, Model, Dataset, Scoring, Vllm, Tools, Generation, Loss, Advantage, Optimizer, Update,
        Distributed, Eval, Checkpoint, Log, Tracking,
    )
}  # fmt: skip


def allowed(f: dataclasses.Field[Any]) -> str:
    """What a knob accepts, in words; "" when its type says it all."""
    meta = f.metadata
    if meta.get("choices"):
        return "one of " + ", ".join(meta["choices"])
    bounds = [
        f"{sign} {meta[key]:g}"
        for key, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if meta.get(key) is not None
    ]
    return " and ".join(bounds)
