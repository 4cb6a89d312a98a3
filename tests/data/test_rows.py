import dataclasses
import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from grpo_cli.config.recipe import Recipe
from grpo_cli.config.sources import file_format, local_path
from grpo_cli.data import files
from grpo_cli.data.prompts import (
    PromptStream,
    epoch_order,
    make_prompts,
    prompt_texts,
    solution_pairs,
)
from grpo_cli.data.rows import Rows, hold_out, load_rows
from grpo_cli.data.settings import Dataset
from grpo_cli.errors import UserError
from grpo_cli.generation.settings import Generation
from grpo_cli.records import Prompt
from grpo_cli.training.rollouts.queue import RolloutQueue
from tests.data.test_files import write

ROWS = [{"question": f"{n}+1=", "answer": str(n + 1), "level": n} for n in range(4)]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", *ROWS)


def config(path: Path | str | None, **settings: Any) -> Dataset:
    settings = {"prompt": "{question}", **settings}
    return Dataset(train=None if path is None else str(path), **settings)


def rows_of(rows: Rows) -> list[dict[str, Any]]:
    return [dict(row) for row in rows.rows]


def message(config: Dataset, split: str = "train") -> str:
    with pytest.raises(UserError) as error:
        load_rows(config, split)
    return str(error.value)


def test_a_csv_files_cells_stay_the_text_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\ufeffquestion,answer\n007,NA\n"a\nb",1e5\nnull,\n', "utf-8")
    found = load_rows(config(path), "train")
    assert found.columns == ["question", "answer"], "without the mark of its encoding"
    assert [(r["question"], r["answer"]) for r in rows_of(found)] == [
        ("007", "NA"),
        ("a\nb", "1e5"),
        ("null", ""),
    ]


MARK = b"\xef\xbb\xbf"  # of UTF-8: what Excel and Windows begin a file with


MIXED = [
    {"answer": 7, "level": 1, "note": "a\u2028b"},
    {"answer": "007", "level": 2},
    {"answer": "1.50", "level": 3},
    {"answer": "true", "level": 4},
    {"answer": "null", "level": 5},
    {"answer": None, "level": 6},
    {"answer": 1.5, "level": 7},
    {"answer": False, "level": 8},
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_text_beside_numbers_stays_the_text_it_is(tmp_path: Path, name: str) -> None:
    found = list(files.load_local(write(tmp_path / name, *MIXED), None, "", "dataset.train"))
    answers = ["7", "007", "1.50", "true", "null", None, "1.5", "false"]
    assert [row["answer"] for row in found] == answers
    assert [row["level"] for row in found] == list(range(1, 9)), "a column of numbers stays one"
    assert [row["note"] for row in found] == ["a\u2028b"] + [None] * 7


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.csv", "a.csv.gz"]
)
def test_a_byte_order_mark_is_no_part_of_a_file(name: str, tmp_path: Path) -> None:
    lines = [b'{"question": "1+1=", "answer": "\xe4"}', b'{"question": "2+1=", "answer": "b"}']
    if ".json." in name or name.endswith(".json"):
        lines = [b"[" + lines[0] + b",", lines[1] + b"]"]
    elif ".csv" in name:
        lines = [b"question,answer", b"1+1=,\xe4", b"2+1=,b"]
    text = b"\r\n".join([*lines, b""]).replace(b"\xe4", "\u00e4".encode())
    found = []
    for mark in (b"", MARK):
        path = tmp_path / str(len(mark)) / name
        path.parent.mkdir()
        path.write_bytes(gzip.compress(mark + text) if name.endswith(".gz") else mark + text)
        loaded = load_rows(config(path), "train")
        assert (loaded.source, loaded.columns) == (str(path), ["question", "answer"])
        found.append(rows_of(loaded))
    assert found[0] == [
        {"question": "1+1=", "answer": "\u00e4"},
        {"question": "2+1=", "answer": "b"},
    ]
    assert found[1] == found[0]


