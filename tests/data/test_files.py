import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from grpo_cli.config.sources import absolute, has_splits
from grpo_cli.data.rows import load_rows
from grpo_cli.data.settings import Dataset
from grpo_cli.data.stored_completions import write_parquet
from grpo_cli.data.streaming import open_stream
from grpo_cli.errors import UserError
from tests.tables import table

A, B, C = ({"question": f"{n}+1=", "answer": str(n + 1)} for n in range(3))


def write(path: Path, *rows: dict[str, Any]) -> Path:
    """Writes rows in the format of the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.name.removesuffix(".gz")
    if kind.endswith(".parquet"):
        write_parquet(path, list(rows))
        return path
    if kind.endswith(".csv"):
        lines = [list(rows[0]), *(row.values() for row in rows)]
        text = "".join(",".join(map(str, line)) + "\n" for line in lines)
    elif kind.endswith(".json"):
        text = json.dumps(rows, indent=1)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if kind != path.name else text.encode())
    return path


def load(source: Path | str, split: str = "train", subset: str | None = None) -> list[Any]:
    config = Dataset(train=str(source), train_split=split, subset=subset, prompt="{question}")
    return list(load_rows(config, "train").rows)


def message(source: Path | str, split: str = "train", subset: str | None = None) -> str:
    with pytest.raises(UserError) as error:
        load(source, split, subset)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_pattern_is_its_files_in_the_order_of_their_names(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / f"b.{suffix}", C)
    write(tmp_path / f"a.{suffix}", A, B)
    (tmp_path / f"folder.{suffix}").mkdir()
    assert load(tmp_path / f"*.{suffix}") == [A, B, C]
    write(tmp_path / f"deep/er/z.{suffix}", B)
    assert load(tmp_path / f"**/*.{suffix}") == [A, B, C, B]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_folder_has_the_splits_that_its_files_are_named_after(
    tmp_path: Path, suffix: str
) -> None:
    write(tmp_path / f"train-00000-of-00002.{suffix}", A)
    write(tmp_path / f"train-00001-of-00002.{suffix}", B)
    write(tmp_path / f"test.{suffix}", C)
    assert load(tmp_path) == [A, B]
    assert load(tmp_path, "test") == [C]
    said = message(tmp_path, "tset")
    assert said.endswith("has no split 'tset'; it has test, train. Did you mean test?")


def test_a_folder_whose_files_name_no_split_is_one_split(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", A)
    write(tmp_path / "b.jsonl", B)
    assert load(tmp_path, subset="main") == [A, B], "as the recipe of a hub data set has it"
    assert message(tmp_path, "test").endswith("has no split 'test'; it has train.")


def test_the_readme_of_a_folder_names_its_subsets(tmp_path: Path) -> None:
    write(tmp_path / "main" / "train.jsonl", A)
    write(tmp_path / "easy" / "train.jsonl", B)
    configs = [
        {"config_name": name, "data_files": [{"split": "train", "path": f"{name}/*.jsonl"}]}
        for name in ("main", "easy")
    ]
    (tmp_path / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    assert load(tmp_path, subset="easy") == [B]
    assert message(tmp_path).endswith("has several subsets; there are easy, main.")
    assert message(tmp_path, subset="hard").endswith("no subset 'hard'; there are easy, main.")


def test_what_save_to_disk_has_written(tmp_path: Path) -> None:
    one, other = datasets.Dataset.from_list([A, B]), datasets.Dataset.from_list([C])
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=one, test=other).save_to_disk(str(tmp_path / "both"))
    assert load(tmp_path / "one", "any") == [A, B], "it has no splits"
    assert load(tmp_path / "both", "test") == [C]
    assert message(tmp_path / "both", "dev").endswith("no split 'dev'; it has test, train.")
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"torn")
    assert "cannot be read: " in message(tmp_path / "one")


@table(
    "names, pattern, complaint",
    [
        ([], "*.parquet", "no file matches this pattern."),
        ([], "", "the folder holds no data; it needs .json, .jsonl, .csv, .parquet files."),
        (["a.txt"], "*", ".parquet file (or .gz of one); {folder}/a.txt is none."),
        (["a.csv", "b.jsonl"], "*", "files of several kinds, a.csv and b.jsonl; name one kind by"),
    ],
)
def test_files_that_are_no_data_set(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], pattern: str, complaint: str
) -> None:
    folder = tmp_path_factory.mktemp("data")
    for name in names:
        write(folder / name, A)
    assert complaint.format(folder=folder) in message(folder / pattern)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_files_with_other_columns(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / f"a.{suffix}", A)
    write(tmp_path / f"b.{suffix}", {"question": "1+1=", "solution": "2"})
    said = f"different columns: a.{suffix} has answer, question; b.{suffix} has question, solution."
    assert message(tmp_path / f"*.{suffix}").endswith(said)


@table(
    "suffix, cells, expected",
    [  # of the column in each file; a text is the message
        ("jsonl", ["007", 7], ["007", "7"]),
        ("jsonl", [7, "007"], ["7", "007"]),
        ("jsonl", [1, 0.5], [1.0, 0.5]),
        ("jsonl", [True, 3], [True, 3]),
        ("jsonl", ["a", [1]], "has text in row 0 of 0.jsonl and a list or an object in row 0 of 1"),
        ("jsonl", ["2024-05-01", "2024-05-02"], ["2024-05-01", "2024-05-02"]),
        ("jsonl", [None, "007"], [None, "007"]),
        ("parquet", ["007", "7"], ["007", "7"]),
        ("parquet", [7, "007"], "is int64 in 0.parquet and string in 1.parquet"),
    ],
)
def test_text_stays_text_over_several_files(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, cells: list[Any], expected: Any
) -> None:
    folder = tmp_path_factory.mktemp("data")
    for number, cell in enumerate(cells):
        write(folder / f"{number}.{suffix}", {"question": "1+1=", "answer": cell})
    if isinstance(expected, str):
        assert expected in message(folder / f"*.{suffix}")
    else:
        assert [row["answer"] for row in load(folder)] == expected


NESTED = [
    {"question": "a", "meta": {"a": 1}, "calls": [{"x": 1}, {"y": "2024-01-01"}]},
    {"question": "b", "meta": {"a": "t", "b": None}, "calls": [{"x": [1, "2"], "z": None}]},
    {"question": "c", "meta": {}, "calls": []},
]


def test_no_column_changes_the_objects_of_another(tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [
        {"other": {"k": 1}, "answer": "5"},
        {"other": [1]},
        {"level": 1},
    ]
    rows = [{**row, **more} for row, more in zip(NESTED, others, strict=True)]
    write(tmp_path / "lines.jsonl", *rows)
    write(tmp_path / "array.json", *rows)
    for name in ("lines.jsonl", "array.json"):
        config = Dataset(train=str(tmp_path / name), prompt="{question}", streaming=True)
        for found in (load(tmp_path / name), open_stream(config).first.rows):
            assert [{key: row[key] for key in NESTED[0]} for row in found] == NESTED


def test_numbers_in_json_stay_what_they_are(tmp_path: Path) -> None:
    cells = [1, 0.5, True, 12345678901234567890123]
    rows = [{"question": "a", "level": cell} for cell in cells]
    found = [row["level"] for row in load(write(tmp_path / "a.jsonl", *rows))]
    assert list(map(repr, found)) == list(map(repr, cells))


@table(
    "name, text, complaint",
    [
        ("a.jsonl", '{"question": 1}\n{"a": 1, "a": 2}', "line 2: an object has the key 'a' twice"),
        ("a.jsonl", '{"question": {"x": 1, "x": 1}}', "line 1: an object has the key 'x' twice."),
        ("a.json", '[{"question": 1}, 3]', "row 1: must be a JSON object."),
        ("a.jsonl", '{"question": "\\ud800"}', "line 1: '\\ud800' is half of a surrogate pair."),
        ("a.jsonl", f'{{"question": {"1" * 5000}}}', "value has 5000 digits"),
        ("a.csv", "question,answer,answer\n1+1=,2,3\n", "the column 'answer' twice; rename one."),
        ("a.csv", "question,,\n1+1=,,\n", "the column '' twice; rename one."),
        (
            "a.jsonl",  # an empty line is none
            '"question"\n\n{"question": 1}\n{\n2\n3\n',
            "double quotes); line 5: must be a JSON object; and 1 more.",
        ),
        ("a.json", '[\n{"question": 1},\n]', ", line 3: malformed JSON ("),
        ("a.jsonl", "", ": the data set is empty."),
        ("a.json", "\n []", ": the data set is empty."),
        ("a.csv", "question,answer\n", ": the data set is empty."),
        ("a.parquet", "not parquet", ": cannot be read: "),
        ("a.jsonl", "[" * 100_000, "a.jsonl: cannot be read: it is nested too deeply."),
        ("a.jsonl", '{"question": ' + "[" * 100_000, "cannot be read: it is nested too deeply."),
    ],
)
def test_what_cannot_be_read_or_would_be_read_in_silence(
    tmp_path_factory: pytest.TempPathFactory, name: str, text: str, complaint: str
) -> None:
    path = tmp_path_factory.mktemp("data") / name
    path.write_text(text)
    assert message(path).startswith(f"dataset.train = {path}")
    assert complaint in message(path)
    with pytest.raises(UserError) as error:
        open_stream(Dataset(train=str(path), prompt="{question}", streaming=True))
    assert complaint in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz", "a.csv.gz", "a.json"])
def test_a_file_that_is_no_utf_8(tmp_path: Path, name: str) -> None:
    line, begin, end, bad = b'{"question": "\xc3\xa9"}', b"", b"", b'{"question": "\xff"}'
    if "csv" in name:
        line, begin, bad = b"\xc3\xa9", b"question", b"\xff"
    elif name == "a.json":
        line, begin, end = line + b",", b"[", b"]"
    content = b"\n".join([begin or line, *[line] * 20_000, bad, end])
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    expected = f"dataset.train = {path}: cannot be read: it is not UTF-8 text (invalid start byte)."
    assert message(path) == expected
    with pytest.raises(UserError) as error:
        for _ in open_stream(Dataset(train=str(path), prompt="{question}", streaming=True)).read(0):
            pass
    assert str(error.value) == expected


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_names_with_brackets(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / "d[x]" / f"a[1].{suffix}", A)
    write(tmp_path / "d[x]" / f"b.{suffix}", B)
    assert load(file) == [A]
    assert load(tmp_path / "d[x]" / f"*.{suffix}") == [A, B]


def test_an_empty_file_among_others_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", A)
    (tmp_path / "b.jsonl").touch()
    assert message(tmp_path).endswith(f"{tmp_path}/b.jsonl: the data set is empty.")


def test_a_parquet_file_without_rows(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"question": ["a"]}).select([]).to_parquet(tmp_path / "b.parquet")
    assert message(tmp_path / "b.parquet").endswith("b.parquet: the data set is empty.")
    datasets.Dataset.from_dict({"question": ["a"]}).to_parquet(tmp_path / "a.parquet")
    assert load(tmp_path) == [{"question": "a"}]


def test_a_pattern_is_stored_with_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data" / "a.jsonl", A)
    assert absolute("data/*.jsonl") == f"{tmp_path}/data/*.jsonl"
    assert absolute("data") == f"{tmp_path}/data"
    assert absolute("openai/gsm8k") == "openai/gsm8k"
    assert absolute("pkg://a/b") == "pkg://a/b"
    found = [has_splits(s) for s in ("data", "data/*.jsonl", "data/a.jsonl", "x/y", "pkg://a/b")]
    assert found == [True, False, False, True, False]
