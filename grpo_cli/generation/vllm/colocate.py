"""Runs vLLM in the trainer's processes: one engine per process, or per tensor-parallel group.

In each step the engine samples and sleeps (with `vllm.sleep`), then the policy is updated and its
weights are loaded in place, parameter by parameter. vLLM is imported only when an engine is made.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed import heartbeat
from grpo_cli.distributed.workers import Workers
from grpo_cli.errors import TrainingError, UserError, first_line
from grpo_cli.generation.base import EngineSetup, Finished, Request, Session
from grpo_cli.generation.vllm import lora
from grpo_cli.generation.vllm.adapter_folder import AdapterFolder
from grpo_cli.generation.vllm.base import VllmGenerator
from grpo_cli.generation.vllm.checks import contradictions_of_colocate, dtype_of, of_head
from grpo_cli.generation.vllm.prompts import (
    ComparedPrompt,
    check_ids,
    in_process,
    limits,
    refused_rows,
)
from grpo_cli.generation.vllm.requests import check_lengths, completion, prompt_logprobs, repeated
from grpo_cli.generation.vllm.weight_check import WeightCheck
from grpo_cli.models import memory
from grpo_cli.random_streams import rng_state, set_rng_state
from grpo_cli.records import Completion, Prompt

CPU_KV_CACHE = 2**29  # default on CPUs, where vLLM would take nearly all memory


def environment(workers: Workers) -> dict[str, str]:
    """Returns environment variables for vLLM's import, except those that the user has set."""
    settings = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    settings |= {"VLLM_NO_USAGE_STATS": "1"}
    if workers.device.type == "cpu":
        # Compiling one small function takes 24 s and a C++ compiler. The trainer sets the threads.
        settings |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {name: value for name, value in settings.items() if name not in os.environ}


def engine_args(
    setup: EngineSetup, max_model_len: int, lora_rank: int | None = None
) -> dict[str, Any]:
    """Returns the arguments of vLLM's `LLM`; the recipe's `engine_args` override them.

    Args:
        lora_rank: largest rank of the adapter that the engine applies; None: no adapter.
    """
    recipe, workers = setup.recipe, setup.workers
    vllm, on_cpu = recipe.generation.vllm, workers.device.type == "cpu"
    args: dict[str, Any] = {
        "model": str(setup.model.name_or_path),  # folder or hub name of the weights
        "revision": recipe.model.revision,
        "trust_remote_code": recipe.model.trust_remote_code,
        "dtype": dtype_of(recipe),
        "max_model_len": max_model_len,
        "tensor_parallel_size": vllm.tensor_parallel,
        "enforce_eager": on_cpu,
        "enable_sleep_mode": vllm.sleep > 0,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
        # Processes of one tensor-parallel group must draw the same tokens.
        "seed": recipe.seed * 1000 + workers.rank // vllm.tensor_parallel,
    }
    if workers.size > 1:  # the engine runs in torchrun's processes, each on its own device
        args["distributed_executor_backend"] = "external_launcher"
    if not on_cpu:
        args["gpu_memory_utilization"] = vllm.memory
    if on_cpu:
        args["kv_cache_memory_bytes"] = CPU_KV_CACHE
        # After a prompt chunk vLLM rewinds seeded generators, which needs a GPU.
        args["enable_chunked_prefill"] = False
    if recipe.generation.max_num_seqs is not None:
        args["max_num_seqs"] = recipe.generation.max_num_seqs
    args |= limits(setup)
    if lora_rank is not None:
        args |= {"enable_lora": True, "max_lora_rank": lora.max_rank(lora_rank), "max_loras": 1}
    return args | vllm.engine_args | of_head(recipe.model.head_dtype, vllm.engine_args)


