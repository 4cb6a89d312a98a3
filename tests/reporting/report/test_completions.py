"""Stored completions become columns: limits, tokens, secrets."""

from pathlib import Path
from typing import Any

import pytest

from grpo_cli.reporting.report.completions import (
    ReportLimits,
    read,
    shortened,
    tokens_of,
)
from grpo_cli.reporting.run_folder import RunFolder
from tests.report_runs import completion, write_run


def read_run(folder: Path, **limits: int) -> dict[str, Any]:
    return read(RunFolder.open(folder), ReportLimits(**limits))


def test_the_columns_of_a_run(tmp_path: Path) -> None:
    table = read_run(write_run(tmp_path))
    assert table["problems"][:2] == [[0, 0], [1, 1]]
    assert table["texts"][:2] == ["question 0?", "question 1?"]
    assert table["first_prompt"] == "\x01\x02", "the decoded prompt_ids"
    assert table["texts"][table["columns"][-1]] == '{"answer": "4"}'
    assert table["step"] == [1] * 10 + [10] * 10
    assert table["finish"].count("length") == 4
    assert table["reward"].count(None) == 2
    assert (table["stored"], table["stored_steps"], table["shortened"]) == (20, 2, 0)


def test_tokens_of_completions(tmp_path: Path) -> None:
    table = read_run(write_run(tmp_path))
    for text, tokens in zip(table["completion"], table["tokens"], strict=True):
        assert "".join(table["vocabulary"][k] for k in tokens["ids"]) == text
        assert tokens["logprobs"][7] == 21  # in steps of −0.01
        assert {*tokens} == {"ids", "logprobs"}, "the model has sampled all"


def test_without_a_tokenizer_there_are_texts_only(tmp_path: Path) -> None:
    write_run(tmp_path)
    next(tmp_path.glob("checkpoints/*/tokenizer.json")).unlink()
    found = read_run(tmp_path)
    assert (found["vocabulary"], found["tokens"]) == (None, [None] * 20)
    assert len(found["completion"]) == 20


def test_a_long_text_loses_its_middle(tmp_path: Path) -> None:
    assert shortened("abcdef", 6) == ("abcdef", 0)
    text, missing = shortened("abcdefghij", 4)
    assert missing == 6
    assert text.startswith("ab\n")
    assert text.endswith("\nij")
    found = read_run(write_run(tmp_path, words=200), characters=10_000)
    assert found["shortened"] == 20
    assert max(map(len, found["completion"])) < 600
    assert not any(found["tokens"])  # colours would show the middle


def test_advantages_of_tokens_and_replies_of_tools() -> None:
    row: dict[str, Any] = completion(1, 0, 0, 10, "ab")
    row |= {"token_advantages": [0.5, -0.25], "sampled": [True, False]}
    rows = [row, completion(1, 1, 0, 10, "c")]
    (one, other), _ = tokens_of(rows, [True, True], 100)
    assert (one["advantages"], one["foreign"]) == ([500, -250], [0, 1])
    assert {*other} == {"ids", "logprobs"}
    assert tokens_of(rows, [True, True], 2)[0][1] is None, "every second"


def test_a_secret_is_in_no_text_and_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "apples is")
    found = read_run(write_run(tmp_path, words=60))
    shown = zip(found["completion"], found["tokens"], strict=True)
    with_secret = [tokens for text, tokens in shown if "apples is" in text]
    assert with_secret
    assert not any(with_secret)
