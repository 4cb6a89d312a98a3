from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from grpo_cli.generation import sampling
from grpo_cli.generation.sampling import Sampling, adjusted, choose, draw, filtered

LARGEST = 1 - 2**-24  # the largest number that torch.rand gives in float32


def log_distribution(
    logits: Tensor,
    sampling: Sampling,
    *,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
    forbidden: Tensor | None = None,
) -> Tensor:
    """Log-probabilities of the distribution that `choose` draws from, [B, V]."""
    bias = sampling.bias(logits.shape[-1], logits.device)
    return filtered(adjusted(logits, sampling, bias, seen, counts, forbidden), sampling)


def how(**settings: float) -> Sampling:
    return Sampling(max_tokens=1, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "expected"),  # of a model that gives 0.125, 0.5, 0.125, 0.25
    [
        ({}, [0.125, 0.5, 0.125, 0.25]),
        # squares: 1/64, 1/4, 1/64, 1/16 of 22/64
        ({"temperature": 0.5}, [1 / 22, 16 / 22, 1 / 22, 4 / 22]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_k": 3}, [0.125, 0.5, 0.125, 0.25]),  # two are the third: both stay
        ({"top_k": 9}, [0.125, 0.5, 0.125, 0.25]),
        ({"top_p": 0.45}, [0, 1, 0, 0]),
        ({"top_p": 0.55}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.8}, [0.125, 0.5, 0.125, 0.25]),  # likewise
        ({"min_p": 0.3}, [0, 2 / 3, 0, 1 / 3]),
        ({"min_p": 0.6}, [0, 1, 0, 0]),
        # temperature first: the likeliest has 16/22 > 0.7, and the second 4/22 < 0.3 * 16/22
        ({"temperature": 0.5, "top_p": 0.7}, [0, 1, 0, 0]),
        ({"temperature": 0.5, "min_p": 0.3}, [0, 1, 0, 0]),
        # top-k before top-p, and renormalised: the likeliest has 2/3 > 0.6
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),
        # greedy: the model's own distribution, whatever else is asked for
        ({"temperature": 0.0, "top_k": 1, "top_p": 0.1}, [0.125, 0.5, 0.125, 0.25]),
    ],
)
def test_log_distribution_by_hand(settings: dict[str, float], expected: list[float]) -> None:
    logits = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log() + 3.0
    out = log_distribution(logits, how(**settings))
    torch.testing.assert_close(out.exp(), torch.tensor([expected], dtype=torch.float32))
    assert out.eq(-torch.inf).tolist() == [[e == 0 for e in expected]]


def test_a_large_vocabulary_has_the_same_nucleus() -> None:
    # Rows whose share is filled by 1, tens, hundreds, thousands and most of the tokens.
    random = torch.Generator().manual_seed(0)
    steepness = torch.tensor([30.0, 3.0, 2.0, 1.0, 0.1, 0.0])[:, None]
    logits = steepness * torch.randn(6, 20_000, generator=random)
    logits[-1] += 1e-4 * torch.randn(20_000, generator=random)
    kept: list[int] = []
    for share in (0.5, 0.9, 0.999):
        scores = TopPLogitsWarper(share)(torch.zeros(6, 1, dtype=torch.long), logits)
        ours = log_distribution(logits, how(top_p=share))
        # where rounding decides, one more or one fewer
        differ = (ours.isinf() != scores.isinf()).sum(-1)
        assert (differ <= 1 + scores.isfinite().sum(-1) / 1000).all(), differ
        mass = logits.softmax(-1).masked_fill(ours.isinf(), 0).sum(-1)
        assert (mass >= share - 1e-5).all()
        kept += ours.isfinite().sum(-1).tolist()
    assert {n > 64 for n in kept} == {n > 1024 for n in kept} == {n > 16384 for n in kept}
    assert any(64 < n <= 1024 for n in kept)
    assert any(1024 < n <= 16384 for n in kept)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [4.0, -2.0, 1.0, 0.0]),
        ({"repetition_penalty": 2.0}, [2.0, -4.0, 1.0, 0.0]),
        ({"repetition_penalty": 0.5}, [8.0, -1.0, 1.0, 0.0]),
        # before the temperature: as logits of 2, -4, 1, 0
        ({"repetition_penalty": 2.0, "temperature": 0.5}, [4.0, -8.0, 2.0, 0.0]),
        # before top-k and top-p: the third is now the second
        ({"repetition_penalty": 8.0, "top_k": 1}, [-torch.inf, -torch.inf, 0.0, -torch.inf]),
        ({"repetition_penalty": 2.0, "temperature": 0.0}, [2.0, -4.0, 1.0, 0.0]),
    ],
    ids=str,
)
def test_repetition_penalty_by_hand(settings: dict[str, float], expected: list[float]) -> None:
    seen = torch.tensor([[True, True, False, True]])
    out = log_distribution(torch.tensor([[4.0, -2.0, 1.0, 0.0]]), how(**settings), seen=seen)
    torch.testing.assert_close(out, torch.tensor([expected]).log_softmax(-1))


