"""Declares every knob of a recipe: type, default, one-sentence description and range.

A composed YAML is turned into a `Recipe` once, by `parsing.parse`. After that, code passes these
dataclasses (or plain values) and never a raw config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_cli.config.knob import above_0, at_least_0, at_least_1, knob, read_if, section
from grpo_cli.rewards import shipped_name

HALF_TYPES = {"bf16": "bfloat16", "fp16": "float16"}  # mixed_precision to torch's names


PROMPT_COLUMNS = ("prompt", "messages", "question", "problem")  # of prompts, in this order
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


@dataclass
class Model:
    """The policy: a hub name, a folder, or a small model built on the spot."""

    path: str | None = knob(
        None,
        "Hub name or folder of a transformers causal language model, or the folder of a run: its "
        "newest checkpoint.",
    )
    revision: str | None = knob(
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
    )
    freeze: list[str] = knob(
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
    )
    attn_implementation: str | None = knob(
        None,
        "Attention implementation as transformers names it (sdpa, eager, flash_attention_2, ...).",
    )
    trust_remote_code: bool = knob(
        False, "Run the modelling code that comes with the model.", read_if=("model.path",)
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
    )
    chat_template_kwargs: dict[str, Any] = knob(
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


@read_if("adapter.method", "lora", "dora", "rslora")
@dataclass
class Adapter:
    """A low-rank adapter that is trained in place of the model's weights (LoRA, through peft)."""

    method: str = knob(
        "none",
        "What is trained: all weights of the model (none), or a low-rank adapter on the frozen "
        "model: LoRA (lora), LoRA with trained magnitudes (dora), or LoRA scaled by alpha/√rank "
        "(rslora).",
        choices=("none", "lora", "dora", "rslora"),
    )
    rank: int = at_least_1(16, "Rank r of the adapter's matrices.")
    alpha: float = above_0(32.0, "Scale of the adapter: its product is multiplied by alpha/rank.")
    target_modules: Any = knob(
        "all-linear",
        "Modules that get an adapter: all-linear (every linear layer except the output head), a "
        "list of names such as [q_proj,v_proj], or a regular expression of full names.",
    )
    path: str | None = knob(
        None,
        "Folder of a trained adapter to continue training from; its own settings replace rank, "
        "alpha, and what else decides its form. The reference policy is this adapter.",
    )
    args: dict[str, Any] = knob(
        {},
        "Further fields of peft's LoraConfig, such as lora_dropout, target_parameters, "
        "modules_to_save, init_lora_weights or rank_pattern.",
    )
    sync: str = knob(
        "merge",
        "Weights that an update sends to vLLM: all weights with the adapter merged in (merge), or "
        "the adapter only, which vLLM applies at every token (adapter).",
        choices=("merge", "adapter"),
        read_if=("generation.engine", "vllm_colocate", "vllm_server"),
    )


@dataclass
class NamedRows:
    """One of several data sets; what it does not set is as in `dataset`."""

    data: str = knob("", "Rows: a hub name, or local data as for dataset.train.")
    subset: str | None = knob(None, "Configuration of the hub data set or the folder.")
    split: str = knob("train", "Split of a hub data set or a folder.")
    columns: dict[str, str] | None = knob(
        None,
        "Columns to rename before they are used, as new_name: old_name; null: dataset.columns.",
    )
    prompt: str | None = knob(
        None, "Column or template of the prompt; null: as dataset.prompt says."
    )
    system: str | None = knob(None, "System prompt, for chats; null: dataset.system.")
    limit: int | None = at_least_1(None, "Use only the first N rows.")


@dataclass
class MixturePart(NamedRows):
    """One of the data sets that a run trains on together."""

    weight: float = above_0(1.0, "Probability of the data set at each prompt, relative.")
    solution: str | None = knob(
        None, "Template of a worked solution, for the warm-up; null: dataset.solution."
    )


@dataclass
class HeldOut(NamedRows):
    """One of several sets of held-out rows."""

    split: str = knob("test", "Split of a hub data set or a folder.")
    rewards: list[str] = knob(
        [],
        "Names of the recipe's rewards that judge the completions; empty: the rewards of the data "
        "set with the same name in dataset.mixture, or else all rewards.",
    )
    accuracy: str | None = knob(
        None,
        "Reward whose value 1 counts as correct; null: eval.accuracy if it judges them, else the "
        "first.",
    )


