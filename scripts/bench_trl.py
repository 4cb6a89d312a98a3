"""TRL's side of the benchmark, and `model.generate`: `python bench_trl.py JOB`, run by bench.py.

TRL runs with its defaults, one optimizer step a batch. Where it is open what belongs to a stage, it
is left out: a step is `training_step`, clipping and `optimizer.step`, without loading rows, zeroing
gradients, schedule and logging; generation is `_generate_single_turn`, without tokenizing and
decoding, and with tools `_tool_call_loop`; the update is the step without `_prepare_inputs`, which
holds generation, rewards and all that lies between them.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from bench_probe import Probe, Step, check_meter
from bench_setup import LORA_ALPHA, Job, reward

from grpo_cli.environments.examples import multiply


def main() -> None:
    job, probe = Job.read(sys.argv[1]), Probe()
    more = {"meter": check_meter(probe.device)} if job.metered else {}
    {"trl": run_trl, "trl_vllm": run_trl, "generate": run_generate}[job.side](job, probe)
    probe.write(job.output, device=str(probe.device), **more)


def run_trl(job: Job, probe: Probe) -> None:
    """Trains with TRL."""
    vllm: dict[str, Any] = {}
    if job.side == "trl_vllm":
        let_trl_use_vllm()
        vllm = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": job.workload.prompt_tokens[1] + job.workload.limit,
        }
    from datasets import Dataset, Image
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    w = job.workload
    at_once = w.micro_batch or w.prompts * w.generations
    parts = w.prompts * w.generations // at_once  # forwards of a step

    class Watched(GRPOTrainer):  # type: ignore[misc]
        """A trainer that tells the probe when it does what."""

        def training_step(self, *given: Any, **named: Any) -> Any:
            if self._step % parts == 0:
                probe.steps.append(Step())
            with probe.stage("step"), contextlib.ExitStack() as self.after_inputs:
                return super().training_step(*given, **named)

        def _prepare_inputs(self, batch: Any) -> Any:
            with probe.stage("inputs"):
                inputs = super()._prepare_inputs(batch)
            if job.metered:  # till the end of training_step: forward and backward
                self.after_inputs.enter_context(probe.peak(self.model))
            return inputs

        is_in_tools = False

        def _tool_call_loop(self, *given: Any, **named: Any) -> Any:
            self.is_in_tools = True
            with probe.stage("generate"):
                found = super()._tool_call_loop(*given, **named)
            self.is_in_tools = False
            return found

        def _generate_single_turn(self, prompt_ids: Any, *given: Any, **named: Any) -> Any:
            if self.is_in_tools:
                found = super()._generate_single_turn(prompt_ids, *given, **named)
                probe.followed([len(c) for c in found[0]])
                return found
            with probe.stage("generate"):
                completions, logprobs = super()._generate_single_turn(prompt_ids, *given, **named)
            size = job.workload.generations
            lengths = [len(c) for c in completions]
            groups = [lengths[i : i + size] for i in range(0, len(lengths), size)]
            probe.sampled(prompt_ids[::size], groups)
            return completions, logprobs

        def _clip_grad_norm(self, model: Any) -> Any:
            with probe.stage("step"):
                return super()._clip_grad_norm(model)

    class OptimizerStep(TrainerCallback):  # type: ignore[misc]
        """Times `optimizer.step`, which the trainer calls between these two."""

        def on_pre_optimizer_step(self, *given: Any, **named: Any) -> None:
            self.open = contextlib.ExitStack()
            self.open.enter_context(probe.stage("step"))

        def on_optimizer_step(self, *given: Any, **named: Any) -> None:
            self.open.close()

    tools: dict[str, Any] = {}
    if w.tools:
        tools = {"tools": [multiply], "processing_class": calling_tokenizer(job.model)}
    adapter = None
    if w.lora_rank:
        from peft import LoraConfig

        adapter = LoraConfig(
            task_type="CAUSAL_LM", r=w.lora_rank, lora_alpha=LORA_ALPHA, target_modules="all-linear"
        )
    data = Dataset.from_list(job.rows())
    if w.images:
        data = data.cast_column("image", Image())
    config = GRPOConfig(
        output_dir=f"{job.output}/run",
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=parts,
        num_generations=w.generations,
        max_completion_length=w.limit,
        generation_kwargs={"min_new_tokens": w.min_tokens} if w.min_tokens else None,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-7,
        max_steps=job.steps,
        shuffle_dataset=False,
        model_init_kwargs={"dtype": "float32"},
        bf16=job.bf16,
        gradient_checkpointing=False,
        use_cpu=probe.device.type == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        **vllm,
        disable_tqdm=True,
    )
    trainer = Watched(
        model=job.model,
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        callbacks=[OptimizerStep()],
        peft_config=adapter,
        **tools,
    )
    trainer.train()
    for step in probe.steps:
        step.seconds["update"] = step.seconds["step"] - step.seconds["inputs"]


def calling_tokenizer(model: str) -> Any:
    """Returns the tokenizer with a description of its chat template's tool calls, for TRL."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }
    return tokenizer


def let_trl_use_vllm() -> None:
    """Makes TRL 1.16 train with vLLM 0.32 on a CPU, with the engine settings of our side.

    TRL loads weights in a way that packed layers do not take, and passes no dtype: float32 models
    would be sampled from in 16 bit.
    """
    import vllm
    import vllm._custom_ops as ops

    ops._supports_onednn = False
    plain = vllm.LLM

    class LLM(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *given: Any, **named: Any) -> None:
            settings = {"dtype": "float32", "enforce_eager": True}
            settings |= {"kv_cache_memory_bytes": 2**29}
            super().__init__(*given, **{**named, **settings})

    vllm.LLM = LLM


@torch.no_grad()
def run_generate(job: Job, probe: Probe) -> None:
    """`model.generate` alone on the same prompts, each repeated for its group."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    w, rows = job.workload, job.rows()
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    dtype = torch.bfloat16 if job.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).to(probe.device).eval()
    ends = torch.tensor(model.generation_config.eos_token_id, device=probe.device).reshape(-1)
    for number in range(job.steps):
        texts = [row["prompt"] for row in rows[number * w.prompts : (number + 1) * w.prompts]]
        batch = tokenizer(texts, return_tensors="pt", padding=True).to(probe.device)
        probe.steps.append(Step())
        with probe.stage("generate"):
            ids = model.generate(
                **batch,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=w.limit,
                min_new_tokens=w.min_tokens or None,
                num_return_sequences=w.generations,
            )
        ended = torch.isin(ids[:, batch["input_ids"].shape[1] :], ends)  # [B, C]
        lengths = ((ended.cumsum(-1) - ended.long()) == 0).sum(-1)  # the first eos is included
        probe.sampled(
            tokenizer(texts)["input_ids"], lengths.reshape(w.prompts, w.generations).tolist()
        )


if __name__ == "__main__":
    main()