class ColocatedGenerator(VllmGenerator):
    """Samples with an in-process engine that has its own, versioned copy of the weights."""

    computes_here = True

    @classmethod
    def contradictions(cls, recipe: Recipe) -> Iterator[str]:
        return contradictions_of_colocate(recipe)

    @classmethod
    def require(cls) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UserError("generation = vllm_colocate needs vLLM: pip install 'vllm>=0.32'.")

    def __init__(self, setup: EngineSetup, weight_check: WeightCheck | None) -> None:
        """Starts the engine. Every process calls it.

        Raises:
            UserError: vLLM is not installed, or refuses the model or the settings.
        """
        super().__init__(setup, weight_check)
        vllm, workers, model = self.config, self.workers, str(setup.model.name_or_path)
        if workers.size % vllm.tensor_parallel:
            raise UserError(
                f"generation.vllm.tensor_parallel = {vllm.tensor_parallel}: must divide the "
                f"number of training processes, {workers.size}."
            )
        if getattr(setup.model.config, "quantization_config", None):
            raise UserError(f"{model}: is quantized; vLLM cannot take weights that are trained.")
        self.has_weights = True  # False after a sleep of level 2
        self.sleeping: list[str] = []  # vLLM's tags of sleeping memory
        self.apart = _Apart()
        self.max_model_len = vllm.engine_args.get("max_model_len") or self.longest
        self.check_lengths(self.longest_prompt, setup.recipe.longest_completion)
        name = f"grpo-{workers.first(secrets.token_hex(8))}"
        with self.apart():
            os.environ |= environment(workers)
            try:
                from vllm import LLM

                # Imported late: the file imports vLLM.
                from grpo_cli.generation.vllm.worker import own_shared_memory

                shares = workers.device.type == "cpu" and workers.size > 1
                with own_shared_memory(name) if shares else contextlib.nullcontext():
                    self.llm = LLM(**engine_args(setup, self.max_model_len, self.lora_rank))
            except Exception as error:  # vLLM, torch and kernels raise many types
                lines = str(error).strip().splitlines() or [type(error).__name__]
                said = f"vLLM did not start with {model}: {' '.join(lines[:4])}"
                raise UserError(said, alone=True) from error
        self.engine = self.llm.llm_engine
        self.lora_request: Any = None  # identifies the adapter to vLLM; None: not yet loaded
        self.written: AdapterFolder | None = None  # only on the main process

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        self._wake_up()
        with self.apart():
            yield ColocatedSession(self)

    def check_lengths(self, longest_prompt: int, max_tokens: int) -> None:
        whose = "generation.vllm.engine_args.max_model_len"
        check_lengths(longest_prompt, max_tokens, self.max_model_len, whose)

    def offload(self) -> None:
        if self.config.sleep and not self.sleeping:
            self.engine.reset_prefix_cache()
            self.llm.sleep(level=self.config.sleep)
            self.sleeping = ["weights", "kv_cache"]
            self.has_weights = self.config.sleep < 2

    def close(self) -> None:
        """Ends the engine and with it the default process group: no collectives afterwards."""
        if self.written is not None:
            self.written.remove()
        with contextlib.suppress(Exception):  # the engine itself may have failed
            self.engine.engine_core.shutdown()

    def load(self, step: int) -> None:
        """Loads the policy's weights; wakes up the memory of weights only, not the KV cache."""
        self._wake("weights")
        try:
            if self.lora_rank is not None:
                self._load_adapter()
            else:
                with self.apart():
                    # Imported late: the file imports vLLM.
                    from grpo_cli.generation.vllm.worker import refresh_packed_heads

                    weights = {"weights_iterator": iter(self.weights())}
                    self.llm.collective_rpc("reload_weights", kwargs=weights)
                    self.llm.apply_model(refresh_packed_heads)
        except Exception as error:  # the engine's weights are partly updated: not recoverable
            said = f"vLLM could not take the weights of step {step}: {error}"
            if self.lora_rank is not None:
                said = f"vLLM could not take the adapter of step {step}: {str(error)[:400]}"
                said += f" ({self.folder}); {lora.OTHER_WAY}."
            raise TrainingError(said, alone=True) from error
        self.has_weights, self.step = True, step
        self.engine.set_weight_version(str(step))
        if not self.sleeping and not self.engine.reset_prefix_cache():
            raise TrainingError("vLLM kept its prefix cache after new weights.", alone=True)
        # The scheduler would otherwise reuse cached features of the old weights.
        self.engine.reset_encoder_cache()

    def _load_adapter(self) -> None:
        """Writes the adapter on the main process, and makes every engine read it."""
        from vllm.lora.request import LoRARequest

        tensors = list(self.weights())  # collective if the policy is sharded
        with self.workers.raise_together():
            if self.workers.is_main:
                if self.written is None:
                    self.written = AdapterFolder(self.folder, self.policy)
                self.written.write(tensors)
        path = str(self.folder)
        with self.apart():
            # Not in a request: one whose adapter fails to load makes the engine loop forever,
            # and one with load_inplace reads the files again at each token.
            self.engine.add_lora(LoRARequest("policy", 1, path, load_inplace=True))
        self.lora_request = LoRARequest("policy", 1, path)

    def _wake_up(self) -> None:
        """Wakes the engine up; a sleeping engine would wait forever."""
        if not self.has_weights:  # no update since a sleep of level 2
            self.load(self.step)
        self._wake("weights")
        self._wake("kv_cache")

    def _wake(self, what: str) -> None:
        if what in self.sleeping:
            memory.release()  # memory that the update has left in torch's caching allocator
            self.llm.wake_up(tags=[what])
            self.sleeping.remove(what)

    def differences(self, trainer: list[list[float]]) -> dict[str, float]:
        assert self.weight_check is not None
        self._wake_up()
        difference = self.weight_check.difference(trainer, self._score(self.weight_check.rows))
        # The maximum over processes, since all have to reload together.
        return {"vLLM": self.workers.max(difference)}

    def _score(self, rows: Sequence[ComparedPrompt]) -> list[list[float]]:
        """Returns the engine's log-probabilities of each row's scored tokens."""
        score = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        with self.apart():
            self.add_requests([(n, row.prompt, _typed(score)) for n, row in enumerate(rows)])
            outputs: dict[int, Any] = {}
            while self.engine.has_unfinished_requests():
                outputs |= self.advance()
        for n, row in enumerate(rows):
            check_ids(row.prompt, outputs[n].prompt_token_ids)
        return [
            prompt_logprobs(
                row.prompt.ids,
                [d and {t: p.logprob for t, p in d.items()} for d in outputs[n].prompt_logprobs],
            )[-row.num_tokens :]
            for n, row in enumerate(rows)
        ]

    def add_requests(self, requests: Sequence[tuple[int, Prompt, Any]]) -> None:
        """Adds (number, prompt, SamplingParams) of each request to the engine.

        Raises:
            TrainingError: vLLM refuses one, as for a regex that it cannot read.
        """
        from vllm.exceptions import VLLMClientError  # not a ValueError

        given = [in_process(prompt) for _, prompt, _ in requests]
        try:
            rendered = self.llm.renderer.render_cmpl(given)
            for (number, _, params), prompt in zip(requests, rendered, strict=True):
                self.engine.add_request(str(number), prompt, params, lora_request=self.lora_request)
        except (ValueError, VLLMClientError) as error:
            rows = refused_rows(prompt for _, prompt, _ in requests)
            said = f"vLLM refuses a request{rows}: {first_line(error)}"
            raise TrainingError(said, alone=True) from error

    def advance(self) -> Iterator[tuple[int, Any]]:
        """Takes a step of the engine; yields (number, output) of each request that is done.

        Raises:
            WorkInterrupted: the run has to end; unfinished requests end with the engine.
        """
        if self.config.tensor_parallel == 1:
            heartbeat.beat()
        else:  # no interrupt here: the engine's other processes take the same step
            heartbeat.touch()
        for output in self.engine.step():
            if output.finished:
                yield int(output.request_id), output

    def completion(self, output: Any) -> Completion:
        ids = list(output.token_ids)
        logprobs = output.logprobs  # flat, with one entry per position: the sampled token's
        assert logprobs.token_ids == ids, "vLLM reports the log-probability of the sampled token"
        found = {span.version for span in output.weight_versions or ()}
        if found != {str(self.step)}:
            raise TrainingError(
                f"vLLM sampled with weights {sorted(found)}, not with those of step {self.step}.",
                alone=True,
            )
        return completion(ids, logprobs.logprobs, output.finish_reason, self.step)