@dataclass
class Dataset:
    """Rows, and how a row becomes a prompt."""

    train: str | None = knob(
        None,
        "Training rows: a hub name, a .json/.jsonl/.jsonl.gz/.csv/.parquet file, a pattern such as "
        "data/*.parquet, a folder of such files or of save_to_disk, or pkg://package/file.",
    )
    eval: str | None = knob(
        None,
        "Held-out rows: a hub name, or local data as for dataset.train; null: no evaluation on "
        "rows.",
    )
    subset: str | None = knob(None, "Configuration of the hub data set (GSM8K has `main`).")
    train_split: str = knob("train", "Split of a hub data set or a folder to train on.")
    eval_split: str = knob("test", "Split of a hub data set or a folder to evaluate on.")
    columns: dict[str, str] = knob(
        {}, "Columns to rename before they are used, as new_name: old_name."
    )
    prompt: str | None = knob(
        None,
        "Column of the prompt, or a template over the row's columns such as '{question} Answer "
        "briefly.', in which a literal brace is written twice; null: the first of the columns "
        "prompt, messages, question and problem.",
    )
    system: str | None = knob(
        None, "System prompt, for prompts that are chats.", read_if=("dataset.chat", "auto", True)
    )
    chat: Any = knob(
        "auto",
        "Wrap the prompt in the tokenizer's chat template; completions become messages. auto: if "
        "the model is loaded and its tokenizer has a template, or if there are tools.",
        choices=("auto", True, False),
    )
    final_assistant: str = knob(
        "refuse",
        "Treatment of a conversation that ends with a message of the assistant: refuse the row, "
        "drop the message (the answer in supervised data), or continue it as a prefill.",
        choices=("refuse", "drop", "continue"),
        read_if=("dataset.chat", "auto", True),
    )
    solution: str | None = knob(
        None,
        "Template of a worked solution, used only for the warm-up of a built model. If it names a "
        "column that holds messages, they are an episode whose assistant's turns are trained.",
        training=True,
    )
    max_prompt_tokens: int = at_least_1(
        512, "Length limit of a training prompt, in tokens; longer ones are dropped.", training=True
    )
    max_pixels: int | None = at_least_1(
        1_048_576,
        "Pixels of an image at most; a larger image is resized, its sides in the same ratio. null: "
        "no image is resized. The tokens of an image grow with its pixels in most models.",
    )
    bad_rows: str = knob(
        "stop",
        "Treatment of a row with an image that cannot be read, or that a reward refuses, such as "
        "tests of `code` that test nothing: stop with an error, or drop the row.",
        choices=("stop", "drop"),
    )
    shuffle: bool = knob(
        True, "Shuffle the rows in each epoch, as a function of (seed, epoch) only.", training=True
    )
    streaming: bool = knob(
        False,
        "Read the training rows while training, instead of all at the start; for data that does "
        "not fit into memory.",
        training=True,
    )
    train_limit: int | None = at_least_1(None, "Use only the first N training rows.")
    eval_limit: int | None = at_least_1(None, "Use only the first N held-out rows.")
    mixture: dict[str, Any] = knob(
        {},
        "Several data sets to train on together, by name, in place of dataset.train; each has "
        "data, weight, split, prompt and so on.",
    )
    held_out: dict[str, Any] = knob(
        {},
        "Several sets of held-out rows by name, in place of dataset.eval; each has data, split, "
        "prompt, rewards and so on.",
    )
    test_split_size: float | None = above_0(
        None,
        "Rows taken off the training rows and held out for evaluation, for data without held-out "
        "rows: a fraction below 1 or a number of rows; null: none.",
    )


@dataclass
class Reward:
    """One reward function of a recipe."""

    function: str = knob(
        "", "Reward function: a short name (see `grpo rewards`) or my_package.my_module:name."
    )
    weight: float = knob(1.0, "Weight of this function in the reward, which is a weighted sum.")
    args: dict[str, Any] = knob({}, "Keyword arguments of the reward function.")
    datasets: list[str] = knob(
        [],
        "Names of data sets of dataset.mixture (values of the column `dataset`) to whose rows the "
        "function applies; empty: all rows.",
    )
    timeout: float | None = at_least_0(
        None,
        "Seconds per completion, in a worker process that is killed on timeout; null: the "
        "function's own setting; 0: no limit, in the trainer's process.",
    )
    on_error: str = knob(
        "stop",
        "Reaction when the function raises or returns no number: stop the run, or count the "
        "failure and treat the reward as not applicable.",
        choices=("stop", "count"),
    )
    concurrency: int | None = at_least_1(
        None, "Completions that an async function scores at the same time; null: 16."
    )


def function_of(stored: object) -> str:
    """Returns the function of a reward that a recipe or an evaluation has stored, or ""."""
    return str(stored.get("function", "")) if isinstance(stored, dict) else ""


def own_first(functions: Mapping[str, str]) -> list[str]:
    """Returns the names of rewards with the user's own rewards first.

    The first one is the accuracy, unless eval.accuracy names another.

    Args:
        functions: the function of each reward, by name.
    """
    return sorted(functions, key=lambda name: shipped_name(functions[name] or name) is not None)


@dataclass
class Callback:
    """A class of the user's own whose methods are called during the run."""

    path: str = knob(
        "",
        "Class with methods on_step, on_evaluate, on_checkpoint or on_end, as "
        "my_module:MyCallback.",
    )
    args: dict[str, Any] = knob({}, "Keyword arguments of the callback's class.")


@dataclass
class Mode:
    """The form in which the problems of a benchmark are put to the model."""

    prompt: str | None = knob(
        None, "Prompt template over the row's columns; null: the benchmark has no such mode."
    )
    tools: bool = knob(False, "Run the programs that a completion contains while it is sampled.")
    title: str | None = knob(None, "Heading of the mode in tables; null: its name.")
    published: dict[str, float] = knob(
        {}, "Published accuracies in percent by model, which tables show for comparison."
    )


