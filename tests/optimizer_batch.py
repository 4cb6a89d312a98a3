"""One optimizer batch of a small float64 model under every loss, for test_invariance.py.

As a program it is started by torchrun and writes what the processes found together:

    torchrun --nproc-per-node 2 tests/optimizer_batch.py OUT.pt VARIANT...
"""

import math
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from grpo_cli.algorithm.settings import Loss
from grpo_cli.config.recipe import Recipe
from grpo_cli.distributed import fsdp
from grpo_cli.distributed.fsdp import full_tensor
from grpo_cli.distributed.settings import Distributed
from grpo_cli.distributed.workers import Workers, exit_process
from grpo_cli.models import tiny
from grpo_cli.models.loading import frozen_copy
from grpo_cli.models.micro_batches import MicroBatchBudget
from grpo_cli.models.policy_logprobs import PolicyLogprobs
from grpo_cli.models.reference import Reference
from grpo_cli.models.routers import RouterRecorder
from grpo_cli.models.settings import Optimizer
from grpo_cli.records import Group, TrainingSample, regrouped, rollout_stats
from grpo_cli.reporting.stage_clock import Clock
from grpo_cli.training import loop
from grpo_cli.training.run import StepBatch
from grpo_cli.training.step import Step
from tests.conftest import BUILD, make_group, make_loss, make_rollout
from tests.models.families import BY_NAME
from tests.models.test_architectures import make
from tests.partial_run import partial_run

LOSSES = Path(__file__).parent.parent / "recipes" / "loss"
SWITCHES: dict[str, dict[str, Any]] = {
    "prompts": {"normalize": "prompts"},
    "k1": {"beta": 0.1, "kl_estimator": "k1", "kl_bias_correction": True},
    "k2": {"beta": 0.1, "kl_estimator": "k2"},
    "k3": {"beta": 0.1},
    "entropy": {"entropy_coef": 0.1},
    "top_entropy": {"top_entropy": 0.4, "entropy_coef": 0.1},
    "token_truncate": {"sampling_correction": "token_truncate", "sampling_cap": 1.1},
    "sequence_mask": {"sampling_correction": "sequence_mask", "sampling_cap": 1.3},
    "sequence_mean_mask": {"sampling_correction": "sequence_mean_mask", "sampling_cap": 1.02},
    "off_policy_mask": {"off_policy_mask": 0.01},
    "router": {"router_aux_loss_coef": 0.5},  # of a mixture of experts
}
Found = dict[str, tuple[Tensor, dict[str, float]]]  # gradient of all weights, metrics
# Of each kind one: on-policy, a KL, whole sequences, tokens chosen over all processes, entropies.
FEW = ("dapo", "k3", "gspo", "clip_cov", "entropy", "router")


@dataclass(frozen=True)
class Variant:
    """How several processes compute the batch."""

    strategy: str
    names: Collection[str] | None = FEW  # of the cases; None: all
    reshard: bool = True
    packed: bool = True
    chunked: bool = True
    checkpointing: bool = False  # of activations
    idle: bool = False  # the last process has nothing


VARIANTS = {
    "ddp": Variant("ddp", names=None),
    "fsdp2": Variant("fsdp2", names=None),
    "few cases": Variant("fsdp2"),
    "kept gathered": Variant("fsdp2", reshard=False),
    "an idle process": Variant("fsdp2", idle=True),
    "padded": Variant("fsdp2", packed=False),
    "whole logits": Variant("fsdp2", chunked=False),
    "plain": Variant("fsdp2", packed=False, chunked=False),
    "checkpointing": Variant("fsdp2", checkpointing=True),
    "checkpointing, kept gathered": Variant("fsdp2", ("dapo",), reshard=False, checkpointing=True),
}


NORMS = (Qwen2RMSNorm, MixtralRMSNorm)


