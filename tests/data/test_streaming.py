"""Rows that are read while a run trains on them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from grpo_cli.data.prompts import make_prompts
from grpo_cli.data.rows import Rows
from grpo_cli.data.settings import Dataset
from grpo_cli.data.streaming import StreamedPrompts, open_stream
from grpo_cli.distributed import heartbeat
from grpo_cli.errors import TrainingError, UserError
from grpo_cli.records import Prompt
from tests.data.test_files import write

ROWS = [{"q": f"{n:03}", "answer": str(n)} for n in range(20)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_cli.data.streaming.BLOCK_ROWS", 6)


def config(source: Path | str, **settings: Any) -> Dataset:
    settings = {"streaming": True, "prompt": "{q}", **settings}
    return Dataset(train=str(source), **settings)


Stream = Callable[..., StreamedPrompts]


@pytest.fixture
def stream(tokenizer: PreTrainedTokenizerFast) -> Stream:
    """Returns what opens the prompts of a streamed data set."""

    def opened(config: Dataset, seed: int = 0) -> StreamedPrompts:
        def prompts(rows: Rows, empty: bool) -> list[Prompt]:
            return make_prompts(rows, config, tokenizer, may_be_empty=empty)[0]

        return StreamedPrompts(open_stream(config), prompts, seed, config.shuffle)

    return opened


def texts(stream: StreamedPrompts, start: int, count: int) -> list[str]:
    return [str(prompt.text) for _, prompt in stream.take(start, count)]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_rows_come_in_blocks_that_are_shuffled(tmp_path: Path, stream: Stream, suffix: str) -> None:
    for part in range(2):
        write(tmp_path / f"{part}.{suffix}", *ROWS[part * 10 : part * 10 + 10])
    found = texts(stream(config(tmp_path)), 0, 40)
    ordered = [row["q"] for row in ROWS]
    for epoch in (found[:20], found[20:]):
        for start in range(0, 20, 6):
            assert sorted(epoch[start : start + 6]) == ordered[start : start + 6]
    assert found[:20] != ordered
    assert found[:20] != found[20:]
    plain = stream(config(tmp_path, shuffle=False))
    assert texts(plain, 0, 40) == ordered * 2
    assert [plain.epoch_at(n) for n in (0, 19, 20, 39)] == [0, 0, 1, 1]
    ((_, prompt),) = plain.take(13, 1)
    assert (prompt.row, prompt.columns) == (13, {"q": "013", "answer": "13"})


def test_a_resumed_stream_is_the_same(tmp_path: Path, stream: Stream) -> None:
    how = config(write(tmp_path / "a.jsonl", *ROWS))
    whole = texts(stream(how), 0, 200)
    for at in (1, 7, 20, 45, 133):
        first = stream(how)
        assert texts(first, 0, at) == whole[:at]
        resumed = stream(how)
        resumed.restore(json.loads(json.dumps(first.state())))
        assert texts(resumed, at - 1, 200 - at) == whole[at - 1 : 199]
        assert texts(resumed, 0, at) == whole[:at], "blocks long gone are read again"
    assert texts(stream(how, seed=1), 0, 20) != whole[:20]
    assert len(resumed._prompts) <= 4


def test_over_long_rows_are_dropped_and_a_block_may_be_empty(
    tmp_path: Path, stream: Stream
) -> None:
    rows = [{"q": str(n) * (50 if 6 <= n < 13 else 1)} for n in range(20)]
    how = config(write(tmp_path / "a.jsonl", *rows), max_prompt_tokens=5, shuffle=False)
    found = stream(how)
    left = [row["q"] for row in rows if len(row["q"]) < 5]
    assert texts(found, 0, 26) == (left * 2)[:26]
    state = found.state()
    assert [block[2] for block in state][:3] == [0, 12, 18], "rows at which blocks begin"
    with pytest.raises(UserError, match="every prompt of"):
        stream(config(tmp_path / "a.jsonl", max_prompt_tokens=1, prompt="{q}+"))


def test_a_limit_and_renamed_columns(tmp_path: Path, stream: Stream) -> None:
    path = write(tmp_path / "a.jsonl", *ROWS)
    how = config(path, train_limit=4, columns={"gold": "answer"}, shuffle=False)
    found = stream(how)
    assert texts(found, 0, 9) == ["000", "001", "002", "003"] * 2 + ["000"]
    assert found.prompt_at(2).columns == {"q": "002", "gold": "2"}


def test_text_stays_text_and_a_missing_column_is_null(tmp_path: Path, stream: Stream) -> None:
    rows = [{"q": "1", "answer": "007"}, {"q": "2", "answer": 7}, {"q": "3", "other": 1}]
    found = stream(config(write(tmp_path / "a.jsonl", *rows), shuffle=False))
    answers = [prompt.columns["answer"] for _, prompt in found.take(0, 3)]
    assert answers == ["007", 7, None]


def test_a_hub_data_set_and_one_of_save_to_disk(
    tmp_path: Path, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "saved"))
    saved = texts(stream(config(tmp_path / "saved")), 0, 50)
    asked = []

    def load(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        return table.to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    how = config("owner/name", subset="main")
    assert texts(stream(how), 0, 50) == saved
    assert asked[0] == (("owner/name", "main"), {"split": "train", "streaming": True})


def test_reading_can_be_interrupted(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has to end, and the hub does not answer."""

    class Hanging:
        def skip(self, start: int) -> Iterator[dict[str, Any]]:
            for number in range(start, 20):
                if number == 13 and heartbeat.leave is not None:
                    heartbeat.interrupt_call()
                yield ROWS[number]

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Hanging())
    found = stream(config("owner/name"))
    before, state = texts(found, 0, 12), found.state()
    with monkeypatch.context() as patch:
        patch.setattr(heartbeat, "leave", lambda: True)
        with pytest.raises(heartbeat.WorkInterrupted):
            texts(found, 12, 6)
    assert found.state() == state
    assert before + texts(found, 12, 6) == texts(stream(config("owner/name")), 0, 18)