def _modes() -> dict[str, Mode]:
    prompt = "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    return {
        "cot": Mode(prompt, title="Chain-of-Thought Reasoning"),
        "tir": Mode(tools=True, title="Tool-Integrated Reasoning"),
    }


@dataclass
class Benchmark:
    """A published set of problems: its rows, its prompts, and how an answer is judged."""

    title: str | None = knob(None, "Column heading in tables; null: the benchmark's name.")
    column: int | None = at_least_1(
        None, "Rank among the columns of a table; null: after those that have one."
    )
    data: str = knob(
        "",
        "Rows: a hub name, a .json/.jsonl/.jsonl.gz/.csv/.parquet file, a pattern or a folder of "
        "such files, or pkg://package/file.",
    )
    subset: str | None = knob(None, "Configuration of the hub data set.")
    split: str = knob("test", "Split of a hub data set or a folder.")
    columns: dict[str, str] = knob(
        {}, "Columns to rename before they are used, as new_name: old_name."
    )
    modes: dict[str, Mode] = field(
        default_factory=_modes,
        metadata={
            "doc": "Modes that eval.mode can name; each has prompt, tools, title and published. "
            "cot (in words) and tir (with programs that are run) are there, tir without a prompt."
        },
    )
    system: str | None = knob(None, "System prompt, for prompts that are chats.")
    chat: bool | None = knob(
        None, "Wrap the prompt in the tokenizer's chat template; null: if the tokenizer has one."
    )
    examples: list[Any] = knob(
        [],
        "Worked examples for the prompt: mappings of the columns that the templates name, "
        "with `cot` or `tir`.",
    )
    shots: int = at_least_0(0, "Number of worked examples that precede the problem.")
    reward: str = knob(
        "math", "Reward function that gives 1 to a correct answer (see `grpo rewards`)."
    )
    args: dict[str, Any] = knob({}, "Keyword arguments of the benchmark's reward function.")
    breakdown: list[str] = knob([], "Columns by which the accuracy is also reported.")
    max_completion_tokens: int | None = at_least_1(
        None,
        "Length limit of a completion, unless eval.max_completion_tokens is set; null: "
        "generation.max_completion_tokens.",
    )
    stop: list[str] = knob(
        [], "Texts that end a completion, such as the beginning of the next example."
    )

    @property
    def prompts(self) -> dict[str, str]:
        """The prompt template of each mode that has one."""
        return {name: mode.prompt for name, mode in self.modes.items() if mode.prompt is not None}


@dataclass
class Scoring:
    """Settings of the worker processes that score completions."""

    workers: int | None = at_least_1(
        None,
        "Worker processes for rewards with a timeout; null: this process's share of the cores.",
    )
    worker_memory_gb: float | None = above_0(
        4.0,
        "Address space of one worker process of rewards, tools or environments, in GiB; null: no "
        "limit.",
    )


@read_if("generation.engine", "vllm_server")
@dataclass
class _VllmServers:
    servers: list[str] = knob(
        [], "Addresses of running `grpo serve` processes, such as http://node1:8000."
    )
    transfer: str = knob(
        "auto",
        "Transport of weights to servers: nccl (GPUs), ipc (the trainer's own GPU), gloo "
        "(CPU), disk (files in output_dir, which the servers must see); auto: as the server was "
        "started.",
        choices=("auto", "nccl", "ipc", "gloo", "disk"),
    )
    prefetch_steps: int = at_least_0(
        0,
        "Steps whose completions are sampled in advance, while the policy is updated; also "
        "the largest staleness in steps.",
        training=True,
    )
    in_flight: bool = knob(
        False,
        "Send new weights to servers in the middle of completions, whose later tokens then "
        "come from the newer policy; false: wait for running completions.",
        read_if=("generation.vllm.prefetch_steps",),
        training=True,
    )


@read_if("generation.engine", "vllm_colocate")
@dataclass
class _VllmColocated:
    tensor_parallel: int = at_least_1(
        1, "Training processes that share one engine; must divide their number."
    )
    memory: float = above_0(0.3, "Share of the GPU's memory that the engine may use.", le=1)
    sleep: int = at_least_0(
        0,
        "Engine memory during an update: kept (0), cache freed and weights moved to the host "
        "(1), or both freed (2); GPUs only.",
        le=2,
    )
    dtype: str = knob(
        "auto",
        "Data type of the engine's arithmetic; auto: bfloat16 with mixed_precision=bf16, float16 "
        "with mixed_precision=fp16, else model.dtype.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    engine_args: dict[str, Any] = knob(
        {},
        "Other engine arguments of vLLM, such as block_size. Unless they are set here, "
        "max_model_len follows from the data and the other limits, and enforce_eager is true on "
        "the CPU.",
    )


@read_if("generation.engine", "vllm_colocate", "vllm_server")
@dataclass
class Vllm(_VllmColocated, _VllmServers):
    """Settings of vLLM, in the trainer's processes (colocate) or in servers of `grpo serve`."""

    regex: str | None = knob(None, "Regular expression that every completion must match.")
    json_schema: str | None = knob(
        None, "JSON schema that every completion must match: JSON text, or a .json file."
    )
    check_weights: bool = knob(
        True,
        "After each weight update, compare the engine's and the trainer's log-probabilities "
        "of a few fixed tokens; if they differ by more than rounding, repeat the update once, "
        "then stop.",
    )