@pytest.mark.parametrize(("line", "count"), [("1,2,3,4", 4), ("1", 1)])
def test_a_csv_row_of_another_width(tmp_path: Path, line: str, count: int) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"question,answer\n5,6\n{line}\n", "utf-8")
    assert message(config(path)).endswith(f"row 1: has {count} fields; the header has 2.")


def test_train_and_eval_have_each_their_file_and_limit(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *ROWS)
    write(tmp_path / "b.jsonl", *ROWS[::-1])
    both = config(tmp_path / "a.jsonl", eval=str(tmp_path / "b.jsonl"), train_limit=1, eval_limit=3)
    assert rows_of(load_rows(both, "train")) == ROWS[:1]
    assert rows_of(load_rows(both, "eval")) == ROWS[:0:-1]
    assert len(load_rows(config(tmp_path / "a.jsonl", train_limit=99), "train").rows) == 4


@pytest.mark.parametrize("package", ["grpo_cli/samples", "grpo_cli.samples"])
def test_a_packages_file_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = local_path(f"pkg://{package}/arithmetic_train.jsonl")
    assert path is not None
    assert path.is_file()


def test_what_is_a_file_and_what_a_hub_name() -> None:
    files = ["./gsm8k", "/data/gsm8k", "~/gsm8k", "rows.jsonl", "some/rows.json.gz"]
    assert [name for name in ("openai/gsm8k", "gsm8k", *files) if local_path(name)] == files


def test_file_format() -> None:
    names = {"json": ["a.jsonl", "a.JSON", "a.v2.jsonl.gz"], "csv": ["a.csv.gz"]}
    for kind, found in {**names, "parquet": ["a.parquet"], None: ["a.txt", "a.gz", "a"]}.items():
        assert {file_format(Path(name)) for name in found} == {kind}


def test_renamed_columns(jsonl: Path) -> None:
    rows = load_rows(
        config(jsonl, columns={"prompt": "question", "gold": "answer"}, prompt="{gold}"), "train"
    )
    assert rows_of(rows)[0] == {"prompt": "0+1=", "gold": "1", "level": 0}
    # a new name that is taken: the old column of that name goes
    rows = load_rows(config(jsonl, columns={"answer": "level"}), "train")
    assert rows_of(rows)[1] == {"question": "1+1=", "answer": 1}
    # and two may swap their names
    swapped = {"answer": "question", "question": "answer"}
    found = rows_of(load_rows(config(jsonl, columns=swapped), "train"))
    assert [(row["answer"], row["question"]) for row in found] == [
        (row["question"], row["answer"]) for row in ROWS
    ]


def test_no_data() -> None:
    for split in ("train", "eval"):
        said = message(config(None), split)
        assert said == f"dataset.{split}: no data; give a file or a hub name."


