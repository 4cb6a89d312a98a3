"""The prompts of several data sets in one sequence."""

from collections import Counter

from grpo_cli.data.prompts import MixtureStream, PromptStream, mixed
from grpo_cli.data.rows import Rows
from grpo_cli.records import Prompt

PARTS = {
    "a": [Prompt(row, [row], f"a{row}", {}) for row in range(3)],
    "b": [Prompt(row, [row], f"b{row}", {}) for row in range(50)],
}


def texts(stream: PromptStream, start: int, count: int) -> list[str]:
    return [str(prompt.text) for _, prompt in stream.take(start, count)]


def make(seed: int = 0, a: float = 1.0, b: float = 1.0) -> MixtureStream:
    return MixtureStream(PARTS, {"a": a, "b": b}, seed, shuffle=True)


# Another order would break the exact resume of existing checkpoints.
FIRST = ["a1", "a2", "a0", "a2", "a1", "a0"]


def test_the_order_depends_only_on_seed_and_position() -> None:
    whole = texts(make(), 0, 60)
    assert whole == [text for start in range(0, 60, 7) for text in texts(make(), start, 7)][:60]
    stream = make()
    assert [texts(stream, n, 1)[0] for n in (59, 3, 31)] == [whole[n] for n in (59, 3, 31)]
    assert texts(make(seed=1), 0, 60) != whole
    assert whole[:6] == FIRST


def test_the_weights_are_the_shares() -> None:
    counts = Counter(text[0] for text in texts(make(a=3, b=1), 0, 4000))
    assert abs(counts["a"] / 4000 - 0.75) < 0.02


def test_each_data_set_has_epochs_of_its_own() -> None:
    found = texts(make(), 0, 200)
    of_a = [text for text in found if text[0] == "a"]
    for start in range(0, len(of_a) - 3, 3):
        assert sorted(of_a[start : start + 3]) == ["a0", "a1", "a2"]
    of_b = [text for text in found if text[0] == "b"]
    assert len({*of_b[:50]}) == 50
    assert of_b[:50] != sorted(of_b[:50]), "shuffled"


def test_every_row_has_every_column_and_a_number_of_its_own() -> None:
    rows = {
        "a": Rows("a.jsonl", ["prompt", "answer"], [{}] * 2),
        "b": Rows("b.jsonl", ["prompt", "tests"], [{}] * 3),
    }
    prompts = {
        "a": [Prompt(1, [5], "1+1=", {"answer": "2"})],
        "b": [Prompt(n, [5], "f", {"tests": "t"}) for n in (0, 2)],
    }
    found = mixed({name: (rows[name], prompts[name]) for name in rows})
    assert [p.row for part in found.values() for p in part] == [1, 2, 4]
    assert found["a"][0].columns == {"answer": "2", "tests": None, "dataset": "a"}
    assert [*found["b"][0].columns.items()] == [("answer", None), ("tests", "t"), ("dataset", "b")]