class Unreachable:
    """A table of the hub, of which a row cannot be read while `is_down`."""

    is_down = True

    def __init__(self, missing: int) -> None:
        self.missing = missing

    def skip(self, start: int) -> Iterator[dict[str, Any]]:
        for number, row in enumerate(ROWS[start:], start):
            if self.is_down and number == self.missing:
                raise ConnectionResetError("peer has gone\nwithout a word")
            yield row


def test_a_hub_that_goes_away_is_one_sentence_and_the_run_is_resumed(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Unreachable(13)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    how = config("owner/name")
    found = stream(how)
    begun = texts(found, 0, 12)
    with pytest.raises(
        TrainingError, match=r"row 13 cannot .*peer has gone\. .*resume=auto"
    ) as error:
        texts(found, 12, 6)
    assert error.value.alone, "another process may have read the row"
    table.is_down = False
    resumed, straight = stream(how), stream(how)
    resumed.restore(found.state())
    assert begun + texts(resumed, 12, 40) == texts(straight, 0, 52)
    table.is_down, table.missing = True, 2
    with pytest.raises(UserError, match="row 2 cannot be read from the hub"):
        open_stream(how)


def test_a_parquet_file_that_is_torn(tmp_path: Path) -> None:
    path, table = tmp_path / "a.parquet", pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, path, use_dictionary=False)
    content = path.read_bytes()
    at = parquet.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    path.write_bytes(content[:at] + b"\xff" * 20 + content[at + 20 :])
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read: "):
        open_stream(config(path))


def test_mistakes_at_the_start_and_later(tmp_path: Path, stream: Stream) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        open_stream(config(tmp_path / "none.jsonl"))
    path = write(tmp_path / "a.jsonl", *ROWS)
    with pytest.raises(UserError, match="lacks the column 'x'"):
        open_stream(config(path, prompt="{x}"))
    late = write(tmp_path / "b.jsonl", *ROWS, {"q": None})
    found = stream(config(late, shuffle=False))
    with pytest.raises(TrainingError, match="row 20: the column 'q' is null"):
        found.prompt_at(20)
    late.write_text(late.read_text() + "{")
    found = stream(config(late, shuffle=False, train_limit=30))
    with pytest.raises(TrainingError, match="line 22: malformed JSON"):
        texts(found, 0, 22)
    with pytest.raises(UserError, match="row 1: the column 'q' is null"):
        stream(config(write(tmp_path / "c.jsonl", ROWS[0], {"q": None})))