def test_a_file_that_is_not_whole_gzip(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", *ROWS)
    for content in (b"no gzip", path.read_bytes()[:-20]):
        path.write_bytes(content)
        assert message(config(path)).startswith(f"dataset.train = {path}: cannot be read: ")


def test_a_hub_name_that_cannot_be_loaded() -> None:
    found = message(config("no-such-owner/no-such-data", train_split="dev"))
    assert "no such file here, and as a hub data set (split dev) it cannot be loaded: " in found


def test_rename_of_a_missing_column(jsonl: Path) -> None:
    said = message(config(jsonl, columns={"gold": "answers"}))
    assert said.startswith("dataset.columns.gold = 'answers': ")
    assert said.endswith("it has answer, level, question. Did you mean answer?")


def test_template_with_a_column_that_is_not_there(jsonl: Path) -> None:
    both = config(jsonl, prompt="{questions}", solution="{rationale}")
    with pytest.raises(UserError) as error:
        load_rows(both, "train", {"gold": "reward.r", "answer": "reward.r"})
    said = str(error.value)
    assert said.startswith(f"dataset.train = {jsonl}: lacks the columns 'questions' (dataset.promp")
    assert "(dataset.solution), 'gold' (reward.r); it has answer, level, question. Did you" in said
    assert said.endswith("=COLUMN dataset.columns.rationale=COLUMN dataset.columns.gold=COLUMN.")


def test_only_training_reads_the_template_of_the_solution(jsonl: Path) -> None:
    both = config(jsonl, eval=str(jsonl), solution="{rationale}")
    assert len(load_rows(both, "eval").rows) == 4


@pytest.mark.parametrize("template", [r"\boxed{}", r"\boxed{ {question}", "{question!x}"])
def test_a_literal_brace_in_a_template(jsonl: Path, template: str) -> None:
    found = message(config(jsonl, prompt=template))
    assert found.startswith(f"dataset.prompt = {template!r}: is not a template for the first row (")
    assert found.endswith(r"write a literal brace twice, as in \boxed{{}}.")


def test_a_doubled_brace_is_a_literal_one(jsonl: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    template = config(jsonl, prompt=r"{question} in \boxed{{}}")
    prompts, _ = make_prompts(load_rows(template, "train"), template, tokenizer)
    assert prompts[0].text == r"0+1= in \boxed{}"


def rows(*rows: dict[str, Any]) -> Rows:
    return Rows("rows.jsonl", list(rows[0]), rows)


def prompt_message(rows: Rows, config: Dataset, tokenizer: PreTrainedTokenizerFast) -> str:
    with pytest.raises(UserError) as error:
        make_prompts(rows, config, tokenizer)
    return str(error.value)


def test_a_prompt_by_hand(tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"question": "1+1=", "answer": "2", "prompt": "?", "completion": "2", "level": 3}
    settings = Dataset(prompt="Q: {question}")
    (prompt,), overlong = make_prompts(rows(row), settings, tokenizer)
    assert (prompt.row, prompt.text, overlong) == (0, "Q: 1+1=", 0)
    assert prompt.columns == {"question": "1+1=", "answer": "2", "level": 3}
    assert tokenizer.decode(prompt.ids) == "Q: 1+1="
    assert len(prompt.ids) == 7


def test_over_long_prompts_are_dropped(tokenizer: PreTrainedTokenizerFast) -> None:
    given = rows({"prompt": "abcd"}, {"prompt": "abcde"}, {"prompt": "xy"})
    prompts, overlong = make_prompts(given, Dataset(max_prompt_tokens=4), tokenizer)
    assert [(p.row, p.text) for p in prompts] == [(0, "abcd"), (2, "xy")]
    assert overlong == 1
    prompts, overlong = make_prompts(given, Dataset(max_prompt_tokens=1), tokenizer, held_out=True)
    assert [len(p.ids) for p in prompts] == [4, 5, 2], "held-out rows are never dropped or cut"
    assert overlong == 0
    said = prompt_message(given, Dataset(max_prompt_tokens=1), tokenizer)
    assert said.startswith("dataset.max_prompt_tokens = 1: every prompt of rows.jsonl is longer")
    assert "(the shortest has 2 tokens)" in said


def test_bytes_in_a_prompt_are_utf_8(tokenizer: PreTrainedTokenizerFast) -> None:
    given = rows({"prompt": b"1"}, {"prompt": "\u00e9".encode()})
    prompts, _ = make_prompts(given, Dataset(), tokenizer)
    assert [prompt.text for prompt in prompts] == ["1", "\u00e9"]
    given = rows({"prompt": b"1"}, {"prompt": b"\xff\xfe"})
    said = prompt_message(given, Dataset(prompt="{prompt} ="), tokenizer)
    assert "row 1: the column 'prompt' holds bytes that are not UTF-8 text (b'\\xff\\xfe')" in said


def test_an_empty_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    given = rows({"prompt": "a"}, *[{"prompt": ""}] * 5)
    said = "dataset.prompt: the prompt of row {} is empty."
    assert prompt_message(given, Dataset(), tokenizer) == said.format(1)
    with pytest.raises(UserError) as error:
        prompt_texts(given, Dataset())
    assert str(error.value).split("\n") == [
        *map(said.format, (1, 2, 3)),
        "5 of 6 rows of rows.jsonl are not prompts.",
    ]


def test_a_row_of_messages_is_kept_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 1?"},
    ]
    given = rows({"prompt": messages})
    (prompt,), _ = make_prompts(given, Dataset(chat=True, system="S"), tokenizer)
    assert prompt.text == [{"role": "system", "content": "S"}, *messages]
    assert len(given.rows[0]["prompt"]) == 3  # the row is not changed
    assert "set dataset.chat=true" in prompt_message(given, Dataset(), tokenizer)


def test_chat_without_a_template(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    said = prompt_message(rows({"prompt": "a"}), Dataset(chat=True), plain)
    assert said.endswith("set model.chat_template or dataset.chat=false.")


def test_solution_pairs() -> None:
    settings = Dataset(prompt="{question}", solution="{work} #### {answer}")
    given = rows({"question": "1+1=", "work": "one more", "answer": 2})
    assert list(solution_pairs(given, settings)) == [("1+1=", "one more #### 2")]
    for work in (None, {}):
        with pytest.raises(UserError, match=r"dataset\.solution: row 0: "):
            [*solution_pairs(rows({"question": "a", "m": work}), Dataset(solution="{m[s]}"))]


def test_a_solution_may_be_the_rest_of_a_conversation() -> None:
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "2", "tool_calls": None},
        {"role": "assistant", "content": "2"},
    ]
    given = rows({"question": "1+1=", "episode": messages})
    settings = Dataset(prompt="{question}", solution="{episode}", chat=True)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    ((prompt, solution),) = solution_pairs(given, settings)
    assert prompt == [{"role": "user", "content": "1+1="}]
    assert solution == [call, {"role": "tool", "content": "2"}, messages[2]]
    for wrong, chat in ((messages, False), (messages[:2], True)):
        with pytest.raises(UserError, match=r"dataset\.solution: .*row 0, episode: messages are"):
            list(
                solution_pairs(
                    rows({"question": "1+1=", "episode": wrong}),
                    dataclasses.replace(settings, chat=chat),
                )
            )