@pytest.mark.parametrize(
    ("settings", "expected"),  # of tokens that the completion holds 0, 1, 3 and 0 times
    [
        ({"presence_penalty": 0.5}, [4.0, -2.5, 0.5, 0.0]),
        ({"frequency_penalty": 0.5}, [4.0, -2.5, -0.5, 0.0]),
        ({"frequency_penalty": -1.0, "presence_penalty": 0.25}, [4.0, -1.25, 3.75, 0.0]),
        # after the repetition penalty, before the temperature
        ({"presence_penalty": 0.5, "repetition_penalty": 2.0}, [2.0, -4.5, 0.0, 0.0]),
        ({"presence_penalty": 0.5, "temperature": 0.5}, [8.0, -5.0, 1.0, 0.0]),
        ({"logit_bias": ((0, -5.0), (3, 1.5))}, [-1.0, -2.0, 1.0, 1.5]),
        # before the repetition penalty, which asks for a logit's sign
        ({"logit_bias": ((0, -5.0),), "repetition_penalty": 2.0}, [-2.0, -4.0, 0.5, 0.0]),
        ({"never": (0, 3)}, [-torch.inf, -2.0, 1.0, -torch.inf]),
    ],
    ids=str,
)
def test_penalties_and_biases_by_hand(settings: dict[str, Any], expected: list[float]) -> None:
    seen, counts = torch.tensor([[True, True, True, False]]), torch.tensor([[0.0, 1.0, 3.0, 0.0]])
    logits = torch.tensor([[4.0, -2.0, 1.0, 0.0]])
    out = log_distribution(logits, how(**settings), seen=seen, counts=counts)
    torch.testing.assert_close(out, torch.tensor([expected]).log_softmax(-1))


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.99}, {"temperature": 0.0}])
def test_forbidden_tokens_by_hand(settings: dict[str, float]) -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().expand(3, -1)
    forbidden = torch.tensor([[0, 1], [-1, -1], [-1, 0]])
    out = log_distribution(logits, how(**settings), forbidden=forbidden)
    expected = torch.tensor([[0, 0, 0.5, 0.5], [0.5, 0.25, 0.125, 0.125], [0, 0.5, 0.25, 0.25]])
    torch.testing.assert_close(out.exp(), expected)
    assert torch.equal(out.isinf(), expected == 0)


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 0.49}, {"min_p": 0.6}])
def test_filters_ignore_forbidden_tokens(settings: dict[str, float]) -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()  # 1/2, 1/4, 1/4 without the first
    out = log_distribution(logits, how(**settings), forbidden=torch.tensor([[0]]))
    assert out.exp().tolist() == [[0, 1, 0, 0]]


EVERYTHING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"top_p": 0.9},
    {"temperature": 1.3, "top_k": 90, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
]


def inputs(rows: int, size: int) -> dict[str, Tensor]:
    """Logits of all degrees of steepness, and what goes with them."""
    random = torch.Generator().manual_seed(size)
    steepness = torch.linspace(0.1, 6, rows)[:, None]
    eos = torch.tensor([[0, size - 1]]).expand(rows, -1)
    return {
        "logits": steepness * torch.randn(rows, size, generator=random),
        "uniforms": torch.rand(rows, generator=random),
        "seen": torch.rand(rows, size, generator=random) < 0.1,
        "forbidden": eos.masked_fill(torch.arange(rows)[:, None] % 2 == 0, -1),
    }


@pytest.mark.parametrize("size", [100, 3000, 40_000])
@pytest.mark.parametrize("settings", EVERYTHING, ids=str)
def test_rows_are_bitwise_independent(settings: dict[str, Any], size: int) -> None:
    given = inputs(7, size)
    tokens, logprobs = choose(sampling=how(**settings), **given)
    for i in range(7):
        alone = {name: value[i : i + 1] for name, value in given.items()}
        token, logprob = choose(sampling=how(**settings), **alone)
        assert (token.item(), logprob.item()) == (tokens[i].item(), logprobs[i].item())
    given.pop("uniforms")
    whole = log_distribution(sampling=how(**settings), **given)
    for i in range(7):
        alone = {name: value[i : i + 1] for name, value in given.items()}
        assert torch.equal(log_distribution(sampling=how(**settings), **alone)[0], whole[i])


@pytest.mark.parametrize("cached", [300, 10**9])
@pytest.mark.parametrize("settings", EVERYTHING, ids=str)
def test_choose_draws_from_the_distribution(
    settings: dict[str, Any], cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "CACHED", cached)
    given = inputs(32, 200)
    before = {name: value.clone() for name, value in given.items()}
    tokens, logprobs = choose(sampling=how(**settings), **given)
    assert all(torch.equal(given[name], before[name]) for name in given), "changed in place"
    uniforms = given.pop("uniforms")
    log_p = log_distribution(sampling=how(**settings), **given)
    greedy = settings.get("temperature") == 0
    assert torch.equal(tokens, log_p.argmax(-1) if greedy else draw(log_p, uniforms))
    assert torch.equal(logprobs, log_p.gather(-1, tokens[:, None])[:, 0])
    assert logprobs.isfinite().all()
    assert len(set(tokens.tolist())) > 10


