"""The loss of padded tensors against the literal one, for every YAML in recipes/loss; its metrics.

A new YAML is tested as it stands, once reference_losses.py knows its policy.
"""

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.functional import pad

from grpo_cli.algorithm import token_selection
from grpo_cli.algorithm.arguments import readers_of
from grpo_cli.algorithm.batch import Batch, collate, pad_right, token_weight
from grpo_cli.algorithm.loss import (
    TRAINED_ENTROPY,
    Coefficients,
    LossOutput,
    every_rollout_has_gradient,
    grpo_loss,
    logged,
)
from grpo_cli.algorithm.losses import loss_function
from grpo_cli.algorithm.metric_sums import MetricSums
from grpo_cli.algorithm.settings import CORRECTIONS, Loss
from grpo_cli.algorithm.variants import knob_values, knobs_read, traits_of
from grpo_cli.config.recipe import Recipe
from grpo_cli.errors import TrainingError
from grpo_cli.models.token_logprobs import token_entropy, token_logprobs
from grpo_cli.records import Rollout
from tests import reference_losses as reference
from tests.conftest import ALONE, CPU, make_loss, make_rollout
from tests.programs import ROOT

FILES = sorted((ROOT / "recipes" / "loss").glob("*.yaml"))
LONGEST = 9  # the run's max_completion_tokens

every_loss = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@lru_cache
def said_by(file: Path) -> dict[str, Any]:
    """The knobs that a YAML sets."""
    said = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file)))
    return {key: value for key, value in said.items() if key != "defaults"}


def config_of(file: Path, **overrides: Any) -> Loss:
    """What a YAML says, and what is set on top of it."""
    return make_loss(**{**said_by(file), **overrides})


# Inputs


def completions(
    lengths: Sequence[int],
    *,
    seed: int = 0,
    prompts: Sequence[int] | None = None,
    log_ratios: Sequence[float] | None = None,
    spread: float = 0.4,
    on_policy: Sequence[bool] | bool = False,
    trains: Sequence[bool] | None = None,
    unknown: float = 0.0,
    token_advantages: bool = False,
    dtype: torch.dtype = torch.float64,
) -> list[reference.Completion]:
    """Random completions of these lengths.

    Args:
        log_ratios: values to draw log ρ from; without, it is normal with standard deviation spread.
        on_policy: of all, or of each. unknown: share of tokens without the engine's logprob.
        token_advantages: each token has an advantage of its own.
    """
    draw = random.Random(seed)
    batch = []
    for i, length in enumerate(lengths):
        logprobs = [-2 * draw.random() for _ in range(length)]
        changes = [
            draw.choice(log_ratios) if log_ratios else draw.gauss(0, spread) for _ in logprobs
        ]
        old = [lp - change for lp, change in zip(logprobs, changes, strict=True)]
        advantage = draw.gauss(0, 1)
        own_policy = on_policy if isinstance(on_policy, bool) else on_policy[i]
        before = logprobs if own_policy else old
        batch.append(
            reference.Completion(
                prompt=prompts[i] if prompts else i // 2,
                logprobs=[torch.tensor(lp, dtype=dtype, requires_grad=True) for lp in logprobs],
                old_logprobs=None if own_policy else old,
                sampling_logprobs=[
                    math.nan if draw.random() < unknown else lp + draw.gauss(0, 0.6)
                    for lp in before
                ],
                ref_logprobs=[lp + draw.gauss(0, 0.5) for lp in logprobs],
                entropies=[
                    torch.tensor(3 * draw.random(), dtype=dtype, requires_grad=True)
                    for _ in logprobs
                ],
                advantages=[draw.gauss(0, 1) if token_advantages else advantage for _ in logprobs],
                noise=[draw.random() for _ in logprobs],
                trains=trains[i] if trains else True,
            )
        )
    return batch


def mixed(seed: int = 0, unknown: float = 0.2) -> list[reference.Completion]:
    """A bit of everything: lengths, a masked completion, unknown logprobs, step rewards."""
    return [
        *completions(
            [4, 1, 3, 2],
            seed=seed,
            prompts=[0, 0, 1, 1],
            trains=[True, True, False, True],
            unknown=unknown,
            on_policy=[False, False, False, seed % 2 == 1],
        ),
        *completions([5], seed=seed + 1000, prompts=[1], token_advantages=True),
    ]