def test_prompts_list_the_tools_of_their_row(tokenizer: PreTrainedTokenizerFast) -> None:
    given = rows({"question": "1", "kind": "a"}, {"question": "2", "kind": "b"})
    settings = Dataset(prompt="{question}", chat=True)
    schema = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"x": {}}}},
    }
    prompts, _ = make_prompts(
        given, settings, tokenizer, tools=lambda row: [schema] if row["kind"] == "a" else []
    )
    shown = [tokenizer.decode(p.ids).split("<|im_start|>user")[0] for p in prompts]
    assert shown == ["<|im_start|>tools f(x)<|im_end|>\n", ""]


PROMPTS = [Prompt(row, [row + 3], str(row), {}) for row in range(7)]


def taken(stream: PromptStream, start: int, count: int) -> list[int]:
    out = list(stream.take(start, count))
    assert [position for position, _ in out] == list(range(start, start + count))
    return [prompt.row for _, prompt in out]


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    order = taken(PromptStream(PROMPTS, seed=1, shuffle=True), 0, 70)
    epochs = [order[i : i + 7] for i in range(0, 70, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 10
    assert taken(PromptStream(PROMPTS, seed=1, shuffle=False), 0, 14) == [*range(7), *range(7)]


def test_what_stands_at_a_position_is_a_function_of_seed_and_position() -> None:
    whole = taken(PromptStream(PROMPTS, seed=1, shuffle=True), 0, 40)
    assert taken(PromptStream(PROMPTS, seed=1, shuffle=True), 17, 11) == whole[17:28]
    wandering = PromptStream(PROMPTS, seed=1, shuffle=True)
    for start in (30, 3, 12, 12, 0):
        assert taken(wandering, start, 9) == whole[start : start + 9]
    assert taken(PromptStream(PROMPTS, seed=2, shuffle=True), 0, 40) != whole


def test_the_order_is_the_same_for_ever() -> None:
    assert epoch_order(0, 0, 8, True) == [0, 2, 1, 4, 6, 7, 3, 5]


def taking(rank: int, size: int, lengths: dict[int, float] | None = None) -> Any:
    """A process that takes prompts; `lengths` are those of the rows' completions, last time."""
    return SimpleNamespace(
        position=0,
        stream=PromptStream(PROMPTS, seed=1, shuffle=True),
        workers=SimpleNamespace(rank=rank, size=size),
        recipe=Recipe(generation=Generation(num_generations=4, max_completion_tokens=50)),
        lengths=lengths or {},
    )


@pytest.mark.parametrize("known", [{}, dict.fromkeys(range(7), 50.0)], ids=["new", "known"])
def test_the_shares_of_two_processes_are_together_that_of_one(known: dict[int, float]) -> None:
    runs, alone = [taking(rank, 2, known) for rank in range(2)], taking(0, 1)
    first = 0
    for number in (5, 5, 3, 4, 5):  # dynamic sampling asks for different numbers
        shares = [RolloutQueue.take_prompts(run, number) for run in runs]
        assert sorted(map(len, shares)) == [number // 2, number - number // 2]
        together = sorted([*shares[0], *shares[1]], key=lambda pair: pair[0])
        assert together == RolloutQueue.take_prompts(alone, number)
        assert [position for position, _ in together] == list(range(first, first + number))
        first += number


def test_shares_take_about_the_same_where_completions_have_been_long() -> None:
    long, new = epoch_order(1, 0, 7, True)[2:4]
    known = {row: 200.0 if row == long else 20.0 for row in range(7) if row != new}
    shares = [RolloutQueue.take_prompts(taking(rank, 2, known), 7) for rank in range(2)]
    rows = [[p.row for _, p in share] for share in shares]
    # 4 completions and a prompt token: 801, against 5 times 81 and 201 for what is new, the mean.
    assert rows[0] == [long]
    assert [position for position, _ in shares[1]] == [0, 1, 3, 4, 5, 6]


def test_a_share_counts_a_prompt_once_and_each_of_its_completions() -> None:
    prompts = [Prompt(0, [5] * 10, "", {}), Prompt(1, [5], "", {}), Prompt(2, [5], "", {})]
    shares = []
    for rank in range(2):
        run = taking(rank, 2, {0: 1.0, 1: 4.0, 2: 2.0})
        run.stream = PromptStream(prompts, seed=1, shuffle=False)
        shares.append([position for position, _ in RolloutQueue.take_prompts(run, 3)])
    assert shares == [[1], [0, 2]]  # 10 + 4 · 1 = 14, 1 + 4 · 4 = 17 and 1 + 4 · 2 = 9


def held_out(jsonl: Path, **settings: Any) -> tuple[list[str], list[str]]:
    parts = hold_out(load_rows(config(jsonl), "train"), config(jsonl, **settings))
    for part in parts:
        assert [row["level"] for row in part.rows] == [part.line(i) for i in range(len(part.rows))]
    train, test = ([row["question"] for row in part.rows] for part in parts)
    return train, test


def test_held_out_rows_and_training_rows_are_disjoint_and_all(tmp_path: Path) -> None:
    rows = ({"question": f"{n}", "level": n} for n in range(100))
    path = write(tmp_path / "rows.jsonl", *rows)
    train, test = held_out(path, test_split_size=0.2)
    assert len(test) == 20
    assert sorted(train + test) == sorted(str(n) for n in range(100))
    assert train == sorted(train, key=int), "in the order of the data"
    assert held_out(path, test_split_size=20) == (train, test)
    assert held_out(path, test_split_size=20, eval_limit=3) == (train, test[:3])
    assert test[:4] == ["0", "7", "17", "20"], "the same in every version"
    assert len(held_out(path, test_split_size=0.001)[1]) == 1


def test_no_row_left_to_train_on(jsonl: Path) -> None:
    with pytest.raises(
        UserError, match=r"test_split_size = 4: leaves no row to train on; .* has 4"
    ):
        held_out(jsonl, test_split_size=4)


def test_a_prompt_of_a_part_has_the_line_of_the_data(
    jsonl: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    part, _ = hold_out(load_rows(config(jsonl), "train"), config(jsonl, test_split_size=2))
    prompts, _ = make_prompts(part, config(jsonl), tokenizer)
    assert [p.row for p in prompts] == [p.columns["level"] for p in prompts]