def test_greedy_compares_logits() -> None:
    logits = torch.zeros(1, 100_000)
    logits[0, 7] = 2**-22
    assert log_distribution(logits, how(temperature=0.0)).argmax() != 7
    tokens, _ = choose(logits, how(temperature=0.0), None)
    assert tokens.tolist() == [7]


def drawn(log_p: Tensor, uniforms: Tensor) -> Tensor:
    """The token that one distribution, [V], gives for each of N uniform numbers."""
    return draw(log_p.expand(len(uniforms), -1), uniforms)


def test_draw_by_hand() -> None:
    log_p = torch.tensor([0.5, 0.0, 0.25, 0.25]).log()
    uniforms = torch.tensor([0.0, 0.2, 0.49, 0.51, 0.74, 0.76, LARGEST])
    assert drawn(log_p, uniforms).tolist() == [0, 0, 0, 2, 2, 3, 3]


def test_draw_at_an_edge() -> None:
    log_p = torch.zeros(4).log_softmax(-1)
    assert drawn(log_p, torch.tensor([0.0, 0.25, 0.5, 0.75])).tolist() == [0, 1, 2, 3]
    # tokens without probability that lie at the edge are passed over
    log_p = torch.tensor([0.5, 0.0, 0.0, 0.5]).log()
    assert drawn(log_p, torch.tensor([0.5])).tolist() == [3]


def sparse(rows: int, size: int) -> Tensor:
    """Distributions [rows, size] of which most tokens are ruled out, often the first and last."""
    random = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, size, generator=random)
    out = torch.rand(rows, size, generator=random) < 0.9
    out[:, 1] = False
    return logits.masked_fill(out, -torch.inf).log_softmax(-1)


def test_draw_at_the_ends() -> None:
    log_p = sparse(500, 1000)
    first = draw(log_p, torch.zeros(500))
    last = draw(log_p, torch.full((500,), LARGEST))
    possible = log_p.exp() > 1e-6
    assert log_p.gather(-1, first[:, None]).isfinite().all()
    assert log_p.gather(-1, last[:, None]).isfinite().all()
    assert (first <= possible.int().argmax(-1)).all()
    assert (last >= 999 - possible.flip(-1).int().argmax(-1)).all()


def parallel_cumsum(values: Tensor, dim: int) -> Tensor:
    """A cumulative sum in the order of a parallel scan (Hillis and Steele 1986).

    So a GPU sums: each prefix in a tree of its own, and one may come out below the one before it.
    """
    assert dim == -1
    out, step = values.clone(), 1
    while step < out.shape[-1]:
        out = torch.cat([out[..., :step], out[..., step:] + out[..., :-step]], dim=-1)
        step *= 2
    return out


def test_no_impossible_token_with_parallel_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    log_p = sparse(500, 1000)
    sums = parallel_cumsum(log_p.exp(), -1)
    impossible = log_p[:, 1:].isinf() & (sums[:, 1:] > sums.cummax(-1).values[:, :-1])
    places = impossible.nonzero()[:20].tolist()
    assert places
    monkeypatch.setattr(Tensor, "cumsum", parallel_cumsum)
    monkeypatch.setattr(sampling, "sums_in_order", lambda device: False)
    for row, column in places:
        edge = (sums[row, column] / sums[row, -1]).item()
        tokens = drawn(log_p[row], torch.linspace(edge - 2e-7, edge + 2e-7, 33))
        assert log_p[row, tokens].isfinite().all()


def test_cumsum_on_the_cpu_is_sequential() -> None:
    # So they never fall, and repeat where a 0 is added: `draw` relies on it.
    p = torch.cat([sparse(200, 5000), inputs(200, 5000)["logits"].log_softmax(-1)]).exp()
    p[:, ::7] = 0
    p[::2, 1::3] *= 1e-9  # below what float32 can add to 1
    sums = p.cumsum(-1)
    assert torch.equal(sums, p.double().cumsum(-1).float())
    steps = sums.diff(dim=-1)
    assert (steps >= 0).all()
    assert (steps[p[:, 1:] == 0] == 0).all()
    assert torch.equal(p.cumsum_(-1), sums)


def test_parallel_sums_give_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    log_p, uniforms = sparse(200, 1000), torch.rand(200, generator=torch.Generator().manual_seed(1))
    expected = draw(log_p, uniforms)
    monkeypatch.setattr(sampling, "sums_in_order", lambda device: False)
    assert torch.equal(draw(log_p, uniforms), expected)
