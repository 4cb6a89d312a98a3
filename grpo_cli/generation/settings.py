"""Declares the knobs of sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_cli.config.knob import (
    above_0,
    at_least_0,
    at_least_1,
    flagged,
    knob,
    read_if,
    section,
    text,
    value_at,
)

TRAINING = ("eval.sampling", "training")


@read_if("generation.engine", "vllm_server")
@dataclass
class _VllmServers:
    servers: list[str] = knob(
        [],
        "Addresses of running `grpo serve` processes, such as http://node1:8000.",
        without_effect=True,
    )
    transfer: str = knob(
        "auto",
        "Transport of weights to servers: nccl (GPUs), ipc (the trainer's own GPU), gloo "
        "(CPU), disk (files in output_dir, which the servers must see); auto: as the server was "
        "started.",
        choices=("auto", "nccl", "ipc", "gloo", "disk"),
        without_effect=True,
        trusted="never",
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
        1,
        "Training processes that share one engine; must divide their number.",
        without_effect=True,
    )
    memory: float = above_0(
        0.3, "Share of the GPU's memory that the engine may use.", le=1, without_effect=True
    )
    sleep: int = at_least_0(
        0,
        "Engine memory during an update: kept (0), cache freed and weights moved to the host "
        "(1), or both freed (2); GPUs only.",
        le=2,
        without_effect=True,
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
        without_effect=True,
    )


@read_if("generation.engine", "vllm_colocate", "vllm_server")
@dataclass
class Vllm(_VllmColocated, _VllmServers):
    """Settings of vLLM, in the trainer's processes (colocate) or in servers of `grpo serve`."""

    regex: str | None = text(
        None, "Regular expression that every completion must match.", decides="distribution"
    )
    json_schema: str | None = knob(
        None,
        "JSON schema that every completion must match: JSON text, or a .json file.",
        decides="distribution",
        trusted="json",
    )
    check_weights: bool = knob(
        True,
        "After each weight update, compare the engine's and the trainer's log-probabilities "
        "of a few fixed tokens; if they differ by more than rounding, repeat the update once, "
        "then stop.",
        without_effect=True,
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
        trusted="guards",
    )


@dataclass
class Generation:
    """Sampling of completions."""

    engine: str = knob(
        "transformers", "Engine that samples completions.", decides="completions", trusted="class"
    )
    num_generations: int = knob(
        8,
        "Completions per prompt (the group size).",
        ge=2,
        decides="completions",
        evaluated_as="eval.num_samples",
    )
    max_completion_tokens: int = at_least_1(
        256, "Length limit of a completion, in tokens.", decides="completions"
    )
    min_completion_tokens: int = at_least_0(
        0,
        "Smallest number of tokens in a completion: no eos and no stop string ends it earlier.",
        decides="distribution",
    )
    stop: list[str] = text(
        [],
        "Texts that end a completion; the token that completes such a text is its last token.",
        decides="completions",
    )
    temperature: float = above_0(
        1.0,
        "Sampling temperature, also applied to the trainer's log-probabilities.",
        decides="completions",
        evaluated_as="eval.temperature",
        evaluated_if=TRAINING,
    )
    top_p: float = above_0(
        1.0,
        "Sample only from the most likely tokens that hold this share of the probability.",
        le=1,
        decides="distribution",
        evaluated_as="eval.top_p",
        evaluated_if=TRAINING,
    )
    top_k: int = at_least_0(
        0,
        "Sample only from the K most likely tokens; 0: from all.",
        decides="distribution",
        evaluated_if=TRAINING,
    )
    min_p: float = at_least_0(
        0.0,
        "Drop tokens whose probability is below this share of the most likely token's.",
        le=1,
        decides="distribution",
        evaluated_if=TRAINING,
    )
    repetition_penalty: float = above_0(
        1.0,
        "Penalty on tokens that the prompt or completion already holds: positive logits are "
        "divided by it, negative ones multiplied; 1: none.",
        decides="distribution",
    )
    presence_penalty: float = knob(
        0.0,
        "Subtracted from the logit of each token that the completion already holds.",
        ge=-2,
        le=2,
        decides="distribution",
    )
    frequency_penalty: float = knob(
        0.0,
        "Subtracted from the logit of a token once for each time that the completion already "
        "holds it.",
        ge=-2,
        le=2,
        decides="distribution",
    )
    logit_bias: dict[int, float] = knob(
        {},
        "Numbers that are added to the logits of tokens, by token id, such as {42: -5}.",
        ge=-100,
        le=100,
        decides="distribution",
    )
    stop_token_ids: list[int] = knob(
        [],
        "Tokens that end a completion, by token id, in addition to the model's own.",
        decides="completions",
    )
    max_num_seqs: int | None = at_least_1(
        None,
        "Completions decoded at the same time (vLLM: per engine, or requested from a server "
        "by one process); null: by free memory. Halved when memory runs out; a group is never "
        "split.",
        without_effect=True,
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
        default, keys = Generation(), flagged(Generation, "decides", "distribution")
        return [key for key in keys if value_at(self, key) != value_at(default, key)]

    def problems(self) -> Iterator[str]:
        """Yields messages about values that contradict one another."""
        if "" in self.stop:
            yield (
                "generation.stop: holds an empty string, which every completion contains; drop it."
            )