CASES: dict[str, list[reference.Completion]] = {
    "several lengths": completions([5, 2, 7, 1, 3, 4]),
    "two": completions([3, 6], seed=1, prompts=[0, 1]),
    "of one token each": completions([1, 1, 1], seed=2),
    # (of one advantage, all its covariances would be 0, and which are the highest, anyone's guess)
    "a single one": completions([4], seed=3, token_advantages=True),
    "a single token": completions([1], seed=4),
    "some of which nothing trains": completions(
        [2, 3, 1, 4], seed=5, trains=[False, True, False, True]
    ),
    "a prompt of which nothing trains": completions(
        [2, 3, 1, 4], seed=6, trains=[False, False, True, True]
    ),
    "of which nothing trains": completions([2, 3], seed=7, trains=[False, False]),
    "large ratios": completions([4, 2, 5], seed=8, log_ratios=[-30.0, 30.0, 3.0, -0.1]),
    "huge ratios": completions([4, 1, 5], seed=9, log_ratios=[-200.0, 200.0, 0.1]),
    "ratios near 1": completions([4, 3, 5, 2], seed=10, spread=5e-4),
    "on-policy": completions([4, 1, 5], seed=11, on_policy=True),
    "partly on-policy": completions([4, 2, 5], seed=12, on_policy=[True, False, True]),
    "unknown logprobs of the engine": completions([4, 2, 5], seed=13, unknown=0.5),
    "token advantages": completions([4, 2, 5], seed=14, token_advantages=True),
}

