"""Log-probabilities are those of the model, whichever way they are computed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_cli.models.attention import NOT_PASSED_ON, UnsupportedModelError
from grpo_cli.models.flops import rollout_flops
from grpo_cli.models.policy_logprobs import SIMPLEST, ForwardMode, PolicyLogprobs, cut
from grpo_cli.models.token_logprobs import Head
from grpo_cli.records import Completion, Prompt, Rollout, sampled_mask
from tests.models.families import Family
from tests.models.test_architectures import flat_gradient as gradient
from tests.models.test_architectures import make

QUICK, CHUNKED, PACKED = ForwardMode(True, True), ForwardMode(False, True), ForwardMode(True, False)
MODES = pytest.mark.parametrize("mode", [QUICK, CHUNKED, PACKED, SIMPLEST], ids=str)
# The second prompt's first completion is one token, which packed is no segment at all.
SHAPES = [(7, [4, 9, 5, 4]), (1, [1, 6]), (3, [1, 1]), (5, [8])]


def make_rollouts(shapes: Sequence[tuple[int, Sequence[int]]] = SHAPES) -> list[Rollout]:
    random = torch.Generator().manual_seed(3)

    def ids(n: int) -> list[int]:
        return torch.randint(3, 96, (n,), generator=random).tolist()

    found = []
    for row, (prompt, completions) in enumerate(shapes):
        shared = Prompt(row, ids(prompt), "", {})
        found += [Rollout(shared, Completion(ids(n), [0.0] * n, "stop"), "") for n in completions]
    return found[::2] + found[1::2]  # rollouts of a prompt need not lie together


@pytest.fixture
def llama() -> PreTrainedModel:
    return make(Family("llama")).double()


def true_numbers(
    model: PreTrainedModel, rollouts: Sequence[Rollout], temperature: float = 1.0
) -> tuple[list[Tensor], list[Tensor]]:
    """(log-probabilities, entropies) of each rollout, from a forward pass of its own."""
    logprobs, entropies = [], []
    for r in rollouts:
        prompt, ids = r.prompt.ids, r.completion.ids
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        log_p = (logits / temperature).log_softmax(-1)
        logprobs.append(log_p[range(len(ids)), ids])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return logprobs, entropies


def by(model: PreTrainedModel, mode: ForwardMode, **settings: Any) -> PolicyLogprobs:
    policy_logprobs = PolicyLogprobs(model, packed=mode.packed, chunked=mode.chunked, **settings)
    assert policy_logprobs.modes[0] == mode
    assert policy_logprobs.mode == SIMPLEST, "until it is checked"
    return policy_logprobs


def weighted(rows: Sequence[Tensor]) -> Tensor:
    """A sum in which every token counts differently."""
    flat = torch.cat(list(rows))
    return (torch.arange(len(flat)).cos() * flat).sum()


@MODES
def test_modes_match_the_model(llama: PreTrainedModel, mode: ForwardMode) -> None:
    temperature = 0.7
    rollouts = make_rollouts()
    logprobs, entropies = true_numbers(llama, rollouts, temperature)
    expected = gradient(llama, weighted(logprobs))
    policy_logprobs = by(llama, mode)
    policy_logprobs.check(rollouts, temperature)
    assert policy_logprobs.mode == mode
    found, none = policy_logprobs(rollouts, temperature)
    assert none is None
    assert found.shape == (len(rollouts), 9)
    assert found.dtype == torch.float64
    rows = [row[: len(r.completion.ids)] for row, r in zip(found, rollouts, strict=True)]
    for row, mine, truth in zip(found, rows, logprobs, strict=True):
        assert (mine - truth).abs().max() < 1e-7
        assert not row[len(mine) :].any(), "0 behind a shorter completion"
    assert torch.cat(logprobs).std() > 1, "something to compare"
    mine = gradient(llama, weighted(rows))
    assert (mine - expected).abs().max() < 1e-6 * expected.abs().max()

    again, found_entropies = policy_logprobs(rollouts, temperature, entropy=True)
    assert torch.allclose(again, found, atol=1e-7)
    assert not found_entropies.requires_grad
    for row, truth in zip(found_entropies, entropies, strict=True):
        assert (row[: len(truth)] - truth).abs().max() < 1e-7
        assert not row[len(truth) :].any()

    true = true_numbers(llama, rollouts, temperature)
    expected = gradient(llama, weighted(true[0]) + weighted(true[1]))
    both = policy_logprobs(rollouts, temperature, entropy=True, entropy_gradient=True)
    rows_of_both = [
        [row[: len(r.completion.ids)] for row, r in zip(t, rollouts, strict=True)] for t in both
    ]
    mine = gradient(llama, weighted(rows_of_both[0]) + weighted(rows_of_both[1]))
    assert (mine - expected).abs().max() < 1e-6 * expected.abs().max()


@MODES
def test_foreign_tokens_are_left_out(llama: PreTrainedModel, mode: ForwardMode) -> None:
    every, rollouts = make_rollouts(), list[Rollout]()
    for i, r in enumerate(every):  # one has nothing that was sampled
        sampled = [t % 3 != 1 and i != 2 for t in range(len(r.completion.ids))]
        rollouts.append(replace(r, completion=replace(r.completion, is_sampled=sampled)))
    policy_logprobs = PolicyLogprobs(llama, say=pytest.fail)
    policy_logprobs.modes, policy_logprobs.checked = [mode], True
    rows = []
    llama.get_output_embeddings().register_forward_hook(lambda *a: rows.append(a[2].shape[-2]))
    mask = sampled_mask(rollouts)
    found = policy_logprobs(rollouts, 0.7, entropy=True)
    expected = policy_logprobs(every, 0.7, entropy=True)
    for own, of_every in zip(found, expected, strict=True):
        assert torch.allclose(own, of_every * mask, atol=1e-12)
        assert (own[~mask] == 0).all()
    assert rollout_flops(llama, rollouts) < rollout_flops(llama, every)
    if mode == PACKED:  # the other modes do not call the layer, or slice its outputs
        assert rows == [mask.sum().item(), sum(len(r.completion.ids) for r in every)]


def in_training(model: PreTrainedModel) -> PreTrainedModel:
    """One whose attention drops weights, in training alone."""
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return model


def heedless(model: PreTrainedModel) -> PreTrainedModel:
    """One that does not hand `attending` on."""

    def drop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = kwargs.pop("attending", None)
        if given is not None:  # a mask that some other model would make of it: all see all
            kwargs["attention_mask"] = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
        return args, kwargs

    model.base_model.register_forward_pre_hook(drop, with_kwargs=True)
    return model


def eager(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("eager")
    return model.float()  # whose softmax makes NaN of a float64 mask


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def odd_head(model: PreTrainedModel) -> PreTrainedModel:
    head = Doubled(model.config.hidden_size, model.config.vocab_size, bias=False).double()
    head.weight = model.lm_head.weight
    model.lm_head = head
    with pytest.raises(TypeError, match="the output layer is a Doubled"):
        Head.of(model)
    return model


def scaled_logits(model: PreTrainedModel) -> PreTrainedModel:
    """One whose logits are not those of its head."""
    model.register_forward_hook(
        lambda module, args, out: out.__class__(logits=3 * out.logits), with_kwargs=False
    )
    return model


def heedless_and_odd(model: PreTrainedModel) -> PreTrainedModel:
    return odd_head(heedless(model))


ODD = "TypeError: the output layer is a Doubled, not an nn.Linear"
DIFFER = "log-probabilities differ by "


@pytest.mark.parametrize(
    ("change", "mode", "reasons"),
    [
        (lambda model: model, QUICK, []),
        (in_training, CHUNKED, ["its attention has dropout"]),
        (heedless, CHUNKED, [NOT_PASSED_ON]),
        (eager, CHUNKED, []),
        (odd_head, PACKED, [ODD, ODD]),
        (scaled_logits, PACKED, [DIFFER, DIFFER]),
        (heedless_and_odd, SIMPLEST, [ODD, ODD, NOT_PASSED_ON]),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_unexpected_models_fall_back(
    llama: PreTrainedModel,
    change: Callable[[PreTrainedModel], PreTrainedModel],
    mode: ForwardMode,
    reasons: list[str],
) -> None:
    model = change(llama)
    rollouts = make_rollouts()
    with torch.no_grad():
        expected, _ = true_numbers(model.eval(), rollouts, 0.9)
    said: list[str] = []
    policy_logprobs = PolicyLogprobs(model.train(), say=said.append)
    if change is eager:
        assert said.pop() == "note: rows are padded: the model's attention is eager"
    order = list(policy_logprobs.modes)
    policy_logprobs.check(rollouts, 0.9)
    assert policy_logprobs.mode == mode
    assert model.training
    assert len(said) == len(reasons)
    for note, reason, given_up, instead in zip(said, reasons, order, order[1:], strict=False):
        assert note.startswith(f"note: {given_up} is off ({reason}")
        assert note.endswith(f"); {instead} gives the same result, slower")
    found, _ = policy_logprobs(rollouts, 0.9)
    if change is in_training:
        model.eval()
        found, _ = policy_logprobs(rollouts, 0.9)
    for row, truth in zip(found, expected, strict=True):
        assert (row[: len(truth)] - truth).abs().max() < (1e-4 if change is eager else 1e-7)


MOE = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 12,
    "layer_types": ["full_attention", "sliding_attention"],
}
WINDOWS = [
    Family("mistral", settings={"sliding_window": 12}),
    # These tell the mask alone.
    Family("qwen2_moe", settings={**SLIDING, **MOE}),
    Family(
        "llama4_text",
        settings={"attention_chunk_size": 12, "num_local_experts": 2, "intermediate_size_mlp": 48},
    ),
]


@pytest.mark.parametrize("family", WINDOWS, ids=str)
def test_rollouts_longer_than_the_window(family: Family) -> None:
    model = make(family)
    said: list[str] = []
    policy_logprobs = PolicyLogprobs(model, say=said.append)
    policy_logprobs.check(make_rollouts([(3, [2, 4]), (1, [5])]), 1.0)
    assert policy_logprobs.mode.packed
    said.clear()
    given_up = policy_logprobs.mode
    rollouts = make_rollouts([(9, [8, 6]), (2, [20])])
    why = "its attention sees 12 tokens and no more"
    with pytest.raises(UnsupportedModelError, match=why):
        policy_logprobs(rollouts, 1.0)
    policy_logprobs.fall_back(why)
    instead = f"{policy_logprobs.mode} gives the same result, slower"
    assert said == [f"note: {given_up} is off ({why}); {instead}"]
    if policy_logprobs.mode.packed:
        policy_logprobs.fall_back(why)
    found, _ = policy_logprobs(rollouts, 1.0)
    expected, _ = true_numbers(model, rollouts)
    for row, truth in zip(found, expected, strict=True):
        assert (row[: len(truth)] - truth).abs().max() < 1e-4
    assert not policy_logprobs.mode.packed


def test_a_window_that_no_layer_has() -> None:
    settings = SLIDING | {"layer_types": ["full_attention"] * 2}
    policy_logprobs = PolicyLogprobs(make(Family("qwen2", settings)), say=pytest.fail)
    policy_logprobs.check(make_rollouts([(9, [8, 6]), (2, [20])]), 1.0)
    assert policy_logprobs.mode.packed


@pytest.mark.parametrize(
    ("mode", "modes", "checked"),
    [
        (QUICK, [QUICK, CHUNKED, PACKED, SIMPLEST], False),
        (PACKED, [PACKED, SIMPLEST], False),
        (SIMPLEST, [SIMPLEST], True),
    ],
)
def test_restored_mode(
    model: PreTrainedModel, mode: ForwardMode, modes: list[ForwardMode], checked: bool
) -> None:
    policy_logprobs = PolicyLogprobs(model)
    policy_logprobs.restore_checks({"mode": str(mode)})
    assert (policy_logprobs.modes, policy_logprobs.checked) == (modes, checked)
    unpacked = PolicyLogprobs(model, packed=False)
    unpacked.restore_checks({"mode": str(PACKED)})  # the recipe has changed since
    assert unpacked.modes == [CHUNKED, SIMPLEST]


def test_micro_batches_depend_on_the_mode(model: PreTrainedModel) -> None:
    rollouts = make_rollouts([(10, [3, 3, 3])])
    split = {}
    for mode in (QUICK, SIMPLEST):
        policy_logprobs = by(model, mode)
        policy_logprobs.check(rollouts, 1.0)
        split[mode] = list(policy_logprobs.micro_batches(rollouts, 26))
        assert policy_logprobs.tokens(rollouts) == (10 + 3 * 2 if mode.packed else 3 * 13)
    assert [len(m) for m in split[QUICK]] == [3]  # 10 + 3 · 2
    assert [len(m) for m in split[SIMPLEST]] == [2, 1]  # 13 each


@pytest.mark.parametrize("training", [True, False])
def test_check_runs_once_without_side_effects(training: bool) -> None:
    model = make(Family("gpt2", without=("num_key_value_heads", "head_dim", "intermediate_size")))
    for block in model.transformer.h:
        block.mlp.dropout.p = 0.5  # which draws random numbers, and leaves attention alone
    model.train(training)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    passes: list[bool] = []
    model.base_model.register_forward_hook(lambda m, *_: passes.append(m.training))
    torch.manual_seed(7)
    state = torch.get_rng_state()
    policy_logprobs = PolicyLogprobs(model, say=pytest.fail)
    for too_few in ([], make_rollouts([(3, [5])]), make_rollouts([(3, [1, 1])])):
        policy_logprobs.check(too_few, 1.0)
        assert not policy_logprobs.checked
    policy_logprobs.check(make_rollouts(), 1.0)
    assert passes == [False, False, True]
    assert torch.equal(torch.get_rng_state(), state)
    assert {m.training for m in model.modules()} == {training}
    assert all((p.grad == 2).all() for p in model.parameters() if p.grad is not None)
    assert not any(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
    assert policy_logprobs.checked
    policy_logprobs.check(make_rollouts(), 1.0)
    assert len(passes) == 3, "once"


def test_out_of_memory_in_the_check(llama: PreTrainedModel) -> None:
    def fail(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if "attending" in kwargs:
            raise torch.OutOfMemoryError("out of memory")

    llama.base_model.register_forward_pre_hook(fail, with_kwargs=True)
    llama.train()
    policy_logprobs = PolicyLogprobs(llama, say=pytest.fail)
    with pytest.raises(torch.OutOfMemoryError):
        policy_logprobs.check(make_rollouts(), 1.0)
    assert policy_logprobs.modes[0] == QUICK
    assert not policy_logprobs.checked
    assert llama.training


def test_check_uses_few_short_rollouts() -> None:
    def lengths(shapes: list[tuple[int, list[int]]]) -> list[tuple[int, int, int]]:
        found = cut(make_rollouts(shapes))
        return sorted((r.prompt.row, len(r.prompt.ids), len(r.completion.ids)) for r in found)

    assert lengths([(3, [5, 1, 9, 7, 2]), (2, [4, 3, 80]), (1, [6])]) == [
        (0, 3, 7), (0, 3, 9), (1, 2, 4), (1, 2, 64),
    ]  # fmt: skip
    assert lengths([(99, [5, 1, 9, 7, 2])]) == [(0, 64, 2), (0, 64, 5), (0, 64, 7), (0, 64, 9)]
    assert lengths([]) == []
    (long,) = make_rollouts([(70, [70])])
    (begun,) = cut([long])
    assert begun.prompt.ids == long.prompt.ids[-64:]
    assert begun.completion.ids == long.completion.ids[:64]