@read_if("eval.mode", "tir")
@dataclass
class Tools:
    """Programs that a completion writes and has run while it is sampled (eval.mode tir)."""

    max_calls: int = at_least_1(4, "Largest number of programs run for one completion.")
    seconds: float = above_0(
        5.0, "Wall-clock limit of one program, including the earlier programs that it continues."
    )
    guards: str = knob(
        "auto",
        "Sandbox level for programs; limits does without namespaces, see docs/sandbox.md.",
        choices=("auto", "namespaces", "limits"),
    )


@dataclass
class EnvironmentSettings:
    """The environment that answers the model's turns; each rollout has one of its own."""

    path: str | None = knob(None, "Class of the environment, as my_module:MyClass.")
    args: dict[str, Any] = knob({}, "Arguments that the environment's class is called with.")
    by_name: dict[str, str] = knob(
        {},
        "Several environments in one run: name and class of each. The column `environment` of a "
        "row holds the name of its environment.",
    )
    mcp: str | None = knob(
        None,
        "MCP server whose tools the model may call: a command that speaks MCP on its standard "
        "input and output, or an address (http://...).",
    )
    workers: int | None = at_least_1(
        None, "Worker processes of environments and tools; null: one for each core."
    )
    seconds: float = above_0(30.0, "Wall-clock limit of one reset, one step or one call of a tool.")
    max_failed_share: float = at_least_0(
        0.2,
        "Largest share of a step's rollouts that may be left without a reward because their "
        "environments failed; the run stops above it.",
        le=1,
    )


@dataclass
class EpisodeSettings:
    """Limits and credit of episodes, in which the model and an environment take turns."""

    max_turns: int | None = at_least_1(
        None,
        "Largest number of turns of the model in an episode; null: as many as fit into "
        "generation.max_completion_tokens.",
    )
    turn_tokens: int | None = at_least_1(
        None, "Length limit of one turn of the model, in tokens; null: none of its own."
    )
    reply_tokens: int = at_least_1(
        512,
        "Length limit of one message of an environment or a tool, in tokens; a longer text is cut "
        "in its middle.",
    )
    order: str = knob(
        "auto",
        "Whether the next turns are sampled together, once all environments have answered, so that "
        "a run repeats to the last bit (repeatable), or each as soon as its own has (eager); auto: "
        "eager with vLLM servers, which repeat nothing, else repeatable.",
        choices=("auto", "repeatable", "eager"),
    )
    credit: str = knob(
        "sum",
        "Advantage of rewards that an environment gives for turns: their sum is the rollout's "
        "reward (sum), or each turn has the rewards from it on against the group's mean (turns).",
        choices=("sum", "turns"),
    )


@dataclass
class Generation:
    """Sampling of completions."""

    engine: str = knob(
        "transformers",
        "Engine that samples completions.",
    )
    num_generations: int = knob(
        8, "Completions per prompt (the group size).", ge=2, schedulable=True
    )
    max_completion_tokens: int = at_least_1(256, "Length limit of a completion, in tokens.")
    min_completion_tokens: int = at_least_0(
        0, "Smallest number of tokens in a completion: no eos and no stop string ends it earlier."
    )
    stop: list[str] = knob(
        [], "Texts that end a completion; the token that completes such a text is its last token."
    )
    temperature: float = above_0(
        1.0,
        "Sampling temperature, also applied to the trainer's log-probabilities.",
        schedulable=True,
    )
    top_p: float = above_0(
        1.0,
        "Sample only from the most likely tokens that hold this share of the probability.",
        le=1,
        schedulable=True,
    )
    top_k: int = at_least_0(
        0, "Sample only from the K most likely tokens; 0: from all.", schedulable=True
    )
    min_p: float = at_least_0(
        0.0,
        "Drop tokens whose probability is below this share of the most likely token's.",
        le=1,
        schedulable=True,
    )
    repetition_penalty: float = above_0(
        1.0,
        "Penalty on tokens that the prompt or completion already holds: positive logits are "
        "divided by it, negative ones multiplied; 1: none.",
    )
    presence_penalty: float = knob(
        0.0,
        "Subtracted from the logit of each token that the completion already holds.",
        ge=-2,
        le=2,
    )
    frequency_penalty: float = knob(
        0.0,
        "Subtracted from the logit of a token once for each time that the completion already "
        "holds it.",
        ge=-2,
        le=2,
    )
    logit_bias: dict[int, float] = knob(
        {},
        "Numbers that are added to the logits of tokens, by token id, such as {42: -5}.",
        ge=-100,
        le=100,
    )
    stop_token_ids: list[int] = knob(
        [], "Tokens that end a completion, by token id, in addition to the model's own."
    )
    max_num_seqs: int | None = at_least_1(
        None,
        "Completions decoded at the same time (vLLM: per engine, or requested from a server "
        "by one process); null: by free memory. Halved when memory runs out; a group is never "
        "split.",
    )
    max_logp_difference: float | None = above_0(
        1.0,
        "Stop when the mean over tokens of |trainer's − sampler's log-probability| exceeds "
        "this in a step; null: never.",
        training=True,
    )
    vllm: Vllm = section(Vllm)
    tools: Tools = section(Tools)
    dynamic_sampling: bool = knob(
        False,
        "Drop groups whose rewards are all equal, and sample more prompts until the step is full; "
        "after ten rounds the step trains on the groups that it has.",
        training=True,
    )

    @property
    def changed_by(self) -> list[str]:
        """The knobs that change the sampling distribution from softmax(logits / temperature)."""
        default = Generation()
        names = [n for n in CHANGING if getattr(self, n) != getattr(default, n)]
        structured = ("regex", "json_schema")
        return names + [f"vllm.{n}" for n in structured if getattr(self.vllm, n) is not None]