# Knobs on top of a YAML's own; one that the YAML's policy does not read is not set.
SWITCHES: list[dict[str, Any]] = [
    {"beta": 0.1, "kl_estimator": "k1"},
    {"beta": 0.1, "kl_estimator": "k2"},
    {"beta": 0.1, "kl_estimator": "k3"},
    {"beta": 0.1, "kl_estimator": "k1", "kl_bias_correction": True},
    {"beta": 0.1, "kl_estimator": "k3", "kl_bias_correction": True},
    {"beta": 0.1, "kl_in": "reward"},
    {"entropy_coef": 0.03},
    {"top_entropy": 0.4},
    {"top_entropy": 0.4, "entropy_coef": 0.03},
    *(
        {"sampling_correction": mode, "sampling_cap": cap, "sampling_floor": floor}
        for mode in CORRECTIONS
        for cap, floor in ((1.1, None), (1.3, 0.9))
    ),
    {"off_policy_mask": 0.1},
    *({"normalize": how} for how in ("tokens", "completions", "prompts", "constant", "sums")),
    *({"ratio_level": level} for level in ("token", "sequence", "sequence_token")),
    {"epsilon": 0.1},
    {"epsilon_high": 0.05},
    {"delta": 1.1},
    {"ratio_cap": 0.9},
    {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    {"vespo_k_pos": 0.5, "vespo_lambda_pos": 1.0, "vespo_k_neg": 0.0, "vespo_lambda_neg": 0.3},
    {"cov_share": 0.3, "cov_low": -0.2, "cov_high": 0.4, "cov_kl": 0.7},
]
CHOICES: dict[str, list[Any]] = {
    "beta": [0.0, 0.1],
    "kl_estimator": ["k1", "k2", "k3"],
    "kl_bias_correction": [False, True],
    "entropy_coef": [0.0, 0.02],
    "top_entropy": [1.0, 0.5],
    "sampling_correction": [*CORRECTIONS],
    "sampling_cap": [1.2, 3.0],
    "sampling_floor": [None, 0.8],
    "off_policy_mask": [None, 0.1],
    "normalize": ["tokens", "completions", "prompts", "constant", "sums"],
    "ratio_level": ["token", "sequence", "sequence_token"],
    "epsilon_high": [None, 0.3],
    "delta": [None, 1.2],
    "cov_share": [0.2, 0.5],
    "cov_low": [-0.5],
    "cov_high": [0.5],
}


def name_of(switch: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in switch.items())


def read(file: Path, knobs: dict[str, Any]) -> dict[str, Any]:
    """Of these knobs, those that the policy of a YAML reads."""
    own = knobs_read(loss_function(config_of(file)))
    return {k: v for k, v in knobs.items() if k in own or not readers_of(f"loss.{k}")}


# The two sides


Gradients = list[Tensor]  # of each completion, [C], by log-probabilities and by entropies


def literal(batch: Sequence[reference.Completion], config: Loss) -> tuple[Tensor, Gradients]:
    """Loss and gradient as the papers have it."""
    loss = reference.total_loss(batch, dataclasses.asdict(config) | config.args, LONGEST)
    leaves = [x for c in batch for x in (*c.logprobs, *c.entropies)]
    flat = gradients(loss, leaves)
    sizes = [len(c) for c in batch for _ in range(2)]
    return loss.detach(), list(torch.split(torch.stack(flat), sizes))


def gradients(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """By each leaf, zeros where there is none."""
    if not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


@dataclass
class Row:
    """A completion and what is known of it before the first backward; tensors are [C]."""

    completion: reference.Completion
    logprobs: Tensor
    entropies: Tensor
    weight: float
    high_entropy: Tensor | None = None
    cov_selected: Tensor | None = None


def ours(
    batch: Sequence[reference.Completion],
    config: Loss,
    *,
    order: Sequence[int] | None = None,
    parts: Sequence[int] | None = None,
    padding: int = 0,
    dtype: torch.dtype = torch.float64,
    sums: MetricSums | None = None,
) -> tuple[Tensor, Gradients]:
    """Loss and gradient of `grpo_loss`, with the weights and the selection of an optimizer batch.

    Args:
        order: of the rows. parts: rows in each micro-batch. padding: columns more than it takes.
    """
    rows = [
        Row(
            completion,
            torch.tensor([x.item() for x in completion.logprobs], dtype=dtype, requires_grad=True),
            torch.tensor([x.item() for x in completion.entropies], dtype=dtype, requires_grad=True),
            weight,
        )
        for completion, weight in zip(batch, weights_of(batch, config), strict=True)
    ]
    training = [row for row in rows if row.completion.trains]
    select(training, config)
    kept = [torch.ones(0), *(row.high_entropy for row in training if row.high_entropy is not None)]
    tokens = sum(len(row.completion) for row in training)
    trained = torch.cat(kept).sum().item() if config.top_entropy < 1 else tokens
    coefficients = Coefficients(config.beta, config.entropy_coef, max(trained, 1))

    sums = MetricSums() if sums is None else sums
    loss = torch.zeros((), dtype=dtype)
    ordered = iter([rows[i] for i in order] if order else rows)
    for number in parts or [len(rows)]:
        inputs = inputs_of_rows(list(islice(ordered, number)), config, padding)
        output = grpo_loss(config, *inputs, coefficients)
        sums.add(output.metrics)
        loss = loss + output.loss
    return loss.detach(), gradients(loss, [x for r in rows for x in (r.logprobs, r.entropies)])


Inputs = tuple[Batch, Tensor, Tensor | None]  # of `grpo_loss`, with logprobs and entropies


def inputs_of_rows(rows: Sequence[Row], config: Loss, padding: int) -> Inputs:
    """A micro-batch of these rows, with more columns than it takes."""
    batch = [row.completion for row in rows]
    width = max(len(c) for c in batch) + padding
    dtype = rows[0].logprobs.dtype

    def padded(values: Sequence[Any], fill: float = 0.0) -> Tensor:
        tensors = [torch.as_tensor(v, dtype=dtype) for v in values]
        return torch.stack([pad(t, (0, width - len(t)), value=fill) for t in tensors])  # [B, C]

    def if_any(values: Sequence[Any]) -> Tensor | None:
        """As `collate`: None, or NaN in rows without; 0 where nothing trains."""
        if all(v is None for v in values):
            return None
        rows = padded([[math.nan] * width if v is None else v for v in values])
        return rows.masked_fill(mask == 0, 0)

    mask = padded([[float(c.trains)] * len(c) for c in batch])
    return (
        Batch(
            loss_mask=mask,
            weights=mask * torch.tensor([[row.weight] for row in rows], dtype=dtype),
            advantages=padded([c.advantages for c in batch]),
            sampling_logprobs=padded([c.sampling_logprobs for c in batch]).masked_fill(
                mask == 0, 0
            ),
            old_logprobs=if_any([c.old_logprobs for c in batch]),
            ref_logprobs=if_any(
                [c.ref_logprobs if c.trains and config.beta else None for c in batch]
            ),
            high_entropy=if_any([row.high_entropy for row in rows]),
            cov_selected=if_any([row.cov_selected for row in rows]),
        ),
        # What a model says of padding can be anything.
        padded([row.logprobs for row in rows], fill=math.nan),
        padded([row.entropies for row in rows], fill=math.nan),
    )


def weights_of(batch: Sequence[reference.Completion], config: Loss) -> list[float]:
    """What the tokens of each completion are multiplied by, as train.weigh."""
    lengths = [len(c) if c.trains else 0 for c in batch]
    of_group = {
        c.prompt: sum(n for n, d in zip(lengths, batch, strict=True) if d.prompt == c.prompt)
        for c in batch
    }
    counts = {"tokens": sum(lengths), "completions": len(batch), "prompts": len(of_group)}
    return [
        token_weight(config.normalize, n, of_group[c.prompt], counts, LONGEST) if n else 0.0
        for n, c in zip(lengths, batch, strict=True)
    ]


def select(rows: Sequence[Row], config: Loss) -> None:
    """Finds the tokens that are treated apart among rows that train, as survey.select_tokens."""
    if not rows:
        return
    lengths = [len(row.completion) for row in rows]
    logprobs = torch.cat([row.logprobs.detach() for row in rows]).double()
    entropies = torch.cat([row.entropies.detach() for row in rows])
    advantages = torch.tensor([a for r in rows for a in r.completion.advantages]).double()
    noise = torch.tensor([x for r in rows for x in r.completion.noise]).double()
    if config.top_entropy < 1:
        kept = entropies >= token_selection.entropy_threshold(entropies, config.top_entropy)
        for row, tokens in zip(rows, torch.split(kept, lengths), strict=True):
            row.high_entropy = tokens.double()
    if config.policy in ("clip_cov", "kl_cov"):
        cov = token_selection.covariance(logprobs, advantages)
        choose = traits_of(loss_function(config)).select_tokens
        chosen = choose(cov, noise, **knob_values(choose, config))
        for row, tokens in zip(rows, torch.split(chosen, lengths), strict=True):
            row.cov_selected = tokens.double()


def assert_equal(
    one: tuple[Tensor, Gradients], other: tuple[Tensor, Gradients], rtol: float = 1e-6
) -> None:
    """The same loss and the same gradient by every token, by itself."""
    torch.testing.assert_close(one[0], other[0], rtol=rtol, atol=1e-12)
    for mine, theirs in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-12)


# Loss and gradient


@every_loss
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_the_papers(file: Path, case: str) -> None:
    config = config_of(file)
    assert_equal(ours(CASES[case], config), literal(CASES[case], config))


@pytest.mark.parametrize(
    ("file", "switch"),
    [(file, switch) for file in FILES for switch in SWITCHES if read(file, switch)],
    ids=lambda value: value.stem if isinstance(value, Path) else name_of(value),
)
def test_switches_on_top_are_the_papers(file: Path, switch: dict[str, Any]) -> None:
    config = config_of(file, **read(file, switch))
    batch = mixed()
    assert_equal(ours(batch, config), literal(batch, config))


@every_loss
@pytest.mark.parametrize("seed", range(4))
def test_switches_together_are_the_papers(file: Path, seed: int) -> None:
    draw = random.Random(f"{file.stem} {seed}")
    drawn = {key: draw.choice(values) for key, values in CHOICES.items()}
    config = config_of(file, **read(file, drawn))
    batch = mixed(seed)
    assert_equal(ours(batch, config), literal(batch, config))


def test_the_off_policy_mask_takes_the_old_policy_where_the_engine_gave_nothing() -> None:
    config = Loss(off_policy_mask=0.1)
    batch = [
        *completions([4, 2], log_ratios=[-0.5], unknown=1.0),  # drifts of 0.5
        *completions([4, 2], log_ratios=[-0.05], unknown=1.0),  # and of 0.05
    ]
    for completion in batch:
        completion.advantages = [-1.0] * len(completion)
    assert_equal(ours(batch, config), literal(batch, config))


@pytest.mark.parametrize("switch", SWITCHES, ids=name_of)
def test_every_switch_is_seen_in_a_loss(switch: dict[str, Any]) -> None:
    """The comparisons would say nothing of a switch that these inputs do not reach."""
    batch = mixed(unknown=0.0)
    for file in FILES:
        if knobs := read(file, switch):
            plain, _ = literal(batch, config_of(file))
            switched, _ = literal(batch, config_of(file, **knobs))
            if not torch.isclose(plain, switched, rtol=1e-3):
                return
    pytest.fail("no loss has changed")


# Properties


@every_loss
def test_equal_rewards_give_no_gradient(file: Path) -> None:
    batch = completions([4, 1, 3], log_ratios=[-200.0, -1.0, 0.0, 0.5, 200.0])
    for completion in batch:
        completion.advantages = [0.0] * len(completion)
    # kl_cov's penalty is a KL, and does not ask for the advantage
    config = config_of(file, beta=0.0, cov_kl=0.0)
    loss, grads = ours(batch, config)
    assert loss == 0
    assert all(grad.eq(0).all() for grad in grads)


@every_loss
def test_at_ratio_one_the_gradient_is_that_of_reinforce(file: Path) -> None:
    config = config_of(file, beta=0.0, cov_low=1e9, cov_high=2e9)  # Clip-Cov leaves none out
    batch = completions(
        [4, 1, 3, 2],
        on_policy=[True, False, True, True],
        log_ratios=[0.0],
        trains=[True, True, False, True],
        # A completion of one ratio shares its gradient out among its tokens.
        token_advantages=config.ratio_level != "sequence" and config.policy != "gmpo",
    )
    _, grads = ours(batch, config)
    weights = weights_of(batch, config)
    for completion, weight, grad in zip(batch, weights, grads[::2], strict=True):
        expected = [-weight * a for a in completion.advantages]  # of −weight · A · logprob
        torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64))
    assert max(grad.abs().max() for grad in grads) > 0.01


