"""vLLM in the trainer's own processes: one engine a process, or one for several (tensor parallel).

The engine samples, then sleeps if it is told to, the policy is updated, and its weights are loaded
in place, parameter by parameter. vLLM is imported when an engine is made, and not before.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from grpo_cli import budget, heartbeat
from grpo_cli.canary import Canary, timed
from grpo_cli.checkpoint import rng_state, set_rng_state
from grpo_cli.config import Recipe
from grpo_cli.distributed import Workers
from grpo_cli.drafts import OnGroup, ignore
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.rollouts import Completion
from grpo_cli.sampling import Sampling
from grpo_cli.vllm_requests import (
    check_lengths,
    completion,
    prompt_logprobs,
    repeated,
    sampling_params,
)
from grpo_cli.vllm_settings import dtype_of, structured_outputs
from grpo_cli.weights import Weights

GIB = 2**30
CPU_KV_CACHE = GIB // 2  # where the recipe does not say; vLLM would take nearly all memory


def environment(workers: Workers) -> dict[str, str]:
    """What vLLM reads when it is imported; what the user has set stays."""
    settings = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    settings |= {"VLLM_NO_USAGE_STATS": "1"}
    if workers.device.type == "cpu":
        # Compiling one small function takes 24 s and a C++ compiler. Threads are the trainer's.
        settings |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {name: value for name, value in settings.items() if name not in os.environ}


def engine_args(recipe: Recipe, model: str, workers: Workers, max_model_len: int) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`, those of the recipe's `engine_args` last.

    Args:
        model: folder or hub name that the weights were loaded from.
    """
    vllm, on_cpu = recipe.generation.vllm, workers.device.type == "cpu"
    args: dict[str, Any] = {
        "model": model,
        "revision": recipe.model.revision,
        "trust_remote_code": recipe.model.trust_remote_code,
        "dtype": dtype_of(recipe),
        "max_model_len": max_model_len,
        "tensor_parallel_size": vllm.tensor_parallel,
        "model_impl": vllm.model_impl,
        "enforce_eager": on_cpu if vllm.eager is None else vllm.eager,
        "enable_sleep_mode": vllm.sleep > 0,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
        # Engines of one tensor-parallel group draw the same.
        "seed": recipe.seed * 1000 + workers.rank // vllm.tensor_parallel,
    }
    if workers.size > 1:  # the engine lives in what torchrun has started, on each one's device
        args["distributed_executor_backend"] = "external_launcher"
    if not on_cpu:
        args["gpu_memory_utilization"] = vllm.memory
    if vllm.kv_cache_gb is not None:
        args["kv_cache_memory_bytes"] = int(vllm.kv_cache_gb * GIB)
    elif on_cpu:
        args["kv_cache_memory_bytes"] = CPU_KV_CACHE
    if recipe.generation.max_rows is not None:
        args["max_num_seqs"] = recipe.generation.max_rows
    return args | vllm.engine_args


