"""Stored completions become columns: limits, tokens, secrets."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_cli.reporting.report.completions import (
    Completions,
    ReportLimits,
    read,
    shortened,
    token_arrays,
)
from grpo_cli.reporting.run_folder import RunFolder
from tests.report_runs import completion, write_run


def read_run(folder: Path, **limits: int) -> Completions:
    return read(RunFolder.open(folder), ReportLimits(**limits))


def test_the_columns_of_a_run(tmp_path: Path) -> None:
    table = read_run(write_run(tmp_path)).table
    assert table["problems"][:2] == [[0, 0], [1, 1]]
    assert table["texts"][:2] == ["question 0?", "question 1?"]
    assert table["first_prompt"] == "\x01\x02", "the decoded prompt_ids"
    assert table["texts"][table["columns"][-1]] == '{"answer": "4"}'
    assert table["step"] == [1] * 10 + [10] * 10
    assert table["finish"].count("length") == 4
    assert table["reward"].count(None) == 2
    assert (table["stored"], table["stored_steps"], table["shortened"]) == (20, 2, 0)


def test_tokens_are_where_the_columns_say(tmp_path: Path) -> None:
    found = read_run(write_run(tmp_path))
    table, total = found.table, found.table["token_total"]
    assert len(found.tokens) == 5 * total
    planes = np.frombuffer(found.tokens, np.uint8).astype(int)
    ids = planes[:total] + 256 * planes[total : 2 * total]
    logprobs = planes[2 * total : 3 * total] + 256 * planes[3 * total : 4 * total]
    for i, text in enumerate(table["completion"]):
        start, number = table["first_token"][i], table["tokens"][i]
        own = ids[start : start + number]
        assert "".join(table["vocabulary"][k] for k in own) == text
        assert logprobs[start + 7] == 21  # in steps of −0.01
    assert not planes[4 * total :].any()  # the model has sampled all


def test_without_a_tokenizer_there_are_texts_only(tmp_path: Path) -> None:
    write_run(tmp_path)
    next(tmp_path.glob("checkpoints/*/tokenizer.json")).unlink()
    found = read_run(tmp_path)
    assert (found.table["vocabulary"], found.tokens) == (None, b"")
    assert len(found.table["completion"]) == 20


def test_a_long_text_loses_its_middle(tmp_path: Path) -> None:
    assert shortened("abcdef", 6) == ("abcdef", 0)
    text, missing = shortened("abcdefghij", 4)
    assert missing == 6
    assert text.startswith("ab\n")
    assert text.endswith("\nij")
    found = read_run(write_run(tmp_path, words=200), characters=10_000)
    assert found.table["shortened"] == 20
    assert max(map(len, found.table["completion"])) < 600
    assert found.table["token_total"] == 0  # colours would show the middle


def test_advantages_of_tokens_and_replies_of_tools() -> None:
    row: dict[str, Any] = completion(1, 0, 0, 10, "ab")
    row |= {"token_advantages": [0.5, -0.25], "sampled": [True, False]}
    arrays, places = token_arrays([row, completion(1, 1, 0, 10, "c")], [True, True], 100)
    assert places["token_advantages"]
    low, high = np.frombuffer(arrays["advantages"], np.uint8).astype(int).reshape(2, 3)
    signed = (low + 256 * high).astype(np.uint16).astype(np.int16)
    assert signed.tolist() == [500, -250, 1500]
    assert arrays["foreign"] == bytes([0, 1, 0])


def test_a_secret_is_in_no_text_and_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "apples is")
    found = read_run(write_run(tmp_path, words=60))
    with_secret = [i for i, text in enumerate(found.table["completion"]) if "apples is" in text]
    assert with_secret
    assert {found.table["first_token"][i] for i in with_secret} == {-1}