@every_loss
def test_micro_batches_row_order_and_padding_change_nothing(file: Path) -> None:
    everything: dict[str, Any] = {
        "beta": 0.1,
        "kl_bias_correction": True,
        "entropy_coef": 0.02,
        "top_entropy": 0.6,
        "off_policy_mask": 0.1,
        "sampling_correction": "token_truncate",
        "sampling_cap": 1.2,
        "cov_share": 0.3,
        "cov_low": -0.5,
    }
    config = config_of(file, **everything)
    batch, whole = mixed(unknown=0.0), MetricSums()
    expected = ours(batch, config, sums=whole)
    assert max(grad.abs().max() for grad in expected[1]) > 0.005
    splits: list[tuple[list[int], int]] = [([5], 4), ([1, 1, 1, 1, 1], 0), ([2, 3], 1)]
    for parts, padding in splits:
        for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
            split = MetricSums()
            one = ours(batch, config, order=order, parts=parts, padding=padding, sums=split)
            assert_equal(one, expected, rtol=1e-9)
            found, wanted = split.reduced(ALONE), whole.reduced(ALONE)
            assert found.figures == pytest.approx(wanted.figures, rel=1e-9)


@every_loss
@pytest.mark.parametrize("mode", ["none", "token_truncate", "sequence_mask"])
def test_huge_ratios_stay_finite_in_float32(file: Path, mode: str) -> None:
    batch = completions([4, 1, 5, 3], log_ratios=[-200.0, 200.0, -90.0, 90.0, 0.1])
    for completion in batch[::2]:  # the engine and the trainer, too, can be far apart
        completion.sampling_logprobs = [lp - 200 for lp in completion.sampling_logprobs]
    config = config_of(file, sampling_correction=mode)
    sums = MetricSums()
    loss, grads = ours(batch, config, dtype=torch.float32, sums=sums)
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in grads)
    assert all(math.isfinite(value) for value in sums.reduced(ALONE).figures.values())