class ColocatedGenerator:
    """Samples with an engine that has its own copy of the weights, and says so when it is stale."""

    samples_from_policy = False
    computes_here = True
    cache_tokens: int | None = None

    def __init__(
        self,
        recipe: Recipe,
        policy: PreTrainedModel,
        model: str,
        longest_prompt: int,
        eos_ids: Sequence[int],
        workers: Workers,
        canary: Canary | None,
    ) -> None:
        """Starts the engine; every process does it.

        Args:
            model: where the policy was loaded from. longest_prompt: of the data, in tokens.

        Raises:
            UserError: vLLM is not installed, does not take the model or the settings.
        """
        vllm = recipe.generation.vllm
        if workers.size % vllm.tensor_parallel:
            raise UserError(
                f"generation.vllm.tensor_parallel = {vllm.tensor_parallel}: must divide the "
                f"number of training processes, {workers.size}."
            )
        if vllm.sleep and workers.device.type != "cuda":
            raise UserError(f"generation.vllm.sleep = {vllm.sleep}: vLLM sleeps on GPUs only.")
        if getattr(policy.config, "quantization_config", None):
            raise UserError(f"{model}: is quantized; vLLM cannot take weights that are trained.")
        self.policy, self.workers, self.canary = policy, workers, canary
        self.eos_ids = list(eos_ids)
        self.seeded, self.sleep_level = vllm.seeded, vllm.sleep
        self.parallel = vllm.tensor_parallel  # processes of one engine
        self.structured = structured_outputs(vllm)
        self.step = 0  # whose weights the engine has
        self.has_weights = True  # no longer, after a sleep of level 2
        self.sleeping: list[str] = []  # what has to be woken before it is used
        self.apart = _Apart()
        longest = recipe.longest_completion
        self.max_model_len = vllm.max_model_len or longest_prompt + longest
        check_lengths(
            [[0] * longest_prompt], longest, self.max_model_len, "generation.vllm.max_model_len"
        )
        with self.apart():
            os.environ |= environment(workers)
            try:
                from vllm import LLM
            except ImportError as error:
                raise UserError(
                    "generation = vllm_colocate: vLLM is not installed here; "
                    f"pip install 'grpo-cli[vllm]'. ({error})",
                    alone=True,
                ) from error
            try:
                self.llm = LLM(**engine_args(recipe, model, workers, self.max_model_len))
            except Exception as error:  # whatever vLLM, torch or a kernel finds wrong
                lines = str(error).strip().splitlines() or [type(error).__name__]
                said = f"vLLM did not start with {model}: {' '.join(lines[:4])}"
                raise UserError(said, alone=True) from error
        self.engine = self.llm.llm_engine

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_generations: int,
        sampling: Sampling,
        seeds: Sequence[int],
        on_group: OnGroup = ignore,
    ) -> list[list[Completion]]:
        from vllm import SamplingParams

        everyones, first = self._of_engine(list(zip(prompts, seeds, strict=True)))
        own = range(first, first + len(prompts))
        groups: dict[int, list[Completion]] = {}
        if not everyones:
            return []
        check_lengths(
            [ids for ids, _ in everyones],
            sampling.max_tokens,
            self.max_model_len,
            "generation.vllm.max_model_len",
        )
        self._wake_up()
        with self.apart():
            inputs = self._rendered([ids for ids, _ in everyones])
            for number, (_, seed) in enumerate(everyones):
                params = sampling_params(
                    sampling,
                    num_generations,
                    self.eos_ids,
                    seed if self.seeded else None,
                    self.structured,
                )
                self.engine.add_request(str(number), inputs[number], _typed(SamplingParams, params))
            for number, output in self._finished():
                if number not in own:  # another process's, of the same engine
                    continue
                group = [self._completion(c) for c in sorted(output.outputs, key=lambda c: c.index)]
                groups[number - first] = repeated(group, num_generations)
                on_group(number - first, groups[number - first])
        return [groups[n] for n in range(len(prompts))]

    def update_weights(self, policy: PreTrainedModel, step: int) -> dict[str, float]:
        self.policy = policy
        begin = time.monotonic()
        self._load(step)
        metrics = {"weights/sync_seconds": time.monotonic() - begin}
        if self.canary is not None:
            metrics |= timed(lambda: self._canary(step))
        return metrics

    def rest(self) -> None:
        if self.sleep_level and not self.sleeping:
            self.engine.reset_prefix_cache()
            self.llm.sleep(level=self.sleep_level)
            self.sleeping = ["weights", "kv_cache"]
            self.has_weights = self.sleep_level < 2

    def close(self) -> None:
        """Ends the engine. It takes the default process group along: nothing collective after."""
        with contextlib.suppress(Exception):  # it may be what broke
            self.engine.engine_core.shutdown()

    def _load(self, step: int) -> None:
        """Puts the policy's weights in place. Wakes up the weights' memory, not yet the cache's."""
        self._wake("weights")
        try:
            with self.apart():
                weights = iter(Weights(self.policy))
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
                # Imported late: the file imports vLLM.
                from grpo_cli.vllm_worker import refresh_packed_heads

                self.llm.apply_model(refresh_packed_heads)
        except Exception as error:  # some layers are new, some old, some nowhere
            said = f"vLLM could not take the weights of step {step}: {error}"
            raise TrainingError(said, alone=True) from error
        self.has_weights, self.step = True, step
        self.engine.set_weight_version(str(step))
        if not self.sleeping and not self.engine.reset_prefix_cache():
            raise TrainingError("vLLM kept its prefix cache after new weights.", alone=True)

    def _wake_up(self) -> None:
        """Makes the engine ready to sample. Asleep it would wait for ever."""
        if not self.has_weights:  # it sampled, slept, and was sent nothing since
            self._load(self.step)
        self._wake("weights")
        self._wake("kv_cache")

    def _wake(self, what: str) -> None:
        if what in self.sleeping:
            budget.release()  # what the update has left in torch's own cache
            self.llm.wake_up(tags=[what])
            self.sleeping.remove(what)

    def _canary(self, step: int) -> float:
        assert self.canary is not None
        trainer = self.canary.of_trainer()
        for is_last in (False, True):
            self._wake_up()
            # One answer for all, since all have to load again.
            difference = self.workers.max(self.canary.difference(trainer, self._score()))
            if self.canary.agrees("vLLM", difference):
                return difference
            if not is_last:
                self._load(step)
        raise self.canary.stale("vLLM", difference, step)

    def _score(self) -> list[list[float]]:
        """What the engine says of the canary's tokens."""
        from vllm import SamplingParams

        assert self.canary is not None
        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        with self.apart():
            for number, prompt in enumerate(self._rendered(self.canary.rows)):
                self.engine.add_request(str(number), prompt, params.clone())
            outputs = dict(self._finished())
        return [
            prompt_logprobs(
                ids, [{t: p.logprob for t, p in d.items()} if d else None for d in found]
            )
            for ids, found in (
                (ids, outputs[n].prompt_logprobs) for n, ids in enumerate(self.canary.rows)
            )
        ]

    def _rendered(self, prompts: Sequence[Sequence[int]]) -> list[Any]:
        """Prompts as the engine takes them."""
        found = self.llm.renderer.render_cmpl([{"prompt_token_ids": list(ids)} for ids in prompts])
        return list(found)

    def _finished(self) -> Iterator[tuple[int, Any]]:
        """(number, output) of each request as it is done.

        Raises:
            Leave: the run has to end; what is unfinished stays with the engine, which ends too.
        """
        while self.engine.has_unfinished_requests():
            if self.parallel == 1:
                heartbeat.beat()
            else:  # the others of this engine take the next step together with this process
                heartbeat.touch()
            for output in self.engine.step():
                if output.finished:
                    yield int(output.request_id), output

    def _of_engine(
        self, own: list[tuple[Sequence[int], int]]
    ) -> tuple[list[tuple[Sequence[int], int]], int]:
        """(prompts and seeds of all processes of this engine, where this process's begin)."""
        size = self.llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size
        if size == 1:
            return own, 0
        parts = self.workers.gather(own)
        first = self.workers.rank // size * size
        before = sum(len(part) for part in parts[first : self.workers.rank])
        return [item for part in parts[first : first + size] for item in part], before

    def _completion(self, output: Any) -> Completion:
        ids = list(output.token_ids)
        logprobs = [d[t].logprob for d, t in zip(output.logprobs, ids, strict=True)]
        found = {span.version for span in output.weight_versions or ()}
        if found != {str(self.step)}:
            raise TrainingError(
                f"vLLM sampled with weights {sorted(found)}, not with those of step {self.step}.",
                alone=True,
            )
        return completion(ids, logprobs, output.finish_reason, self.step)


def _typed(kind: Callable[..., Any], params: dict[str, Any]) -> Any:
    """SamplingParams of plain fields."""
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structured = params.pop("structured_outputs", None)
    if structured is not None:
        params["structured_outputs"] = StructuredOutputsParams(**structured)
    return kind(**params, output_kind=RequestOutputKind.FINAL_ONLY)


class _Apart:
    """Keeps what vLLM does to the process out of the trainer: random streams, thread count.

    The engine's streams go on where they stood when the engine was left.
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
