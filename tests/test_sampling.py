import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_cli.sampling import Sampling, draw, log_distribution

LARGEST = 1 - 2**-24  # the largest number that torch.rand gives in float32


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
        ({"top_k": 4}, [0.125, 0.5, 0.125, 0.25]),
        ({"top_k": 9}, [0.125, 0.5, 0.125, 0.25]),
        ({"top_p": 0.01}, [0, 1, 0, 0]),
        ({"top_p": 0.45}, [0, 1, 0, 0]),
        ({"top_p": 0.55}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.7}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.9}, [0.125, 0.5, 0.125, 0.25]),
        ({"min_p": 0.2}, [0.125, 0.5, 0.125, 0.25]),
        ({"min_p": 0.3}, [0, 2 / 3, 0, 1 / 3]),
        ({"min_p": 0.6}, [0, 1, 0, 0]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        # temperature first: the likeliest has 16/22 > 0.7
        ({"temperature": 0.5, "top_p": 0.7}, [0, 1, 0, 0]),
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


WARPERS: list[tuple[dict[str, float], list[LogitsProcessor]]] = [
    ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
    ({"top_k": 7}, [TopKLogitsWarper(7)]),
    ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
    (
        {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        [
            TemperatureLogitsWarper(1.4),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ],
    ),
]


@pytest.mark.parametrize(("settings", "warpers"), WARPERS, ids=lambda v: str(v)[:40])
def test_log_distribution_is_that_of_transformers(
    settings: dict[str, float], warpers: list[LogitsProcessor]
) -> None:
    logits = 3 * torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    scores = logits
    for warper in warpers:
        scores = warper(torch.zeros(64, 1, dtype=torch.long), scores)
    ours = log_distribution(logits, how(**settings))
    assert torch.equal(ours.isinf(), scores.isinf())
    torch.testing.assert_close(ours, scores.log_softmax(-1))


def test_rows_do_not_depend_on_one_another() -> None:
    logits = 3 * torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    settings = how(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05)
    alone = torch.cat([log_distribution(row[None], settings) for row in logits])
    torch.testing.assert_close(log_distribution(logits, settings), alone)


def test_bfloat16_logits_give_float32() -> None:
    assert log_distribution(torch.zeros(1, 4, dtype=torch.bfloat16), how()).dtype == torch.float32


def drawn(log_p: Tensor, uniforms: Tensor) -> Tensor:
    """The token that one distribution, [V], gives for each of N uniform numbers."""
    return draw(log_p.expand(len(uniforms), -1), uniforms)


def grid(n: int) -> Tensor:
    return (torch.arange(n) + 0.5) / n


def test_draw_by_hand() -> None:
    log_p = torch.tensor([0.5, 0.0, 0.25, 0.25]).log()
    uniforms = torch.tensor([0.0, 0.2, 0.49, 0.51, 0.74, 0.76, LARGEST])
    assert drawn(log_p, uniforms).tolist() == [0, 0, 0, 2, 2, 3, 3]


def test_a_uniform_number_at_an_edge_belongs_to_the_token_that_begins_there() -> None:
    log_p = torch.zeros(4).log_softmax(-1)
    assert drawn(log_p, torch.tensor([0.0, 0.25, 0.5, 0.75])).tolist() == [0, 1, 2, 3]
    # tokens without probability that lie at the edge are passed over
    log_p = torch.tensor([0.5, 0.0, 0.0, 0.5]).log()
    assert drawn(log_p, torch.tensor([0.5])).tolist() == [3]


@pytest.mark.parametrize("size", [2, 5, 300])
def test_frequencies_over_a_grid_are_the_probabilities(size: int) -> None:
    random = torch.Generator().manual_seed(size)
    p = torch.randn(size, generator=random).softmax(-1)
    p[size // 2] = 0.0
    log_p = p.log().log_softmax(-1)
    frequencies = drawn(log_p, grid(4096)).bincount(minlength=size) / 4096
    torch.testing.assert_close(frequencies, log_p.exp(), rtol=0, atol=1.1 / 4096)


def sparse(rows: int, size: int) -> Tensor:
    """Distributions [rows, size] of which most tokens are ruled out, often the first and last."""
    random = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, size, generator=random)
    out = torch.rand(rows, size, generator=random) < 0.9
    out[:, 1] = False
    return logits.masked_fill(out, -torch.inf).log_softmax(-1)


def test_the_ends_of_the_range_give_the_first_and_last_token_of_some_probability() -> None:
    log_p = sparse(500, 1000)
    first = draw(log_p, torch.zeros(500))
    last = draw(log_p, torch.full((500,), LARGEST))
    possible = log_p.exp() > 1e-6
    assert log_p.gather(-1, first[:, None]).isfinite().all()
    assert log_p.gather(-1, last[:, None]).isfinite().all()
    assert (first <= possible.int().argmax(-1)).all()
    assert (last >= 999 - possible.flip(-1).int().argmax(-1)).all()


def test_a_number_that_rounding_puts_at_the_very_end_gives_a_possible_token() -> None:
    log_p = sparse(500, 1000)
    tokens = draw(log_p, torch.ones(500))
    assert log_p.gather(-1, tokens[:, None]).isfinite().all()


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


def test_no_impossible_token_is_drawn_where_sums_are_not_monotone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log_p = sparse(500, 1000)
    sums = parallel_cumsum(log_p.exp(), -1)
    impossible = log_p[:, 1:].isinf() & (sums[:, 1:] > sums.cummax(-1).values[:, :-1])
    places = impossible.nonzero()[:20].tolist()
    assert places
    monkeypatch.setattr(Tensor, "cumsum", parallel_cumsum)
    for row, column in places:
        edge = (sums[row, column] / sums[row, -1]).item()
        tokens = drawn(log_p[row], torch.linspace(edge - 2e-7, edge + 2e-7, 33))
        assert log_p[row, tokens].isfinite().all()


def test_a_row_draws_the_same_alone_as_among_others() -> None:
    log_p = sparse(50, 100)
    uniforms = torch.rand(50, generator=torch.Generator().manual_seed(1))
    alone = [draw(log_p[i : i + 1], uniforms[i : i + 1]).item() for i in range(50)]
    assert draw(log_p, uniforms).tolist() == alone