class SureOfItself:
    """A causal LM that gives the padding's id, 0, a log-probability of −200 everywhere."""

    def __init__(self) -> None:
        self.weight = torch.zeros(10, requires_grad=True)

    def __call__(self, rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
        logits = self.weight + torch.tensor([-200.0] + [0.0] * 9)
        targets = pad_right([torch.tensor(r.completion.ids) for r in rollouts], 3)  # [B, C]
        logits = logits.expand(*targets.shape, 10)
        return token_logprobs(logits, targets), token_entropy(logits)


@every_loss
def test_what_the_policy_says_of_padding_cannot_overflow_the_loss(file: Path) -> None:
    rollouts = []
    for ids, advantage in (([3, 4, 5], 1.0), ([3], -1.0)):
        logprobs = [-math.log(9)] * len(ids)
        known = {"old_logprobs": torch.tensor(logprobs), "ref_logprobs": torch.tensor(logprobs)}
        own = {"logprobs": logprobs, "advantage": advantage, "weight": 0.25}
        rollouts.append(make_rollout([5, 6], ids, **own, **known))
    model = SureOfItself()
    batch = collate(rollouts, CPU)
    config = config_of(file, beta=0.1, sampling_correction="sequence_truncate")
    output = grpo_loss(config, batch, *model(rollouts), Coefficients(0.1, 0.01, 4.0))
    assert output.loss.isfinite()
    (gradient,) = torch.autograd.grad(output.loss, model.weight)
    # Every ratio is 1, π = π_ref and no entropy is higher than that of 9 equal tokens, which leaves
    # Σ_t −A_t/4 · ∇log π_t with ∇log π_t = 1 for the token − 1/9 for each of the nine.
    expected = [0.0] + [1 / 18] * 9
    expected[4] -= 1 / 4
    expected[5] -= 1 / 4
    torch.testing.assert_close(gradient, torch.tensor(expected), rtol=0, atol=1e-6)
    assert output.metrics.reduced(ALONE).figures["kl"] == pytest.approx(0.0, abs=1e-6)


# Metrics, by hand


def terms_of(
    log_ratios: list[list[float]],
    advantages: list[list[float]],
    mask: list[list[int]],
    *,
    sampler: list[list[float]] | None = None,
    **more: list[list[float]],
) -> Inputs:
    """Inputs with log-probabilities −1, old ones by their log ratio, sampled ones by the old ones.

    Args:
        sampler: log π_old − log π_sampler.
    """

    def tensor(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    inside = tensor(mask)
    logprobs = -inside
    old = (logprobs - tensor(log_ratios)) * inside
    batch = Batch(
        old_logprobs=old,
        sampling_logprobs=old if sampler is None else (old - tensor(sampler)) * inside,
        ref_logprobs=(logprobs.detach() - tensor(more["kl"])) * inside if "kl" in more else None,
        advantages=tensor(advantages),
        loss_mask=inside,
        weights=inside / inside.sum(),
        high_entropy=tensor(more["high_entropy"]) * inside if "high_entropy" in more else None,
        cov_selected=tensor(more["cov_selected"]) * inside if "cov_selected" in more else None,
    )
    entropies = tensor(more["entropies"]) if "entropies" in more else None
    return batch, logprobs.requires_grad_(), entropies


def output_of(config: Loss, inputs: Inputs, beta: float = 0.0, entropy: float = 0.0) -> LossOutput:
    return grpo_loss(config, *inputs, Coefficients(beta, entropy, 1.0))


def measured(
    config: Loss, inputs: Inputs, beta: float = 0.0, entropy: float = 0.0
) -> dict[str, float]:
    """The metrics of `output_of`."""
    return output_of(config, inputs, beta, entropy).metrics.reduced(ALONE).figures


CLIP_RATIOS = [
    f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")
]


def clip_ratios(config: Loss, inputs: Inputs) -> list[float]:
    """The metrics named by CLIP_RATIOS, in its order."""
    found = measured(config, inputs)
    return [found[name] for name in CLIP_RATIOS]


@pytest.mark.parametrize(
    ("policy_loss", "names"),
    [
        ("clipped", CLIP_RATIOS),
        ("gmpo", CLIP_RATIOS),
        ("clip_cov", [*CLIP_RATIOS, "cov_selected"]),
        ("kl_cov", ["cov_selected"]),
        ("cispo", ["cispo_clip_ratio"]),
        ("vespo", ["vespo/phi_seq_mean"]),
        ("sapo", []),
    ],
)
def test_what_each_policy_loss_logs(policy_loss: str, names: list[str]) -> None:
    found = measured(Loss(policy=policy_loss), terms_of([[0.0]], [[1.0]], [[1]]))
    gap = "sampling/sampling_logp_difference"
    always = {f"{gap}/mean", f"{gap}/max", "sampling/kl", "staleness/logp_difference"}
    always |= {"loss", "policy_loss", "sampling/weight", "sampling/weight_squared"}
    assert set(found) == {*names} | always


UP, DOWN = math.log(1.5), math.log(0.5)


def test_clip_ratios_of_tokens() -> None:
    terms = terms_of(
        [[UP, DOWN, 0.0], [DOWN, UP, DOWN], [UP, DOWN, DOWN]],
        [[1.0, -1.0, 1.0], [-1.0, -1.0, -1.0], [1.0, -1.0, -1.0]],
        [[1, 1, 1], [1, 1, 0], [0, 0, 0]],  # the last one does not train
    )
    # The last two are the lowest of the rows 1/3, 1/2 and the highest of 1/3, 0.
    assert clip_ratios(Loss(), terms) == pytest.approx([2 / 5, 1 / 5, 3 / 5, 1 / 3, 1 / 3])
    assert clip_ratios(Loss(epsilon=0.6, epsilon_high=0.6), terms) == [0.0] * 5
    upwards = clip_ratios(Loss(epsilon=0.2, epsilon_high=0.6), terms)
    assert upwards[:2] == [pytest.approx(2 / 5), 0]


def test_clip_ratios_of_sequences() -> None:
    """One ratio a row: shares are of rows, each the same whatever its length."""
    terms = terms_of(
        [[2 * UP, 0.0, UP], [DOWN, 0.0, 0.0], [2 * UP, 0.0, 0.0], [DOWN, DOWN, DOWN]],
        [[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, 0.0], [-1.0, -1.0, -1.0]],
        [[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]],
    )
    found = clip_ratios(Loss(ratio_level="sequence"), terms)  # ratios 1.5, 0.5, 1.5, and none
    assert found == pytest.approx([1 / 3, 1 / 3, 2 / 3, 0, 1])
    by_token = clip_ratios(Loss(ratio_level="sequence_token"), terms)
    assert by_token[:2] == pytest.approx([1 / 6, 3 / 6])


def test_clip_ratios_of_gmpo_are_in_log_space() -> None:
    terms = terms_of([[0.38, 0.42, -0.38, -0.42]], [[1.0, 1.0, -1.0, -1.0]], [[1, 1, 1, 1]])
    found = clip_ratios(Loss(policy="gmpo", epsilon=0.4), terms)
    assert found[:2] == pytest.approx([1 / 4, 1 / 4])


def test_clip_ratio_of_cispo() -> None:
    six, four = math.log(6), math.log(4)
    terms = terms_of(
        [[six, four, 0.0], [six, six, six]], [[1.0, 1.0, 1.0], [-1.0, 1.0, 1.0]],
        [[1, 1, 1], [1, 1, 0]],
    )  # fmt: skip
    found = measured(make_loss(policy="cispo", ratio_cap=5.0), terms)
    assert found["cispo_clip_ratio"] == pytest.approx(2 / 5)
    rows = measured(make_loss(policy="cispo", ratio_cap=5.0, ratio_level="sequence"), terms)
    # Ratios 24^(1/3) and 6; of the second row's tokens one has A > 0.
    assert rows["cispo_clip_ratio"] == pytest.approx((0 + 1 / 2) / 2)
    terms = terms_of([[six, six], [six, 0.0]], [[1.0, 1.0], [-1.0, 0.0]], [[1, 1], [1, 0]])
    of_rows = measured(make_loss(policy="cispo", ratio_cap=5.0, ratio_level="sequence"), terms)
    assert of_rows["cispo_clip_ratio"] == pytest.approx(1 / 2), "as TRL: a share of completions"


def test_phi_of_vespo() -> None:
    terms = terms_of(
        [[math.log(2), 0.0], [math.log(2), 9.0], [1.0, 1.0]],
        [[1.0, 1.0], [-1.0, -1.0], [1.0, 1.0]],
        [[1, 1], [1, 0], [0, 0]],
    )
    found = measured(Loss(policy="vespo"), terms)
    # 2²e^(3(1−2)) and 2³e^(2(1−2))
    assert found["vespo/phi_seq_mean"] == pytest.approx((0.1991482735 + 1.0826822659) / 2)


def test_share_of_tokens_chosen_by_covariance() -> None:
    terms = terms_of(
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [[1.0] * 3] * 2, [[1, 1, 1], [1, 0, 0]],
        cov_selected=[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]],
    )  # fmt: skip
    for name in ("clip_cov", "kl_cov"):
        assert measured(Loss(policy=name), terms)["cov_selected"] == pytest.approx(1 / 4)


def sampler_terms() -> Inputs:
    """Sampler's ratios 2, 0.5, 4; 0.25; and, of what does not train, 9."""
    two, nine = math.log(2), math.log(9)
    return terms_of(
        [[0.0, 0.0, 0.0, 0.0]] * 3,
        [[1.0] * 4] * 3,
        [[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]],
        sampler=[[two, -two, 2 * two, math.nan], [-2 * two, nine, nine, nine], [nine] * 4],
    )


@pytest.mark.parametrize(
    ("mode", "floor", "ratios", "weights"),
    [
        ("token_truncate", None, [2, 0.5, 4, 1, 0.25], [2, 0.5, 3, 1, 0.25]),
        ("token_truncate", 0.4, [2, 0.5, 4, 1, 0.25], [2, 0.5, 3, 1, 0.4]),
        ("token_mask", None, [2, 0.5, 4, 1, 0.25], [2, 0.5, 0, 1, 0.25]),
        ("token_mask", 0.4, [2, 0.5, 4, 1, 0.25], [2, 0.5, 0, 1, 0]),
        ("sequence_truncate", None, [4, 0.25], [3, 0.25]),
        ("sequence_mask", 0.4, [4, 0.25], [0, 0]),
        ("sequence_mean_truncate", 0.4, [4**0.25, 0.25], [4**0.25, 0.4]),
        ("sequence_mean_mask", 0.4, [4**0.25, 0.25], [4**0.25, 0]),
    ],
)
def test_what_is_logged_of_the_sampler(
    mode: str, floor: float | None, ratios: list[float], weights: list[float]
) -> None:
    config = Loss(sampling_correction=mode, sampling_cap=3.0, sampling_floor=floor)
    found = measured(config, sampler_terms())
    number = len(ratios)
    assert found["sampling/importance_sampling_ratio/mean"] == pytest.approx(sum(ratios) / number)
    assert found["sampling/importance_sampling_ratio/min"] == pytest.approx(min(ratios))
    assert found["sampling/importance_sampling_ratio/max"] == pytest.approx(max(ratios))
    outside = sum(r != w for r, w in zip(ratios, weights, strict=True))
    assert found["sampling/outside_bounds"] == pytest.approx(outside / number)
    assert found["sampling/weight"] == pytest.approx(sum(weights) / number)
    assert found["sampling/weight_squared"] == pytest.approx(sum(w * w for w in weights) / number)


def test_sampler_metrics_by_hand() -> None:
    """The trainer holds a token for four times as likely, one for half, one for the same."""
    two = math.log(2)
    terms = terms_of(
        [[0.5 - 2 * two, two], [-0.25, 9.0]], [[1.0, 1.0]] * 2, [[1, 1], [1, 0]],
        sampler=[[2 * two, -two], [math.nan, 9.0]],
    )  # fmt: skip
    found = logged(Loss(), measured(Loss(), terms))
    # π/π_sampler − log(π/π_sampler) − 1: 4 − 2 ln 2 − 1, 1/2 + ln 2 − 1, 0
    assert found["sampling/kl"] == pytest.approx((2.5 - two) / 3)
    assert found["sampling/sampling_logp_difference/mean"] == pytest.approx(3 * two / 3)
    assert found["sampling/sampling_logp_difference/max"] == pytest.approx(2 * two)
    # of weights 4, 1/2, 1: (5.5/3)² / (17.25/3)
    assert found["sampling/effective_sample_size"] == pytest.approx((5.5 / 3) ** 2 / 5.75)
    assert found["staleness/logp_difference"] == pytest.approx((0.5 + 0 + 0.25) / 3)
    assert not {"sampling/weight", "sampling/weight_squared"} & found.keys()
    assert not any("importance" in name for name in found)
    terms = terms_of([[0.0]], [[1.0]], [[1]], sampler=[[80.0]])
    for config in (Loss(), Loss(sampling_correction="sequence_mask", sampling_cap=None)):
        assert measured(config, terms)["sampling/weight_squared"] <= 1e18  # finite in float32


def test_share_of_tokens_that_the_off_policy_mask_leaves_out() -> None:
    """Drifts a token: 0.4 = (0.8 + 0) / 2, 0.2, 0.9, 5; the last one does not train."""
    terms = terms_of(
        [[-0.8, 0.0, -9.0], [-0.2, -0.2, -0.2], [-0.9, -0.9, -0.9], [-5.0, -5.0, -5.0]],
        [[-1.0, 1.0, -1.0], [-1.0, -1.0, -1.0], [1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]],
        [[1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]],
    )
    for threshold, left_out in ((0.3, 3), (0.5, 2), (1.0, 0), (0.1, 6)):
        found = measured(Loss(off_policy_mask=threshold), terms)
        assert found["sampling/off_policy_masked"] == pytest.approx(left_out / 8), threshold
    assert "sampling/off_policy_masked" not in measured(Loss(), terms)


def test_kl_and_entropy_are_means_over_the_tokens_that_train() -> None:
    terms = terms_of(
        [[UP, UP, 0.0], [0.0, 0.0, 0.0]],
        [[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]],
        [[1, 1, 0], [1, 1, 0]],
        kl=[[0.2, 0.4, 9.0], [-0.3, 0.1, 9.0]],
        entropies=[[1.0, 2.0, 9.0], [3.0, 4.0, 9.0]],
        high_entropy=[[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]],
    )
    config = Loss(beta=0.5, kl_estimator="k1", top_entropy=0.5)
    found = measured(config, terms, beta=0.5, entropy=0.25)
    assert found["kl"] == pytest.approx((0.2 + 0.4 - 0.3 + 0.1) / 4)
    assert found["entropy"] == pytest.approx(10 / 4)
    assert found[TRAINED_ENTROPY] == pytest.approx(9 / 3), "of the tokens that it trains"
    policy_loss = -1.2 * 2 / 4  # the first token is left out, the ratio of the second is clipped
    assert found["policy_loss"] == pytest.approx(policy_loss)
    assert found["loss"] == pytest.approx(policy_loss + 0.5 * 0.4 / 4 - 0.25 * 9 / 1)
    # kl_in: reward only measures it here
    config = dataclasses.replace(config, kl_in="reward", kl_bias_correction=True)
    found = measured(config, terms, beta=0.5)
    assert found["loss"] == found["policy_loss"] == pytest.approx(policy_loss)
    assert found["kl"] == pytest.approx((0.2 * 1.5 + 0.4 * 1.5 - 0.3 + 0.1) / 4)


@pytest.mark.parametrize(
    ("knobs", "has_reference", "entropy_coef", "expected"),
    [
        ({}, False, 0.0, False),
        ({"kl_in": "loss"}, True, 0.0, True),
        ({"kl_in": "loss"}, False, 0.0, False),
        ({"kl_in": "reward"}, True, 0.0, False),  # it is in the advantage
        ({}, False, 0.01, True),
        ({"entropy_coef": 0.01, "entropy_target": 0.5}, False, 0.0, False),  # as it is adapted
        ({"policy": "kl_cov"}, False, 0.0, True),
        ({"policy": "clip_cov"}, False, 0.0, False),
    ],
)
def test_whether_a_rollout_without_advantage_has_a_gradient(
    knobs: dict[str, Any], has_reference: bool, entropy_coef: float, expected: bool
) -> None:
    config = dataclasses.replace(Recipe().loss, **knobs)
    found = every_rollout_has_gradient(
        config, has_reference=has_reference, entropy_coef=entropy_coef
    )
    assert found == expected


def test_rollouts_without_gradient_add_only_their_entropy() -> None:
    inputs = terms_of([[UP, 0.0]], [[1.0, 2.0]], [[1, 1]], kl=[[0.2, 0.4]], entropies=[[1.0, 2.0]])
    output = output_of(Loss(), inputs)
    both, alone = MetricSums(), MetricSums()
    alone.add(output.metrics)
    both.add(output.metrics, only=("entropy",))
    both.add(output.metrics)
    mine, wanted = both.reduced(ALONE), alone.reduced(ALONE)
    assert mine.figures == pytest.approx(wanted.figures)
    assert (mine.sums["entropy"], mine.counts["entropy"]) == (6.0, 4.0)
    only = MetricSums()
    only.add(output.metrics, only=("entropy",))
    found = only.reduced(ALONE).figures
    assert list(found) == list(wanted.figures), "as on other processes"
    assert found["loss"] == 0
    assert math.isnan(found["kl"])
    assert math.isnan(found["sampling/kl"])


def test_a_loss_of_another_shape_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean_of_rows(ratio: Tensor) -> Tensor:
        return ratio.mean(-1)

    monkeypatch.setattr("grpo_cli.algorithm.loss.loss_function", lambda config: mean_of_rows)
    inputs = terms_of([[0.1, 0.2]] * 3, [[1.0, 1.0]] * 3, [[1, 1]] * 3)
    with pytest.raises(TrainingError, match=r"shape \[3\] for 3 completions of up to 2 tokens"):
        output_of(Loss(), inputs)