# Sampling knobs for `Generation.changed_by`.
CHANGING = (
    "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "min_completion_tokens",
)  # fmt: skip


@dataclass
class Loss:
    """The objective: policy, KL and entropy terms. docs/algorithm.md has the formulas."""

    policy: str = knob(
        "clipped",
        "Policy term: a function of algorithm/losses.py, or your own as my_module:my_loss.",
    )
    args: dict[str, Any] = knob(
        {}, "Arguments that only this policy loss has, such as ratio_cap of cispo."
    )
    ratio_level: str = knob(
        "token",
        "Importance ratio: per token, per completion (sequence, GSPO), or per completion with "
        "each token's own gradient (sequence_token, GSPO-token).",
        choices=("token", "sequence", "sequence_token"),
    )
    normalize: str = knob(
        "tokens",
        "Average over all tokens of the batch, over completion means, or over prompt means; "
        "or the sum of each completion, divided by max_completion_tokens (constant) or "
        "undivided (sums).",
        choices=("tokens", "completions", "prompts", "constant", "sums"),
    )
    epsilon: float = at_least_0(
        0.2,
        "Lower clip distance: the ratio is clipped below at 1 - epsilon (gmpo: its logarithm "
        "at -epsilon).",
        le=1,
        hint="For the upper bound: loss.epsilon_high.",
        schedulable=True,
    )
    epsilon_high: float | None = at_least_0(
        None,
        "Upper clip distance: the ratio is clipped above at 1 + epsilon_high; null: epsilon.",
        schedulable=True,
    )
    mask_truncated: bool = knob(
        False,
        "Exclude completions that reached the length limit from the loss; their rewards still "
        "count.",
    )
    beta: float = at_least_0(
        0.0, "Weight of the KL to the reference policy; 0 loads no reference.", schedulable=True
    )
    kl_estimator: str = knob(
        "k3",
        "Estimator of the KL on sampled tokens.",
        choices=("k1", "k2", "k3"),
        read_if=("loss.beta",),
    )
    kl_in: str = knob(
        "loss",
        "Place of the KL: a term of the loss, or subtracted from the reward as a sum over tokens.",
        choices=("loss", "reward"),
        read_if=("loss.beta",),
    )
    kl_bias_correction: bool = knob(
        False, "Multiply the KL by the importance ratio (DeepSeek-V3.2).", read_if=("loss.beta",)
    )
    kl_target: float | None = above_0(
        None,
        "Mean KL per token that beta is adapted to; null: beta is fixed.",
        read_if=("loss.beta",),
    )
    reference_every: int = at_least_0(
        0,
        "Refresh the reference from the policy every N steps (iterative GRPO); 0: never.",
        read_if=("loss.beta",),
    )
    reference_alpha: float = above_0(
        1.0,
        "Share of the policy in a refreshed reference; 1 replaces the reference.",
        le=1,
        read_if=("loss.reference_every",),
    )
    entropy_coef: float = at_least_0(
        0.0,
        "Weight of the entropy bonus; its initial value if entropy_target is set.",
        schedulable=True,
    )
    entropy_target: float | None = above_0(
        None,
        "Entropy, in nats per token, below which the entropy bonus acts; entropy_coef is "
        "adapted to hold it.",
    )
    router_aux_loss_coef: float | None = at_least_0(
        None,
        "Weight of the load-balancing loss of a mixture of experts; null: the weight in the "
        "model's own config.",
    )
    top_entropy: float = above_0(
        1.0,
        "Share of the batch's tokens that the policy term trains on: the ones with the highest "
        "entropy.",
        le=1,
        schedulable=True,
    )
    sampling_correction: str = knob(
        "none",
        "Weight the policy term by the trainer's probability over the sampler's, per token, "
        "per completion or by its mean over the length; bounded (truncate) or set to 0 "
        "outside the bounds (mask).",
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
    sampling_cap: float | None = above_0(
        3.0,
        "Upper bound of the ratio of sampling_correction; null: none.",
        read_if=("loss.sampling_correction",),
        schedulable=True,
    )
    sampling_floor: float | None = at_least_0(
        None,
        "Lower bound of the ratio of sampling_correction; null: none.",
        read_if=("loss.sampling_correction",),
        schedulable=True,
    )
    off_policy_mask: float | None = at_least_0(
        None,
        "Exclude the tokens with negative advantage of completions whose mean log-probability "
        "has fallen by more than this since sampling (DeepSeek-V3.2); null: keep them.",
        schedulable=True,
    )


@dataclass
class Advantage:
    """Rewards to advantages."""

    rule: str = knob(
        "group",
        "Rule: a function of algorithm/advantages.py, or your own as my_module:my_rule.",
    )
    args: dict[str, Any] = knob({}, "Arguments that only this rule has, such as k of pass_at_k.")
    scale: str = knob(
        "group",
        "Divide by the standard deviation of the group, of the complete step (batch), or not "
        "at all (none).",
        choices=("group", "batch", "none"),
    )


@dataclass
class Schedule:
    """The change of a scalar knob with the step."""

    to: float = knob(0.0, "Final value of the scheduled knob.")
    shape: str = knob(
        "linear",
        "Course of the change; jump: all at once at `begin`.",
        choices=("linear", "cosine", "jump"),
    )
    begin: int = at_least_0(0, "Step, counted from 0, until which the knob keeps its own value.")
    end: int | None = at_least_1(
        None,
        "Step, counted from 0, from which the knob has its final value; null: the run's last step.",
    )


ADAM = ("adamw", "muon")  # optimizers that read betas


@dataclass
class Optimizer:
    """The optimizer and the schedule of its learning rate."""

    algorithm: str = knob(
        "adamw",
        "Optimizer: adamw, muon (AdamW for all but hidden matrices), or a class of PyTorch, of "
        "bitsandbytes or of your own, such as torch.optim:SGD.",
    )
    args: dict[str, Any] = knob(
        {}, "Further arguments of the optimizer's constructor, such as momentum of muon."
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


@dataclass
class Update:
    """The update on one step's batch of completions."""

    num_iterations: int = at_least_1(1, "Passes over the completions of one step.")
    minibatches: int = at_least_1(1, "Optimizer steps in one pass, each on complete groups.")
    tokens_per_micro_batch: int | None = at_least_1(
        None,
        "Tokens in one backward; null: by free memory. Halved when memory runs out; changes "
        "memory use, never the gradient.",
    )


@dataclass
class Eval:
    """Held-out evaluation, during training and by `grpo eval`."""

    every: int = at_least_0(0, "Evaluate every N steps; 0: never during training.", training=True)
    at_start: bool = knob(
        True,
        "Evaluate before the first step; after the last step a run always evaluates.",
        training=True,
    )
    accuracy: str | None = knob(
        None,
        "Reward function whose value 1 counts as correct; null: the recipe's first reward of your "
        "own, or the first of all.",
    )
    num_samples: int = at_least_1(1, "Completions per held-out row or problem.")
    sampling: str = knob(
        "own",
        "Sampling settings of evaluation: eval.temperature and eval.top_p (own), or temperature, "
        "top_p, top_k and min_p of generation, without their schedules (training).",
        choices=("own", "training"),
    )
    temperature: float | None = at_least_0(
        None,
        "Sampling temperature of evaluation; 0: greedy; null: 0 for one completion per row, "
        "0.7 for several.",
        read_if=("eval.sampling", "own"),
    )
    top_p: float = above_0(
        1.0,
        "Sample only from the most likely tokens that hold this share of the probability, in "
        "evaluation.",
        le=1,
    )
    max_completion_tokens: int | None = at_least_1(
        None, "Length limit of a completion in evaluation; null: generation.max_completion_tokens."
    )
    mode: list[str] = knob(
        ["cot"],
        "Modes in which benchmarks are solved: in words (cot), or with programs that are run "
        "(tir).",
    )
    metric: list[str] = knob(
        [],
        "Metrics over several completions of a row: mean accuracy, pass@k, maj@k; empty: all.",
        choices=("mean", "pass", "maj"),
    )
    k: list[int] = at_least_1(
        [],
        "Values of k in pass@k and maj@k; empty: the powers of 2 up to eval.num_samples, and "
        "eval.num_samples.",
    )
    limit: int | None = at_least_1(None, "Use only the first N rows of every benchmark.")
    best: str = knob(
        "accuracy",
        "Metric whose best value decides which checkpoint is kept as the best, as `eval/` "
        "names it, such as gsm8k/maj@8.",
        training=True,
    )
    patience: int = at_least_0(
        0, "End the run after this many evaluations in a row without a new best; 0: never.",
        read_if=("eval.every",), training=True,
    )  # fmt: skip

    @property
    def drawn_at(self) -> float:
        """The sampling temperature of evaluation, with its default resolved."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.num_samples == 1 else 0.7


@dataclass
class Distributed:
    """Division of the work over the processes that torchrun starts."""

    strategy: str = knob(
        "ddp",
        "One process (single); the complete model in each process (ddp); weights, gradients "
        "and optimizer state sharded over all processes by PyTorch's FSDP2 (fsdp2).",
        choices=("single", "ddp", "fsdp2"),
    )
    reshard_after_forward: bool = knob(
        True,
        "Free a layer's gathered weights after its forward and gather them again in the "
        "backward; false: keep them, which is faster where memory allows.",
        read_if=("distributed.strategy", "fsdp2"),
    )
    offload: str = knob(
        "none",
        "Tensors that are kept in host memory. all: weights, gradients and optimizer state, by "
        "FSDP2's CPU offload (distributed=fsdp2).",
        choices=("none", "all"),
        training=True,
    )
    stall_minutes: float = at_least_0(
        30.0,
        "Minutes without progress of any process after which a run names the process at fault "
        "and ends; 0: it waits for ever.",
    )


@dataclass
class Stop:
    """Rules that end a run before its last step, as completely as that step would end it."""

    zero_gradient: int = at_least_0(
        0,
        "Steps in a row in which no completion has an advantage, after which the run ends; 0: "
        "never.",
    )
    hours: float | None = above_0(
        None,
        "Hours of training, evaluating and saving, over all starts of the run, after which it "
        "ends; null: no limit.",
    )
    max_kl: float | None = above_0(
        None, "Largest KL to the reference, in nats a token; null: no limit."
    )
    accuracy: float | None = knob(
        None,
        "Held-out accuracy, or value of the metric that eval.best names, at which the run ends; "
        "null: no limit.",
        read_if=("eval.every",),
    )


@dataclass
class Checkpoint:
    """Checkpoints: when they are written, and which of them are kept."""

    every: int = at_least_0(
        100,
        "Save a checkpoint every N steps; 0: only when the run ends, as a model folder from which "
        "it cannot be resumed.",
    )
    keep_last: int = at_least_1(
        2,
        "Number of newest checkpoints to keep; the best one is also kept, without the optimizer's "
        "state.",
    )
    model: str = knob(
        "auto",
        "Add a model folder to each checkpoint, as `grpo export` makes one; auto: up to 8 GB, and "
        "for each checkpoint that hub.repo gets.",
        choices=("auto", "always", "never"),
    )
    grace: float = at_least_0(
        30.0,
        "Seconds between a SIGTERM, SIGHUP or SIGUSR1 and the end: a longer step is interrupted "
        "between two micro-batches and continued by resume=auto.",
    )


@dataclass
class Log:
    """Files and lines that a run writes in addition to metrics.jsonl."""

    completions_every: int = at_least_0(
        20,
        "Write the completions of a step every N steps, with the images of their prompts, and "
        "print the first; 0: never.",
    )
    report: bool = knob(
        True, "Write report.html when the run ends, as `grpo report RUN` does at any time."
    )
    keep_steps: list[int] = at_least_1(
        [],
        "Steps, counted from 1, of which the run keeps rollouts and weights in replay/step-N, so "
        "that grpo replay can recompute their loss and gradient.",
    )


@dataclass
class Tracking:
    """Trackers that receive the metrics in addition to metrics.jsonl."""

    backend: list[str] = knob(
        ["none"],
        "Experiment trackers that also receive the metrics; trackio and wandb also receive a table "
        "of the written completions.",
        choices=(
            "none", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard",
            "trackio", "wandb",
        ),
    )  # fmt: skip
    project: str = knob(
        "grpo",
        "Project name in the trackers; experiment name in MLflow.",
        read_if=(
            "tracking.backend", "clearml", "comet_ml", "mlflow", "swanlab", "trackio", "wandb",
        ),
    )  # fmt: skip
    name: str | None = knob(
        None,
        "Run name in the trackers; null: the name of the output folder.",
        read_if=(
            "tracking.backend", "aim", "clearml", "mlflow", "swanlab", "trackio", "wandb",
        ),
    )  # fmt: skip


@dataclass
class Hub:
    """Pushes to the Hugging Face Hub, with the token of HF_TOKEN or of `hf auth login`."""

    repo: str | None = knob(
        None,
        "Model repository on the hub, as owner/name or name, that checkpoints are pushed to in the "
        "background; a new one is private; null: none.",
    )
    strategy: str = knob(
        "every_save",
        "Pushes of the model: the last checkpoint when the run ends (end); every checkpoint, over "
        "the one before (every_save); and also the complete checkpoint, to the folder "
        "last-checkpoint of the repository, from which a run can resume (checkpoint).",
        choices=("end", "every_save", "checkpoint"),
        read_if=("hub.repo",),
    )


@dataclass
class Recipe:
    """One run."""

    recipe: str = knob("", "Name of the recipe; set by the command line.")
    description: str = knob("", "One-line description, shown by `grpo recipes`.")
    output_dir: str = knob("outputs/${recipe}", "Folder that the run writes to.")
    overwrite: bool = knob(False, "Discard an earlier run in output_dir.")
    resume: str | None = knob(
        None,
        "Checkpoint to resume from: a path, or `auto` for the newest in output_dir, if any.",
        training=True,
    )
    resume_changed: bool = knob(
        False,
        "Resume although data or tokenizer have other contents than the checkpoint was trained "
        "with.",
        read_if=("resume",),
        training=True,
    )
    seed: int = at_least_0(0, "Seed of all random numbers.", lt=2**32)
    steps: int = at_least_1(
        100,
        "Number of training steps; each samples one batch of completions and trains on it.",
        training=True,
    )
    epochs: float | None = above_0(
        None,
        "Length of the run in passes over the training prompts, which replaces `steps`; null: "
        "`steps` decides.",
        training=True,
    )
    prompts_per_step: int = at_least_1(
        32, "Prompts in one step, over all processes.", training=True
    )
    device: str = knob(
        "auto",
        "Device to run on; auto: CUDA, else MPS, else CPU.",
        choices=("auto", "cpu", "cuda", "mps"),
    )
    mixed_precision: str = knob(
        "no",
        "Data type of the forward and backward arithmetic; no: that of the weights. fp16 scales "
        "the loss, so that small gradients do not become 0, and skips an optimizer step whose "
        "gradients overflow.",
        choices=("no", "bf16", "fp16"),
    )
    model: Model = section(Model)
    adapter: Adapter = section(Adapter, training=True)
    dataset: Dataset = section(Dataset)
    reward: dict[str, Any] = knob({}, "Rewards by name; each has function, weight and args.")
    benchmark: dict[str, Any] = knob(
        {},
        "Benchmarks by name, such as benchmark=gsm8k,math; they replace dataset.eval in "
        "evaluation.",
    )
    scoring: Scoring = section(Scoring)
    generation: Generation = section(Generation)
    tools: dict[str, str] = knob(
        {},
        "Tools that the model may call, by name: typed functions with docstrings, as "
        "my_module:my_function.",
    )
    environment: EnvironmentSettings = section(EnvironmentSettings)
    episode: EpisodeSettings = section(EpisodeSettings)
    rollout: str | None = knob(
        None,
        "Function that makes the rollouts, as my_module:my_function; null: the model and its "
        "tools or environment take turns.",
    )
    loss: Loss = section(Loss, training=True)
    advantage: Advantage = section(Advantage, training=True)
    optimizer: Optimizer = section(Optimizer, training=True)
    update: Update = section(Update, training=True)
    schedules: dict[str, Any] = knob(
        {},
        "Schedules of scalars of loss and generation over the steps, such as loss.beta.to=0.",
        training=True,
    )
    distributed: Distributed = section(Distributed)
    eval: Eval = section(Eval)
    stop: Stop = section(Stop, training=True)
    checkpoint: Checkpoint = section(Checkpoint, training=True)
    log: Log = section(Log, training=True)
    tracking: Tracking = section(Tracking, training=True)
    callbacks: dict[str, Any] = knob(
        {}, "Callbacks by name; each has path and args.", training=True
    )
    hub: Hub = section(Hub, training=True)

    @property
    def arithmetic_dtype(self) -> str:
        """The data type of the forward computation, by its name in torch."""
        return HALF_TYPES.get(self.mixed_precision, self.model.dtype)

    @property
    def longest_completion(self) -> int:
        """The longest completion limit in tokens, over training and evaluation."""
        own = self.eval.max_completion_tokens
        of_benchmarks = [own or b.max_completion_tokens or 0 for b in self.benchmark.values()]
        return max(self.generation.max_completion_tokens, own or 0, *of_benchmarks)

    @property
    def evaluation_temperature(self) -> float:
        """The sampling temperature of evaluation."""
        if self.eval.sampling == "training":
            return self.generation.temperature
        return self.eval.drawn_at

    @property
    def runs_programs(self) -> bool:
        """Whether an evaluation runs programs that the model writes."""
        modes = (b.modes.get(m) for b in self.benchmark.values() for m in self.eval.mode)
        return any(mode is not None and mode.tools for mode in modes)

    @property
    def has_environment(self) -> bool:
        """Whether tools or an environment answer the model's turns."""
        of = self.environment
        return bool(self.tools or of.path or of.by_name or of.mcp)

    @property
    def has_episodes(self) -> bool:
        """Whether completions are episodes of several turns."""
        return self.has_environment or self.rollout is not None

    @property
    def accuracies(self) -> list[str]:
        """The names of the rewards, first the one whose value 1 counts as correct."""
        names = own_first({name: reward.function for name, reward in self.reward.items()})
        return sorted(names, key=lambda name: name != self.eval.accuracy)

    @property
    def needs_reference(self) -> bool:
        """Whether the run has, or a schedule will add, a KL to a reference."""
        schedule = self.schedules.get("loss.beta")
        return self.loss.beta > 0 or (schedule is not None and schedule.to > 0)


def knobs(node: Any = Recipe, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yields (full key, field) of every knob of a dataclass, sections before their knobs."""
    for f in dataclasses.fields(node):
        yield prefix + f.name, f
        kind = globals().get(str(f.type).removesuffix(" | None"))  # the class of a section
        if dataclasses.is_dataclass(kind):
            yield from knobs(kind, f"{prefix}{f.name}.")


# Mappings whose keys the user chooses, and the class of their entries.
ENTRIES: dict[str, type] = {
    "reward": Reward,
    "benchmark": Benchmark,
    "schedules": Schedule,
    "callbacks": Callback,
    "dataset.held_out": HeldOut,
    "dataset.mixture": MixturePart,
}


def entry_field(key: str) -> tuple[dataclasses.Field[Any], list[str]] | None:
    """Finds the field of a key below an entry, such as `reward.NAME.weight`.

    Returns:
        (the field, the key's parts below it), or None for other keys.
    """
    for mapping, kind in ENTRIES.items():
        _, is_below, rest = key.partition(f"{mapping}.")
        if not key.startswith(f"{mapping}.") or not is_below:
            continue
        fields = {f.name: f for f in dataclasses.fields(kind)}
        parts = rest.split(".")
        start = len(parts) - 1 if kind is Schedule else 1  # names of schedules contain dots
        if 0 < start < len(parts) and parts[start] in fields:
            return fields[parts[start]], parts[start + 1 :]
    return None