class ColocatedSession(Session):
    """Adds each submitted request to the engine's running ones; a poll is a step of the engine."""

    generator: ColocatedGenerator
    joins_requests = True
    rounds_lengths = False

    def __init__(self, generator: ColocatedGenerator) -> None:
        super().__init__(generator)
        self.numbers = itertools.count()
        # By vLLM's number of a request; prompts of the engine's other processes have a negative or
        # too large index.
        self.asked: dict[int, tuple[Request, int]] = {}

    def submit(self, request: Request) -> None:
        engine = self.generator
        engine.check_prompts(request.prompts)
        everyones = [
            (replace(p, text="", columns={}), engine.params(request, seed))
            for p, seed in zip(request.prompts, request.seeds, strict=True)
        ]
        first, rank = 0, engine.workers.rank  # first: index of this process's first prompt
        if (size := engine.config.tensor_parallel) > 1:
            parts, begin = engine.workers.gather(everyones), rank // size * size
            first = sum(map(len, parts[begin:rank]))
            everyones = [pair for part in parts[begin : begin + size] for pair in part]
        if not everyones:
            return
        longest = max(len(prompt.ids) for prompt, _ in everyones)
        engine.check_lengths(longest, request.sampling.max_tokens)
        self.unfinished += len(everyones)
        asked = []
        for i, (prompt, params) in enumerate(everyones):
            number = next(self.numbers)
            self.asked[number] = request, i - first
            # flat_logprobs: lists of numbers instead of a dict and an object per token.
            asked.append((number, prompt, _typed(params, flat_logprobs=True)))
        engine.add_requests(asked)

    def poll(self, timeout: float = 1.0) -> list[Finished]:
        found = []
        for vllm_number, output in self.generator.advance():
            self.unfinished -= 1
            request, number = self.asked.pop(vllm_number)
            if 0 <= number < len(request.prompts):
                check_ids(request.prompts[number], output.prompt_token_ids)
                by_index = sorted(output.outputs, key=lambda c: c.index)
                group = [self.generator.completion(c) for c in by_index]
                group = repeated(group, request.num_generations)
                found.append(Finished(request, number, group))
        return found


def _typed(params: dict[str, Any], **more: Any) -> Any:
    """Returns vLLM's SamplingParams with these fields."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
    return SamplingParams(**params, **more, output_kind=RequestOutputKind.FINAL_ONLY)


class _Apart:
    """Restores the trainer's random states and thread count after each use of vLLM.

    The engine's own random states continue from one use to the next.
    """

    def __init__(self) -> None:
        self.engines: dict[str, Any] | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        streams, threads, in_group = rng_state(), torch.get_num_threads(), dist.is_initialized()
        if self.engines is not None:
            set_rng_state(self.engines)
        try:
            yield
        finally:
            self.engines = rng_state()
            set_rng_state(streams)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            assert dist.is_initialized() or not in_group, "vLLM ended the trainer's process group"
