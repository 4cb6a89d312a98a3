"""Times a model of a recipe's shape, with random weights, in some seconds: rates for a plan.

The recipe's own modules are timed: the embedded engine with its sampling settings, a micro-batch
with its loss, the optimizer. A model of more than `MOST_BYTES` is timed with fewer layers.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from grpo_cli.algorithm.batch import collate
from grpo_cli.algorithm.loss import Coefficients, grpo_loss
from grpo_cli.config.schema import Recipe
from grpo_cli.distributed.fsdp import norm_of
from grpo_cli.distributed.workers import Workers
from grpo_cli.generation.sampling import Sampling
from grpo_cli.models import adapters, loading, optimizers
from grpo_cli.models.flops import FORWARD_BACKWARD, peak_flops
from grpo_cli.models.loading import inference
from grpo_cli.models.packing import packed_micro_batches, padded_micro_batches, unique_tokens
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.planning.devices import Device
from grpo_cli.planning.seconds import Speeds, rows_at_a_time
from grpo_cli.planning.settings import Settings
from grpo_cli.planning.shapes import Shape
from grpo_cli.planning.workload import Workload
from grpo_cli.records import Completion, Prompt, Rollout
from grpo_cli.training.plan.decode_timing import decode_seconds

MOST_BYTES = 1e9  # of float32 weights
SECONDS = 3.0  # that one micro-batch, or one step of decoding, is expected to take at most
EXPECTED = 0.4  # share of the peak that products reach, for choosing sizes


class Trial:
    """A model with random weights, with everything that a step does to it."""

    def __init__(self, recipe: Recipe, config: PretrainedConfig, workers: Workers) -> None:
        """Builds the model; of a large one, some of its layers.

        Args:
            config: of the recipe's model.
        """
        self.recipe, self.workers = recipe, workers
        self.config, self.whole = smaller(config), Shape.of(config)
        self.shape = Shape.of(self.config)
        self.model = make_model(recipe, self.config)
        workers.place(self.model)
        self.policy_logprobs = PolicyLogprobs(
            self.model,
            packed=recipe.update.packing,
            attention_kernel=recipe.update.attention_kernel,
            autocast=workers.autocast,
            say=lambda text: None,
        )
        dtype = workers.half_type or self.model.dtype
        self.rate = EXPECTED * peak_flops(workers.device, dtype)  # FLOPs a second, expected
        # Of the whole model, in multiples of the built one: of all products.
        self.times = self.whole.active / self.shape.active

    def speeds(self, settings: Settings, gpus: int, device: Device) -> Speeds:
        """Returns the rates with the settings of a plan."""
        s, work = settings, Workload(settings, gpus)
        train, forward = self._micro_batch(work)
        optimizer = self._optimizer()
        wanted = work.groups * s.num_generations
        rows = rows_at_a_time(self.whole, device, s, wanted)
        prefill, steps, key = self._decoding(s, rows)
        return Speeds(
            train=train,
            forward=forward,
            micro_batch=0.0,  # within the rate: the timed micro-batch is as large as the run's
            prefill=prefill,
            steps=steps,
            key=key,
            optimizer=optimizer * self.whole.parameters / self.shape.parameters,
            weights=0.0,
            is_measured=True,
            recomputed=s.gradient_checkpointing,
        )

    def _micro_batch(self, work: Workload) -> tuple[float, float]:
        """Returns the model FLOPs a second with and without gradient."""
        s = work.settings
        flops_of_token = 2 * FORWARD_BACKWARD * self.shape.active
        most = min(s.micro_tokens, max(int(SECONDS * self.rate / flops_of_token), 64))
        split = packed_micro_batches if s.packed else padded_micro_batches
        batches = list(split(random_rollouts(work, self.shape.vocab), most))
        batch = batches[(len(batches) - 1) // 2]
        temperature = self.recipe.generation.temperature
        self.policy_logprobs.check(batch, temperature)
        tokens, pairs = unique_tokens(batch)
        if not s.packed:
            width = max(len(r.prompt.ids) + len(r.completion.ids) for r in batch)
            tokens, pairs = len(batch) * width, len(batch) * width * (width + 1) // 2
        logits = sum(len(r.completion.ids) for r in batch)
        flops = self.shape.forward_flops(tokens, pairs, logits)
        passes = FORWARD_BACKWARD - (1 if s.adapter_rank else 0)
        seconds = self._seconds(lambda: self._forward_backward(batch, temperature))
        forward = seconds / passes
        if s.reference or s.old_logprobs:

            def without_gradient() -> None:
                with inference(self.model):
                    self.policy_logprobs(batch, temperature)

            forward = self._seconds(without_gradient)
        return passes * flops / seconds, flops / forward

    def _forward_backward(self, batch: list[Rollout], temperature: float) -> None:
        """Computes loss and gradient of a micro-batch."""
        logprobs, entropies = self.policy_logprobs(batch, temperature)
        coefficients = Coefficients(self.recipe.loss.beta, 0.0, 1.0)
        tensors = collate(batch, self.workers.device)
        output = grpo_loss(self.recipe.loss, tensors, logprobs, entropies, coefficients)
        self.workers.backward(output.loss)
        output.detached()

    def _optimizer(self) -> float:
        """Returns the seconds of an optimizer step, norm of the gradient included."""
        recipe = self.recipe
        optimizer = optimizers.make(
            recipe.optimizer, self.model, offload=recipe.distributed.offload
        )

        def step() -> None:
            norm_of(self.model.parameters(), recipe.optimizer.max_grad_norm)
            optimizer.step()

        seconds = self._seconds(step)  # the first, untimed step makes the state
        self.model.zero_grad(set_to_none=True)
        return seconds

    def _decoding(self, s: Settings, rows: int) -> tuple[float, list[tuple[float, float]], float]:
        """Returns the rate of prompts, the seconds of steps by rows, and those of a key."""
        sampling = Sampling.of(self.recipe.generation)
        of_row = 2 * self.shape.active / self.rate
        most = max(min(rows, int(SECONDS / 2 / of_row)), 1)
        sizes = sorted({most, max(most // 4, 1), max(most // 16, 1), 1})
        points: list[tuple[float, float]] = []
        prefill, key = 0.0, 0.0
        middle = int(s.completion_tokens // 2)  # of a completion
        with inference(self.model), self.workers.autocast():
            for size in sizes:
                prompts, each = max(size // s.num_generations, 1), min(size, s.num_generations)
                size = prompts * each
                timed = [
                    decode_seconds(
                        self.model,
                        prompts,
                        s.prompt_tokens,
                        each,
                        sampling,
                        context=context,
                        synchronize=self._synchronize,
                    )
                    for context in ([0, middle] if size >= most // 2 else [0])
                ]
                of_prompts, seconds = timed[-1][0], timed[0][1]
                own = s.prompt_tokens
                flops = prompts * self.shape.forward_flops(own, own * (own + 1) // 2, 1)
                prefill = flops / of_prompts
                if points and size == points[-1][0]:
                    points.pop()
                points.append((float(size), seconds * self.times))
                if len(timed) > 1 and middle:
                    per_token = (timed[1][1] - seconds) / (size * middle)
                    key = max(per_token, 0.0) * self.whole.layers / self.shape.layers
        return prefill, points, key

    def _seconds(self, work: Callable[[], object], most: float = SECONDS) -> float:
        """Returns the shortest of a few times of a work, after one that does not count."""
        start = time.perf_counter()
        work()
        self._synchronize()
        first = time.perf_counter() - start
        found: list[float] = []
        while len(found) < 3 and (not found or sum(found) + found[-1] < most - first):
            start = time.perf_counter()
            work()
            self._synchronize()
            found.append(time.perf_counter() - start)
        return min(found)

    def _synchronize(self) -> None:
        if self.workers.device.type == "cuda":
            torch.cuda.synchronize(self.workers.device)


def smaller(config: PretrainedConfig) -> PretrainedConfig:
    """Returns a config of fewer layers where the whole model would take too many bytes."""
    shape = Shape.of(config)
    of_root = 4 * shape.vocab * shape.hidden * (1 if shape.tied else 2)
    of_layer = (4 * shape.parameters - of_root) / shape.layers
    layers = max(min(shape.layers, int((MOST_BYTES - of_root) // of_layer)), 1)
    if layers == shape.layers:
        return config
    config = copy.deepcopy(config)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    config.num_hidden_layers = layers
    return config


def make_model(recipe: Recipe, config: PretrainedConfig) -> PreTrainedModel:
    """Returns a model with random weights, with the recipe's adapter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, recipe.model.dtype),
            **(
                {"attn_implementation": recipe.model.attn_implementation}
                if recipe.model.attn_implementation
                else {}
            ),
        )
    loading.prepare_for_training(model, recipe.model)
    if recipe.adapter.method != "none":
        plain = replace(recipe.adapter, path=None, init="true")
        adapters.attach(model, adapters.config_of(plain, "plan", None), 0)
    return model


def random_rollouts(work: Workload, vocab: int) -> list[Rollout]:
    """Returns rollouts of a workload's lengths with random tokens, ready for the loss."""
    draws = torch.Generator().manual_seed(0)

    def tokens(number: int) -> list[int]:
        ids: list[int] = torch.randint(0, vocab, (number,), generator=draws).tolist()
        return ids

    made: list[Rollout] = []
    prompts: dict[int, Prompt] = {}
    for i, r in enumerate(work.rollouts):
        row, length = r.prompt.row, len(r.completion.ids)
        if row not in prompts:
            prompts[row] = replace(r.prompt, ids=tokens(len(r.prompt.ids)))
        logprobs = [-math.log(vocab)] * length
        rollout = Rollout(prompts[row], Completion(tokens(length), logprobs, "stop"), "")
        rollout.reward = rollout.advantage = 1.0 if i % 2 else -1.0
        rollout.weight = 1e-4
        s = work.settings
        if s.iterations * s.minibatches > 1:
            rollout.old_logprobs = torch.tensor(logprobs)
        if s.reference:
            rollout.ref_logprobs = torch.tensor(logprobs)
        made.append(rollout)
    return made