class Norm(Qwen2RMSNorm):
    """In its input's precision: Qwen2's own rounds to float32, otherwise with another split."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(mean + self.variance_epsilon)


def cases() -> dict[str, Loss]:
    """Every loss that ships, and the switches of all of them on top of dapo."""
    out = {}
    for path in sorted(LOSSES.glob("*.yaml")):
        settings = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))
        del settings["defaults"]
        if settings["policy"] in ("clip_cov", "kl_cov"):  # so that some of a few tokens are chosen
            settings |= {"cov_share": 0.5}
            settings |= {"cov_low": 0.0} if settings["policy"] == "clip_cov" else {}
        out[path.stem] = make_loss(**settings)
    return out | {name: Loss(**switch) for name, switch in SWITCHES.items()}


def make_groups() -> list[Group]:
    """Seven ragged groups of three: one token, no reward, cut off, no signal, rewarded steps."""
    random = torch.Generator().manual_seed(0)
    groups = []
    for position in range(7):
        rollouts = []
        prompt = torch.randint(3, 200, (1 + position % 4,), generator=random).tolist()
        for j in range(3):
            length = 1 + (3 * position + 2 * j) % 8
            ids = torch.randint(3, 200, (length,), generator=random).tolist()
            noise = [0.1 * torch.randn(length, generator=random) for _ in range(3)]
            level = torch.full((length,), -5.6)  # about what a new model gives each of 259 tokens
            old = level + noise[0]
            no_signal = position in (3, 4)
            r = make_rollout(
                prompt,
                ids,
                logprobs=(old + 0.3 * noise[2]).tolist(),
                old_logprobs=old,
                ref_logprobs=level + noise[1],
                advantage=0.0 if no_signal else torch.randn((), generator=random).item(),
                reward=math.nan if (position, j) == (2, 0) else 1.0,
                excluded=(position, j) == (1, 1),
            )
            # One prompt's object, as data.py and the generator leave it.
            rollouts.append(replace(r, prompt=rollouts[0].prompt) if rollouts else r)
        groups.append(make_group(position, rollouts))
    of_steps = [
        r.as_kind(
            TrainingSample, token_advantages=torch.randn(len(r.completion.ids), generator=random)
        )
        for r in groups[5].rollouts
    ]
    groups[5] = make_group(5, of_steps)
    return groups


def make_experts() -> PreTrainedModel:
    """A mixture of experts, whose load is uneven."""
    model = make(BY_NAME["mixtral"], vocabulary=259)
    model.config._experts_implementation = "eager"  # grouped products have no float64
    return model


def prepared(model: PreTrainedModel, checkpointing: bool) -> PreTrainedModel:
    """The model in float64 and training mode."""
    model = model.double()
    for module in model.modules():
        if isinstance(module, NORMS):
            module.__class__ = Norm
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def all_gradients(
    workers: Workers,
    groups: list[Group],
    tokens_per_micro_batch: int,
    *,
    packed: bool = True,
    chunked: bool = True,
    checkpointing: bool = False,
    names: Collection[str] | None = None,
    make: Callable[[], list[Group]] = make_groups,
) -> Found:
    """The gradient of the first optimizer step under each case, over all processes.

    Args:
        names: of the cases; None: all.
        make: makes the groups of all processes.
    """
    torch.manual_seed(workers.rank)  # the others are given the main process's weights
    dense = prepared(tiny.make_model(BUILD, tiny.make_tokenizer(BUILD, [])), checkpointing)
    experts = prepared(make_experts(), checkpointing)
    reference = frozen_copy(dense)
    for model in (dense, experts):
        workers.place(model)
        assert fsdp.is_sharded(model) == workers.runs_in_lockstep
    found: Found = {}
    for name, loss in cases().items():
        if names is not None and name not in names:
            continue
        model = experts if name == "router" else dense
        gradients: list[Tensor] = []
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.step = lambda *a, g=gradients, m=model, **k: g.append(  # type: ignore[method-assign]
            torch.cat([full_tensor(p.grad).flatten().clone() for p in m.parameters()])
        )
        recipe = Recipe(loss=loss, optimizer=Optimizer(max_grad_norm=1e9))
        run = partial_run(
            workers,
            PolicyLogprobs(model, packed=packed, chunked=chunked, agree_on=workers.first),
            MicroBatchBudget(
                tokens_per_micro_batch, print, runs_in_lockstep=workers.runs_in_lockstep
            ),
            optimizer,
            recipe=recipe,
            reference=Reference(PolicyLogprobs(reference)) if loss.beta else None,
        )
        if loss.router_aux_loss_coef:
            run.policy.router_coef = loss.router_aux_loss_coef
            run.policy.logprobs.routers = RouterRecorder(model)
        every = make()
        own = [g for g in every if g.prompt_index in {mine.prompt_index for mine in groups}]
        if not loss.beta:
            samples = [r for g in own for r in g.rollouts]
            own = regrouped(own, [r.as_kind(TrainingSample, ref_logprobs=None) for r in samples])
        own.sort(key=lambda g: [mine.prompt_index for mine in groups].index(g.prompt_index))
        step = Step(run, 0, Clock(workers.device))
        step.keep(StepBatch(own, dict(rollout_stats(every)), {}))
        metrics = loop.update_policy(run, step, own)
        found[name] = (gradients[0], metrics)
    return found


def share(rank: int, size: int) -> list[Group]:
    """A process's groups: not as many of them, nor as many tokens, as another's."""
    return make_groups()[rank::size] if rank < size else []


if __name__ == "__main__":
    result: dict[str, Found] = {}
    for name in sys.argv[2:]:
        how = VARIANTS[name]
        divided = Distributed(strategy=how.strategy, reshard_after_forward=how.reshard)
        joined = Workers("cpu", config=divided)
        result[name] = all_gradients(
            joined,
            share(joined.rank, joined.size - how.idle),
            tokens_per_micro_batch=40,
            packed=how.packed,
            chunked=how.chunked,
            checkpointing=how.checkpointing,
            names=how.names,
        )
    if joined.is_main:
        torch.save(result, sys.argv[1])
    joined.close()
    exit_process(0)
